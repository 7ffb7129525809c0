"""The figures of the book: numbers in, a plotly figure out. Nothing here trains, samples or shows on its own.

One palette serves the whole book (`MECHANISM_STYLE`, `QUANTITY_STYLE`): a colour, a line style and a marker for each
mechanism and each quantity, so that no figure relies on colour alone. `new_figure` lays panels out, the builders draw
into them, and `publish` writes the figure into a notebook in a form that a static page draws in its own theme.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import NormalDist
from typing import Any

import numpy as np
import plotly.graph_objects as go

from lipattn._validate import choice, integer, refuse

__all__ = [
    "MECHANISM_STYLE",
    "QUANTITY_STYLE",
    "Style",
    "bundle",
    "heatmap",
    "line",
    "new_figure",
    "points",
    "publish",
    "reference_line",
    "simplex",
    "simplex_path",
    "small_multiples",
    "style",
    "survival_bars",
    "survival_points",
    "time_courses",
    "wilson_interval",
]

Numbers = Any  # a numpy array, a torch tensor (any device) or a sequence of numbers


# --- the palette ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """How one mechanism or quantity looks in every figure: label, two colours (light and dark page), dash, marker."""

    label: str
    color: str
    color_dark: str
    dash: str
    symbol: str


MECHANISM_STYLE: dict[str, Style] = {
    "softmax": Style("softmax", "#b3320a", "#ea6d43", "solid", "circle"),
    "relu_kernel": Style("ReLU kernel", "#5757fe", "#4a83fa", "dash", "square"),
    "elu_kernel": Style("ELU+1 kernel", "#109d66", "#71f5c2", "dashdot", "diamond"),
    "qk_layernorm": Style("QK-LayerNorm", "#5b1a78", "#a97fb4", "dot", "triangle-up"),
    "sigmoid": Style("sigmoid", "#8a6d00", "#e0c04a", "longdash", "triangle-down"),
    "relu_pointwise": Style("pointwise ReLU", "#0e7490", "#4cc3de", "longdashdot", "square-open"),
    "squared_relu_pointwise": Style("pointwise squared ReLU", "#9d174d", "#f38cb4", "6px,2px", "square-cross"),
    "cosine": Style("cosine", "#4d7c0f", "#a8d468", "2px,2px", "star"),
    "l2": Style("L2", "#5a6270", "#b4bcc8", "10px,3px", "hexagon"),
    "soft_cap": Style("soft-cap", "#a84a05", "#f5a45c", "8px,2px,2px,2px", "pentagon"),
    "ssmax": Style("SSMax", "#c2185b", "#ff80ab", "8px,2px,2px,2px,2px,2px", "star-triangle-up"),
    "softpick": Style("softpick", "#1d4ed8", "#82aaff", "3px,6px", "x"),
    "p_softmax": Style("p-softmax", "#3a3f47", "#dfe3e8", "12px,2px,4px,2px", "cross"),
}
"""One style for each mechanism of `lipattn.REWEIGHTINGS`; the four that the chapters compare differ most."""

QUANTITY_STYLE: dict[str, Style] = {
    "entropy": Style("entropy", "#1a7477", "#87f8f0", "solid", "circle"),
    "frobenius_norm": Style("‖P‖<sub>F</sub>", "#8c0a0f", "#dd7163", "dash", "square"),
    "spectral_norm": Style("‖P‖<sub>2</sub>", "#b87500", "#f7ef60", "dot", "diamond"),
    "column_mass": Style("largest column sum", "#4e2078", "#a65ccf", "dashdot", "triangle-up"),
    "logit_variance": Style("logit variance", "#2458b8", "#7fb2ff", "longdash", "triangle-down"),
    "loss": Style("loss", "#3a3f47", "#dfe3e8", "solid", "square-open"),
    "gradient_norm": Style("gradient norm", "#a8327a", "#f08cc8", "longdashdot", "star"),
    "gradient_W_Q": Style("‖∇W<sub>Q</sub>‖", "#5757fe", "#4a83fa", "dash", "triangle-left"),
    "gradient_W_K": Style("‖∇W<sub>K</sub>‖", "#5b1a78", "#a97fb4", "dot", "triangle-right"),
    "gradient_W_V": Style("‖∇W<sub>V</sub>‖", "#b3320a", "#ea6d43", "solid", "hexagon"),
    "sharpness": Style("learning rate × sharpness", "#5c7a00", "#bede5a", "dashdot", "pentagon"),
    "theory": Style("theory", "#222832", "#f3f4f5", "6px,2px", "circle-open"),
    "bound": Style("bound", "#5a6270", "#b4bcc8", "2px,2px", "line-ew-open"),
    "optimum": Style("optimum", "#109d66", "#71f5c2", "10px,3px", "x"),
}
"""One style for each quantity the book draws."""


def style(name: str | Style) -> Style:
    """The style of a mechanism or a quantity by its name; a `Style` passes through.

    Raises:
        ValueError: if neither table has the name.
    """
    if isinstance(name, Style):
        return name
    both = MECHANISM_STYLE | QUANTITY_STYLE
    return both[choice("style", name, both)]


# --- layout -----------------------------------------------------------------------------------------------------------

_GREY = "#808080"  # 3.9 to 1 on white, 4.7 to 1 on the dark page
_AXIS = {
    "gridcolor": "rgba(128,128,128,0.22)",
    "linecolor": "rgba(128,128,128,0.8)",
    "showline": True,
    "zeroline": False,
    "ticks": "outside",
    "ticklen": 4,
    "tickcolor": "rgba(128,128,128,0.8)",
    "hoverformat": ".4~g",
    "exponentformat": "power",
    "automargin": True,
    "title": {"standoff": 6, "font": {"size": 13}},
}
_LOG = {"type": "log", "nticks": 4, "tickformat": "~g"}  # few ticks: 1, 2, 5 or decades, in full
_TEMPLATE = {
    "layout": {
        "font": {"size": 12, "color": "#222832", "family": "system-ui, sans-serif"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {
            "orientation": "h",
            "x": 0.5,
            "xanchor": "center",
            "xref": "container",
            "y": 0,
            "yanchor": "bottom",
            "yref": "container",
            "bgcolor": "rgba(0,0,0,0)",
            "itemwidth": 40,
            "tracegroupgap": 0,
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": _GREY, "activecolor": _GREY},
    }
}
_WIDE, _NARROW = 700, 340  # usable pixels assumed on a wide page and on a 390-pixel telephone


def _per_panel(name: str, value: Any, panels: int) -> list[Any]:
    """One value for each panel: a single value is repeated, a sequence must have one entry a panel."""
    if isinstance(value, str | bool):
        return [value] * panels
    if len(value) != panels:
        raise refuse(name, f"one value, or one for each of the {panels} panels", value)
    return list(value)


def _panel(figure: go.Figure, row: int, col: int) -> str:
    """The suffix of the axes of a panel: "" for the first, then "2", "3", …"""
    meta = figure.layout.meta or {"rows": 1, "cols": 1}
    integer("row", row, minimum=1, maximum=meta["rows"])
    integer("col", col, minimum=1, maximum=meta["cols"])
    k = (row - 1) * meta["cols"] + col
    return "" if k == 1 else str(k)


def new_figure(
    rows: int = 1,
    cols: int = 1,
    *,
    titles: Sequence[str] = (),
    x: str | Sequence[str] = "",
    y: str | Sequence[str] = "",
    log_x: bool | Sequence[bool] = False,
    log_y: bool | Sequence[bool] = False,
    panel_height: int = 270,
    narrow_cols: int = 1,
    narrow_panel_height: int | None = None,
) -> go.Figure:
    """An empty figure of `rows` × `cols` panels, filled row by row.

    Args:
        rows, cols: the panels; on a narrow page they are stacked in `narrow_cols` columns, in the same order.
        titles: one for each panel, or none.
        x, y: axis titles with their unit, one for all panels or one for each ("entropy (nats)").
        log_x, log_y: logarithmic axes, likewise.
        panel_height: height of one panel in CSS pixels; `narrow_panel_height` on a narrow page (the same if None).

    Raises:
        ValueError: if a list does not have one entry a panel, or a count is not a positive integer.
    """
    panels = integer("rows", rows, minimum=1) * integer("cols", cols, minimum=1)
    integer("narrow_cols", narrow_cols, minimum=1)
    names = _per_panel("titles", titles or [""] * panels, panels)
    xs, ys = _per_panel("x", x, panels), _per_panel("y", y, panels)
    log_xs, log_ys = _per_panel("log_x", log_x, panels), _per_panel("log_y", log_y, panels)
    layout: dict[str, Any] = {
        "template": _TEMPLATE,
        "meta": {
            "rows": rows,
            "cols": cols,
            "narrow_cols": min(narrow_cols, cols),
            "panel": panel_height,
            "narrow_panel": narrow_panel_height or panel_height,
            "left": 0,
            "titled": any(names),
            "x_titles": any(xs),
            "y_titles": any(ys),
        },
        "annotations": [],
    }
    for k in range(panels):
        s = "" if k == 0 else str(k + 1)
        layout["xaxis" + s] = {"title": {"text": xs[k]}, "anchor": "y" + s, **(_LOG if log_xs[k] else {})}
        layout["yaxis" + s] = {"title": {"text": ys[k]}, "anchor": "x" + s, **(_LOG if log_ys[k] else {})}
        if names[k]:
            layout["annotations"].append(
                {
                    "text": f"<b>{names[k]}</b>",
                    "xref": f"x{s} domain",
                    "yref": f"y{s} domain",
                    "x": 0.5,
                    "y": 1,
                    "yshift": 4,
                    "yanchor": "bottom",
                    "showarrow": False,
                }
            )
    figure = go.Figure(layout=layout)
    figure.update_layout(_nested(_geometry(figure, narrow=False)))
    return figure


def _legend_rows(names: Sequence[str], width: int) -> int:
    """Rows of a horizontal legend `width` pixels wide, filled entry by entry (about 7 pixels a letter)."""
    rows, used = 0, math.inf
    for name in names:
        entry = 56 + 7 * len(re.sub(r"<[^>]*>", "", name))
        rows, used = (rows, used + entry) if used + entry <= width else (rows + 1, entry)
    return rows


def _geometry(figure: go.Figure, *, narrow: bool) -> dict[str, Any]:
    """Height, margins and panel domains on a wide or a narrow page, as dotted layout paths for `figures.js`.

    Pixels are reserved for titles, axis titles, legend and colour bar, so that none of them covers another.
    """
    meta = figure.layout.meta
    count = meta["rows"] * meta["cols"]
    cols = meta["narrow_cols"] if narrow else meta["cols"]
    rows = math.ceil(count / cols)
    panel = meta["narrow_panel"] if narrow else meta["panel"]
    top = 30 if meta["titled"] else 14
    legend = 21 * _legend_rows(_legend_names(figure), _NARROW if narrow else _WIDE)
    bar = 58 if figure.layout.coloraxis.colorscale else 0
    bottom = (46 if meta["x_titles"] else 28) + (legend + 8 if legend else 0) + bar
    gap_y = (26 if meta["titled"] else 8) + (54 if meta["x_titles"] else 30)
    inner = rows * panel + (rows - 1) * gap_y
    height = top + inner + bottom
    left_labels = max(meta["left"], 54 if meta["y_titles"] else 30)
    gap_x = 0 if cols == 1 else min((left_labels + 20) / (_NARROW if narrow else _WIDE), 0.5 / (cols - 1))
    width = (1 - gap_x * (cols - 1)) / cols
    paths: dict[str, Any] = {
        "height": height,
        "margin.t": top,
        "margin.b": bottom,
        "margin.l": left_labels,
        "margin.r": 14,
        "legend.y": bar / height,
    }
    for k in range(count):
        row, col = divmod(k, cols)
        low = 1 - (row * (panel + gap_y) + panel) / inner
        s = "" if k == 0 else str(k + 1)
        left = col * (width + gap_x)
        paths[f"xaxis{s}.domain"] = [round(left, 4), round(min(1.0, left + width), 4)]
        paths[f"yaxis{s}.domain"] = [round(max(0.0, low), 4), round(min(1.0, low + panel / inner), 4)]
    return paths


def _nested(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted paths as plotly's underscored keyword arguments."""
    return {path.replace(".", "_"): value for path, value in paths.items()}


