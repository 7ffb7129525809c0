"""How far one gradient step moves the attention output, against a Lipschitz bound: the numbers and their explorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from lipattn import figures
from lipattn.lipschitz import query_key_value_upper_bound
from lipattn.model import BLOCKS, forward
from lipattn.tasks import sample_prompts
from lipattn.training import TrainConfig, train
from lipattn.widgets._panel import learning_rate_slider, logit_std_slider, panel

__all__ = ["GradientStep", "gradient_step", "gradient_step_figure", "lipschitz_explorer"]


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientStep:
    """What one gradient step did to the attention outputs O = softmax(c·qkᵀ)v of each prompt.

    Distances are Frobenius norms over all rows of one prompt.
    """

    moved: Float[Tensor, "runs batch"]
    """‖O′ − O‖_F, the step's effect on the output."""
    input_distance: Float[Tensor, "runs batch"]
    """√(‖q′ − q‖² + ‖k′ − k‖² + ‖v′ − v‖²), its effect on queries, keys and values."""
    constant: Float[Tensor, "runs batch"]
    """Upper bound on the Lipschitz constant of (q, k, v) ↦ O on the smallest centred balls that hold both ends."""
    entropy: tuple[float, float]
    """Mean attention entropy of all rows, in nats, before and after."""

    @property
    def bound(self) -> Float[Tensor, "runs batch"]:
        """constant · input_distance, which `moved` cannot exceed."""
        return self.constant * self.input_distance


def gradient_step(logit_std: float, learning_rate: float, **settings: Any) -> GradientStep:
    r"""One step of plain gradient descent on W_Q, W_K, W_V, one softmax layer, seen in the outputs of its own batch.

    .. math:: \|O' - O\|_F \le L\,\sqrt{\|q' - q\|_F^2 + \|k' - k\|_F^2 + \|v' - v\|_F^2},
              \qquad L = \sqrt{(c R_v R_k)^2 + n\,(c R_v R_q)^2 + n}

    L bounds the Lipschitz constant of (q, k, v) ↦ softmax(c·qkᵀ)v in the Frobenius norm, on rows of length ≤ R_q, R_k,
    R_v (:func:`lipattn.lipschitz.query_key_value_upper_bound`). The radii are the longest rows before or after the
    step; balls are convex, so the whole segment between the two ends lies in the domain.

    Args:
        logit_std: σ ≥ 0 of the initial logits (sets the scale of W_Q and W_K).
        learning_rate: η ≥ 0.
        settings: other settings of :class:`lipattn.training.TrainConfig` (seeds, d, n_context, batch, init_std, …);
            one softmax layer with one head, plain SGD and float64 are fixed here.

    Raises:
        ValueError: if a setting is out of its range.

    Source: ours, chapter 1.
    """
    fixed: dict[str, Any] = {"reweighting": "softmax", "layers": 1, "heads": 1, "optimizer": "sgd", "dtype": "float64"}
    config = TrainConfig(**{**settings, **fixed, "logit_std": logit_std, "learning_rate": learning_rate, "steps": 1})
    before, after = train(replace(config, steps=0)).weights, train(config).weights
    tokens, _ = sample_prompts(
        config.seeds, 0, n_context=config.n_context, d=config.d, batch=config.batch, dtype=torch.float64
    )
    ends = [_projections(weights, tokens) for weights in (before, after)]
    outputs = [forward(weights, tokens, residual=False) for weights in (before, after)]
    change = torch.stack([torch.linalg.matrix_norm(b - a).square() for a, b in zip(*ends, strict=True)])
    radii = [torch.maximum(_longest(a), _longest(b)) for a, b in zip(*ends, strict=True)]
    scale = config.width**-0.5
    constants = [
        query_key_value_upper_bound(config.tokens, scale, *map(float, r)).value
        for r in zip(*(radius.flatten() for radius in radii), strict=True)
    ]
    h = [float(torch.special.entr(layers[0].p).sum(-1).mean()) for _, layers in outputs]
    return GradientStep(
        moved=torch.linalg.matrix_norm(outputs[1][0] - outputs[0][0]),
        input_distance=change.sum(0).sqrt(),
        constant=torch.tensor(constants, dtype=torch.float64).view(radii[0].shape),
        entropy=(h[0], h[1]),
    )


def _projections(weights: dict[str, Tensor], tokens: Tensor) -> list[Tensor]:
    """q, k and v of the one layer and head, each (runs, batch, tokens, D)."""
    return [tokens @ weights[block][:, 0] for block in BLOCKS]


def _longest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1).amax(-1)


RATES = tuple(float(10**e) for e in np.linspace(-2, 1, 10))
"""Learning rates at which the explorer's curve is computed, the slider's whole range."""


def gradient_step_figure(
    x: Sequence[float],
    steps: Sequence[GradientStep],
    *,
    figure: go.Figure | None = None,
    col: int = 1,
) -> go.Figure:
    """Draw the move of the output and its bound against x: medians over runs and prompts, bands from 10 to 90 %.

    Args:
        x: one number a step (a learning rate, a logit std).
        steps: the steps.
        figure, col: where to draw; a new figure with logarithmic axes if None.
    """
    if figure is None:
        figure = figures.new_figure(
            x="learning rate η", y="‖O′ − O‖<sub>F</sub> of a prompt", log_x=True, log_y=True, panel_height=320
        )
    for name, label, values in (
        ("softmax", "how far the output moves", [step.moved for step in steps]),
        ("bound", "Lipschitz bound", [step.bound for step in steps]),
    ):
        low, middle, high = np.quantile(torch.stack(values).flatten(1).numpy(), (0.1, 0.5, 0.9), axis=1)
        figures.line(figure, x, middle, style=name, name=label, col=col, band=(low, high), markers=True)
    return figure


def lipschitz_explorer(
    logit_std: float = 1.0, learning_rate: float = 0.5, *, rates: Sequence[float] = RATES, **settings: Any
) -> ipywidgets.VBox:
    """Sliders for σ and η over :func:`gradient_step_figure`; the last two traces mark the chosen η.

    Args:
        logit_std, learning_rate: where the sliders start.
        rates: learning rates of the curve.
        settings: as for :func:`gradient_step`.

    Raises:
        ValueError: if a setting is out of its range.
    """

    def draw(sigma: float, eta: float) -> go.Figure:
        figure = gradient_step_figure(rates, [gradient_step(sigma, rate, **settings) for rate in rates])
        now = gradient_step(sigma, eta, **settings)
        for name, label, value in (("softmax", "at this η", now.moved), ("bound", "its bound", now.bound)):
            figures.points(figure, [eta], [float(value.quantile(0.5))], style=name, name=label, size=14)
        return figure

    def read_out(sigma: float, eta: float) -> str:
        now = gradient_step(sigma, eta, **settings)
        share = float((now.moved / now.bound).max()) if bool((now.bound > 0).all()) else 0.0
        moved, bound = float(now.moved.quantile(0.5)), float(now.bound.quantile(0.5))
        return (
            f"σ = {sigma:.2f} (σ² = {sigma**2:.2f}), η = {eta:.3g}: one step moves the output of a prompt by "
            f"{moved:.3g} (median); its bound is {bound:.3g}. The closest any prompt comes to its bound is "
            f"{100 * share:.2g} %. Mean entropy {now.entropy[0]:.3f} → {now.entropy[1]:.3f} nats."
        )

    controls = {"sigma": logit_std_slider(logit_std), "eta": learning_rate_slider(learning_rate)}
    return panel(controls, draw, read_out)
