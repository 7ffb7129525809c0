"""Chapter 3's explorer: the state agrees with autograd and the law; sliders move the picture and the read-out."""

import math
import re

import numpy as np
import pytest
import torch

from lipattn.curvature import top_hessian_eigenvalue
from lipattn.philox import normal
from lipattn.tasks import sample_prompts
from lipattn.widgets.curvature import curvature_explorer, curvature_figure, curvature_sentence, curvature_state


def prompts(d, n_context=20, batch=4096, seed=0):
    tokens, targets = sample_prompts([seed], 0, n_context=n_context, d=d, batch=batch, dtype=torch.float64)
    return tokens[0], targets[0]


def loss_of(state, d):
    """W_V → loss, written with a loop over tokens."""
    tokens, targets = prompts(d)

    def loss(w_v):
        output = sum(float(state.p[j]) * tokens[:, j] @ w_v for j in range(len(state.p)))
        return (output[:, -1] - targets).square().mean()

    return loss


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("sigma", [0.0, 1.0, 8.0])
def test_curvature_is_the_hessians_and_near_the_law(sigma, d):
    state = curvature_state(sigma, 0.5, d=d)
    loss = loss_of(state, d)
    weights = {"W_V": torch.zeros(1, d + 1, d + 1)}
    found = top_hessian_eigenvalue(lambda w: loss(w["W_V"][0])[None], weights, blocks=("W_V",), iterations=(d + 1) ** 2)
    assert state.curvature == pytest.approx(found.item(), rel=1e-9)
    squares = sum(float(x) ** 2 for x in state.p)
    assert state.sum_of_squares == pytest.approx(squares, rel=1e-12)
    assert state.predicted_curvature == pytest.approx(2 * d * squares, rel=1e-12)
    assert state.predicted_critical_rate == pytest.approx(1 / (d * squares), rel=1e-12)
    assert state.curvature == pytest.approx(2 * d * squares, rel=0.15)  # 4096 prompts, heavy tails


def test_attention_is_the_softmax_of_one_draw():
    zero = torch.tensor(0)
    z = normal(20, torch.tensor(3), (zero, zero), 48)
    weights = [math.exp(2.5 * float(x)) for x in z]
    expected = [w / sum(weights) for w in weights]
    np.testing.assert_allclose(curvature_state(2.5, 0.5, seed=3).p, expected, rtol=1e-12)
    np.testing.assert_allclose(curvature_state(0.0, 0.5).p, [1 / 20] * 20, rtol=1e-12)


@pytest.mark.parametrize(("sigma", "eta"), [(0.0, 0.5), (4.0, 0.5), (8.0, 1.0)])
def test_the_path_is_gradient_descent_on_w_v_seen_along_the_eigenvector(sigma, eta):
    state, d = curvature_state(sigma, eta), 2
    loss = loss_of(state, d)
    hessian = torch.autograd.functional.hessian(
        lambda v: loss(torch.cat((torch.zeros(3, 2), v[:, None]), 1)), torch.zeros(3)
    )
    e = torch.linalg.eigh(hessian).eigenvectors[:, -1]
    e = e * e[-1].sign()
    w_v = torch.zeros(3, 3)
    w_v[:, -1] = e
    seen, losses = [], []
    for _ in range(len(state.path)):
        w_v.requires_grad_(True)
        a = float(w_v.detach()[:, -1] @ e)
        on_line = torch.zeros(3, 3)
        on_line[:, -1] = a * e
        seen.append(a)
        losses.append(float(loss(on_line)))
        (gradient,) = torch.autograd.grad(loss(w_v), w_v)
        w_v = (w_v - eta * gradient).detach()
    np.testing.assert_allclose(state.path, seen, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(state.path_loss, losses, rtol=1e-8)
    assert state.multiplier == pytest.approx(float(1 - eta * hessian.max()), abs=0.05)
    steps = np.diff(seen)
    np.testing.assert_allclose(steps[1:] / steps[:-1], state.multiplier, rtol=1e-6)


def test_the_grid_is_the_loss_along_the_same_line():
    state = curvature_state(4.0, 0.5)
    second = np.diff(state.grid_loss, 2) / float(state.grid[1] - state.grid[0]) ** 2
    np.testing.assert_allclose(second, state.curvature, rtol=1e-8)
    middle = int(state.grid.abs().argmin())
    assert float(state.grid_loss[middle]) == pytest.approx(float(prompts(2)[1].square().mean()), rel=1e-12)  # W_V = 0
    assert float(np.interp(1.0, state.grid, state.grid_loss)) == pytest.approx(float(state.path_loss[0]), rel=1e-2)


def test_a_rate_beyond_the_limit_grows_and_one_below_shrinks():
    limit = 2 / curvature_state(6.0, 0.5).curvature
    assert "shrinks" in curvature_sentence(curvature_state(6.0, 0.98 * limit))
    assert "grows" in curvature_sentence(curvature_state(6.0, 1.02 * limit))
    below, above = (curvature_state(6.0, f * limit).path.diff().abs() for f in (0.98, 1.02))
    assert (below[1:] < below[:-1]).all()
    assert (above[1:] > above[:-1]).all()


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match="logit_std"):
        curvature_state(bad, 0.5)
    with pytest.raises(ValueError, match="learning_rate"):
        curvature_state(1.0, bad)
    with pytest.raises(ValueError, match="steps"):
        curvature_state(1.0, 0.5, steps=0)