def _legend_names(figure: go.Figure) -> list[str]:
    """The entries of the legend; plotly shows none for a single trace unless that trace asks for it."""
    shown = [t for t in figure.data if t.name and t.showlegend is not False and t.type in ("scatter", "bar")]
    return [t.name for t in shown] if len(figure.data) > 1 or any(t.showlegend for t in shown) else []


# --- into the notebook and the page -----------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Plain JSON values: lists for arrays (base64 ones too), 5 significant digits, null for NaN and infinities."""
    if isinstance(value, Mapping):
        if set(value) >= {"bdata", "dtype"}:
            array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=np.dtype(value["dtype"]))
            shape = [int(n) for n in str(value.get("shape", array.size)).split(",")]
            return _plain(array.reshape(shape).tolist())
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        rounded = float(f"{value:.5g}")
        if math.isinf(rounded):  # the last doubles before overflow
            return value
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value


def _spec(figure: go.Figure) -> dict[str, Any]:
    """The figure as plain JSON values, in the house layout, with what `figures.js` needs to restack it."""
    figure = go.Figure(figure)
    if figure.layout.meta:
        figure.update_layout(_nested(_geometry(figure, narrow=False)))
        figure.update_layout(meta={**figure.layout.meta, "narrow": _geometry(figure, narrow=True)})
    spec = figure.to_dict()
    layout = {key: value for key, value in spec["layout"].items() if key != "template"}
    return {"data": _plain(spec["data"]), "layout": _plain({"height": 360, **layout, "template": _TEMPLATE})}


