"""A run that dies or lives, moved by two sliders: the explorer of chapter 4."""

from __future__ import annotations

from functools import lru_cache

import ipywidgets
import plotly.graph_objects as go
import torch

from lipattn import figures
from lipattn.reweighting import REWEIGHTINGS
from lipattn.tasks import null_loss
from lipattn.training import History, TrainConfig, train
from lipattn.widgets._panel import learning_rate_slider, logit_std_slider, panel

__all__ = ["explorer_config", "training_explorer"]

_STEPS, _SEEDS = 60, tuple(range(4))


def explorer_config(mechanism: str, sigma: float, eta: float) -> TrainConfig:
    """The runs that the explorer shows: four seeds, 60 steps, one layer, d = 2.

    Raises:
        ValueError: for a mechanism, σ or η out of range.
    """
    return TrainConfig(seeds=_SEEDS, reweighting=mechanism, logit_std=sigma, learning_rate=eta, steps=_STEPS)


@lru_cache(maxsize=64)
def _run(mechanism: str, sigma: float, eta: float) -> History:
    return train(explorer_config(mechanism, sigma, eta))


def _draw(mechanism: str, sigma: float, eta: float) -> go.Figure:
    figure = figures.new_figure(
        1, 2, titles=("loss", "entropy"), x="step", y=("mean squared error", "H / ln 21"), log_y=(True, False)
    )
    # The second mechanism keeps one style of its own, so that the two differ also when both are softmax.
    for name, look in (("softmax", "softmax"), (mechanism, "elu_kernel" if mechanism == "softmax" else mechanism)):
        history = _run(name, sigma, eta)
        loss = torch.where(history.loss > 1e8, torch.nan, history.loss)
        steps = torch.arange(_STEPS)
        for col, values in ((1, loss), (2, history.normalized_entropy[..., 0])):
            for run in range(len(_SEEDS)):
                shown = REWEIGHTINGS[name].label if run == 0 and col == 1 else None
                figures.line(figure, steps, values[run], style=look, name=shown, width=1.4, col=col)
                figure.data[-1].showlegend = shown is not None
    figures.reference_line(figure, y=null_loss(2), label="predicting 0", side="start")
    return figure


def _read_out(mechanism: str, sigma: float, eta: float) -> str:
    dead = {name: int(_run(name, sigma, eta).diverged.sum()) for name in ("softmax", mechanism)}
    counts = "; ".join(f"{REWEIGHTINGS[name].label}: {k} of {len(_SEEDS)} dead" for name, k in dead.items())
    return f"σ = {sigma:.2f}, σ² = {sigma**2:.2f}, η = {eta:.3g}, within {_STEPS} steps: {counts}."


def training_explorer(
    *, mechanism: str = "elu_kernel", logit_std: float = 0.7071, learning_rate: float = 0.5
) -> ipywidgets.VBox:
    """Softmax and another mechanism trained on the same data, four seeds each, redrawn when a control moves.

    Args:
        mechanism: the second one, a name in `REWEIGHTINGS`.
        logit_std: σ, the initial standard deviation of the logits.
        learning_rate: η.

    Returns:
        A box with ``controls`` (``mechanism``, ``sigma``, ``eta``), ``figure`` and ``read_out``.

    Raises:
        ValueError: for a setting out of range.
    """
    explorer_config(mechanism, logit_std, learning_rate)
    choices = ipywidgets.Dropdown(
        options=[(entry.label, name) for name, entry in REWEIGHTINGS.items()],
        value=mechanism,
        description="beside softmax",
    )
    controls = {
        "mechanism": choices,
        "sigma": logit_std_slider(logit_std),
        "eta": learning_rate_slider(learning_rate),
    }
    return panel(controls, _draw, _read_out)
