"""The gradient step against its bound: the numbers, the figure and the sliders, held to autograd written out here."""

import math
import re

import numpy as np
import pytest
import torch

from lipattn.model import init_std_for, init_weights
from lipattn.tasks import sample_prompts
from lipattn.widgets.lipschitz import gradient_step, gradient_step_figure, lipschitz_explorer

SEEDS, D, CONTEXT, BATCH = (3, 8), 2, 6, 5
SMALL = {"seeds": SEEDS, "d": D, "n_context": CONTEXT, "batch": BATCH}


def by_hand(sigma, eta):
    """Moves, bounds and entropies of every prompt of every run, prompt by prompt."""
    width = D + 1
    std = {"W_Q": init_std_for(sigma, D), "W_K": init_std_for(sigma, D), "W_V": 0.5}
    start = init_weights(SEEDS, width=width, init_std=std, dtype=torch.float64)
    tokens, targets = sample_prompts(SEEDS, 0, n_context=CONTEXT, d=D, batch=BATCH, dtype=torch.float64)
    moved, bound, entropies = [], [], ([], [])
    for run in range(len(SEEDS)):
        w = [start[b][run, 0, 0].clone().requires_grad_() for b in ("W_Q", "W_K", "W_V")]

        def parts(x, w):
            q, k, v = (x @ m for m in w)
            p = torch.softmax(q @ k.T / math.sqrt(width), -1)
            return q, k, v, p, p @ v

        loss = sum((parts(x, w)[4][-1, -1] - y) ** 2 for x, y in zip(tokens[run], targets[run], strict=True)) / BATCH
        ends = (w, [m - eta * g for m, g in zip(w, torch.autograd.grad(loss, w), strict=True)])
        for x in tokens[run]:
            one, two = (parts(x, [m.detach() for m in end]) for end in ends)
            r_q, r_k, r_v = (max(float(t[i].norm(dim=1).max()) for t in (one, two)) for i in range(3))
            n, c = CONTEXT + 1, 1 / math.sqrt(width)
            constant = math.sqrt((c * r_v * r_k) ** 2 + n * (c * r_v * r_q) ** 2 + n)
            distance = math.sqrt(sum(float((one[i] - two[i]).square().sum()) for i in range(3)))
            moved.append(float((one[4] - two[4]).square().sum().sqrt()))
            bound.append(constant * distance)
            for where, end in zip(entropies, (one, two), strict=True):
                where += [-sum(float(a) * math.log(a) for a in row if a > 0) for row in end[3]]
    return np.array(moved), np.array(bound), [float(np.mean(h)) for h in entropies]


@pytest.mark.parametrize("sigma", [0.0, 1.3, 8.0])
@pytest.mark.parametrize("eta", [0.01, 0.5, 10.0])
def test_a_step_moves_the_output_as_autograd_says_and_no_further_than_its_bound(sigma, eta):
    step = gradient_step(sigma, eta, **SMALL)
    moved, bound, entropies = by_hand(sigma, eta)
    np.testing.assert_allclose(step.moved.flatten(), moved, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(step.bound.flatten(), bound, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(step.entropy, entropies, rtol=1e-9)
    assert (step.moved <= step.bound * (1 + 1e-12)).all()
    assert step.moved.shape == (len(SEEDS), BATCH)


def test_no_step_moves_nothing_and_small_steps_move_in_proportion():
    none = gradient_step(1.0, 0.0, **SMALL)
    assert none.moved.max() == 0
    assert none.input_distance.max() == 0
    assert none.entropy[0] == none.entropy[1]
    small, twice = gradient_step(1.0, 1e-5, **SMALL), gradient_step(1.0, 2e-5, **SMALL)
    torch.testing.assert_close(twice.moved, 2 * small.moved, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("name", "sigma", "eta"), [("logit_std", -1.0, 0.5), ("learning_rate", 1.0, math.nan)])
def test_bad_settings_are_refused_by_name(name, sigma, eta):
    with pytest.raises(ValueError, match=name):
        gradient_step(sigma, eta, **SMALL)


def test_the_figure_draws_medians_and_the_middle_of_the_prompts():
    rates = [0.1, 1.0, 3.0]
    steps = [gradient_step(1.0, rate, **SMALL) for rate in rates]
    figure = gradient_step_figure(rates, steps)
    bands, lines = figure.data[0::2], figure.data[1::2]
    hand = [by_hand(1.0, rate) for rate in rates]
    for k, (band, line) in enumerate(zip(bands, lines, strict=True)):
        values = np.array([h[k] for h in hand])
        np.testing.assert_allclose(line.x, rates)
        np.testing.assert_allclose(line.y, np.median(values, axis=1), rtol=1e-9)
        np.testing.assert_allclose(band.y[:3], np.quantile(values, 0.1, axis=1), rtol=1e-9)
        np.testing.assert_allclose(band.y[:2:-1], np.quantile(values, 0.9, axis=1), rtol=1e-9)
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"


@pytest.fixture(scope="module")
def box():
    return lipschitz_explorer(1.0, 0.5, rates=(0.1, 1.0), **SMALL)


@pytest.mark.parametrize(("sigma", "eta"), [(0.0, 0.01), (0.0, 10.0), (8.0, 0.01), (8.0, 10.0), (2.5, 0.1)])
def test_moving_the_sliders_moves_figure_and_read_out_to_the_right_numbers(box, sigma, eta):
    box.controls["sigma"].value, box.controls["eta"].value = sigma, eta
    moved, bound, entropies = by_hand(sigma, eta)
    curve, limit, at, its_bound = box.figure.data[1], box.figure.data[3], box.figure.data[-2], box.figure.data[-1]
    for position, rate in enumerate((0.1, 1.0)):
        there = by_hand(sigma, rate)
        assert curve.y[position] == pytest.approx(np.median(there[0]))
        assert limit.y[position] == pytest.approx(np.median(there[1]))
    assert at.x[0] == its_bound.x[0] == pytest.approx(eta)
    assert at.y[0] == pytest.approx(np.median(moved))
    assert its_bound.y[0] == pytest.approx(np.median(bound))
    said = [float(x) for x in re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", box.read_out.value)]
    expected = [sigma, sigma**2, eta, np.median(moved), np.median(bound), 100 * (moved / bound).max(), *entropies]
    assert said == pytest.approx(expected, rel=0.05, abs=0.0006)


def test_a_bad_state_keeps_the_last_good_picture_and_says_why(box):
    box.controls["sigma"].value, box.controls["eta"].value = 1.0, 0.5
    before = [tuple(trace.y) for trace in box.figure.data]
    box.controls["sigma"].min = -2.0
    box.controls["sigma"].value = -1.0
    assert "logit_std" in box.read_out.value
    assert "-1" in box.read_out.value
    assert [tuple(trace.y) for trace in box.figure.data] == before
    box.controls["sigma"].value = 1.0
    box.controls["sigma"].min = 0.0
    assert "one step moves" in box.read_out.value


def test_sliders_span_what_the_chapter_says():
    controls = lipschitz_explorer(1.0, 0.5, rates=(0.1, 1.0), **SMALL).controls
    assert (controls["sigma"].min, controls["sigma"].max) == (0, 8)
    assert (10 ** controls["eta"].min, 10 ** controls["eta"].max) == (0.01, 10)
    assert (controls["sigma"].value, controls["eta"].value) == (1.0, 0.5)