def _dumps(spec: Mapping[str, Any]) -> str:
    """JSON that may stand inside a `<script>` element; the same figure always gives the same bytes."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _aria_label(layout: Mapping[str, Any]) -> str:
    """What the plot shows, from its axis titles, for those who do not see it; the caption says what follows from it."""

    def texts(axis: str) -> str:
        found = [v.get("title", {}).get("text", "") for k, v in sorted(layout.items()) if k.startswith(axis)]
        return ", ".join(dict.fromkeys(re.sub(r"<[^>]*>", "", text) for text in found if text))

    x, y = texts("xaxis"), texts("yaxis")
    return f"Plot of {y} against {x}" if x and y else f"Plot of {x or y}" if x or y else "Plot"


def bundle(figure: go.Figure, *, id: str, summary: str) -> dict[str, Any]:
    """The figure as one MIME bundle: HTML for the book, plotly JSON for JupyterLab and VS Code, the summary as text.

    The HTML holds no script that runs: `figures.js` draws the JSON in the theme's colours, and without scripts the
    caption remains. The same numbers always give the same bytes.

    Args:
        figure: a figure made by `new_figure`.
        id: "fig-" and then lower-case letters, digits and hyphens; unique in its chapter.
        summary: what one sees, in full sentences; shown as the caption.

    Raises:
        ValueError: if the id has another form, or the summary is not a sentence.
    """
    if not re.fullmatch(r"fig-[a-z0-9-]+", id):
        raise refuse("id", "'fig-' and then lower-case letters, digits or hyphens", id)
    if not re.fullmatch(r"\S+\s.*[.!?][\"”’)]?", summary.strip(), re.DOTALL):
        raise refuse("summary", "a sentence (words, and a full stop at the end)", summary)
    spec = _spec(figure)
    layout = spec["layout"]
    narrow = layout.get("meta", {}).get("narrow", {}).get("height", layout["height"])
    html = (
        f'<figure id="{id}" class="lipattn-figure" style="--height:{layout["height"]}px;--height-narrow:{narrow}px">'
        f'<div class="lipattn-plot" role="img" aria-label="{escape(_aria_label(layout))}"></div>'
        f'<script type="application/json">{_dumps(spec)}</script>'
        f"<figcaption>{escape(summary.strip())}</figcaption></figure>"
    )
    on_white = {**layout, "paper_bgcolor": "white", "plot_bgcolor": "white"}
    notebook = json.loads(_dumps({"data": spec["data"], "layout": on_white}))  # sorted keys here too
    return {"text/html": html, "application/vnd.plotly.v1+json": notebook, "text/plain": summary.strip()}


def publish(figure: go.Figure, *, id: str, summary: str) -> None:
    """Display `bundle(figure, id=…, summary=…)` as the output of the cell; in Colab the figure is also drawn there.

    Raises:
        ValueError: see `bundle`.
    """
    from IPython.display import display

    display(bundle(figure, id=id, summary=summary), raw=True)
    if "google.colab" in sys.modules:
        figure.show(renderer="colab")


# --- builders ---------------------------------------------------------------------------------------------------------


def _array(values: Numbers) -> np.ndarray:
    """Any numbers as a float64 array."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=np.float64)