KINDS = ("loss", "path")  # the traces of a panel


def curves(figure):
    return [(np.asarray(t.x, float), np.asarray(t.y, float)) for t in figure.data]


def test_both_sliders_move_the_picture_and_the_read_out_tells_the_same():
    box = curvature_explorer()
    sigma, eta = box.controls["logit_std"], box.controls["learning_rate"]
    for to_sigma, to_eta in [(sigma.min, 0.5), (sigma.max, 0.5), (3.0, 10**eta.min), (3.0, 10**eta.max), (5.0, 1.0)]:
        sigma.value, eta.value = to_sigma, to_eta
        flat, sharp = curvature_state(0.0, eta.value), curvature_state(sigma.value, eta.value)
        drawn = curves(box.figure)
        assert len(drawn) == 4
        for (x, y), (want_x, want_y) in zip(
            drawn,
            [
                (s.grid, s.grid_loss) if what == "loss" else (s.path, s.path_loss)
                for s in (flat, sharp)
                for what in KINDS
            ],
            strict=True,
        ):
            np.testing.assert_allclose(x, want_x, rtol=1e-12)
            np.testing.assert_allclose(y, want_y, rtol=1e-12)
        numbers = [float(v) for v in re.findall(r"-?\d+\.\d+", box.read_out.value)]
        squares = float(sharp.p.square().sum())
        expected = [sigma.value, sigma.value**2, squares, sharp.curvature, 4 * squares, 2 / sharp.curvature]
        expected += [eta.value, abs(1 - eta.value * sharp.curvature)]
        np.testing.assert_allclose(numbers, expected, atol=0.00501)
        assert f"σ = {sigma.value:g}" in box.figure.layout.annotations[1].text


def test_both_panels_share_one_scale():
    figure = curvature_figure(curvature_state(0.0, 0.5), curvature_state(4.0, 0.5))
    assert figure.layout.yaxis.range == figure.layout.yaxis2.range
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range


def test_a_bad_state_keeps_the_last_good_picture_and_says_why():
    box = curvature_explorer()
    box.controls["logit_std"].value = 2.0
    before = curves(box.figure)
    slider = box.controls["logit_std"]
    slider.min = -1.0
    slider.value = -0.5
    assert "logit_std must be finite and" in box.read_out.value
    for (x, y), (old_x, old_y) in zip(curves(box.figure), before, strict=True):
        np.testing.assert_array_equal(x, old_x)
        np.testing.assert_array_equal(y, old_y)
    slider.value = 4.0
    assert "σ = 4.00" in box.read_out.value
