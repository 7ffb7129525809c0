"""What every explorer of a live notebook shares: two sliders, a figure updated in place, a live read-out."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
import plotly.graph_objects as go

__all__ = ["learning_rate_slider", "logit_std_slider", "panel"]

_WIDE = {"description_width": "12em"}


def logit_std_slider(value: float = 1.0, *, minimum: float = 0.0, maximum: float = 8.0) -> ipywidgets.FloatSlider:
    """Slider for σ, the standard deviation of the attention logits; the read-out beside it should show σ²."""
    return ipywidgets.FloatSlider(
        value=value,
        min=minimum,
        max=maximum,
        step=0.05,
        description="logit std σ",
        style=_WIDE,
        layout=ipywidgets.Layout(width="28em"),
        continuous_update=False,
    )


def learning_rate_slider(value: float = 0.5, *, decades: tuple[float, float] = (-2, 1)) -> ipywidgets.FloatLogSlider:
    """Slider for the learning rate η, in powers of ten."""
    return ipywidgets.FloatLogSlider(
        value=value,
        base=10,
        min=decades[0],
        max=decades[1],
        step=0.05,
        description="learning rate η",
        style=_WIDE,
        layout=ipywidgets.Layout(width="28em"),
        continuous_update=False,
    )


def panel(
    controls: Mapping[str, ipywidgets.Widget],
    draw: Callable[..., go.Figure],
    read_out: Callable[..., str],
) -> ipywidgets.VBox:
    """Controls over a figure that is recomputed by the library whenever one of them moves.

    Args:
        controls: name → widget with a ``value``; the names are the keyword arguments of `draw` and `read_out`.
        draw: values → plotly figure; must return the same number of traces for every value.
        read_out: values → one sentence with the numbers of the current state.

    Returns:
        A box with attributes ``controls`` (the mapping), ``figure`` (the FigureWidget) and ``read_out`` (an HTML
        widget), so that ``box.controls["sigma"].value = 3`` moves the picture.

    Raises:
        ValueError: from `draw` or `read_out`; the picture then keeps its last good state and the read-out says why.
    """

    def values() -> dict[str, Any]:
        return {name: widget.value for name, widget in controls.items()}

    figure = go.FigureWidget(draw(**values()))
    text = ipywidgets.HTML(value=html.escape(read_out(**values())))

    def refresh(_change: Any) -> None:
        try:
            new, sentence = draw(**values()), read_out(**values())
        except ValueError as error:
            text.value = f"<strong>{html.escape(str(error))}</strong>"
            return
        with figure.batch_update():
            for old, trace in zip(figure.data, new.data, strict=True):
                old.update(trace.to_plotly_json(), overwrite=True)
            figure.layout.update(new.layout.to_plotly_json(), overwrite=True)
        text.value = html.escape(sentence)

    for widget in controls.values():
        widget.observe(refresh, names="value")
    box = ipywidgets.VBox([*controls.values(), figure, text])
    box.controls, box.figure, box.read_out = dict(controls), figure, text
    return box
