"""Figures: the palette can be told apart and read, what is published is plain and safe, builders draw the numbers."""

import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs
from scipy.stats import binomtest

from lipattn import figures as F
from lipattn.reweighting import REWEIGHTINGS

MAIN = ["softmax", "relu_kernel", "elu_kernel", "qk_layernorm"]
STYLES = F.MECHANISM_STYLE | F.QUANTITY_STYLE
LIGHT_PAGE, DARK_PAGE = "#ffffff", "#121212"  # sphinx-book-theme 1.1.4

# Machado, Oliveira, Fernandes (2009), severity 1.0, on linear RGB
SIGHT = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear_rgb(color):
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one, other):  # WCAG 2
    low, high = sorted(TO_XYZ[1] @ linear_rgb(c) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(color, sight):
    xyz = TO_XYZ @ np.clip(np.array(SIGHT[sight]) @ linear_rgb(color), 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def bundle(figure, summary="A line that falls."):
    return F.bundle(figure, id="fig-test", summary=summary)


def spec_of(html):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)[1])


def drawn(y=(1.0, 2.0, 3.0), **options):
    return F.line(F.new_figure(x="σ", y="entropy (nats)"), np.arange(len(y)), y, style="softmax", **options)


# --- the palette ------------------------------------------------------------------------------------------------------


def test_every_mechanism_of_the_table_has_a_style_and_no_other():
    assert set(F.MECHANISM_STYLE) == set(REWEIGHTINGS)
    assert not set(F.MECHANISM_STYLE) & set(F.QUANTITY_STYLE)


@pytest.mark.parametrize("name", STYLES)
def test_lines_and_markers_stand_out_from_both_pages(name):
    assert contrast(STYLES[name].color, LIGHT_PAGE) >= 3
    assert contrast(STYLES[name].color_dark, DARK_PAGE) >= 3


def test_grey_lines_stand_out_and_text_reads_on_both_pages():
    assert contrast(F._GREY, LIGHT_PAGE) >= 3
    assert contrast(F._GREY, DARK_PAGE) >= 3
    assert contrast(F._TEMPLATE["layout"]["font"]["color"], LIGHT_PAGE) >= 4.5


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("shade", ["color", "color_dark"])
@pytest.mark.parametrize(
    "names",
    [
        MAIN,
        ["entropy", "frobenius_norm", "spectral_norm", "column_mass"],
        ["gradient_W_Q", "gradient_W_K", "gradient_W_V"],
    ],
    ids=["mechanisms", "quantities", "gradients"],
)
def test_what_is_compared_most_differs_in_colour_for_every_kind_of_sight(names, shade, sight):
    for one, other in itertools.combinations(names, 2):
        distance = np.linalg.norm(lab(getattr(STYLES[one], shade), sight) - lab(getattr(STYLES[other], shade), sight))
        assert distance >= 25, (one, other, distance)


@pytest.mark.parametrize("table", [F.MECHANISM_STYLE, F.QUANTITY_STYLE], ids=["mechanisms", "quantities"])
def test_without_any_colour_line_style_and_marker_still_tell_all_apart(table):
    assert len({s.symbol for s in table.values()}) == len(table)
    assert len({(s.dash, s.symbol) for s in table.values()}) == len(table)
    assert len({F.style(name).dash for name in MAIN}) == 4


def test_an_unknown_style_is_refused_by_name():
    with pytest.raises(ValueError, match=r"style must be one of .*got style='softmux'"):
        F.style("softmux")


# --- publishing -------------------------------------------------------------------------------------------------------


def test_the_bundle_is_one_figure_element_with_data_caption_and_label():
    html = bundle(drawn())["text/html"]
    assert html.startswith('<figure id="fig-test" class="lipattn-figure"')
    assert 'role="img" aria-label="Plot of entropy (nats) against σ"' in html
    assert html.endswith("<figcaption>A line that falls.</figcaption></figure>")
    assert spec_of(html)["data"][0]["y"] == [1, 2, 3]
    assert "src=" not in html


