"""The explorer of chapter 4 draws what the library computes for the state of its controls."""

import numpy as np
import pytest
import torch

from lipattn.reweighting import REWEIGHTINGS
from lipattn.training import TrainConfig, train
from lipattn.widgets.training import training_explorer


def history(mechanism, sigma, eta):
    return train(TrainConfig(seeds=range(4), reweighting=mechanism, logit_std=sigma, learning_rate=eta, steps=60))


def check(box):
    mechanism, sigma, eta = (box.controls[name].value for name in ("mechanism", "sigma", "eta"))
    expected = []
    for name in ("softmax", mechanism):
        h = history(name, sigma, eta)
        loss = torch.where(h.loss > 1e8, torch.nan, h.loss)
        expected += [*loss, *h.normalized_entropy[..., 0]]
        assert f"{REWEIGHTINGS[name].label}: {int(h.diverged.sum())} of 4 dead" in box.read_out.value
    for trace, values in zip(box.figure.data, expected, strict=False):
        drawn = np.array([np.nan if v is None else v for v in trace.y], dtype=float)
        np.testing.assert_allclose(drawn, values.numpy(), rtol=1e-6)
    assert f"σ² = {sigma**2:.2f}" in box.read_out.value


def test_every_control_moves_the_picture_to_the_library_value():
    box = training_explorer()
    check(box)
    box.controls["eta"].value = 0.01
    check(box)
    box.controls["eta"].value = 10.0
    check(box)
    box.controls["sigma"].value = 8.0
    check(box)
    box.controls["sigma"].value = 0.0
    check(box)
    box.controls["mechanism"].value = "qk_layernorm"
    check(box)
    box.controls["mechanism"].value = "softmax"
    check(box)


def test_a_bad_state_keeps_the_last_good_picture_and_says_why():
    box = training_explorer()
    before = [tuple(trace.y) for trace in box.figure.data]
    box.controls["sigma"].min = -1.0
    box.controls["sigma"].value = -1.0
    assert "logit_std=-1.0" in box.read_out.value
    for trace, values in zip(box.figure.data, before, strict=True):
        np.testing.assert_array_equal(np.array(trace.y, dtype=float), np.array(values, dtype=float))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="reweighting='sotfmax'"):
        training_explorer(mechanism="sotfmax")