def _fade(color: str, alpha: float) -> str:
    """A hex colour with an opacity."""
    return f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:7], 16)},{alpha})"


def _add(figure: go.Figure, kind: type, row: int, col: int, *, dark: Mapping[str, Any], **trace: Any) -> None:
    """Add a trace to a panel; a name that the legend already has is not listed again but toggles with it."""
    s = _panel(figure, row, col)
    name = trace.get("name")
    if name and any(t.name == name and t.showlegend is not False for t in figure.data):
        trace["showlegend"] = False
    group = {"legendgroup": name} if name else {}
    figure.add_trace(kind(xaxis="x" + s, yaxis="y" + s, meta={"dark": dict(dark)}, **group, **trace))


def line(
    figure: go.Figure,
    x: Numbers,
    y: Numbers,
    *,
    style: str | Style,
    name: str | None = None,
    row: int = 1,
    col: int = 1,
    band: tuple[Numbers, Numbers] | None = None,
    markers: bool = False,
    width: float | int = 2.2,
) -> go.Figure:
    """Draw a line in the style of a mechanism or quantity, with an optional shaded band (lower, upper).

    Non-finite values leave a gap. Returns the figure.
    """
    look = _look(style)
    x, y = _array(x), _array(y)
    label = look.label if name is None else name
    if band is not None:
        low, high = _array(band[0]), _array(band[1])
        keep = np.isfinite(low) & np.isfinite(high)
        _add(
            figure,
            go.Scatter,
            row,
            col,
            x=np.concatenate([x[keep], x[keep][::-1]]),
            y=np.concatenate([low[keep], high[keep][::-1]]),
            fill="toself",
            fillcolor=_fade(look.color, 0.18),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            name=label,
            dark={"fillcolor": _fade(look.color_dark, 0.22)},
        )
    _add(
        figure,
        go.Scatter,
        row,
        col,
        x=x,
        y=y,
        mode="lines+markers" if markers else "lines",
        line={"color": look.color, "dash": look.dash, "width": width},
        marker={"color": look.color, "symbol": look.symbol, "size": 7},
        name=label,
        dark={"line.color": look.color_dark, "marker.color": look.color_dark},
    )
    return figure


