"""Run, refresh and build the chapters: ``python -m lipattn.book list | run | sync | build``.

A chapter is a text, ``book/text/NAME.md`` (MyST), and the notebook made from it, ``book/NAME.ipynb``, executed at the
parameters' defaults with its outputs kept. The text is what one edits; the notebook is what the site is built from.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import difflib
import hashlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lipattn
from lipattn._validate import integer

__all__ = [
    "BOOK",
    "BookError",
    "Chapter",
    "ChapterFailed",
    "Parameter",
    "build",
    "chapters",
    "check_twins",
    "library_hash",
    "main",
    "pages",
    "read_parameters",
    "read_text",
    "run",
    "sync",
]

BOOK = Path(lipattn.__file__).resolve().parent.parent / "book"
"""The book's folder, beside the package."""

CELL_TIMEOUT = 300
"""Seconds a cell may take; the build's ``execute: timeout`` is the same."""

_TOOLS = ("book.py", "sphinx_ext.py")  # they run chapters and cannot change a number in one
_KEPT_CELL_METADATA = ("tags",)


class BookError(ValueError):
    """What one asked for is wrong: the message says what, in one line."""


class ChapterFailed(RuntimeError):
    """A chapter raised, wrote to stderr, or did not build."""


def library_hash(package: Path | None = None) -> str:
    """SHA-256 over the sources of `lipattn` that can change a number or a figure of the book.

    Left out are `book.py` and `sphinx_ext.py`, which run chapters and appear in none. A notebook carries the hash of
    the library it was executed with, and the build's execution cache is named by it.
    """
    folder = Path(lipattn.__file__).resolve().parent if package is None else package
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).as_posix()
        if path.suffix in {".py", ".js", ".css", ".json"} and inside not in _TOOLS:
            data = path.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{inside}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


# Parameters


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One line of a chapter's ``parameters`` cell: ``n_runs = 32  # [8, 512] fast 8: seeds per mechanism``."""

    name: str
    default: Any
    low: int | float | None = None
    high: int | float | None = None
    choices: tuple[Any, ...] | None = None
    fast: Any = None
    meaning: str = ""

    @property
    def range(self) -> str:
        """The allowed values as the chapter writes them: ``[lo, hi]`` or ``{a, b}``."""
        if self.choices is not None:
            return "{" + ", ".join(map(str, self.choices)) + "}"
        return f"[{self.low}, {self.high}]"

    def _refuse(self, requirement: str, value: Any) -> BookError:
        return BookError(f"{self.name} must be {requirement}, got {self.name}={value!r}")

    def check(self, value: Any) -> Any:
        """`value` in the default's type, if it is allowed.

        Raises:
            BookError: if the type differs from the default's or the value is outside the range.
        """
        if isinstance(self.default, list | tuple):
            if not isinstance(value, list | tuple) or not value:
                raise self._refuse(f"a non-empty list, each value in {self.range}", value)
            return [self._check_one(item, self.default[0], value) for item in value]
        return self._check_one(value, self.default, value)

    def _check_one(self, item: Any, like: Any, shown: Any) -> Any:
        if isinstance(like, bool):
            fits, kind = isinstance(item, bool), "True or False"
        elif isinstance(like, int):
            fits, kind = isinstance(item, int) and not isinstance(item, bool), "an integer"
        elif isinstance(like, float):
            fits = isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
            kind = "a finite number"
            item = float(item) if fits else item
        else:
            fits, kind = isinstance(item, str), "a string"
        if not fits:
            raise self._refuse(f"{kind} in {self.range}", shown)
        if self.choices is not None:
            if item not in self.choices:
                raise self._refuse(f"one of {self.range}", shown)
        elif self.low is None or self.high is None or not self.low <= item <= self.high:
            raise self._refuse(f"{kind} in {self.range}", shown)
        return item

    def parse(self, text: str) -> Any:
        """The value that `text`, as typed on a command line, stands for."""
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = {"true": True, "false": False}.get(text.lower(), text) if isinstance(self.default, bool) else text
        if isinstance(self.default, str) and not isinstance(value, str):
            value = text
        return self.check(value)


_COMMENT = re.compile(r"#\s*(?P<range>\[[^\]]*\]|\{[^}]*\})\s*(?:fast\s+(?P<fast>.+?)\s*)?:\s+(?P<meaning>\S.*)$")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text.strip()


