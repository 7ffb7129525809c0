"""The committed notebooks and the build: what a page shows is what the library gives, or the build fails."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from tiny_book import CHAPTER, ROOT, command, nbval, tiny_book

from lipattn import book as runner

pytestmark = pytest.mark.book
CHAPTERS = list(runner.chapters().values())
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)


def has_figure(cell) -> bool:
    return any('class="lipattn-figure"' in output.get("data", {}).get("text/html", "") for output in cell.outputs)


def build(book: Path, *, python_path: Path = ROOT):
    return command("-m", "lipattn.book", "--book", str(book), "build", python_path=python_path)


# what is committed


@each_chapter
def test_notebook_is_what_text_and_library_give(chapter):
    assert runner.check_twins(chapter) == []


@each_chapter
def test_at_least_one_cell_that_states_a_result_is_compared_strictly(chapter):
    cells = nbformat.read(chapter.notebook, as_version=4).cells
    strict = [
        cell
        for cell in cells
        if cell.cell_type == "code" and cell.outputs and "nbval-ignore-output" not in cell.metadata.get("tags", [])
    ]
    assert any(any(sign.isdigit() for sign in str(cell.outputs)) for cell in strict)


@each_chapter
def test_only_figures_and_controls_are_left_out_of_the_comparison(chapter):
    for cell in nbformat.read(chapter.notebook, as_version=4).cells:
        tags = set(cell.metadata.get("tags", []))
        assert not {tag for tag in tags if tag.startswith("nbval")} - {"nbval-ignore-output"}
        assert not tags & {"raises-exception", "skip-execution"}
        if "nbval-ignore-output" in tags and "remove-cell" not in tags:
            assert has_figure(cell), cell.source
            assert all(output.output_type == "display_data" for output in cell.outputs), cell.source


@each_chapter
def test_fresh_outputs_equal_the_committed_ones(chapter):
    done = nbval(chapter.notebook)
    assert done.returncode == 0, done.stdout


def test_table_of_contents_and_texts_name_the_same_chapters():
    listed = runner.pages()
    assert len(listed) == len(set(listed))
    assert set(runner.chapters()) == {page for page in listed if not (runner.BOOK / f"{page}.md").exists()}


def test_requirements_pin_every_direct_dependency_once():
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    pinned = [line for line in lines if line and line != "-e ."]
    assert all(line.count("==") == 1 for line in pinned)
    names = [line.split("==")[0] for line in pinned]
    assert len(names) == len(set(names))

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for line in wanted:
        name = line.split(">")[0].split("[")[0]
        assert name == "lipattn" or name in names, f"{name} is in pyproject.toml and not in requirements.txt"


def test_settings_name_no_other_site_that_a_page_would_load():
    settings = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert settings["execute"] == {
        "execute_notebooks": "cache",
        "timeout": runner.CELL_TIMEOUT,
        "allow_errors": False,
        "stderr_output": "warn",
    }
    assert settings["sphinx"]["config"]["nb_execution_raise_on_error"] is True
    assert not (ROOT / "book" / "_static").exists()  # Jupyter Book would load every script in it on every page


# what happens to a copy that is wrong


def broken(folder: Path, *changes: tuple[str, str]) -> Path:
    """A book whose chapter differs from the good one by the changes; its notebook was never executed."""
    text = CHAPTER
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    book = tiny_book(folder, text)
    (chapter,) = runner.chapters(book).values()
    nbformat.write(runner.read_text(chapter), chapter.notebook)
    return book


def test_nbval_passes_the_notebook_and_catches_one_wrong_digit(tmp_path):
    book = tiny_book(tmp_path)
    runner.sync(book=book)
    notebook = book / "01_chapter.ipynb"
    assert nbval(notebook).returncode == 0
    stored = notebook.read_text()
    assert stored.count("0.693147") == 1
    notebook.write_text(stored.replace("0.693147", "0.693148"))
    done = nbval(notebook)
    assert done.returncode == 1
    assert "0.693148" in done.stdout


def test_a_page_shows_the_library_it_was_built_with_also_from_a_cache(tmp_path):
    library = tmp_path / "library" / "lipattn"
    shutil.copytree(Path(runner.lipattn.__file__).parent, library, ignore=shutil.ignore_patterns("__pycache__"))
    print_toy = "from lipattn.toy import VALUE\n\nprint(f'toy {VALUE}', open('../count', 'a').write('x'))\n"
    book = tiny_book(tmp_path, CHAPTER.replace("import math\n", f"import math\n{print_toy}"))
    page, count = book / "_build" / "html" / "01_chapter.html", tmp_path / "count"

    def built_with(value: int) -> str:
        (library / "toy.py").write_text(f"VALUE = {value}\n")
        sync = command("-m", "lipattn.book", "--book", str(book), "sync", python_path=library.parent)
        assert sync.returncode == 0, sync.stdout
        count.write_text("")
        done = build(book, python_path=library.parent)
        assert done.returncode == 0, done.stdout
        assert page.as_uri().replace("01_chapter", "index") in done.stdout
        return page.read_text()

    assert "toy 1 " in built_with(1)
    assert count.read_text() == "x"
    assert "toy 1 " in built_with(1)
    assert count.read_text() == "", "an unchanged chapter is not executed again"
    assert "toy 2 " in built_with(2)
    assert count.read_text() == "x"


def test_a_chapter_that_raises_fails_the_build(tmp_path):
    done = build(broken(tmp_path, ("import math\n", "import math\n\nraise RuntimeError('poison')\n")))
    assert done.returncode == 1, done.stdout
    assert "RuntimeError" in done.stdout
    assert "poison" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("failed: ")


def test_warnings_fail_the_build_each_by_name(tmp_path):
    warning = ("import math\n", "import math\nimport warnings\n\nwarnings.warn('careful')\n")
    references = ("of a coin.", "of a {eq}`coin`, {cite}`nobody2025nothing`.")
    bare = "from IPython.display import display\n\ndisplay({'application/vnd.plotly.v1+json': {}}, raw=True)\n"
    figure = ("import math\n\nprint", f"import math\n\n{bare}print")
    done = build(broken(tmp_path, figure, warning, references))
    assert done.returncode == 1, done.stdout
    warnings = [line for line in done.stdout.splitlines() if "WARNING" in line and "01_chapter" in line]
    assert any("stderr" in line for line in warnings), warnings
    assert any("coin" in line for line in warnings), warnings
    assert any("nobody2025nothing" in line for line in warnings), warnings
    assert any("unknown output mime type" in line for line in warnings), "a bare plotly figure is absent from the page"


def test_a_missing_page_fails_the_build(tmp_path):
    book = broken(tmp_path)
    (book / "01_chapter.ipynb").unlink()
    done = build(book)
    assert done.returncode == 1, done.stdout
    assert "01_chapter" in done.stdout


def test_a_changed_vendored_file_fails_the_build(tmp_path):
    book = broken(tmp_path)
    (book / "_assets").unlink()
    shutil.copytree(ROOT / "book" / "_assets", book / "_assets")
    with (book / "_assets" / "vendor" / "plotly" / "plotly-cartesian.min.js").open("a") as script:
        script.write("\n")
    done = build(book)
    assert done.returncode == 1, done.stdout
    assert "plotly-cartesian.min.js of plotly.js-cartesian-dist-min is missing or changed" in done.stdout