_look = style  # inside the builders `style` is the argument


def points(
    figure: go.Figure,
    x: Numbers,
    y: Numbers,
    *,
    style: str | Style,
    name: str | None = None,
    row: int = 1,
    col: int = 1,
    interval: tuple[Numbers, Numbers] | None = None,
    size: float | int = 8,
    text: Sequence[str] | None = None,
) -> go.Figure:
    """Draw markers, with optional error bars from `interval` = (lower, upper) in the unit of y. Returns the figure."""
    look = _look(style)
    y = _array(y)
    error, dark = {}, {"marker.color": look.color_dark}
    if interval is not None:
        low, high = _array(interval[0]), _array(interval[1])
        error["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": high - y,
            "arrayminus": y - low,
            "color": look.color,
            "thickness": 1.5,
            "width": 4,
        }
        dark["error_y.color"] = look.color_dark
    _add(
        figure,
        go.Scatter,
        row,
        col,
        x=_array(x),
        y=y,
        mode="markers",
        marker={"color": look.color, "symbol": look.symbol, "size": size},
        name=look.label if name is None else name,
        hovertext=text,
        dark=dark,
        **error,
    )
    return figure


def reference_line(
    figure: go.Figure,
    *,
    x: float | int | None = None,
    y: float | int | None = None,
    label: str = "",
    row: int = 1,
    col: int = 1,
    dash: str = "4px,4px",
    side: str = "end",
) -> go.Figure:
    """Draw a grey line across a panel at `x` (vertical) or `y` (horizontal), with a label inside the panel at one end.

    Args:
        side: "end" puts the label at the right of a horizontal line or the top of a vertical one, "start" opposite.

    Raises:
        ValueError: if not exactly one of x and y is given.
    """
    if (x is None) == (y is None):
        raise refuse("x, y", "one number and one None", (x, y))
    choice("side", side, ("start", "end"))
    s = _panel(figure, row, col)
    at = float(x if x is not None else y)  # type: ignore[arg-type]
    across = (0, 1)
    far = 0.99 if side == "end" else 0.01
    vertical = x is not None
    refs = {"xref": "x" + s + ("" if vertical else " domain"), "yref": "y" + s + (" domain" if vertical else "")}
    ends = (at, at)
    (x0, x1), (y0, y1) = (ends, across) if vertical else (across, ends)
    figure.add_shape(
        type="line",
        x0=x0,
        x1=x1,
        y0=y0,
        y1=y1,
        line={"color": _GREY, "width": 1.4, "dash": dash},
        layer="below",
        **refs,
    )
    if label:
        axis = figure.layout[("xaxis" if vertical else "yaxis") + s]
        value = math.log10(at) if axis.type == "log" else at  # annotations on a logarithmic axis take the exponent
        place = (
            {"x": value, "y": far, "xanchor": "left", "yanchor": "top" if side == "end" else "bottom"}
            if vertical
            else {"x": far, "y": value, "xanchor": "right" if side == "end" else "left", "yanchor": "bottom"}
        )
        figure.add_annotation(text=label, showarrow=False, font={"size": 11}, **refs, **place)
    return figure


def heatmap(figure: go.Figure, p: Numbers, *, row: int = 1, col: int = 1) -> go.Figure:
    """Draw attention probabilities (n queries × m keys) on the fixed scale 0 to 1: query 1 on top, square cells.

    Raises:
        ValueError: if p is not a matrix.
    """
    p = _array(p)
    if p.ndim != 2:
        raise refuse("p", "a matrix (queries × keys)", p.shape)
    s = _panel(figure, row, col)
    n, m = p.shape
    _add(
        figure,
        go.Heatmap,
        row,
        col,
        z=p,
        x=np.arange(1, m + 1),
        y=np.arange(1, n + 1),
        coloraxis="coloraxis",
        hovertemplate="query %{y}, key %{x}: %{z:.4f}<extra></extra>",
        dark={},
    )
    figure.update_layout(
        {
            "coloraxis": {
                "cmin": 0,
                "cmax": 1,
                "colorscale": "Viridis",
                "colorbar": {
                    "orientation": "h",
                    "x": 0.5,
                    "y": 0,
                    "yref": "container",
                    "yanchor": "bottom",
                    "thickness": 12,
                    "len": 0.6,
                    "outlinewidth": 0,
                    "title": {"text": "attention probability", "side": "bottom"},
                },
            },
            "xaxis" + s: {"showgrid": False, "constrain": "domain", "range": [0.5, m + 0.5], "nticks": 6},
            "yaxis" + s: {
                "showgrid": False,
                "constrain": "domain",
                "range": [n + 0.5, 0.5],
                "scaleanchor": "x" + s,
                "nticks": 6,
            },
        }
    )
    return figure


