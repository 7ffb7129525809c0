"""Does every constant of a module turn a test red when it is 1 % off?

    python tools/mutate.py [lipattn/theory.py [tests/test_theory.py]] [--only LINE ...]

Each numeric literal of the module is multiplied by 1.01 in turn; the mutated module goes into a temporary copy of the
package, and the tests run against it until the first failure. Exit status 1 if a mutant survives that is not allowed.
Forks one process a mutant, so that torch is imported once (Linux and macOS).

Left out by rule, since they are no constants of a law:
- 0, which a factor does not move; True and False;
- literals inside subscripts (`x[..., -1]`) and the keyword arguments dim, dim1, dim2, axis, keepdim, maxsize;
- module constants named _STEP…, _REACH…, _SWITCH…: the resolution, range and change of form of a quadrature, past
  which its value no longer depends on them.
The keywords minimum and maximum, which are bounds of whole numbers, are raised by 1 instead.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
IGNORED_KEYWORDS = {"dim", "dim1", "dim2", "axis", "keepdim", "maxsize"}
IGNORED_CONSTANTS = ("_STEP", "_REACH", "_SWITCH")
COUNTING_KEYWORDS = {"minimum", "maximum"}

EQUIVALENT = {  # (function, the mutated line as written) -> why the mutant computes the same
    ("_gaussian_moments", "step_t = _STEP * max(1.0, sigma / (1 + sigma_c))"): "resolution of a converged quadrature",
}


class Literal(NamedTuple):
    """A numeric literal: where it stands, what it is and what it becomes."""

    line: int
    start: int
    end: int
    function: str
    old: str
    new: str


class Finder(ast.NodeVisitor):
    """Collects the literals that the rules do not leave out."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines, self.found, self.function, self.counting = lines, [], "", False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.function = self.function, node.name
        for child in [*node.decorator_list, node.args, *node.body]:  # annotations hold shapes, not constants
            self.visit(child)
        self.function = outer

    def visit_arg(self, node: ast.arg) -> None:
        """Annotations of arguments are shapes."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if not (self.function == "" and any(name.startswith(IGNORED_CONSTANTS) for name in names)):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg in IGNORED_KEYWORDS:
            return
        outer, self.counting = self.counting, node.arg in COUNTING_KEYWORDS
        self.generic_visit(node)
        self.counting = outer

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float) or node.value == 0:
            return
        old = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
        new = repr(node.value + 1 if self.counting else node.value * 1.01)
        self.found.append(Literal(node.lineno, node.col_offset, node.end_col_offset, self.function, old, new))


def find_literals(source: str) -> list[Literal]:
    """The literals of `source` that are mutated, in order."""
    finder = Finder(source.encode().splitlines())
    finder.visit(ast.parse(source))
    return finder.found


def mutate(source: str, literal: Literal) -> str:
    """`source` with that one literal replaced."""
    lines = source.encode().splitlines(keepends=True)
    line = lines[literal.line - 1]
    lines[literal.line - 1] = line[: literal.start] + literal.new.encode() + line[literal.end :]
    return b"".join(lines).decode()


def passes(package_root: Path, test: Path, quiet: bool) -> bool:
    """Whether `test` passes against the package in `package_root`, in a forked process."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 2
        try:
            if quiet:
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
            os.chdir(package_root)
            sys.path.insert(0, str(package_root))
            import pytest

            status = int(pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", str(test)]))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, 1, 2):
        raise RuntimeError(f"the tests could not be run: exit status {status}")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", nargs="?", default="lipattn/theory.py", help="path from the top of the project")
    parser.add_argument("test", nargs="?", help="default: tests/test_<module>.py")
    parser.add_argument("--only", type=int, nargs="+", metavar="LINE", help="mutate these lines alone")
    arguments = parser.parse_args()
    module = Path(arguments.module)
    test = Path(arguments.test or f"tests/test_{module.stem}.py")
    source = (ROOT / module).read_text()
    literals = [x for x in find_literals(source) if arguments.only is None or x.line in arguments.only]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    import beartype.claw  # noqa: F401
    import jaxtyping  # noqa: F401
    import mpmath  # noqa: F401
    import pytest  # noqa: F401
    import scipy.integrate
    import scipy.special
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401  the slow imports, once, before the forks; never the package itself

    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / module.parts[0], copy / module.parts[0], ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if not passes(copy, copy / test, quiet=False):
            print(f"{test} fails on the module as it stands: nothing to learn")
            return 2
        print(f"{module}: {len(literals)} constants, tests {test}")
        for literal in literals:
            (copy / module).write_text(mutate(source, literal))
            line = source.splitlines()[literal.line - 1].strip()
            start = time.perf_counter()
            if not passes(copy, copy / test, quiet=True):
                verdict = "killed"
            elif (literal.function, line) in EQUIVALENT:
                verdict = "allowed: " + EQUIVALENT[literal.function, line]
            else:
                verdict = "SURVIVED"
                survivors += 1
            change = f"{literal.old} -> {literal.new}"
            seconds = time.perf_counter() - start
            print(f"{literal.line:4d}  {change:30s}  {verdict:10s}  {seconds:5.1f} s  {line[:90]}", flush=True)
    print(f"{survivors} of {len(literals)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
