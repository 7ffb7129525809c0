"""The explorer of chapter 2: what it draws and says is what the library gives for the state of its sliders."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

from lipattn import figures
from lipattn.model import init_std_for, init_weights
from lipattn.tasks import EVALUATION, TRAINING, sample_prompts
from lipattn.theory import expected_entropy
from lipattn.training import TrainConfig
from lipattn.widgets.entropy import entropy_explorer, one_step, series_styles

CONFIG = TrainConfig(seeds=(3, 7, 11), dtype="float64", batch=8, n_context=6)
PROMPTS = 32


def rows_by_hand(weights, tokens):
    """Logits and softmax of the query's row, prompt by prompt."""
    w_q, w_k = weights
    logits = torch.stack([(t[-1] @ w_q) @ (t @ w_k).T / math.sqrt(tokens.shape[-1]) for t in tokens])
    return logits, torch.stack([z.exp() / z.exp().sum() for z in logits - logits.amax(-1, keepdim=True)])


def step_by_hand(sigma, eta, config=CONFIG):
    """Standard deviation, entropy and first row before and after one SGD step, one run and one prompt at a time."""
    std = {"W_Q": init_std_for(sigma, config.d), "W_K": init_std_for(sigma, config.d), "W_V": config.init_std}
    kwargs = {"n_context": config.n_context, "d": config.d, "dtype": torch.float64}
    found = []
    for seed in config.seeds:
        start = init_weights([seed], width=config.width, init_std=std, dtype=torch.float64)
        w = {block: x[0, 0, 0].clone().requires_grad_(True) for block, x in start.items()}
        tokens, targets = sample_prompts([seed], 0, batch=config.batch, stream=TRAINING, **kwargs)
        loss = 0.0
        for t, y in zip(tokens[0], targets[0], strict=True):
            p = torch.softmax((t[-1] @ w["W_Q"]) @ (t @ w["W_K"]).T / math.sqrt(config.width), dim=-1)
            loss = loss + (t[-1, -1] + (p @ t @ w["W_V"])[-1] - y) ** 2 / config.batch
        loss.backward()
        fresh = sample_prompts([seed], 0, batch=PROMPTS, stream=EVALUATION, **kwargs).tokens[0]
        for eta_now in (0.0, eta):
            logits, p = rows_by_hand([(w[b] - eta_now * w[b].grad).detach() for b in ("W_Q", "W_K")], fresh)
            context = logits[:, :-1]
            variance = (context - context.mean(-1, keepdim=True)).square().mean()
            entropy = -torch.special.xlogy(p, p).sum(-1).mean()
            found.append((float(variance.sqrt()), float(entropy), p[0].sort(descending=True).values))
    before, after = found[0::2], found[1::2]
    return [np.array([run[i] for run in runs]) for i in (0, 1) for runs in (before, after)], before[0][2], after[0][2]