def test_the_notebook_gets_the_same_numbers_on_white_and_the_terminal_the_summary():
    shown = bundle(drawn())
    assert set(shown) == {"text/html", "application/vnd.plotly.v1+json", "text/plain"}
    notebook = shown["application/vnd.plotly.v1+json"]
    assert notebook["data"] == spec_of(shown["text/html"])["data"]
    assert notebook["layout"]["paper_bgcolor"] == "white"
    assert go.Figure(notebook).data[0].y == (1, 2, 3)
    assert shown["text/plain"] == "A line that falls."


@settings(deadline=None, max_examples=60)
@example([sys.float_info.max, 5e-324, -0.0, math.nan, -math.inf])
@given(st.lists(st.floats(width=64), min_size=1, max_size=20))
def test_numbers_keep_five_significant_digits_and_non_finite_ones_become_null(values):
    read = spec_of(bundle(go.Figure(go.Scatter(y=np.array(values))))["text/html"])["data"][0]["y"]
    for value, back in zip(values, read, strict=True):
        assert (back is None) == (not math.isfinite(value))
        if back is not None:
            assert abs(back - value) <= 0.50001e-4 * abs(value)
            assert abs(back) > 1.7976e308 or len(re.sub(r"e.*|[-.]", "", repr(back)).strip("0")) <= 5


def test_matrices_stay_matrices_and_integers_stay_exact():
    figure = F.heatmap(F.new_figure(), np.eye(3) / 3)
    figure.add_trace(go.Scatter(x=np.array([123456789], dtype=np.int64), y=[1.5]))
    data = spec_of(bundle(figure)["text/html"])["data"]
    assert data[0]["z"] == [[0.33333, 0, 0], [0, 0.33333, 0], [0, 0, 0.33333]]
    assert data[1]["x"] == [123456789]
    assert "bdata" not in json.dumps(data)


def test_text_in_the_data_can_neither_end_the_script_nor_enter_the_page():
    nasty = '</script><img src=x onerror="alert(1)">&\u2028'
    html = F.bundle(drawn(name=nasty), id="fig-test", summary=f"Beware {nasty}.")["text/html"]
    assert html.count("</script>") == 1
    assert "<img" not in html
    assert spec_of(html)["data"][0]["name"] == nasty


def test_the_same_numbers_give_the_same_bytes_and_no_default_template():
    assert bundle(drawn()) == bundle(drawn())
    html = bundle(drawn())["text/html"]
    assert len(html) < 4000
    spec = spec_of(html)
    assert list(spec["layout"]) == sorted(spec["layout"])
    assert (
        spec_of(bundle(go.Figure(go.Scatter(y=[1])))["text/html"])["layout"]["template"] == spec["layout"]["template"]
    )


@pytest.mark.parametrize("id", ["entropy", "fig-", "fig-Entropy", "fig-a b", 'fig-"', "fig-a\n", ""])
def test_an_id_of_another_form_is_refused(id):
    with pytest.raises(ValueError, match="id must be"):
        F.bundle(drawn(), id=id, summary="A line that falls.")


@pytest.mark.parametrize("summary", ["", "  ", "Entropy", "entropy against sigma", "."])
def test_a_summary_that_is_no_sentence_is_refused(summary):
    with pytest.raises(ValueError, match="summary must be"):
        bundle(drawn(), summary)


def test_publish_displays_once_and_returns_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr("IPython.display.display", lambda *args, **options: calls.append((args, options)))
    assert F.publish(drawn(), id="fig-test", summary="A line that falls.") is None
    assert calls == [((bundle(drawn()),), {"raw": True})]


def test_in_colab_the_figure_is_drawn_there_as_well(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *args, **options: None)
    monkeypatch.setattr(go.Figure, "show", lambda self, renderer: shown.append(renderer))
    F.publish(drawn(), id="fig-test", summary="A line that falls.")
    assert shown == []
    monkeypatch.setitem(sys.modules, "google.colab", object())
    F.publish(drawn(), id="fig-test", summary="A line that falls.")
    assert shown == ["colab"]


