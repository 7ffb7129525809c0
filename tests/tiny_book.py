"""A one-chapter book in a temporary folder, with the real settings: what tests poison, corrupt and misspell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHAPTER = """---
kernelspec: {display_name: Python 3, language: python, name: python3}
---

# A chapter

Entropy $H$ of a coin.

```{code-cell} ipython3
:tags: [parameters]

n_runs = 32  # [8, 512] fast 9: seeds per mechanism
learning_rate = 0.5  # [0.01, 2.0] fast 0.25: step of plain gradient descent
kind = "softmax"  # {softmax, relu_kernel}: mechanism
grid = [0.5, 1.0]  # [0.0, 4.0] fast [1.0]: standard deviations of the logits
```

```{code-cell} ipython3
import math

print(f"{n_runs} {learning_rate} {kind} {grid} H = {math.log(2):.6f}")
```
"""


def tiny_book(folder: Path, chapter: str = CHAPTER, *, name: str = "01_chapter") -> Path:
    """A book with the given chapter, the repository's settings and assets; returns its folder."""
    book = folder / "book"
    (book / "text").mkdir(parents=True)
    (book / "text" / f"{name}.md").write_text(chapter, encoding="utf-8")
    (book / "intro.md").write_text("# Front page\n", encoding="utf-8")
    (book / "references.bib").write_text("", encoding="utf-8")
    toc = f"format: jb-book\nroot: intro\nchapters:\n  - file: {name}\n"
    (folder / "_toc.yml").write_text(toc, encoding="utf-8")
    shutil.copy(ROOT / "_config.yml", folder / "_config.yml")
    (book / "_config.yml").symlink_to("../_config.yml")
    (book / "_toc.yml").symlink_to("../_toc.yml")
    (book / "_assets").symlink_to(ROOT / "book" / "_assets")
    return book


def command(*arguments: str, python_path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python …` with the library importable, as a user runs it; output and errors together in `stdout`."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(python_path), "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=python_path,  # which comes first on the path of `python -m`
    )


def nbval(notebook: Path) -> subprocess.CompletedProcess[str]:
    """Execute the notebook and compare every output with the stored one, strictly."""
    sanitize = str(ROOT / "tests" / "nbval_sanitize.cfg")
    options = ["--nbval", "--nbval-sanitize-with", sanitize, "--nbval-cell-timeout", "300"]
    return command("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, *options, str(notebook))
