"""Refresh the copies of MathJax and plotly.js that the book ships, so that a page needs no network.

Run `python tools/vendor.py` after changing a version below (needs npm); then commit what changed under
`book/_assets/vendor`. `versions.json` records version and SHA-256 of every file; the build refuses files that differ.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).resolve().parent.parent / "book" / "_assets" / "vendor"

# package, version, folder, {path in the tarball: path in the folder}; a path that ends in / means the whole folder
PACKAGES = [
    (
        "mathjax",
        "3.2.2",  # the full build: the smaller ones fetch parts later, and one missing part leaves every formula raw
        "mathjax",
        {
            "LICENSE": "LICENSE",
            "es5/tex-chtml-full.js": "tex-chtml-full.js",
            "es5/output/chtml/fonts/woff-v2/": "output/chtml/fonts/woff-v2/",
        },
    ),
    (
        "plotly.js-cartesian-dist-min",
        "4.1.1",  # what the plotly wheel of requirements.txt carries; scatter, bar, histogram, heatmap, contour
        "plotly",
        {"LICENSE": "LICENSE", "plotly-cartesian.min.js": "plotly-cartesian.min.js"},
    ),
]


def main() -> None:
    record: dict[str, dict[str, object]] = {}
    for package, version, folder, wanted in PACKAGES:
        files = {}
        with tempfile.TemporaryDirectory() as scratch:
            command = ["npm", "pack", f"{package}@{version}", "--silent"]
            name = subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True).stdout.split()[-1]
            with tarfile.open(Path(scratch) / name) as tarball:
                for member in tarball.getmembers():
                    inside = member.name.removeprefix("package/")
                    for source, target in wanted.items():
                        if inside == source or (source.endswith("/") and inside.startswith(source)):
                            extracted = tarball.extractfile(member)
                            if extracted is None:
                                continue
                            data = extracted.read()
                            path = VENDOR / folder / (target + inside[len(source) :])
                            path.parent.mkdir(parents=True, exist_ok=True)
                            path.write_bytes(data)
                            files[path.relative_to(VENDOR).as_posix()] = hashlib.sha256(data).hexdigest()
        record[package] = {"version": version, "files": dict(sorted(files.items()))}
        print(f"{package} {version}: {len(files)} files")
    (VENDOR / "versions.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