def test_publishing_leaves_the_figure_as_it_was():
    figure = drawn()
    before = figure.to_json()
    bundle(figure)
    assert figure.to_json() == before


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "cols", "narrow_cols"), [(1, 1, 1), (1, 2, 1), (2, 3, 1), (2, 3, 2), (3, 2, 1)])
def test_panels_never_overlap_wide_or_narrow_and_are_as_high_as_asked(rows, cols, narrow_cols):
    figure = F.new_figure(rows, cols, x="step", y="loss", panel_height=200, narrow_cols=narrow_cols)
    spec = spec_of(bundle(figure)["text/html"])["layout"]
    wide = {"height": spec["height"], "margin.t": spec["margin"]["t"], "margin.b": spec["margin"]["b"]}
    for k in range(rows * cols):
        s = "" if k == 0 else str(k + 1)
        for axis in "xy":
            wide[f"{axis}axis{s}.domain"] = spec[f"{axis}axis{s}"]["domain"]
    for place in (wide, spec["meta"]["narrow"]):
        inner = place["height"] - place["margin.t"] - place["margin.b"]
        boxes = []
        for k in range(rows * cols):
            s = "" if k == 0 else str(k + 1)
            boxes.append((*place[f"xaxis{s}.domain"], *place[f"yaxis{s}.domain"]))
        for x0, x1, y0, y1 in boxes:
            assert 0 <= x0 < x1 <= 1
            assert 0 <= y0 < y1 <= 1
            assert (y1 - y0) * inner == pytest.approx(200, abs=0.2)
        for a, b in itertools.combinations(boxes, 2):
            assert a[1] < b[0] or b[1] < a[0] or a[3] < b[2] or b[3] < a[2]
        # reading order: row by row, left to right
        assert boxes == sorted(boxes, key=lambda box: (-box[3], box[0]))
    assert len(
        {tuple(spec["meta"]["narrow"][f"xaxis{s}.domain"]) for s in ["", *map(str, range(2, rows * cols + 1))]}
    ) == (min(narrow_cols, cols))


def test_the_figure_grows_with_its_legend_so_that_the_panel_does_not_shrink():
    heights = []
    for count in (2, 13):
        figure = F.new_figure(x="σ", y="H")
        for name in list(F.MECHANISM_STYLE)[:count]:
            F.line(figure, [1, 2], [1, 2], style=name)
        spec = spec_of(bundle(figure)["text/html"])["layout"]
        heights.append((spec["height"], spec["meta"]["narrow"]["height"]))
    assert heights[1][0] > heights[0][0] + 20
    assert heights[1][1] > heights[1][0]


def test_one_title_too_few_and_a_panel_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="titles must be one value"):
        F.new_figure(1, 2, titles=["only one"])
    with pytest.raises(ValueError, match="rows must be an integer >= 1"):
        F.new_figure(0, 1)
    with pytest.raises(ValueError, match="col must be an integer in \\[1, 2\\], got col=3"):
        F.line(F.new_figure(1, 2), [1], [1], style="softmax", col=3)


# --- builders ---------------------------------------------------------------------------------------------------------


def test_a_line_has_its_style_in_both_themes_and_takes_tensors():
    figure = F.line(F.new_figure(1, 2), torch.arange(3), torch.ones(3, requires_grad=True), style="elu_kernel", col=2)
    (trace,) = figure.data
    look = F.MECHANISM_STYLE["elu_kernel"]
    assert (trace.line.color, trace.line.dash, trace.marker.symbol) == (look.color, look.dash, look.symbol)
    assert trace.meta["dark"] == {"line.color": look.color_dark, "marker.color": look.color_dark}
    assert (trace.xaxis, trace.yaxis, trace.name) == ("x2", "y2", "ELU+1 kernel")


def test_a_name_stands_in_the_legend_once_however_many_panels_show_it():
    figure = F.new_figure(1, 2)
    for col in (1, 2):
        F.line(figure, [1, 2], [1, 2], style="softmax", col=col, band=([0, 1], [2, 3]))
    listed = [t for t in figure.data if t.showlegend is not False]
    assert len(listed) == 1
    assert {t.legendgroup for t in figure.data} == {"softmax"}


def test_a_band_and_error_bars_reach_from_lower_to_upper():
    figure = F.line(F.new_figure(), [0, 1], [5, 6], style="theory", band=([4, np.nan], [7, 9]))
    assert list(figure.data[0].y) == [4, 7]
    figure = F.points(F.new_figure(), [0], [5], style="entropy", interval=([4.0], [7.0]))
    assert (figure.data[0].error_y.array[0], figure.data[0].error_y.arrayminus[0]) == (2, 1)