@pytest.mark.parametrize("sigma", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("eta", [0.01, 0.5, 10.0])
def test_one_step_equals_the_same_step_written_out_run_by_run(sigma, eta):
    state = one_step(dataclasses.replace(CONFIG, logit_std=sigma, learning_rate=eta))
    (std_before, std_after, h_before, h_after), row_before, row_after = step_by_hand(sigma, eta)
    np.testing.assert_allclose(state.logit_std_before, std_before, rtol=1e-9)
    np.testing.assert_allclose(state.logit_std_after, std_after, rtol=1e-9)
    np.testing.assert_allclose(state.entropy_before, h_before, rtol=1e-9)
    np.testing.assert_allclose(state.entropy_after, h_after, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state.row_before, row_before, rtol=1e-9)
    np.testing.assert_allclose(state.row_after, row_after, rtol=1e-9, atol=1e-15)
    assert state.diverged == 0


def test_a_step_of_length_0_changes_nothing():
    state = one_step(dataclasses.replace(CONFIG, logit_std=2.0, learning_rate=0.0))
    assert torch.equal(state.entropy_before, state.entropy_after)
    assert torch.equal(state.logit_std_before, state.logit_std_after)


def test_sigma_is_the_logit_std_before_the_step():
    many = TrainConfig(seeds=range(400), dtype="float64", logit_std=1.7, learning_rate=0.0)
    variance = one_step(many).logit_std_before.square()
    error = variance.std() / math.sqrt(400)
    assert abs(variance.mean() - 1.7**2) < 4 * error
    assert error < 0.1 * 1.7**2


def test_after_a_long_step_the_logits_are_quadratic_in_its_length():
    """W_Q W_Kᵀ after the step is a polynomial of degree 2 in η, so the logit std grows like η²."""
    far = [
        one_step(dataclasses.replace(CONFIG, logit_std=1.0, learning_rate=eta)).logit_std_after for eta in (1e6, 2e6)
    ]
    torch.testing.assert_close(far[1] / far[0], torch.full((3,), 4.0), rtol=1e-3, atol=0)


def test_a_run_that_diverges_in_its_step_is_counted_and_does_not_move():
    config = dataclasses.replace(CONFIG, logit_std=1.0, learning_rate=0.5, init_std=1e5)  # loss above 10⁶ × null loss
    state = one_step(config)
    assert state.diverged == 3
    assert torch.equal(state.entropy_before, state.entropy_after)


def numbers(text):
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", text)]


@pytest.mark.parametrize("sigma", [0.05, 2.5, 8.0])
@pytest.mark.parametrize("eta", [0.01, 0.5, 10.0])
def test_sliders_move_picture_and_read_out_to_the_library_s_values(sigma, eta):
    box = entropy_explorer(CONFIG, sigma=1.0, learning_rate=0.1)
    box.controls["sigma"].value = sigma
    box.controls["learning_rate"].value = eta
    assert (box.controls["sigma"].value, box.controls["learning_rate"].value) == (sigma, eta)
    (std_before, std_after, h_before, h_after), row_before, row_after = step_by_hand(sigma, eta)
    shown_before, shown_after, law, runs_before, runs_after = box.figure.data[:5]
    np.testing.assert_allclose(shown_before.y, row_before, rtol=1e-9)
    np.testing.assert_allclose(shown_after.y, row_after, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(law.y, expected_entropy(7, np.array(law.x)), rtol=1e-12)
    np.testing.assert_allclose([runs_before.x, runs_before.y], [std_before, h_before], rtol=1e-9)
    np.testing.assert_allclose([runs_after.x, runs_after.y], [std_after, h_after], rtol=1e-9, atol=1e-12)
    assert len(box.figure.data) == 5
    said = numbers(box.read_out.value)
    assert said[0] == sigma
    assert said[1] == pytest.approx(sigma**2, rel=5e-3)
    assert said[2] == pytest.approx(eta, rel=5e-3)
    assert said[3:] == [
        3,
        *(float(f"{np.median(x):.2f}") for x in (std_before, std_after)),
        *(float(f"{np.median(x):.3f}") for x in (h_before, h_after)),
    ]


def test_the_read_out_tells_of_runs_that_diverged():
    box = entropy_explorer(dataclasses.replace(CONFIG, init_std=1e5))
    assert "3 of 3 runs diverged and did not step." in box.read_out.value


def test_a_bad_state_keeps_the_last_good_picture_and_says_why():
    box = entropy_explorer(CONFIG, sigma=1.0, learning_rate=0.5)
    before = box.figure.to_dict()["data"]
    box.controls["sigma"].min = -1.0
    box.controls["sigma"].value = -1.0
    assert "logit_std must be" in box.read_out.value
    assert repr(box.figure.to_dict()["data"]) == repr(before)
    box.controls["sigma"].value = 2.0
    assert "σ = 2.00" in box.read_out.value


def test_no_prompts_and_too_many_labels_are_refused():
    with pytest.raises(ValueError, match=r"prompts must be .*prompts=0"):
        one_step(CONFIG, prompts=0)
    for labels in ([], ["a"] * 7):
        with pytest.raises(ValueError, match="labels must be between 1 and 6"):
            series_styles(labels)


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_series_is_told_apart_by_dash_and_marker_and_stands_out_on_both_pages():
    looks = series_styles(list("abcdef"))
    assert len({look.dash for look in looks}) == len({look.symbol for look in looks}) == 6
    for look in looks:
        assert isinstance(look, figures.Style)
        assert 1.05 / (luminance(look.color) + 0.05) >= 4.5  # on white
        assert (luminance(look.color_dark) + 0.05) / (luminance("#121212") + 0.05) >= 4.5
