"""What normalised-kernel attention costs in its quadratic and its linear form, forward and backward, against the
number of tokens N.

On one thread, so that the ratio is one of work. Both forms are timed in turn within one round, so that a busy machine
slows both, and the ratio is taken round by round. The crossover is the N, between the last size where the quadratic
form is not slower and the next, at which the median ratio is 1, by a straight line in ln N and ln ratio.

    python benchmarks/linear_attention.py [--json PATH] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lipattn
from lipattn.reweighting import REWEIGHTINGS, linear_attention

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
WIDTH = 16
CASES = [(mechanism, causal) for mechanism in ("relu_kernel", "elu_kernel") for causal in (False, True)]


def seconds(form: Callable[..., torch.Tensor], tokens: tuple[torch.Tensor, ...]) -> float:
    """One forward and backward pass."""
    leaves = [x.clone().requires_grad_() for x in tokens]
    start = time.perf_counter()
    form(*leaves).sum().backward()
    return time.perf_counter() - start


def measure(mechanism: str, causal: bool, n: int, rounds: int) -> dict[str, float]:
    """Medians and quartiles over rounds of both forms and of their ratio."""
    generator = torch.Generator().manual_seed(n)
    tokens = tuple(torch.randn(1, n, WIDTH, generator=generator) for _ in range(3))

    def quadratic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return REWEIGHTINGS[mechanism].weights(q, k, causal=causal) @ v

    def linear(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return linear_attention(q, k, v, mechanism=mechanism, causal=causal)

    seconds(quadratic, tokens), seconds(linear, tokens)  # first calls allocate
    pairs = [(seconds(quadratic, tokens), seconds(linear, tokens)) for _ in range(rounds)]
    series = {
        "quadratic_s": [a for a, _ in pairs],
        "linear_s": [b for _, b in pairs],
        "ratio": [a / b for a, b in pairs],
    }
    result: dict[str, float] = {"n": n}
    for name, values in series.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        result |= {name: median, f"{name}_q1": low, f"{name}_q3": high}
    return result


def crossover(rows: list[dict[str, float]]) -> float | None:
    """N from which on the linear form is faster; the smallest N if it always is, None if it never is."""
    slower = [i for i, row in enumerate(rows) if row["ratio"] <= 1]
    if not slower:
        return rows[0]["n"]
    if slower[-1] == len(rows) - 1:
        return None
    a, b = rows[slower[-1]], rows[slower[-1] + 1]
    step = -math.log(a["ratio"]) / (math.log(b["ratio"]) - math.log(a["ratio"]))
    return a["n"] * (b["n"] / a["n"]) ** step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "linear_attention.json")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {arguments.rounds}")

    cases = []
    for mechanism, causal in CASES:
        rows = [measure(mechanism, causal, n, arguments.rounds) for n in SIZES]
        at = crossover(rows)
        cases.append({"mechanism": mechanism, "causal": causal, "rows": rows, "crossover_n": at})
        title = REWEIGHTINGS[mechanism].label + (", causal" if causal else "")
        print(f"\n{title}: d = d_v = {WIDTH}, one forward and backward pass, median (quartiles)")
        print(f"{'N':>6}  {'quadratic, ms':>24}  {'linear, ms':>24}  {'quadratic / linear':>24}")
        for row in rows:
            cells = [
                f"{f * row[name]:.3g} ({f * row[f'{name}_q1']:.3g} to {f * row[f'{name}_q3']:.3g})"
                for name, f in (("quadratic_s", 1e3), ("linear_s", 1e3), ("ratio", 1.0))
            ]
            print(f"{row['n']:>6}  " + "  ".join(f"{cell:>24}" for cell in cells))
        if at is None:
            print(f"the quadratic form is faster up to N = {SIZES[-1]}")
        else:
            print(f"the linear form is faster from N ≈ {at:.0f} on")

    record = {
        "benchmark": "linear_attention",
        "library": lipattn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "width": WIDTH,
        "rounds": arguments.rounds,
        "spread": "quartiles over rounds",
        "cases": cases,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {arguments.json}")


if __name__ == "__main__":
    main()