def test_a_reference_line_stands_at_its_value_also_on_a_logarithmic_axis():
    figure = F.reference_line(F.new_figure(log_x=True), x=100.0, label="here")
    (shape,), (label,) = figure.layout.shapes, figure.layout.annotations
    assert (shape.x0, shape.x1, shape.yref) == (100, 100, "y domain")
    assert label.x == pytest.approx(2)
    figure = F.reference_line(F.new_figure(log_x=True), y=100.0, label="here")
    assert (figure.layout.annotations[0].y, figure.layout.shapes[0].xref) == (100, "x domain")
    for wrong in ({}, {"x": 1.0, "y": 1.0}):
        with pytest.raises(ValueError, match="one number and one None"):
            F.reference_line(F.new_figure(), **wrong)


def test_heat_maps_share_the_scale_from_0_to_1_and_count_queries_downwards():
    figure = F.small_multiples([np.eye(4), np.full((4, 4), 0.25), np.eye(4)], ["a", "b", "c"], cols=2)
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    assert {t.coloraxis for t in figure.data} == {"coloraxis"}
    assert figure.layout.yaxis3.range == (4.5, 0.5)
    assert figure.layout.yaxis4.visible is False
    with pytest.raises(ValueError, match="one for each matrix"):
        F.small_multiples([np.eye(2)], [])
    with pytest.raises(ValueError, match="p must be a matrix"):
        F.heatmap(F.new_figure(), np.ones(3))


def test_time_courses_stop_at_death_and_the_dead_stay_in_the_median():
    steps = np.arange(5)
    values = np.array([[1.0, 1, 1, 1, 1], [2, 2, 9, 9, 9], [3, 3, 3, 9, np.nan]])
    figure = F.time_courses(F.new_figure(), steps, values, style="softmax", dead_step=torch.tensor([-1, 2, 3]))
    runs, median, crosses = figure.data
    y = [list(group) for nan, group in itertools.groupby(runs.y, np.isnan) if not nan]
    assert y == [[1, 1, 1, 1, 1], [2, 2], [3, 3, 3]]
    # two of three are dead from step 3 on: the median of all runs is one of theirs
    assert list(median.y[:2]) == [2, 2]
    assert median.y[2] == 3
    assert np.isinf(median.y[3:]).all()
    assert (list(crosses.x), list(crosses.y)) == ([1, 2], [2, 3])
    assert spec_of(bundle(figure)["text/html"])["data"][1]["y"] == [2, 2, 3, None, None]
    low = F.time_courses(
        F.new_figure(), steps, values, style="softmax", dead_step=[np.inf, 2, np.nan], dead_rank="low"
    ).data[1]
    assert low.y[2] == 1


def test_long_time_courses_are_thinned_but_keep_the_step_before_death():
    steps = np.arange(10_000)
    figure = F.time_courses(
        F.new_figure(), steps, np.ones((2, 10_000)), style="softmax", dead_step=[7001, -1], max_points=50
    )
    assert len(figure.data[0].x) <= 2 * 52
    assert 7000 in figure.data[0].x
    assert list(figure.data[2].x) == [7000]
    with pytest.raises(ValueError, match="values must be of shape"):
        F.time_courses(F.new_figure(), steps, np.ones((2, 3)), style="softmax")
    with pytest.raises(ValueError, match="dead_step must be of shape"):
        F.time_courses(F.new_figure(), [0, 1], np.ones((2, 2)), style="softmax", dead_step=[1])


@pytest.mark.parametrize("level", [0.9, 0.95])
@pytest.mark.parametrize(("k", "n"), [(0, 32), (32, 32), (1, 96), (48, 96), (7, 8), (1, 1)])
def test_wilson_intervals_agree_with_scipy(k, n, level):
    expected = binomtest(k, n).proportion_ci(level, method="wilson")
    low, high = F.wilson_interval(k, n, level=level)
    assert float(low) == pytest.approx(expected.low, abs=1e-12)
    assert float(high) == pytest.approx(expected.high, abs=1e-12)


