"""The prompts are what they say, and the baselines are what a reader would compute."""

import pytest
import torch

from lipattn.tasks import (
    EVALUATION,
    Prompts,
    gradient_step_prediction,
    least_squares_loss,
    least_squares_prediction,
    linear_attention_optimum,
    null_loss,
    sample_prompts,
)

SETTING = {"n_context": 20, "d": 3, "batch": 8, "dtype": torch.float64}


def test_targets_are_linear_in_the_query_and_the_query_hides_its_answer():
    tokens, targets = sample_prompts([3, 4], 0, **SETTING)
    assert tokens.shape == (2, 8, 21, 4)
    w = torch.linalg.lstsq(tokens[..., :-1, :3], tokens[..., :-1, 3:]).solution[..., 0]
    assert torch.allclose((tokens[..., -1, :3] * w).sum(-1), targets, atol=1e-10)
    assert torch.equal(tokens[..., -1, -1], torch.zeros(2, 8))


def test_prompts_have_the_stated_moments():
    tokens, targets = sample_prompts(range(64), 0, n_context=20, d=3, batch=64, dtype=torch.float64)
    x, y = tokens[..., :-1, :3], tokens[..., :-1, 3]
    assert float(x.mean()) == pytest.approx(0, abs=0.01)
    assert float(x.square().mean()) == pytest.approx(1, abs=0.01)
    assert float(y.square().mean()) == pytest.approx(3, abs=0.2)
    assert float(targets.square().mean()) == pytest.approx(null_loss(3), abs=0.3)


def test_a_prompt_does_not_depend_on_its_company():
    alone = sample_prompts([9], 5, n_context=4, d=3, batch=2, dtype=torch.float64)
    among = sample_prompts([1, 9, 2], 5, n_context=4, d=3, batch=7, dtype=torch.float64)
    longer = sample_prompts([9], 5, n_context=9, d=3, batch=2, dtype=torch.float64)
    assert torch.equal(alone.tokens[0], among.tokens[1, :2])
    assert torch.equal(alone.tokens[..., :4, :], longer.tokens[..., :4, :])
    assert torch.equal(alone.targets, longer.targets)


def test_seed_step_and_stream_each_change_the_numbers():
    base = sample_prompts([0], 0, **SETTING).tokens
    for other in (
        sample_prompts([1], 0, **SETTING),
        sample_prompts([0], 1, **SETTING),
        sample_prompts([0], 0, **SETTING, stream=EVALUATION),
    ):
        assert not bool((base[..., :-1, :] == other.tokens[..., :-1, :]).any())


def test_float32_prompts_are_the_rounded_float64_ones():
    exact = sample_prompts([0], 0, **SETTING)
    rounded = sample_prompts([0], 0, **{**SETTING, "dtype": torch.float32})
    assert torch.equal(exact.tokens.float(), rounded.tokens)


@pytest.mark.parametrize(("d", "value"), [(2, 0.261), (3, 0.5), (5, 1.154)])
def test_linear_attention_optimum_has_its_right_values(d, value):
    assert linear_attention_optimum(20, d) == pytest.approx(value, abs=6e-4)


def test_linear_attention_optimum_is_the_best_gradient_step():
    n, d = 7, 2
    prompts = sample_prompts(range(50), 0, n_context=n, d=d, batch=2000, dtype=torch.float64)

    def loss(a):
        return float((gradient_step_prediction(prompts, a) - prompts.targets).square().mean())

    best = n / (n + d + 1)
    assert loss(best) == pytest.approx(linear_attention_optimum(n, d), rel=0.02)
    assert loss(best) < min(loss(best - 0.1), loss(best + 0.1))


@pytest.mark.parametrize(("n", "d"), [(2, 5), (5, 5), (20, 3), (1, 4)])
def test_least_squares_loss_is_the_dimension_it_cannot_see(n, d):
    prompts = sample_prompts(range(40), 0, n_context=n, d=d, batch=500, dtype=torch.float64)
    loss = float((least_squares_prediction(prompts) - prompts.targets).square().mean())
    assert loss == pytest.approx(least_squares_loss(n, d), rel=0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_context": 0}, "n_context=0"),
        ({"d": 0}, "d=0"),
        ({"batch": -1}, "batch=-1"),
        ({"step": -1}, "step=-1"),
        ({"seeds": []}, r"seeds=\[\]"),
        ({"seeds": [1, 1]}, r"seeds=\[1, 1\]"),
        ({"seeds": [-1]}, "seed=-1"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        sample_prompts(**{"seeds": [0], "step": 0, "n_context": 2, "d": 2, "batch": 2, **change})


def test_one_pair_and_one_dimension():
    prompts = sample_prompts([0], 0, n_context=1, d=1, batch=3, dtype=torch.float64)
    assert prompts.tokens.shape == (1, 3, 2, 2)
    assert torch.allclose(least_squares_prediction(Prompts(*prompts)), prompts.targets)
