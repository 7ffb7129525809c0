r"""Chapter 3's explorer: one learning rate on the curvature of the value path, uniform against sharp attention.

For attention weights p that do not depend on the tokens the loss is a quadratic in W_V. Along the top eigenvector of
its Hessian gradient descent multiplies the distance to the minimum by 1 − ηλ: it shrinks while ηλ < 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import ipywidgets
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from lipattn import figures
from lipattn._validate import integer, non_negative
from lipattn.diagnostics import sum_of_squares
from lipattn.philox import normal
from lipattn.tasks import sample_prompts
from lipattn.theory import critical_learning_rate, value_curvature
from lipattn.widgets._panel import learning_rate_slider, logit_std_slider, panel

__all__ = ["CurvatureState", "curvature_explorer", "curvature_figure", "curvature_sentence", "curvature_state"]

_LOGIT_STREAM = 48
_START = 1.0
_REACH = 2.5


@dataclass(frozen=True)
class CurvatureState:
    """The loss along the top eigenvector of W_V's Hessian, and gradient descent on it.

    Attributes:
        logit_std: σ of the logits that made p.
        learning_rate: η.
        p: attention weights of the query over the context tokens; they sum to 1 and the query has none.
        sum_of_squares: Σp², in [1/N, 1].
        predicted_curvature: λ = 2d·Σp², the law.
        predicted_critical_rate: 1/(d·Σp²), the law.
        curvature: λ measured on the prompts, 2·λ_max of the mean of uuᵀ with u = Σ_j p_j z_j.
        multiplier: 1 − ηλ with the measured λ; gradient descent is stable iff its modulus is below 1.
        grid, grid_loss: distances a along the eigenvector, and the mean squared error there.
        path, path_loss: gradient descent from a = 1, the start included.
    """

    logit_std: float
    learning_rate: float
    p: Float[Tensor, " context"]
    sum_of_squares: float
    predicted_curvature: float
    predicted_critical_rate: float
    curvature: float
    multiplier: float
    grid: Float[Tensor, " grid"]
    grid_loss: Float[Tensor, " grid"]
    path: Float[Tensor, " points"]
    path_loss: Float[Tensor, " points"]


def curvature_state(
    logit_std: float,
    learning_rate: float,
    *,
    d: int = 2,
    n_context: int = 20,
    batch: int = 4096,
    steps: int = 6,
    seed: int = 0,
) -> CurvatureState:
    r"""The value path for p = softmax(σz), z one fixed standard normal draw, on sampled regression prompts.

    .. math:: L(a) = \mathrm{mean}\,(a\,u^\top e - y)^2, \qquad a \leftarrow a - \eta L'(a)

    with e the top eigenvector of mean(uuᵀ), so that this is gradient descent on W_V seen along e. All weights W_V
    start at 0 except along e.

    Args:
        logit_std: σ; 0 makes attention uniform.
        learning_rate: η.
        d, n_context, batch: of the prompts.
        steps: of gradient descent.
        seed: of z and of the prompts.

    Raises:
        ValueError: if a size is below 1, or σ or η is negative or not finite.

    Source: ours, chapter 3.
    """
    sigma, eta = non_negative("logit_std", logit_std), non_negative("learning_rate", learning_rate)
    steps = integer("steps", steps, minimum=1)
    tokens, targets = (
        x[0] for x in sample_prompts([seed], 0, n_context=n_context, d=d, batch=batch, dtype=torch.float64)
    )
    zero = torch.tensor(0)
    p = torch.softmax(sigma * normal(n_context, torch.tensor(seed), (zero, zero), _LOGIT_STREAM), dim=-1)
    u = torch.einsum("n,bnw->bw", p, tokens[:, :-1])
    values, vectors = torch.linalg.eigh(u.mT @ u / batch)
    along = u @ (vectors[:, -1] * vectors[-1, -1].sign())  # towards a growing y coordinate
    curvature, slope = 2 * values[-1], -2 * (along * targets).mean()

    def loss(a: Tensor) -> Tensor:
        return (a[:, None] * along - targets).square().mean(-1)

    path = [torch.tensor(_START, dtype=torch.float64)]
    for _ in range(steps):
        path.append(path[-1] - eta * (curvature * path[-1] + slope))
    grid, points = torch.linspace(-_REACH, _REACH, 41, dtype=torch.float64), torch.stack(path)
    squares = float(sum_of_squares(p))
    return CurvatureState(
        logit_std=sigma,
        learning_rate=eta,
        p=p,
        sum_of_squares=squares,
        predicted_curvature=float(value_curvature(squares, d)),
        predicted_critical_rate=float(critical_learning_rate(squares, d)),
        curvature=float(curvature),
        multiplier=float(1 - eta * curvature),
        grid=grid,
        grid_loss=loss(grid),
        path=points,
        path_loss=loss(points),
    )


def curvature_figure(flat: CurvatureState, sharp: CurvatureState) -> go.Figure:
    """Draw two states side by side on the same axes: the loss, the steps of gradient descent, where they start."""
    figure = figures.new_figure(
        1,
        2,
        titles=(f"uniform, σ = {flat.logit_std:g}", f"σ = {sharp.logit_std:g}"),
        x="distance along the top eigenvector",
        y=("loss", ""),
        panel_height=290,
    )
    for col, state in enumerate((flat, sharp), start=1):
        figures.line(figure, state.grid, state.grid_loss, style="loss", row=1, col=col)
        figures.line(
            figure,
            state.path,
            state.path_loss,
            style="gradient_W_V",
            name="steps of gradient descent",
            markers=True,
            width=1.2,
            row=1,
            col=col,
        )
    low = float(min(flat.grid_loss.min(), sharp.grid_loss.min()))
    high = float(max(flat.grid_loss.max(), sharp.grid_loss.max()))
    span = {"range": [low - 0.06 * (high - low), high + 0.06 * (high - low)]}
    wide = {"range": [-_REACH, _REACH]}
    figure.update_layout(xaxis=wide, xaxis2=wide, yaxis=span, yaxis2=span)
    return figure


def curvature_sentence(state: CurvatureState) -> str:
    """What the state shows, in one sentence: σ and σ², Σp², λ against the law, and what a step does."""
    size = abs(state.multiplier)
    verdict = "shrinks" if size < 1 else "grows"
    return (
        f"σ = {state.logit_std:.2f} (σ² = {state.logit_std**2:.2f}): Σp² = {state.sum_of_squares:.3f}, "
        f"curvature λ = {state.curvature:.2f} (law 2d·Σp² = {state.predicted_curvature:.2f}), so the largest stable "
        f"learning rate is {2 / state.curvature:.2f}; at η = {state.learning_rate:.2f} the distance to the minimum "
        f"{verdict} by a factor {size:.2f} each step."
    )


def curvature_explorer(
    logit_std: float = 4.0, learning_rate: float = 0.5, *, d: int = 2, n_context: int = 20, seed: int = 0
) -> ipywidgets.VBox:
    """The step on the curvature of the value path, with a slider for σ and one for η.

    Args:
        logit_std, learning_rate: where the sliders start.
        d, n_context, seed: of the prompts, see :func:`curvature_state`.

    Returns:
        A box with attributes ``controls`` (``logit_std`` and ``learning_rate``), ``figure`` and ``read_out``.

    Source: ours, chapter 3.
    """

    def state(sigma: float, eta: float) -> CurvatureState:
        return curvature_state(sigma, eta, d=d, n_context=n_context, seed=seed)

    return panel(
        {"logit_std": logit_std_slider(logit_std), "learning_rate": learning_rate_slider(learning_rate)},
        draw=lambda logit_std, learning_rate: curvature_figure(
            state(0.0, learning_rate), state(logit_std, learning_rate)
        ),
        read_out=lambda logit_std, learning_rate: curvature_sentence(state(logit_std, learning_rate)),
    )
