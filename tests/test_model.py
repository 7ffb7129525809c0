"""The stack against loops over one prompt, its query-row shortcut, its initial scale, and independence of runs."""

import math

import pytest
import torch

from lipattn.model import (
    BLOCKS,
    FIXED_ATTENTION,
    expected_logit_std,
    fixed_attention_weights,
    forward,
    init_std_for,
    init_weights,
    predict,
)
from lipattn.reweighting import REWEIGHTINGS
from lipattn.tasks import sample_prompts

SIZES = {"n_context": 5, "d": 2, "batch": 3, "dtype": torch.float64}


@pytest.fixture
def tokens():
    return sample_prompts([0, 1], 0, **SIZES).tokens


def stack(layers=2, heads=2, seeds=(0, 1), width=3):
    return init_weights(seeds, width=width, layers=layers, heads=heads, dtype=torch.float64)


def softmax_stack_in_python(w, x, residual):
    """One run, one prompt, lists of floats."""

    def times(a, b):
        return [[sum(r[i] * b[i][j] for i in range(len(b))) for j in range(len(b[0]))] for r in a]

    for layer in range(len(w["W_Q"])):
        total = [[value if residual else 0.0 for value in row] for row in x]
        for head in range(len(w["W_Q"][layer])):
            q, k, v = (times(x, w[b][layer][head]) for b in BLOCKS)
            for i, row in enumerate(q):
                scores = [
                    math.exp(sum(a * b for a, b in zip(row, key, strict=True)) / math.sqrt(len(row))) for key in k
                ]
                for j, value in enumerate(v):
                    for f in range(len(row)):
                        total[i][f] += scores[j] / sum(scores) * value[f]
        x = total
    return x


@pytest.mark.parametrize("residual", [True, False])
def test_stack_equals_loops_over_one_prompt(tokens, residual):
    w = stack()
    out, layers = forward(w, tokens, residual=residual)
    for run, prompt in ((0, 0), (1, 2)):
        expected = softmax_stack_in_python(
            {b: w[b][run].tolist() for b in BLOCKS}, tokens[run, prompt].tolist(), residual
        )
        assert torch.allclose(out[run, prompt], torch.tensor(expected), atol=1e-12)
    assert len(layers) == 2
    assert layers[0].p.shape == (2, 2, 3, 6, 6)


@pytest.mark.parametrize("name", REWEIGHTINGS)
@pytest.mark.parametrize("residual", [True, False])
def test_prediction_is_the_query_row_of_the_whole_stack(tokens, name, residual):
    w = stack()
    whole, _ = forward(w, tokens, reweighting=name, residual=residual)
    assert torch.allclose(predict(w, tokens, reweighting=name, residual=residual), whole[:, :, -1, -1], atol=1e-12)


@pytest.mark.parametrize("kind", FIXED_ATTENTION)
def test_fixed_attention_ignores_queries_and_keys(tokens, kind):
    w = stack()
    other = {**w, "W_Q": 3 * w["W_Q"], "W_K": -w["W_K"]}
    assert torch.equal(predict(w, tokens, fixed_attention=kind), predict(other, tokens, fixed_attention=kind))
    whole, layers = forward(w, tokens, fixed_attention=kind)
    assert torch.allclose(predict(w, tokens, fixed_attention=kind), whole[:, :, -1, -1])
    assert torch.equal(layers[0].p[0, 0, 0], fixed_attention_weights(kind, 6, torch.float64))


def test_fixed_attention_is_what_its_name_says():
    assert torch.equal(fixed_attention_weights("uniform", 4), torch.full((4, 4), 0.25, dtype=torch.float32))
    assert fixed_attention_weights("one_token", 3).tolist() == [[1, 0, 0]] * 3
    assert fixed_attention_weights("cyclic", 3).tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_weights_depend_on_their_own_place_only():
    small, large = stack(layers=1, heads=1, seeds=(5,)), stack(layers=3, heads=2, seeds=(1, 5))
    for b in BLOCKS:
        assert torch.equal(small[b][0, 0, 0], large[b][1, 0, 0])
    assert not torch.equal(large["W_Q"], large["W_K"])
    assert not torch.equal(large["W_Q"][:, 0], large["W_Q"][:, 1])


def test_initial_logit_std_is_the_stated_one():
    d, n, seeds = 2, 20, range(400)
    s = init_std_for(1.7, d)
    assert expected_logit_std(s, d) == pytest.approx(1.7, rel=1e-12)
    w = init_weights(seeds, width=d + 1, init_std={"W_Q": s, "W_K": s, "W_V": 0.5}, dtype=torch.float64)
    tokens = sample_prompts(seeds, 0, n_context=n, d=d, batch=64, dtype=torch.float64).tokens
    _, (layer,) = forward(w, tokens)
    logits = layer.scores[..., -1, :-1]
    assert float(logits.square().mean().sqrt()) == pytest.approx(1.7, rel=0.06)
    assert float(logits.var(-1, unbiased=True).mean().sqrt()) == pytest.approx(1.7, rel=0.06)


def test_a_batch_of_runs_equals_each_run_alone(tokens):
    w = stack()
    both = predict(w, tokens)
    for run in range(2):
        alone = predict({b: x[run : run + 1] for b, x in w.items()}, tokens[run : run + 1])
        assert torch.equal(both[run : run + 1], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reweighting": "sotfmax"}, "reweighting='sotfmax'"),
        ({"fixed_attention": "diagonal"}, "fixed_attention='diagonal'"),
        ({"tokens": torch.zeros(2, 3, 6, 4)}, "tokens"),
        ({"tokens": torch.zeros(1, 3, 6, 3)}, "tokens"),
        ({"weights": {"W_Q": torch.zeros(2, 1, 1, 3, 3)}}, "weights"),
    ],
)
def test_bad_input_is_refused(tokens, change, message):
    with pytest.raises(ValueError, match=message):
        predict(**{"weights": stack(), "tokens": tokens, **change})
