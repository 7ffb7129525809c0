"""The built pages in a browser, every other site cut off: by http and from disk, narrow and wide, light and dark."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from expected_figures import EXPECTED_FIGURES
from playwright.sync_api import Browser, Page, sync_playwright

from lipattn import book as runner

pytestmark = [pytest.mark.book, pytest.mark.browser, pytest.mark.xdist_group("site")]

PAGES = runner.pages()
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# over what, width, theme: every pair of two of them occurs
VIEWS = [("http", 390, "light"), ("http", 1280, "dark"), ("file", 1280, "light"), ("file", 390, "dark")]


def chromium() -> str:
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES), mac if Path(mac).exists() else None]
    path = next((path for path in found if path), None)
    assert path, "no Chromium: `sudo apt-get install chromium`, or CHROMIUM=/path"
    return path


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the built pages: the one `make test` has just built, else one built now."""
    built = os.environ.get("LIPATTN_SITE")
    return Path(built) if built else runner.build().parent


@pytest.fixture(scope="session")
def addresses(site: Path) -> Iterator[dict[str, str]]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {"http": f"http://127.0.0.1:{server.server_port}", "file": site.resolve().as_uri()}
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page as it was opened, and everything that went wrong on the way."""

    page: Page
    wrong: list[str] = field(default_factory=list)


@pytest.fixture
def visit(browser: Browser, addresses: dict[str, str]):
    contexts = []

    def open_page(name: str, over: str = "http", width: int = 1280, theme: str = "light") -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        seen = Visit(context.new_page())
        home = addresses[over]

        def local_only(route):
            if route.request.url.startswith((home, "data:", "blob:")):
                route.continue_()
            else:
                seen.wrong.append(f"asked another site: {route.request.url}")
                route.abort()

        context.route("**/*", local_only)
        page = seen.page
        page.on("console", lambda m: seen.wrong.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: seen.wrong.append(f"error: {error}"))
        page.on("requestfailed", lambda request: seen.wrong.append(f"failed: {request.url} {request.failure}"))
        page.on("response", lambda r: seen.wrong.append(f"status {r.status}: {r.url}") if r.status >= 400 else None)
        page.goto(f"{home}/{name}.html", wait_until="load")
        page.wait_for_function("!window.MathJax || !MathJax.startup || MathJax.startup.promise")
        page.evaluate("() => window.MathJax && MathJax.startup && MathJax.startup.promise.then(() => null)")
        return seen

    yield open_page
    for context in contexts:
        context.close()


def draw(page: Page) -> None:
    """Bring each figure into view, as a reader does, and wait until it is drawn."""
    for figure in page.query_selector_all("figure.lipattn-figure"):
        figure.scroll_into_view_if_needed()
        name = figure.get_attribute("id")
        page.wait_for_function("id => document.getElementById(id).dataset.drawn", arg=name)


# Text that MathJax should have turned into formulas, and did not
RAW_MATHS = r"""() => {
  const body = document.querySelector("main").cloneNode(true);
  body.querySelectorAll("pre, code, script, style, mjx-container, .lipattn-figure").forEach(e => e.remove());
  return body.textContent.match(/\\[()[\]]|\\[a-zA-Z]{2,}|\$[^$]+\$/g) || [];
}"""
FORMULAS = """() => [...document.querySelectorAll("main .math")].map(e => ({
  source: e.textContent.slice(0, 80),
  done: e.querySelectorAll("mjx-container").length,
  wrong: e.querySelectorAll("mjx-merror").length,
  width: e.querySelector("mjx-container")?.getBoundingClientRect().width,
}))"""
FIGURES = """() => [...document.querySelectorAll("figure")].filter(e => e.id.startsWith("fig-")).map(e => e.id)"""
# Marks that show data: lines, markers, bars, contours and heat maps
MARKS = """id => [...document.getElementById(id).querySelectorAll(
  "svg.main-svg .cartesianlayer :is(.scatterlayer, .barlayer, .contourlayer, .heatmaplayer) :is(path, image)")]
  .filter(e => e.getBoundingClientRect().width + e.getBoundingClientRect().height > 0).length"""
CAPTION = """id => document.getElementById(id).querySelector("figcaption")?.innerText.trim()"""
TEXTS = """() => [...document.querySelectorAll("figure.lipattn-figure svg text, figure.lipattn-figure figcaption")]
  .filter(e => e.textContent.trim() && e.getBoundingClientRect().width > 0).map(e => {
    const css = getComputedStyle(e), svg = e.tagName === "text";
    let under = e, page = "rgba(0, 0, 0, 0)";
    while (under && /rgba\\(.*, 0\\)|transparent/.test(page)) {
      under = under.parentElement; page = under ? getComputedStyle(under).backgroundColor : "rgb(255, 255, 255)";
    }
    const own = e.closest(".annotation")?.querySelector("rect.bg");
    const box = own ? getComputedStyle(own) : null;
    if (box && Number(box.fillOpacity) === 1 && box.fill.startsWith("rgb(")) page = box.fill;
    const opacity = svg ? Number(css.fillOpacity) * Number(css.opacity) : 1;
    return {text: e.textContent, colour: svg ? css.fill : css.color, opacity, page, figure: e.closest("figure").id};
  })"""


def channels(colour: str) -> list[float]:
    return [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")]


def luminance(rgb: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (c / 255 for c in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str, page: str, opacity: float) -> float:
    """WCAG 2 contrast ratio of a colour laid over the page's."""
    above, below = channels(colour), channels(page)[:3]
    alpha = opacity * (above[3] if len(above) == 4 else 1)
    mixed = [alpha * a + (1 - alpha) * b for a, b in zip(above, below, strict=False)]
    light, dark = sorted((luminance(mixed), luminance(below)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_standard():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)", 1) == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", "rgb(255, 255, 255)", 1) == pytest.approx(4.48, abs=0.01)
    assert contrast("rgba(0, 0, 0, 0)", "rgb(255, 255, 255)", 1) == 1


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: "-".join(map(str, view)))
@pytest.mark.parametrize("name", PAGES)
def test_page_is_complete_without_a_network(visit, name, view):
    seen = visit(name, *view)
    page, (_, width, theme) = seen.page, view
    assert page.evaluate("document.documentElement.dataset.theme") == theme

    formulas = page.evaluate(FORMULAS)
    assert [f for f in formulas if f["done"] != 1 or f["wrong"] or not f["width"]] == []
    assert page.evaluate(RAW_MATHS) == []

    draw(page)
    assert page.evaluate(FIGURES) == list(EXPECTED_FIGURES.get(name, ()))
    for figure in EXPECTED_FIGURES.get(name, ()):
        assert page.evaluate(MARKS, figure) > 0, f"{figure} shows no data"
        assert page.evaluate(CAPTION, figure), f"{figure} has no caption"
    faint = [t for t in page.evaluate(TEXTS) if contrast(t["colour"], t["page"], t["opacity"]) < 4.5]
    assert faint == []

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.wrong == []


