"""Chapter 4's table on its own seeds and on a disjoint block: the claims hold on both, the intervals agree."""

import pytest
import torch

from lipattn.training import TrainConfig, survival, train

MECHANISMS = ("softmax", "relu_kernel", "elu_kernel", "qk_layernorm")
BLOCKS = (range(32), range(1000, 1032))
SETTINGS = {
    "one layer, 0.5": TrainConfig(record_every=1000),
    "three layers, 0.5": TrainConfig(d=3, layers=3, steps=60, record_every=1),
    "three layers, 0.1": TrainConfig(d=3, layers=3, learning_rate=0.1, steps=60, record_every=1000),
}


def both_blocks(setting, mechanism):
    config = SETTINGS[setting]
    torch.set_default_dtype(torch.float32)  # the chapter's own precision
    return [train(TrainConfig(**{**vars(config), "seeds": block, "reweighting": mechanism})) for block in BLOCKS]


def assert_blocks_agree(histories):
    one, other = (survival(h.diverged) for h in histories)
    assert max(one.low, other.low) <= min(one.high, other.high), (one, other)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_one_layer_only_softmax_dies(mechanism):
    histories = both_blocks("one layer, 0.5", mechanism)
    assert_blocks_agree(histories)
    for h in histories:
        dead = survival(h.diverged).dead
        assert dead >= 29 if mechanism == "softmax" else dead <= 3


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_three_layers_at_the_high_rate_all_die_and_the_others_mostly_uncollapsed(mechanism):
    histories = both_blocks("three layers, 0.5", mechanism)
    assert_blocks_agree(histories)
    for h in histories:
        assert survival(h.diverged).dead >= 29
        collapsed = (h.last(h.normalized_entropy).amin(1)[h.diverged] < 0.15).double().mean()
        assert collapsed >= 0.9 if mechanism == "softmax" else collapsed <= 0.4


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_three_layers_at_the_low_rate_the_blocks_agree(mechanism):
    histories = both_blocks("three layers, 0.1", mechanism)
    assert_blocks_agree(histories)
    for h in histories:
        dead = survival(h.diverged).dead
        if mechanism == "softmax":
            assert dead >= 24
        if mechanism in ("elu_kernel", "qk_layernorm"):
            assert dead <= 8
