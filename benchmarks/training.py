"""Does the leading runs axis pay? The batched program against a plain PyTorch loop, and what recording costs.

Both train the same runs (same generator, same prompts, same start); the table gives the median and the spread over
repeats, and the ratio within one run of this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lipattn.model import init_weights, predict
from lipattn.tasks import sample_prompts
from lipattn.training import TrainConfig, train

STEPS, REPEATS = 15, 5


def plain_loop(config: TrainConfig) -> None:
    """One run after another with torch.optim, as a user would write it."""
    for seed in config.seeds:
        weights = init_weights((seed,), width=config.width, layers=config.layers)
        weights = {block: w.requires_grad_() for block, w in weights.items()}
        optimizer = torch.optim.SGD(weights.values(), lr=config.learning_rate)
        for step in range(config.steps):
            tokens, targets = sample_prompts((seed,), step, n_context=config.n_context, d=config.d, batch=config.batch)
            loss = (predict(weights, tokens) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def seconds(work: Callable[[], object]) -> list[float]:
    """Wall times of `REPEATS` calls, after one that warms up."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/training.json"))
    path = parser.parse_args().json
    torch.set_num_threads(1)
    settings = {
        "one layer, width 3, 32 runs": TrainConfig(learning_rate=0.01, steps=STEPS, record_every=10**6),
        "three layers, width 4, 16 runs": TrainConfig(
            seeds=range(16), d=3, layers=3, learning_rate=0.01, steps=STEPS, record_every=10**6
        ),
    }
    rows = []
    print(f"{'setting':32s} {'program':28s} {'ms a step, median':>18s} {'spread':>15s} {'× batched':>10s}")
    for label, config in settings.items():
        programs = {
            "batched": lambda config=config: train(config),
            "batched, recorded every 10": lambda config=config: train(replace(config, record_every=10)),
            "plain loop, run after run": lambda config=config: plain_loop(config),
        }
        base = 0.0
        for program, work in programs.items():
            times = [1e3 * t / STEPS for t in seconds(work)]
            middle = statistics.median(times)
            base = base or middle
            print(
                f"{label:32s} {program:28s} {middle:18.1f} {min(times):7.1f}–{max(times):<7.1f} {middle / base:10.2f}"
            )
            rows.append({"setting": label, "program": program, "ms_per_step": times, "ratio": middle / base})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"threads": 1, "steps": STEPS, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