def read_parameters(source: str, where: str = "parameters cell") -> dict[str, Parameter]:
    """The parameters that the source of a ``parameters`` cell declares.

    Raises:
        BookError: if a line is not ``name = literal  # [lo, hi] fast value: meaning`` (or ``{a, b}`` for the range),
            or if the default or the fast value is outside the range.
    """
    found: dict[str, Parameter] = {}
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for statement in ast.parse(source).body:
        line = source.splitlines()[statement.lineno - 1].strip()
        match = _COMMENT.match(comments.get(statement.end_lineno or 0, ""))
        if not (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
            and match
        ):
            raise BookError(f"{where}: wanted `name = value  # [lo, hi] fast value: meaning`, got `{line}`")
        name = statement.targets[0].id
        try:
            default = ast.literal_eval(statement.value)
        except ValueError:
            raise BookError(f"{where}: the default of {name} must be a literal, got `{line}`") from None
        inner = match["range"][1:-1]
        if match["range"].startswith("["):
            try:
                low, high = (float(bound) if "." in bound or "e" in bound else int(bound) for bound in inner.split(","))
            except ValueError:
                raise BookError(f"{where}: the range of {name} must be [lo, hi], got {match['range']}") from None
            parameter = Parameter(name=name, default=default, low=low, high=high, meaning=match["meaning"].strip())
        else:
            options = tuple(_literal(option) for option in inner.split(","))
            parameter = Parameter(name=name, default=default, choices=options, meaning=match["meaning"].strip())
        fast = default if match["fast"] is None else _literal(match["fast"])
        try:
            parameter.check(default)
            fast = parameter.check(fast)
        except BookError as error:
            raise BookError(f"{where}: {error}") from None
        found[name] = Parameter(**{**vars(parameter), "fast": fast})
    return found


# Chapters


@dataclass(frozen=True)
class Chapter:
    """A chapter: its name, its text and the notebook made from it."""

    name: str
    book: Path

    @property
    def text(self) -> Path:
        return self.book / "text" / f"{self.name}.md"

    @property
    def notebook(self) -> Path:
        return self.book / f"{self.name}.ipynb"

    def parameters(self) -> dict[str, Parameter]:
        """Name → parameter, in the order of the ``parameters`` cell; empty if the chapter has none."""
        for cell in read_text(self).cells:
            if "parameters" in cell.metadata.get("tags", []):
                return read_parameters(cell.source, f"{self.text.name}, parameters cell")
        return {}


def chapters(book: Path = BOOK) -> dict[str, Chapter]:
    """Name → chapter, in the order of their names with the front page first."""
    names = sorted((path.stem for path in (book / "text").glob("*.md")), key=lambda name: (name != "intro", name))
    return {name: Chapter(name, book) for name in names}


def _nearest(kind: str, name: str, known: Iterable[str]) -> BookError:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return BookError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known) or 'none'})")


def _chapter(name: str, book: Path) -> Chapter:
    known = chapters(book)
    if name not in known:
        raise _nearest("chapter", name, known)
    return known[name]