@pytest.mark.parametrize(("k", "n"), [(-1, 8), (9, 8), (0, 0), (np.nan, 8)])
def test_impossible_counts_are_refused(k, n):
    with pytest.raises(ValueError, match="successes must be"):
        F.wilson_interval(k, n)


def test_survival_figures_print_n_and_draw_the_interval():
    figure = F.survival_points(F.new_figure(log_x=True), [0.1, 0.5], [30, 0], 32, style="softmax")
    marks = figure.data[1]
    assert marks.name == "softmax (n = 32)"
    assert list(marks.y) == [30 / 32, 0]
    expected = binomtest(30, 32).proportion_ci(0.95, method="wilson")
    assert marks.error_y.array[0] == pytest.approx(expected.high - 30 / 32)
    assert marks.error_y.arrayminus[0] == pytest.approx(30 / 32 - expected.low)
    figure = F.survival_bars(F.new_figure(), MAIN, [0, 32, 32, 31], 32)
    (bars,) = figure.data
    assert bars.y[0] == "softmax<br>0 of 32"
    assert bars.x[3] == 31 / 32
    expected = binomtest(31, 32).proportion_ci(0.95, method="wilson")
    assert bars.error_x.array[3] == pytest.approx(expected.high - 31 / 32)
    assert bars.error_x.arrayminus[3] == pytest.approx(31 / 32 - expected.low)
    with pytest.raises(ValueError, match="alive must be one count for each"):
        F.survival_bars(F.new_figure(), MAIN, [0, 1], 32)


def barycentric(x, y):
    p3 = y / (math.sqrt(3) / 2)
    p2 = x - p3 / 2
    return np.stack([1 - p2 - p3, p2, p3], axis=-1)


def test_simplex_contours_lie_in_the_simplex_and_have_their_entropy():
    levels = (0.3, math.log(2) + 1e-3, 1.0)
    figure = F.simplex(F.new_figure(), levels=levels)
    for level, trace in zip(levels, figure.data, strict=False):
        x, y = (np.asarray(v, dtype=float) for v in (trace.x, trace.y))
        inside = np.isfinite(x)
        assert inside.sum() > 30
        assert inside.all() == (level > math.log(2))  # below ln 2 a contour leaves through the edges
        p = barycentric(x, y)[inside]
        assert (p > -1e-12).all()
        p = np.clip(p, 1e-300, 1)
        np.testing.assert_allclose(-(p * np.log(p)).sum(1), level, atol=1e-9)
    with pytest.raises(ValueError, match="levels must be"):
        F.simplex(F.new_figure(), levels=[1.2])


def test_a_simplex_path_runs_through_its_points_and_ends_in_a_marker():
    p = np.array([[1 / 3, 1 / 3, 1 / 3], [0.7, 0.2, 0.1], [0, 0, 1]])
    trace = F.simplex_path(F.new_figure(), p, style="softmax").data[0]
    np.testing.assert_allclose(barycentric(np.array(trace.x), np.array(trace.y)), p, atol=1e-12)
    assert list(trace.marker.size) == [0, 0, 9]
    with pytest.raises(ValueError, match="p must be of shape"):
        F.simplex_path(F.new_figure(), np.ones((3, 2)), style="softmax")


# --- in the page ------------------------------------------------------------------------------------------------------