@pytest.mark.parametrize("name", ["index", "search", "genindex"])
def test_other_pages_ask_no_other_site_and_log_no_error(visit, name):
    seen = visit(name)
    seen.page.wait_for_load_state("networkidle")
    assert seen.wrong == []


def test_the_search_finds_a_word_of_the_book(visit, addresses):
    seen = visit("search")
    seen.page.goto(f"{addresses['http']}/search.html?q=entropy")
    seen.page.wait_for_selector("#search-results li a")
    assert seen.wrong == []


@pytest.mark.parametrize("name", PAGES)
def test_page_links_to_the_form_that_reports_an_error(visit, name):
    links = visit(name).page.eval_on_selector_all("a", "links => links.map(a => a.href)")
    (report,) = {link for link in links if "/lipattn/lipattn/issues/new" in link}
    assert f"{name}.html" in report
    if name in runner.chapters():
        assert f"https://colab.research.google.com/github/lipattn/lipattn/blob/main/book/{name}.ipynb" in links
        assert f"https://mybinder.org/v2/gh/lipattn/lipattn/main?urlpath=lab/tree/book/{name}.ipynb" in links


@pytest.mark.parametrize("name", sorted(EXPECTED_FIGURES))
def test_figures_follow_when_the_reader_switches_the_theme(visit, name):
    page = visit(name).page
    draw(page)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.lipattn-figure')].every(e => e.dataset.drawn === 'dark')"
    )
    faint = [t for t in page.evaluate(TEXTS) if contrast(t["colour"], t["page"], t["opacity"]) < 4.5]
    assert faint == []


def test_every_link_inside_the_book_leads_somewhere(visit, site):
    dead = []
    for name in PAGES:
        page = visit(name, "file").page
        for target in page.eval_on_selector_all("main a[href]", "links => links.map(a => a.href)"):
            if not target.startswith("file:"):
                continue
            path, _, anchor = target.removeprefix("file://").partition("#")
            here = path == str((site / f"{name}.html").resolve())
            known = "id => !!document.getElementById(decodeURIComponent(id))"
            if not Path(path).is_file() or (anchor and here and not page.evaluate(known, anchor)):
                dead.append(f"{name}: {target}")
    assert dead == []