def read_text(chapter: Chapter) -> Any:
    """The chapter's text as a notebook without outputs; a cell's id comes from its source, so that it never changes."""
    import jupytext

    notebook = jupytext.read(chapter.text, fmt="md:myst")
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        stem = hashlib.sha256(f"{cell.cell_type}\0{cell.source}".encode()).hexdigest()[:12]
        seen[stem] = seen.get(stem, 0) + 1
        cell["id"] = stem if seen[stem] == 1 else f"{stem}-{seen[stem]}"
        cell.metadata = {key: cell.metadata[key] for key in _KEPT_CELL_METADATA if key in cell.metadata}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _quiet_kernels() -> None:
    """One thread for each kernel: sums come out in the same order everywhere, and two chapters can run side by side."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")


# run


def run(
    name: str,
    values: Mapping[str, str] | None = None,
    *,
    fast: bool = False,
    out: Path | None = None,
    book: Path = BOOK,
) -> Path:
    """Execute one chapter through papermill and return the executed notebook's path.

    Args:
        name: chapter, as `chapters` lists it.
        values: parameter → value as typed; what is not named keeps its default.
        fast: start from the fast values of the ``parameters`` cell instead of the defaults.
        out: folder for the executed notebook; ``book/_build/run`` if not given.
        book: the book's folder.

    Raises:
        BookError: unknown chapter or parameter, wrong type, value outside its range; nothing is executed then.
        ChapterFailed: a cell raised.
    """
    chapter = _chapter(name, book)
    parameters = chapter.parameters()
    chosen = {key: parameter.fast for key, parameter in parameters.items()} if fast else {}
    for key, text in (values or {}).items():
        if key not in parameters:
            raise _nearest(f"parameter of {name}", key, parameters)
        chosen[key] = parameters[key].parse(text)

    import nbformat
    import papermill

    _quiet_kernels()
    folder = book / "_build" / "run" if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / f".{name}.in.ipynb", folder / f"{name}.ipynb"
    nbformat.write(read_text(chapter), source)
    try:
        papermill.execute_notebook(
            str(source),
            str(target),
            parameters=chosen,
            kernel_name="python3",
            cwd=str(book),
            progress_bar=False,
            execution_timeout=CELL_TIMEOUT,
        )
    except papermill.PapermillExecutionError as error:
        raise ChapterFailed(f"{name}: cell {error.exec_count} raised {error.ename}: {error.evalue}") from error
    finally:
        source.unlink()
    return target


# sync


def _executed(chapter: Chapter) -> tuple[Any, float]:
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    _quiet_kernels()
    notebook = read_text(chapter)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(chapter.book)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
    )
    start = time.perf_counter()
    try:
        asyncio.run(client.async_execute())
    except (CellExecutionError, CellTimeoutError) as error:
        raise ChapterFailed(f"{chapter.name}: {error}") from error
    seconds = time.perf_counter() - start
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if "remove-cell" in cell.metadata.get("tags", []):
            cell.outputs = []  # controls that need a live kernel: a saved view would be dead
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise ChapterFailed(f"{chapter.name}: a cell wrote to stderr: {output.text.strip()}")
        shown = json.dumps(cell.outputs)
        for place in {str(chapter.book.resolve().parent), str(Path.home())} - {"/"}:
            if place in shown:
                raise ChapterFailed(f"{chapter.name}: an output names a folder of this machine, {place}")
    notebook.metadata = {
        **read_text(chapter).metadata,
        "lipattn": {"version": lipattn.__version__, "library": library_hash()},
    }
    return notebook, seconds


def check_twins(chapter: Chapter) -> list[str]:
    """What is wrong with the chapter's notebook, one line each; empty if it is what the text and the library give."""
    import nbformat

    again = f"run `python -m lipattn.book sync {chapter.name}`"
    if not chapter.notebook.exists():
        return [f"{chapter.name}: there is no {chapter.notebook.name}; {again}"]
    notebook, text = nbformat.read(chapter.notebook, as_version=4), read_text(chapter)
    wrong = []

    def content(cells: list[Any]) -> list[Any]:
        return [(cell.cell_type, cell.source, cell["id"], cell.metadata.get("tags", [])) for cell in cells]

    if content(notebook.cells) != content(text.cells):
        wrong.append(f"{chapter.name}: {chapter.notebook.name} differs from text/{chapter.text.name}; {again}")
    if any(cell.cell_type == "code" and cell.execution_count is None for cell in notebook.cells):
        wrong.append(f"{chapter.name}: a cell was not executed; {again}")
    made_with = notebook.metadata.get("lipattn", {})
    if made_with.get("library") != library_hash() or made_with.get("version") != lipattn.__version__:
        wrong.append(f"{chapter.name}: executed with an older library; {again}")
    return wrong


def sync(names: Iterable[str] = (), *, jobs: int = 1, book: Path = BOOK) -> dict[str, float]:
    """Make the notebooks from the texts, executed at the defaults; chapter → seconds.

    Args:
        names: chapters to refresh; all of them if empty.
        jobs: how many to execute side by side.
        book: the book's folder.

    Raises:
        BookError: unknown chapter.
        ChapterFailed: a cell raised, wrote to stderr, or printed a path of this machine; its notebook is left alone.
    """
    from concurrent.futures import ThreadPoolExecutor

    import nbformat

    wanted = [_chapter(name, book) for name in names] or list(chapters(book).values())
    integer("jobs", jobs, minimum=1)
    times = {}
    with ThreadPoolExecutor(jobs) as pool:
        for chapter, (notebook, seconds) in zip(wanted, pool.map(_executed, wanted), strict=True):
            nbformat.validate(notebook)
            text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
            chapter.notebook.write_text(text, encoding="utf-8")
            times[chapter.name] = seconds
            print(f"{chapter.name:<32} {seconds:6.1f} s", flush=True)
    return times


# build


def pages(book: Path = BOOK) -> list[str]:
    """Every page that ``_toc.yml`` names, front page first."""
    import yaml

    def walk(node: Any) -> list[str]:
        if isinstance(node, list):
            return [page for item in node for page in walk(item)]
        if isinstance(node, dict):
            own = [str(node[key]) for key in ("root", "file") if key in node]
            return own + [page for key in ("parts", "chapters", "sections") for page in walk(node.get(key, []))]
        return []

    toc = yaml.safe_load(_settings(book)[1].read_text(encoding="utf-8"))
    return [page.removesuffix(".md").removesuffix(".ipynb") for page in walk(toc)]


