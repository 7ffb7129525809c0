"""What the book's build needs beyond Jupyter Book: a cache that knows the library, our scripts, and no dead ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import lipattn
from lipattn.book import _quiet_kernels, library_hash

__all__ = ["setup"]

FIGURE = 'class="lipattn-figure"'
PLOTLY = "../vendor/plotly/plotly-cartesian.min.js"  # relative to _static; html_extra_path puts it beside the pages
FIGURES_SCRIPT = "../site/figures.js"
STYLES = ("../site/book.css", "../site/api.css")
PLOTLY_JSON = "application/vnd.plotly.v1+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def _name_cache(app: Any, config: Any) -> None:
    """Name the execution cache by the library's sources: outputs never outlive the code that made them."""
    caches = Path(app.outdir).parent / ".jupyter_cache"
    cache = caches / library_hash()[:16]
    if caches.is_dir():
        for old in caches.iterdir():
            if old != cache:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    config.nb_execution_cache_path = str(cache)


def _disconnect_thebe(app: Any, config: Any) -> None:
    """Jupyter Book loads sphinx-thebe always; its script asks another site and logs an error on every page."""
    for listeners in app.events.listeners.values():
        for listener in list(listeners):
            if listener.handler.__module__.partition(".")[0] == "sphinx_thebe":
                app.disconnect(listener.id)


def _accept_published_figures() -> None:
    """`publish` gives two forms of a figure, and a page takes the HTML one: no warning about the other.

    A plotly figure that comes without the HTML form is still a warning, since it would be absent from the page.
    """
    from myst_nb.core.render import NbElementRenderer

    warn = NbElementRenderer.render_unhandled

    def render_unhandled(self: Any, data: Any) -> list[Any]:
        if data.mime_type == PLOTLY_JSON and data.cell_index is not None and data.output_index is not None:
            outputs = self.renderer.nb_client.notebook.cells[data.cell_index].outputs
            if FIGURE in outputs[data.output_index].data.get("text/html", ""):
                return []
        return warn(self, data)

    if warn.__module__ != __name__:
        NbElementRenderer.render_unhandled = render_unhandled


def _check_assets(app: Any, config: Any) -> None:
    """Refuse to build from vendored files that are missing or differ from what `versions.json` records."""
    from sphinx.errors import ConfigError

    assets = Path(app.srcdir) / "_assets"
    record = assets / "vendor" / "versions.json"
    if not record.is_file():
        raise ConfigError(f"{record} is missing: run `python tools/vendor.py`")
    for package, entry in json.loads(record.read_text()).items():
        for name, digest in entry["files"].items():
            path = assets / "vendor" / name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                raise ConfigError(f"{path} of {package} is missing or changed: run `python tools/vendor.py`")
    for name in (FIGURES_SCRIPT, *STYLES):
        if not (assets / name.removeprefix("../")).is_file():
            raise ConfigError(f"{assets / name.removeprefix('../')} is missing")


def _page_scripts(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Figures' scripts on pages that have figures; saved widget state, which needs a kernel, on none."""
    styles = context.get("css_files", [])
    styles[:] = [one for one in styles if "sphinx-thebe" not in str(getattr(one, "filename", one))]
    scripts = context.get("script_files", [])
    scripts[:] = [one for one in scripts if getattr(one, "attributes", {}).get("type") != WIDGET_STATE]
    if FIGURE in context.get("body", ""):
        app.add_js_file(PLOTLY, loading_method="defer", priority=800)
        app.add_js_file(FIGURES_SCRIPT, loading_method="defer", priority=810)


_FONTAWESOME_SCRIPT = re.compile(r'\s*<script [^>]*src="[^"]*/fontawesome/[^"]*/js/[^"]*"[^>]*></script>')
_FONTAWESOME_PRELOAD = re.compile(r'\s*<link [^>]*rel="pre(?:load|fetch)"[^>]*fontawesome[^>]*/?>')


def _finish(app: Any, exception: Exception | None) -> None:
    """Drop FontAwesome's script (its style sheet draws the same icons, 0.5 MB lighter); print what each page took."""
    if exception is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        if "_static" in page.parts or "vendor" in page.parts:
            continue
        text = page.read_text(encoding="utf-8")
        lighter = _FONTAWESOME_PRELOAD.sub("", _FONTAWESOME_SCRIPT.sub("", text))
        if lighter != text:
            page.write_text(lighter, encoding="utf-8")
    _print_times(app)


_LOADED = re.compile(r'<(?:script[^>]*?\ssrc|link[^>]*?rel="stylesheet"[^>]*?\shref)="([^"#?:]+)')


def _weight(page: Path) -> int:
    """Bytes of a page with its scripts and style sheets, gzipped as servers send them; fonts and images come on top."""
    text = page.read_text(encoding="utf-8")
    files = {page} | {(page.parent / name).resolve() for name in _LOADED.findall(text)}
    return sum(len(gzip.compress(file.read_bytes(), mtime=0)) for file in files if file.is_file())


def _print_times(app: Any) -> None:
    from myst_nb.sphinx_ import NbMetadataCollector
    from sphinx.util import logging

    log = logging.getLogger(__name__)
    times = {}
    log.info("%-32s %10s %12s", "page", "executed", "weight (gz)")
    for name in sorted(app.env.found_docs):
        data = NbMetadataCollector.get_exec_data(app.env, name)
        took = data.get("runtime") if data else None
        if took is not None:
            times[name] = round(float(took), 2)
        page = Path(app.outdir) / f"{name}.html"
        weight = f"{_weight(page) / 1000:.0f} kB" if page.is_file() else "missing"
        log.info("%-32s %10s %12s", name, "" if took is None else f"{took:.1f} s", weight)
    (Path(app.outdir).parent / "times.json").write_text(json.dumps(times, indent=2) + "\n")


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry point."""
    _quiet_kernels()
    _accept_published_figures()
    app.connect("config-inited", _check_assets)
    app.connect("config-inited", _disconnect_thebe)
    app.connect("config-inited", _name_cache)
    app.connect("html-page-context", _page_scripts, priority=900)
    app.connect("build-finished", _finish)
    for style in STYLES:
        app.add_css_file(style, priority=900)
    return {"version": lipattn.__version__, "parallel_read_safe": True, "parallel_write_safe": True}
