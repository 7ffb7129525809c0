"""What the logit variance and one gradient step do to the attention entropy: the explorer of chapter 2."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from lipattn import figures
from lipattn._validate import integer, refuse
from lipattn.diagnostics import entropy, logit_variance
from lipattn.model import Weights, forward
from lipattn.tasks import EVALUATION, sample_prompts
from lipattn.theory import expected_entropy
from lipattn.training import TrainConfig, train
from lipattn.widgets._panel import learning_rate_slider, logit_std_slider, panel

__all__ = ["OneStep", "entropy_explorer", "one_step", "series_styles"]

_RAMP = (  # from cold to warm; contrast with a white and with a dark page at least 3 to 1
    ("#5b1a78", "#c9a0e8", "solid", "circle"),
    ("#2c4bb0", "#8fb0ff", "10px,3px", "square"),
    ("#146b85", "#5fd0e0", "dashdot", "diamond"),
    ("#117a4d", "#5fe0a8", "6px,2px", "triangle-up"),
    ("#6b7300", "#cddc50", "dot", "triangle-down"),
    ("#b3480a", "#ffb060", "longdash", "star"),
)


def series_styles(labels: Sequence[str]) -> list[figures.Style]:
    """One style for each member of an ordered series (N = 16, 64, … or σ = 0.5, 1, …), cold to warm.

    Raises:
        ValueError: if there are no labels or more than six.
    """
    if not 1 <= len(labels) <= len(_RAMP):
        raise refuse("labels", f"between 1 and {len(_RAMP)} labels", list(labels))
    return [figures.Style(label, *look) for label, look in zip(labels, _RAMP, strict=False)]


class OneStep(NamedTuple):
    """The query's attention row before and after one update, on the same prompts; the first axis is the run."""

    logit_std_before: Float[Tensor, " runs"]
    """Root of the mean variance of the query's logits over its context tokens; about `config.logit_std`."""
    logit_std_after: Float[Tensor, " runs"]
    entropy_before: Float[Tensor, " runs"]
    """Mean entropy of the query's row, nats, in [0, ln(N + 1)]."""
    entropy_after: Float[Tensor, " runs"]
    row_before: Float[Tensor, " tokens"]
    """The query's attention in the first prompt of the first run, largest weight first."""
    row_after: Float[Tensor, " tokens"]
    diverged: int
    """Runs whose loss or gradient was not finite: they did not step."""