def small_multiples(matrices: Sequence[Numbers], titles: Sequence[str], *, cols: int = 3) -> go.Figure:
    """Heat maps of several P side by side, one title each; in two columns on a narrow page. Returns a new figure.

    Raises:
        ValueError: if there is no matrix, or not one title for each.
    """
    count = len(matrices)
    if count == 0 or len(titles) != count:
        raise refuse("titles", "one for each matrix, at least one", (len(titles), count))
    cols = min(integer("cols", cols, minimum=1), count)
    rows = math.ceil(count / cols)
    names = [*titles, *[""] * (rows * cols - count)]
    wide = round(min(320.0, (_WIDE - 40 * cols) / cols))
    figure = new_figure(
        rows,
        cols,
        titles=names,
        x="key",
        y="query",
        panel_height=wide,
        narrow_cols=min(2, cols),
        narrow_panel_height=130 if cols > 1 else 260,
    )
    for k, p in enumerate(matrices):
        heatmap(figure, p, row=k // cols + 1, col=k % cols + 1)
    for k in range(count, rows * cols):
        figure.update_layout({f"xaxis{k + 1}": {"visible": False}, f"yaxis{k + 1}": {"visible": False}})
    return figure


def time_courses(
    figure: go.Figure,
    steps: Numbers,
    values: Numbers,
    *,
    style: str | Style,
    name: str | None = None,
    dead_step: Numbers | None = None,
    dead_rank: str = "high",
    row: int = 1,
    col: int = 1,
    max_points: int = 80,
) -> go.Figure:
    """Draw one thin line a run, a cross where a run dies, and the median over **all** runs as a thick line.

    Dead runs stay in the median: they rank above every living run (`dead_rank="high"`, for a loss or a gradient) or
    below (`"low"`). Where that leaves the median undefined, half of the runs or more being dead, the thick line ends.

    Args:
        steps: the steps, shape (steps,).
        values: shape (runs, steps); non-finite values are not drawn.
        dead_step: for each run the step at which it died; negative or not finite for a survivor. None: all live.
        max_points: at most about this many points a run (evenly spaced steps, and the last one before death).

    Raises:
        ValueError: if the shapes do not agree.
    """
    look = _look(style)
    steps, values = _array(steps), _array(values).copy()
    runs = values.shape[0] if values.ndim == 2 else 0
    if values.shape != (runs, len(steps)) or runs == 0:
        raise refuse("values", f"of shape (runs, {len(steps)}) with at least one run", values.shape)
    dead = np.full(runs, np.inf) if dead_step is None else _array(dead_step).copy()
    if dead.shape != (runs,):
        raise refuse("dead_step", f"of shape ({runs},)", dead.shape)
    choice("dead_rank", dead_rank, ("high", "low"))
    dead[~np.isfinite(dead) | (dead < 0)] = np.inf
    lost = steps[None, :] >= dead[:, None]
    values[lost | ~np.isfinite(values)] = np.nan
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), max(2, max_points))).round().astype(int))
    xs: list[float] = []
    ys: list[float] = []
    ends: list[tuple[float, float]] = []
    for run in range(runs):
        drawn = np.flatnonzero(np.isfinite(values[run]))
        if not len(drawn):
            continue
        if np.isfinite(dead[run]):
            ends.append((steps[drawn[-1]], values[run, drawn[-1]]))
        keep = np.union1d(shown[shown <= drawn[-1]], drawn[-1:])
        xs += [*steps[keep], np.nan]
        ys += [*values[run, keep], np.nan]
    label = look.label if name is None else name
    _add(
        figure,
        go.Scatter,
        row,
        col,
        x=xs,
        y=ys,
        mode="lines",
        line={"color": _fade(look.color, 0.3), "width": 0.7},
        hoverinfo="skip",
        showlegend=False,
        name=label,
        dark={"line.color": _fade(look.color_dark, 0.32)},
    )
    ranked = np.where(lost, np.inf if dead_rank == "high" else -np.inf, values)
    median = np.median(ranked[:, shown], axis=0)
    line(figure, steps[shown], median, style=look, name=label, row=row, col=col, width=3)
    if ends:
        _add(
            figure,
            go.Scatter,
            row,
            col,
            x=[e[0] for e in ends],
            y=[e[1] for e in ends],
            mode="markers",
            marker={"symbol": "x-thin", "size": 7, "line": {"width": 1.5, "color": look.color}},
            hovertemplate="dies after step %{x}<extra></extra>",
            showlegend=False,
            name=label,
            dark={"marker.line.color": look.color_dark},
        )
    return figure