def _settings(book: Path) -> tuple[Path, Path]:
    """``_config.yml`` and ``_toc.yml``: beside the book's folder where the links in it did not survive (Windows)."""
    found = []
    for name in ("_config.yml", "_toc.yml"):
        linked, real = book / name, book.resolve().parent / name
        usable = linked.exists() and linked.stat().st_size > 0 and ":" in linked.read_text(encoding="utf-8")
        found.append(linked if usable else real)
    return found[0], found[1]


def build(*, fresh: bool = False, book: Path = BOOK) -> Path:
    """Build the site with warnings as errors and return its front page.

    Args:
        fresh: remove the earlier build and its execution cache first.
        book: the book's folder; the site is left in ``_build/html`` under it.

    Raises:
        ChapterFailed: a chapter raised, there was a warning, or a page of ``_toc.yml`` is missing.
    """
    _quiet_kernels()
    output = book / "_build"
    if fresh:
        shutil.rmtree(output, ignore_errors=True)
    config, toc = _settings(book)
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
    command += ["build", str(book), "--all", "-W", "-n", "--keep-going"]
    command += ["--config", str(config.absolute()), "--toc", str(toc.absolute()), "--path-output", str(book)]
    start = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise ChapterFailed(f"the build failed (exit status {done.returncode}); what it said is above")
    missing = [page for page in pages(book) if not (output / "html" / f"{page}.html").is_file()]
    if missing:
        raise ChapterFailed(f"pages of _toc.yml were not built: {', '.join(missing)}")
    index = (output / "html" / "index.html").resolve()
    print(f"\nbuilt in {seconds:.1f} s\nthe book is in  {index.parent}\nopen            {index.as_uri()}", flush=True)
    return index


# the command line


def _list(book: Path) -> None:
    for chapter in chapters(book).values():
        print(chapter.name)
        for parameter in chapter.parameters().values():
            allowed = f"{parameter.range}, fast {parameter.fast!r}"
            print(f"    {parameter.name} = {parameter.default!r}   {allowed}: {parameter.meaning}")


def _assignments(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise BookError(f"-p takes name=value, got {pair!r}")
        values[name.strip()] = value.strip()
    return values


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0 done, 1 a chapter failed, 2 the request was wrong."""
    parser = argparse.ArgumentParser(prog="python -m lipattn.book", description="Run, refresh and build the chapters.")
    parser.add_argument("--book", type=Path, default=BOOK, help="the book's folder (default: beside the package)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="chapters and their parameters")
    runs = commands.add_parser("run", help="execute one chapter with other parameters")
    runs.add_argument("chapter")
    runs.add_argument("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE")
    runs.add_argument("--fast", action="store_true", help="start from the fast values")
    runs.add_argument("--out", type=Path, help="folder for the executed notebook")
    syncs = commands.add_parser("sync", help="make the notebooks from the texts, executed at the defaults")
    syncs.add_argument("chapters", nargs="*")
    syncs.add_argument("--check", action="store_true", help="only say which notebooks are not up to date")
    syncs.add_argument("--jobs", type=int, default=1, help="chapters to execute side by side")
    builds = commands.add_parser("build", help="build the site, warnings as errors")
    builds.add_argument("--fresh", action="store_true", help="remove the earlier build and its cache first")
    chosen = parser.parse_args(arguments)
    book = chosen.book.absolute()
    try:
        if not (book / "text").is_dir():
            raise BookError(f"no chapters in {book}: install the library with `pip install -e .` from its repository")
        if chosen.command == "list":
            _list(book)
        elif chosen.command == "run":
            start = time.perf_counter()
            values = _assignments(chosen.parameters)
            target = run(chosen.chapter, values, fast=chosen.fast, out=chosen.out, book=book)
            print(f"{target}   {time.perf_counter() - start:.1f} s")
        elif chosen.command == "sync" and chosen.check:
            wanted = [_chapter(name, book) for name in chosen.chapters] or list(chapters(book).values())
            wrong = [line for chapter in wanted for line in check_twins(chapter)]
            if wrong:
                raise ChapterFailed("\n".join(wrong))
            print(f"{len(wanted)} notebooks are what their texts and the library give")
        elif chosen.command == "sync":
            sync(chosen.chapters, jobs=chosen.jobs, book=book)
        else:
            build(fresh=chosen.fresh, book=book)
    except ChapterFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
