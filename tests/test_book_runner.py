"""The chapter runner: what it refuses, what it runs, and what it writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import nbformat
import pytest
from tiny_book import CHAPTER, command, tiny_book

from lipattn import book as runner

LINE = "n_runs = 32  # [8, 512] fast 8: seeds per mechanism"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tiny_book(tmp_path)


def printed(notebook: Path) -> str:
    cells = nbformat.read(notebook, as_version=4).cells
    return "".join(output.text for cell in cells if cell.cell_type == "code" for output in cell.outputs)


# declarations


def test_a_declaration_gives_default_range_fast_value_and_meaning():
    (parameter,) = runner.read_parameters(LINE).values()
    assert parameter == runner.Parameter(
        name="n_runs", default=32, low=8, high=512, choices=None, fast=8, meaning="seeds per mechanism"
    )


def test_without_a_fast_value_the_default_is_the_fast_one():
    assert runner.read_parameters("x = 0.5  # [0, 1]: a share")["x"].fast == 0.5


def test_meanings_may_hold_colons_hashes_and_brackets():
    source = 'kind = "a#b"  # {a#b, c} fast c: which [of two]: see # below'
    parameter = runner.read_parameters(source)["kind"]
    assert (parameter.default, parameter.choices, parameter.fast) == ("a#b", ("a#b", "c"), "c")
    assert parameter.meaning == "which [of two]: see # below"


@pytest.mark.parametrize(
    "line",
    [
        "n_runs = 32",
        "n_runs = 32  # seeds per mechanism",
        "n_runs = 32  # [8, 512] fast 8 seeds per mechanism",
        "n_runs = 32  # [8] fast 8: seeds",
        "n_runs = 32  # [a, b]: seeds",
        "n_runs = 4  # [8, 512]: default outside the range",
        "n_runs = 32  # [8, 512] fast 4: fast value outside the range",
        "n_runs = 32  # [8, 512] fast 8.5: fast value of another type",
        'kind = "a"  # {b, c}: default not among the choices',
        "n_runs = 2 * n  # [8, 512]: not a literal",
        "import math  # [8, 512]: not a parameter",
        "a, b = 1, 2  # [0, 3]: two at once",
    ],
)
def test_a_line_that_does_not_declare_a_parameter_is_refused(line):
    with pytest.raises(runner.BookError, match="parameters cell"):
        runner.read_parameters(line)


# values

GOOD = {
    "n_runs": [("8", 8), ("512", 512)],
    "learning_rate": [("0.01", 0.01), ("2", 2.0), ("1e-1", 0.1)],
    "kind": [("relu_kernel", "relu_kernel"), ("'softmax'", "softmax")],
    "grid": [("[0, 4.0]", [0.0, 4.0]), ("(1.5,)", [1.5])],
}
BAD = {
    "n_runs": ["7", "513", "8.0", "many", "True", "[8]", "nan", "None", "1e3"],
    "learning_rate": ["0.009", "2.01", "nan", "inf", "1e999", "-0.5", "'0.5'", "True", "[0.5]"],
    "kind": ["sofmax", "1", "None"],
    "grid": ["0.5", "[]", "[0.5, 5.0]", "['a']", "[True]", "[[1.0]]"],
}


@pytest.mark.parametrize(("name", "text", "value"), [(n, t, v) for n, cases in GOOD.items() for t, v in cases])
def test_a_value_in_its_range_is_taken_in_the_type_of_the_default(book, name, text, value):
    found = runner.chapters(book)["01_chapter"].parameters()[name].parse(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, cases in BAD.items() for t in cases])
def test_a_bad_value_is_refused_by_name_and_nothing_runs(book, capsys, name, text):
    assert runner.main(["--book", str(book), "run", "01_chapter", "-p", f"{name}={text}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {name} must be ")
    assert error.count("\n") == 1
    assert not (book / "_build").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "01_chaptr"], "unknown chapter '01_chaptr'; did you mean '01_chapter'?"),
        (["run", "zzz"], "unknown chapter 'zzz' (known: 01_chapter)"),
        (["run", "../01_chapter"], "unknown chapter"),
        (["sync", "01_chaptr"], "did you mean '01_chapter'?"),
        (["sync", "--jobs", "0"], "jobs must be an integer >= 1, got jobs=0"),
        (["run", "01_chapter", "-p", "n_run=32"], "unknown parameter of 01_chapter 'n_run'; did you mean 'n_runs'?"),
        (["run", "01_chapter", "-p", "n_runs"], "-p takes name=value, got 'n_runs'"),
        (["run", "01_chapter", "-p", "n_runs="], "-p takes name=value"),
        (["run", "01_chapter", "-p", "=3"], "-p takes name=value"),
    ],
)
def test_a_wrong_request_gets_one_clear_line_and_status_2(book, capsys, arguments, message):
    assert runner.main(["--book", str(book), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (book / "_build").exists()


def test_a_folder_without_chapters_is_refused(tmp_path, capsys):
    assert runner.main(["--book", str(tmp_path), "list"]) == 2
    assert "no chapters in" in capsys.readouterr().err


def test_list_names_chapters_and_what_their_parameters_mean(book, capsys):
    assert runner.main(["--book", str(book), "list"]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith("01_chapter\n")
    assert "n_runs = 32   [8, 512], fast 9: seeds per mechanism" in listed
    assert "kind = 'softmax'   {softmax, relu_kernel}, fast 'softmax': mechanism" in listed


# running


@pytest.mark.book
@pytest.mark.parametrize(
    ("options", "result"),
    [
        ([], "32 0.5 softmax [0.5, 1.0] H = 0.693147\n"),
        (["--fast"], "9 0.25 softmax [1.0] H = 0.693147\n"),
        (["--fast", "-p", "n_runs=64", "-p", "grid=[2]"], "64 0.25 softmax [2.0] H = 0.693147\n"),
    ],
    ids=["defaults", "fast", "fast and named"],
)
def test_run_uses_defaults_fast_values_and_named_ones(book, tmp_path, options, result):
    done = command("-m", "lipattn.book", "--book", str(book), "run", "01_chapter", "--out", str(tmp_path), *options)
    assert done.returncode == 0, done.stdout
    assert printed(tmp_path / "01_chapter.ipynb") == result


@pytest.mark.book
def test_a_chapter_that_raises_is_reported_with_status_1(tmp_path):
    book = tiny_book(tmp_path, CHAPTER.replace("import math\n", "import math\n\n1 / 0\n"))
    done = command("-m", "lipattn.book", "--book", str(book), "run", "01_chapter")
    assert done.returncode == 1
    assert "raised ZeroDivisionError" in done.stdout


@pytest.mark.book
@pytest.mark.parametrize("name", list(runner.chapters()))
def test_each_chapter_runs_with_its_fast_values(name, tmp_path):
    done = command("-m", "lipattn.book", "run", name, "--fast", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    code = [cell for cell in nbformat.read(tmp_path / f"{name}.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert code
    assert all(cell.execution_count for cell in code)


# notebooks from texts


@pytest.mark.book
def test_sync_gives_the_same_bytes_twice_and_no_trace_of_the_machine(book):
    runner.sync(book=book)
    notebook = book / "01_chapter.ipynb"
    first = notebook.read_bytes()
    runner.sync(book=book)
    assert notebook.read_bytes() == first
    assert json.loads(first)["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "lipattn": {"library": runner.library_hash(), "version": runner.lipattn.__version__},
    }
    assert all(set(cell["metadata"]) <= {"tags"} for cell in json.loads(first)["cells"])
    assert runner.check_twins(runner.chapters(book)["01_chapter"]) == []


@pytest.mark.book
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise RuntimeError('poison')", "poison"),
        ("import warnings; warnings.warn('careful')", "wrote to stderr"),
        ("import os; print(os.getcwd())", "names a folder of this machine"),
    ],
)
def test_sync_refuses_what_must_not_be_published_and_leaves_the_notebook(book, line, message):
    runner.sync(book=book)
    before = (book / "01_chapter.ipynb").read_bytes()
    text = book / "text" / "01_chapter.md"
    text.write_text(text.read_text().replace("import math\n", f"import math\n{line}\n"))
    with pytest.raises(runner.ChapterFailed, match=message):
        runner.sync(book=book)
    assert (book / "01_chapter.ipynb").read_bytes() == before


@pytest.mark.book
def test_controls_that_need_a_kernel_leave_no_dead_view_behind(tmp_path):
    controls = "```{code-cell} ipython3\n:tags: [remove-cell]\n\nimport ipywidgets\n\nipywidgets.FloatSlider()\n```\n"
    book = tiny_book(tmp_path, CHAPTER + "\n" + controls)
    runner.sync(book=book)
    stored = (book / "01_chapter.ipynb").read_text()
    assert "ipywidgets.FloatSlider()" in stored
    assert "widget-view" not in stored
    assert "widget-state" not in stored


@pytest.mark.book
def test_check_names_an_edited_text_an_older_library_and_a_cell_that_was_not_run(book, monkeypatch, capsys):
    chapter = runner.chapters(book)["01_chapter"]
    check = ["--book", str(book), "sync", "--check"]
    assert "there is no 01_chapter.ipynb" in runner.check_twins(chapter)[0]
    runner.sync(book=book)
    assert runner.main(check) == 0

    text = chapter.text.read_text()
    chapter.text.write_text(text.replace("of a coin", "of a fair coin"))
    assert "differs from text/01_chapter.md" in "\n".join(runner.check_twins(chapter))
    assert runner.main(check) == 1
    chapter.text.write_text(text)

    stored = nbformat.read(chapter.notebook, as_version=4)
    stored.cells[-1].execution_count = None
    nbformat.write(stored, chapter.notebook)
    assert runner.check_twins(chapter) == [
        "01_chapter: a cell was not executed; run `python -m lipattn.book sync 01_chapter`"
    ]

    runner.sync(book=book)
    monkeypatch.setattr(runner, "library_hash", lambda: "another")
    assert "executed with an older library" in "\n".join(runner.check_twins(chapter))


def test_the_library_hash_changes_with_any_source_but_the_runner(tmp_path):
    package = tmp_path / "lipattn"
    shutil.copytree(Path(runner.lipattn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = runner.library_hash(package)
    assert before == runner.library_hash()
    for tool in ("book.py", "sphinx_ext.py"):
        (package / tool).write_text("# other\n")
    assert runner.library_hash(package) == before
    (package / "philox.py").write_text((package / "philox.py").read_text() + "\n")
    changed = runner.library_hash(package)
    assert changed != before
    (package / "philox.py").rename(package / "renamed.py")
    assert runner.library_hash(package) not in {before, changed}