def wilson_interval(successes: Numbers, trials: Numbers, *, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    r"""Wilson's interval for a binomial fraction, element by element.

    .. math:: \frac{\hat p + z^2/2n \pm z\sqrt{\hat p(1-\hat p)/n + z^2/4n^2}}{1 + z^2/n}

    Returns:
        Lower and upper ends in [0, 1]; at 0 successes the lower end is 0, at n the upper end is 1.

    Raises:
        ValueError: if a count is not in 0 … trials, trials is not positive, or level is not strictly between 0 and 1.

    Source: Wilson (1927), Journal of the American Statistical Association 22.
    """
    k, n = np.broadcast_arrays(_array(successes), _array(trials))
    if not ((n > 0) & (k >= 0) & (k <= n)).all():
        raise refuse("successes", "in [0, trials] with trials > 0", (k.tolist(), n.tolist()))
    if not 0 < level < 1:
        raise refuse("level", "strictly between 0 and 1", level)
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    centre = (k + z2 / 2) / (n + z2)
    half = np.sqrt(z2) / (n + z2) * np.sqrt(k * (n - k) / n + z2 / 4)
    return np.where(k == 0, 0.0, centre - half), np.where(k == n, 1.0, centre + half)


def survival_points(
    figure: go.Figure,
    x: Numbers,
    alive: Numbers,
    runs: Numbers,
    *,
    style: str | Style,
    name: str | None = None,
    row: int = 1,
    col: int = 1,
) -> go.Figure:
    """Draw the fraction of runs that live against a setting x, with 95 % Wilson intervals; n stands in the legend.

    `runs` is one number, or one for each x. Returns the figure.
    """
    low, high = wilson_interval(alive, runs)
    k, n = np.broadcast_arrays(_array(alive), _array(runs))
    look = _look(style)
    sizes = f"n = {n.min():.0f}" if n.min() == n.max() else f"n = {n.min():.0f} to {n.max():.0f}"
    label = f"{look.label if name is None else name} ({sizes})"
    text = [f"{a:.0f} of {b:.0f} live" for a, b in zip(k.ravel(), n.ravel(), strict=True)]
    line(figure, x, k / n, style=look, name=label, row=row, col=col, width=1)
    figure.data[-1].update(showlegend=False, hoverinfo="skip")
    points(figure, x, k / n, style=look, name=label, row=row, col=col, interval=(low, high), text=text)
    figure.update_layout({"yaxis" + _panel(figure, row, col): {"range": [-0.03, 1.03]}})
    return figure


def survival_bars(
    figure: go.Figure, names: Sequence[str | Style], alive: Numbers, runs: Numbers, *, row: int = 1, col: int = 1
) -> go.Figure:
    """Draw the fraction of runs that live, one horizontal bar a mechanism, with 95 % Wilson intervals and "k of n".

    The first name stands on top. Returns the figure.
    """
    looks = [_look(name) for name in names]
    low, high = wilson_interval(alive, runs)
    k, n = np.broadcast_arrays(_array(alive), _array(runs))
    if k.shape != (len(looks),):
        raise refuse("alive", f"one count for each of the {len(looks)} names", k.tolist())
    colors, darks = [s.color for s in looks], [s.color_dark for s in looks]
    _add(
        figure,
        go.Bar,
        row,
        col,
        orientation="h",
        y=[f"{s.label}<br>{a:.0f} of {b:.0f}" for s, a, b in zip(looks, k, n, strict=True)],
        x=k / n,
        marker={"color": [_fade(c, 0.55) for c in colors], "line": {"color": colors, "width": 1.5}},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": high - k / n,
            "arrayminus": k / n - low,
            "color": "#222832",
            "thickness": 2,
            "width": 6,
        },
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        showlegend=False,
        dark={"marker.color": [_fade(c, 0.55) for c in darks], "marker.line.color": darks, "error_x.color": "#f3f4f5"},
    )
    s = _panel(figure, row, col)
    left = max(figure.layout.meta["left"], 14 + 7 * max(len(look.label) for look in looks))
    figure.update_layout(meta={**figure.layout.meta, "left": left})
    figure.update_layout(
        {"xaxis" + s: {"range": [0, 1.02]}, "yaxis" + s: {"autorange": "reversed", "showgrid": False, "ticks": ""}}
    )
    return figure


