"""Everything that CI runs, quick things first; stops at the first stage that fails and prints how long each took.

`make test` runs it. The last stage is pytest, so that its closing line is the last thing printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable

STAGES = {
    "lint": [PYTHON, "-m", "ruff", "check", "."],
    "format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "types": [PYTHON, "-m", "mypy"],
    "notebooks are up to date": [PYTHON, "-m", "lipattn.book", "sync", "--check"],
    "book, warnings as errors": [PYTHON, "-m", "lipattn.book", "build", "--fresh"],
    # two workers: the browser tests, which share one site, stay together on one of them
    "tests": [PYTHON, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-rfE", "--durations=12"],
}


def main() -> int:
    environment = {**os.environ, "LIPATTN_SITE": str(ROOT / "book" / "_build" / "html"), "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    times = []
    for name, command in STAGES.items():
        if name == "tests":
            print("\n== times so far: " + ", ".join(times), flush=True)
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        status = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
        times.append(f"{name} {time.perf_counter() - start:.0f} s")
        if status != 0:
            print(f"\n== failed: {name} (exit status {status}); " + ", ".join(times), flush=True)
            return 1
        if name != "tests":
            print(f"== {times[-1]} (in all {time.perf_counter() - begin:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