def _query_row(config: TrainConfig, weights: Weights, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per run: logit standard deviation and entropy of the query row; and the row of the first prompt."""
    first = forward(
        weights,
        tokens,
        reweighting=config.reweighting,
        options=config.reweighting_options,
        residual=config.residual,
        fixed_attention=config.fixed_attention,
    )[1][0]
    variance = logit_variance(first.scores[..., -1, :-1]).mean((1, 2))
    row = first.p[0, 0, 0, -1].sort(descending=True).values
    return variance.sqrt(), entropy(first.p[..., -1, :]).mean((1, 2)), row


def one_step(config: TrainConfig, *, prompts: int = 32) -> OneStep:
    r"""What one update of the optimizer does to the logits and the entropy of the query's row in the first layer.

    Weights before (`config.logit_std` sets the logits' expected standard deviation σ) and after one step of size
    `config.learning_rate` on one batch are compared on the same `prompts` evaluation prompts, which no step sees. So
    the change is the step's, and none of it is a change of data.

    Args:
        config: of the runs; its `steps` does not matter.
        prompts: evaluation prompts a run.

    Returns:
        `OneStep`. At learning rate 0 before and after are equal. NaN entropy where a row is undefined (dead, or
        logits out of range).

    Raises:
        ValueError: if prompts < 1.

    Source: ours, chapter 2.
    """
    integer("prompts", prompts, minimum=1)
    tokens, _ = sample_prompts(
        config.seeds,
        0,
        n_context=config.n_context,
        d=config.d,
        batch=prompts,
        stream=EVALUATION,
        dtype=config.torch_dtype,
        device=config.device,
    )
    start = train(dataclasses.replace(config, steps=0))
    end = train(dataclasses.replace(config, steps=1))
    with torch.no_grad():
        std_before, entropy_before, row_before = _query_row(config, start.weights, tokens)
        std_after, entropy_after, row_after = _query_row(config, end.weights, tokens)
    return OneStep(std_before, std_after, entropy_before, entropy_after, row_before, row_after, int(end.diverged.sum()))


_LOWEST, _HIGHEST = 0.05, 500.0  # logit standard deviations that the explorer's axis shows


def _draw(state: OneStep, config: TrainConfig) -> go.Figure:
    figure = figures.new_figure(
        1,
        2,
        titles=("one query's row", "all runs"),
        x=("token, largest weight first", "logit std of the query's row"),
        y=("attention probability", "entropy (nats)"),
        log_x=(False, True),
        panel_height=280,
    )
    before, after = series_styles(["before the step", "unused", "unused", "unused", "unused", "after the step"])[::5]
    ranks = np.arange(1, config.tokens + 1)
    for look, row in ((before, state.row_before), (after, state.row_after)):
        figures.line(figure, ranks, row, style=look, markers=True)
    sigma = np.geomspace(_LOWEST, _HIGHEST, 60)
    law = expected_entropy(config.tokens, sigma)
    figures.line(figure, sigma, law, style="theory", name="softmax of Gaussian logits", col=2)
    figures.points(figure, state.logit_std_before, state.entropy_before, style=before, col=2)
    figures.points(figure, state.logit_std_after, state.entropy_after, style=after, col=2)
    top = math.log(config.tokens)
    figures.reference_line(figure, y=top, label=f"ln {config.tokens}", col=2)
    figure.update_layout(
        yaxis_range=[-0.02, 1.02],
        xaxis2_range=[math.log10(_LOWEST), math.log10(_HIGHEST)],
        yaxis2_range=[-0.1, 1.12 * top],
    )
    return figure


def _sentence(sigma: float, learning_rate: float, state: OneStep) -> str:
    died = f" {state.diverged} of {len(state.entropy_after)} runs diverged and did not step." if state.diverged else ""
    return (
        f"σ = {sigma:.2f} (σ² = {sigma**2:.3g}), η = {learning_rate:.3g}: over {len(state.entropy_after)} runs the "
        f"median logit std goes from {state.logit_std_before.median():.2f} to {state.logit_std_after.median():.2f}, "
        f"the median entropy from {state.entropy_before.median():.3f} to {state.entropy_after.median():.3f} nats.{died}"
    )


def entropy_explorer(
    config: TrainConfig | None = None, *, sigma: float = 1.0, learning_rate: float = 0.5
) -> ipywidgets.VBox:
    """Sliders for the logit std σ and the learning rate η over the query's row before and after one step.

    Args:
        config: of the runs; 16 runs of the one-layer softmax setting of chapter 4 in float64 if not given. Its
            `logit_std` and `learning_rate` are what the sliders set.
        sigma, learning_rate: where the sliders start.

    Returns:
        The box of `panel`: ``box.controls["sigma"]``, ``box.controls["learning_rate"]``, ``box.figure``,
        ``box.read_out``. The figure's traces: row before, row after, law, runs before, runs after.

    Raises:
        ValueError: if `config` is not one that `TrainConfig` takes with the sliders' values.
    """
    fixed = TrainConfig(seeds=tuple(range(16)), dtype="float64") if config is None else config

    @lru_cache(maxsize=1)  # the figure and the read-out show one and the same state
    def state(sigma: float, learning_rate: float) -> OneStep:
        return one_step(dataclasses.replace(fixed, logit_std=sigma, learning_rate=learning_rate))

    def draw(sigma: float, learning_rate: float) -> go.Figure:
        return _draw(state(sigma, learning_rate), fixed)

    def read_out(sigma: float, learning_rate: float) -> str:
        return _sentence(sigma, learning_rate, state(sigma, learning_rate))

    controls = {
        "sigma": logit_std_slider(sigma, minimum=_LOWEST),
        "learning_rate": learning_rate_slider(learning_rate),
    }
    return panel(controls, draw, read_out)