_SIMPLEX_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])


def _entropy_contour(level: float, per_edge: int = 60) -> np.ndarray:
    """Points of the simplex of three tokens where the entropy is `level` nats, by bisection along rays from the centre.

    The entropy is concave with its maximum ln 3 at the centre, so it falls along every ray and each ray meets the
    contour at most once; rays that leave the simplex first give NaN. The rays are denser towards the corners.
    """
    u = (1 - np.cos(np.pi * np.arange(per_edge) / per_edge))[:, None] / 2
    corners = np.eye(3)
    edge = np.concatenate([(1 - u) * corners[j] + u * corners[(j + 1) % 3] for j in range(3)] + [corners[:1]])
    way = edge - 1 / 3

    def entropy_at(r: np.ndarray) -> np.ndarray:
        p = np.clip(1 / 3 + r[:, None] * way, 0, 1)
        return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)

    low, high = np.zeros(len(way)), np.ones(len(way))
    for _ in range(50):
        middle = (low + high) / 2
        outside = entropy_at(middle) < level
        low, high = np.where(outside, low, middle), np.where(outside, middle, high)
    p = 1 / 3 + low[:, None] * way
    p[entropy_at(np.ones(len(way))) > level] = np.nan
    return p


def simplex(
    figure: go.Figure, *, levels: Sequence[float] = (0.3, 0.5, 0.7, 0.9, 1.0, 1.08), row: int = 1, col: int = 1
) -> go.Figure:
    """Draw the simplex of three tokens with its corners named and contours of equal entropy (nats). Returns the figure.

    Raises:
        ValueError: if a level is not strictly between 0 and ln 3.
    """
    s = _panel(figure, row, col)
    for level in levels:
        if not 0 < level < math.log(3):
            raise refuse("levels", "strictly between 0 and ln 3", level)
        xy = _entropy_contour(level) @ _SIMPLEX_CORNERS
        _add(
            figure,
            go.Scatter,
            row,
            col,
            x=xy[:, 0],
            y=xy[:, 1],
            mode="lines",
            line={"color": "rgba(128,128,128,0.75)", "width": 1},
            text=f"entropy {level:g} nats",
            hoverinfo="text",
            showlegend=False,
            dark={},
        )
    edge = _SIMPLEX_CORNERS[[0, 1, 2, 0]]
    _add(
        figure,
        go.Scatter,
        row,
        col,
        x=edge[:, 0],
        y=edge[:, 1],
        mode="lines",
        line={"color": _GREY, "width": 1.6},
        hoverinfo="skip",
        showlegend=False,
        dark={},
    )
    for j, (x, y) in enumerate(_SIMPLEX_CORNERS):
        figure.add_annotation(
            text=f"token {j + 1}", x=x, y=y, xref="x" + s, yref="y" + s, showarrow=False, yshift=12 if j == 2 else -12
        )
    narrow = min(figure.layout.meta["narrow_panel"], 300)  # as high as a triangle that fills a telephone's width
    figure.update_layout(meta={**figure.layout.meta, "narrow_panel": narrow})
    hidden = {"visible": False, "constrain": "domain"}
    figure.update_layout(
        {
            "xaxis" + s: {**hidden, "range": [-0.12, 1.12]},
            "yaxis" + s: {**hidden, "range": [-0.12, 0.98], "scaleanchor": "x" + s},
        }
    )
    return figure


def simplex_path(
    figure: go.Figure,
    p: Numbers,
    *,
    style: str | Style,
    name: str | None = None,
    row: int = 1,
    col: int = 1,
    text: Sequence[str] | None = None,
) -> go.Figure:
    """Draw the path of p (points × 3 tokens, rows summing to 1) in the simplex; the marker is its last point.

    Raises:
        ValueError: if p does not have three columns.
    """
    p = _array(p)
    if p.ndim != 2 or p.shape[1] != 3:
        raise refuse("p", "of shape (points, 3)", p.shape)
    xy = p @ _SIMPLEX_CORNERS
    line(figure, xy[:, 0], xy[:, 1], style=style, name=name, row=row, col=col)
    labels = list(text) if text is not None else [""] * len(p)
    hover = [f"{t} p = ({a:.3f}, {b:.3f}, {c:.3f})".strip() for t, (a, b, c) in zip(labels, p, strict=True)]
    figure.data[-1].update(
        mode="lines+markers", text=hover, hoverinfo="text", marker={"size": [0] * (len(p) - 1) + [9]}
    )
    return figure