SITE = Path(__file__).parents[1] / "book" / "_assets" / "site"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
STATE = """() => {
  const plot = document.querySelector("#fig-test .lipattn-plot"), layout = plot._fullLayout;
  return {
    line: plot._fullData[0].line.color, font: layout.font.color, top: layout.yaxis.domain, second: layout.yaxis2.domain,
    height: layout.height, reserved: plot.clientHeight, width: layout.width, room: plot.clientWidth,
    drag: layout.dragmode, fixed: layout.xaxis.fixedrange, page: document.documentElement.scrollWidth,
  };
}"""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        running = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def page_url(tmp_path_factory):
    """A page with one two-panel figure far below the fold of a short window, opened as a file."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    for name in ("figures.js", "book.css"):
        shutil.copy(SITE / name, folder)
    figure = F.new_figure(1, 2, x="step", y=["loss", "entropy (nats)"])
    for col in (1, 2):
        F.line(figure, [0, 1, 2], [3, 2, 1], style="softmax", col=col)
    (folder / "page.html").write_text(
        '<!doctype html><html data-theme="light"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="stylesheet" href="book.css">'
        "<style>body{margin:0 16px;color:#222832}[data-theme=dark] body{background:#121212;color:#ced6dd}</style>"
        '<script src="plotly.min.js"></script><script src="figures.js"></script><body><div style="height:2000px"></div>'
        f"{bundle(figure)['text/html']}<p id='after'>after</p></body></html>",
        encoding="utf-8",
    )
    return (folder / "page.html").as_uri()


@pytest.mark.browser
def test_a_figure_is_drawn_when_it_comes_near_in_reserved_space_and_follows_theme_and_width(browser, page_url):
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    wrong = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(page_url)
    page.wait_for_timeout(200)
    assert page.locator("[data-drawn]").count() == 0
    place = page.locator("#after").bounding_box()["y"]
    page.mouse.wheel(0, 1500)
    page.wait_for_selector("[data-drawn=light]")
    assert page.locator("#after").bounding_box()["y"] + page.evaluate("scrollY") == pytest.approx(place, abs=0.5)
    wide = page.evaluate(STATE)
    look = F.MECHANISM_STYLE["softmax"]
    assert (wide["line"], wide["font"]) == (look.color, "rgb(34, 40, 50)")
    assert wide["top"] == wide["second"] == [0, 1]
    assert (wide["height"], wide["width"]) == (wide["reserved"], wide["room"])
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.wait_for_selector("[data-drawn=dark]")
    dark = page.evaluate(STATE)
    assert (dark["line"], dark["font"]) == (look.color_dark, "rgb(206, 214, 221)")
    page.set_viewport_size({"width": 390, "height": 700})
    page.wait_for_function("document.querySelector('.lipattn-plot')._fullLayout.yaxis2.domain[1] < 0.5")
    narrow = page.evaluate(STATE)
    assert narrow["second"][1] < narrow["top"][0]
    assert (narrow["height"], narrow["width"]) == (narrow["reserved"], narrow["room"])
    assert (narrow["drag"], narrow["fixed"], narrow["page"]) == (False, True, 390)
    page.set_viewport_size({"width": 1000, "height": 700})
    page.wait_for_function("document.querySelector('.lipattn-plot')._fullLayout.yaxis2.domain[1] === 1")
    assert page.evaluate(STATE)["fixed"] is False
    assert wrong == []
    page.close()


@pytest.mark.browser
def test_a_finger_on_the_plot_scrolls_the_page(browser, page_url):
    context = browser.new_context(viewport={"width": 390, "height": 700}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(page_url)
    page.locator("#fig-test").scroll_into_view_if_needed()
    page.wait_for_selector("[data-drawn]")
    page.evaluate("scrollTo(0, 1800)")
    box = page.locator("#fig-test .nsewdrag").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] - 10
    touch = context.new_cdp_session(page)
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for k in range(1, 11):
        touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{"x": x, "y": y - 20 * k}]})
        page.wait_for_timeout(16)
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_timeout(300)
    assert page.evaluate("scrollY") > 1850
    context.close()


@pytest.mark.browser
def test_without_scripts_or_plotly_the_caption_remains_and_no_empty_box(browser, page_url):
    for options in ({"java_script_enabled": False}, {}):
        context = browser.new_context(**options)
        page = context.new_page()
        page.route("**/plotly.min.js", lambda route: route.abort())
        page.goto(page_url)
        assert page.locator("#fig-test figcaption").is_visible()
        assert not page.locator("#fig-test .lipattn-plot").is_visible()
        context.close()


@pytest.mark.browser
def test_printing_draws_what_was_not_yet_seen(browser, page_url):
    page = browser.new_page()
    page.goto(page_url)
    page.pdf()
    assert page.locator("[data-drawn]").count() == 1
    page.close()


def test_script_and_style_sheet_agree_on_what_is_narrow():
    (script,) = re.findall(r"NARROW = (\d+)", (SITE / "figures.js").read_text(encoding="utf-8"))
    (sheet,) = re.findall(r"@container \(max-width: ([\d.]+)px\)", (SITE / "book.css").read_text(encoding="utf-8"))
    assert 0 < int(script) - float(sheet) < 0.1
