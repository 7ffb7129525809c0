"""Every mechanism of the table: shared properties, its oracle, and corners known in closed form.

A property is a function of one `Reweighting` and its oracle. `PROPERTIES` lists them; a new row of the table is held
to all of them.
"""

import dataclasses
import itertools
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import OPTION_VALUES, ORACLES

from lipattn.reweighting import (
    LOGIT_OPTIONS,
    REWEIGHTINGS,
    Reweighting,
    allowed_keys,
    causal_mask,
    elu_feature_map,
    linear_attention,
    relu_feature_map,
)

examples = settings(max_examples=40, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
close = torch.testing.assert_close


def gaussian(*shape, seed=0, dtype=None):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype or torch.get_default_dtype())


def expected(oracle, q, k, allowed=None, **options):
    """The oracle's weights for tensors with any batch axes, in float64."""
    shape = (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
    allowed = torch.ones(shape, dtype=torch.bool) if allowed is None else allowed.expand(shape)
    qs = q.double().expand(*shape[:-2], *q.shape[-2:]).reshape(-1, *q.shape[-2:]).tolist()
    ks = k.double().expand(*shape[:-2], *k.shape[-2:]).reshape(-1, *k.shape[-2:]).tolist()
    may = allowed.reshape(-1, *shape[-2:]).tolist()
    rows = [oracle(x, y, a, **options) for x, y, a in zip(qs, ks, may, strict=True)]
    return torch.tensor(rows, dtype=torch.float64).reshape(shape)


def gradients(entry, q, k, *, seed=7, **arguments):
    """p and the gradients of q and k for one random direction in p."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    p = entry.weights(q, k, **arguments)
    return (p.detach(), *torch.autograd.grad(p, (q, k), gaussian(*p.shape, seed=seed, dtype=p.dtype)))


@st.composite
def cases(draw, entry):
    """Queries and keys on a coarse grid (zeros and ties occur), a mask or none, and options."""
    n, m, d = (draw(st.integers(1, 4)) for _ in range(3))
    grid = st.integers(-24, 24).map(lambda a: a / 8)
    vectors = [draw(st.lists(st.lists(grid, min_size=d, max_size=d), min_size=size, max_size=size)) for size in (n, m)]
    q, k = (torch.tensor(x) for x in vectors)
    mask = draw(st.none() | st.lists(st.booleans(), min_size=n * m, max_size=n * m))
    mask = None if mask is None else torch.tensor(mask).reshape(n, m)
    options = {name: draw(st.sampled_from(OPTION_VALUES[name])) for name in entry.options if draw(st.booleans())}
    return q, k, mask, options


def over_cases(entry, body):
    @examples
    @given(cases(entry))
    def run(case):
        body(*case)

    run()


# --- properties: each takes an entry and its oracle ------------------------------------------------------------------


def agrees_with_the_oracle(entry, oracle):
    def body(q, k, mask, options):
        p = entry.weights(q, k, mask=mask, **options)
        close(p, expected(oracle, q, k, mask, **options), rtol=1e-11, atol=1e-13)

    over_cases(entry, body)


def agrees_with_the_oracle_at_defaults(entry, oracle):
    q, k = gaussian(3, 5, 4), gaussian(3, 7, 4, seed=1)
    close(entry.weights(q, k), expected(oracle, q, k), rtol=1e-11, atol=1e-13)


def weights_are_non_negative_and_zero_where_forbidden(entry, oracle):
    def body(q, k, mask, options):
        p = entry.weights(q, k, mask=mask, **options)
        assert (p >= 0).all()
        assert mask is None or (p[~mask] == 0).all()

    over_cases(entry, body)


def live_rows_sum_to_one_or_the_row_declares_otherwise(entry, oracle):
    sums = []

    def body(q, k, mask, options):
        p = entry.weights(q, k, mask=mask, **options)
        sums.append(p.sum(-1)[(p > 0).any(-1)])

    over_cases(entry, body)
    deviation = (torch.cat(sums) - 1).abs()
    if entry.row_stochastic:
        assert deviation.max() < 1e-12
    else:
        assert deviation.max() > 0.01


def dead_rows_exist_exactly_where_declared(entry, oracle):
    dead = []

    def body(q, k, mask, options):
        p = entry.weights(q, k, mask=mask, **options)
        attends = torch.ones(len(q), dtype=torch.bool) if mask is None else mask.any(-1)
        dead.append(((p == 0).all(-1) & attends).any())

    over_cases(entry, body)
    assert any(dead) == entry.may_have_dead_rows


def keys_and_queries_are_interchangeable(entry, oracle):
    q, k = gaussian(5, 3), gaussian(6, 3, seed=1)
    mask = gaussian(5, 6, seed=2) < 0.8
    rows, columns = torch.tensor([3, 1, 4, 0, 2]), torch.tensor([2, 5, 0, 1, 4, 3])
    p = entry.weights(q, k, mask=mask)
    moved = entry.weights(q[rows], k[columns], mask=mask[rows][:, columns])
    close(moved, p[rows][:, columns], rtol=1e-12, atol=1e-14)


def gradients_agree_with_finite_differences(entry, oracle):
    """Of the oracle: the independent truth. Second derivatives, which curvature needs, against those of the first."""
    q, k, direction = gaussian(3, 2), gaussian(4, 2, seed=1), gaussian(3, 4, seed=3)
    mask = torch.tensor([[True, True, False, True], [False, False, False, False], [False, True, False, True]])
    for arguments, allowed in (({}, None), ({"mask": mask}, mask), ({"causal": True}, causal_mask(3, 4))):
        leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
        weights = partial(entry.weights, **arguments)
        got = torch.autograd.grad(weights(*leaves), leaves, direction)
        for which, gradient in enumerate(got):
            truth = torch.empty_like(gradient)
            for at in range(truth.numel()):
                up, down = [q.clone(), k.clone()], [q.clone(), k.clone()]
                up[which].view(-1)[at] += 1e-6
                down[which].view(-1)[at] -= 1e-6
                change = expected(oracle, *up, allowed) - expected(oracle, *down, allowed)
                truth.view(-1)[at] = (change * direction).sum() / 2e-6
            close(gradient, truth, rtol=1e-6, atol=1e-7)
        assert torch.autograd.gradgradcheck(weights, leaves, eps=1e-6, atol=1e-5)


def forbidden_keys_and_fully_masked_rows_have_no_gradient(entry, oracle):
    q, k = gaussian(3, 2), gaussian(4, 2, seed=1)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 2] = False
    mask[1] = False
    p, grad_q, grad_k = gradients(entry, q, k, mask=mask)
    assert (p[1] == 0).all()
    assert (grad_q[1] == 0).all()
    assert (grad_k[2] == 0).all()
    p, grad_q, grad_k = gradients(entry, q, k, mask=torch.zeros(3, 4, dtype=torch.bool))
    assert (p == 0).all()
    assert (grad_q == 0).all()
    assert (grad_k == 0).all()


def dead_rows_have_no_gradient(entry, oracle):
    q, k = gaussian(2000, 1, 2), gaussian(2000, 2, 2, seed=1)
    p, grad_q, grad_k = gradients(entry, q, k)
    dead = (p == 0).all(-1).squeeze(-1)
    assert bool(dead.any()) == entry.may_have_dead_rows
    assert grad_q.isfinite().all()
    assert grad_k.isfinite().all()
    assert (grad_q[dead] == 0).all()
    assert (grad_k[dead] == 0).all()


def what_a_query_may_not_attend_cannot_matter(entry, oracle):
    q, k = gaussian(3, 2), gaussian(5, 2, seed=1)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 1, 0]], dtype=torch.bool)
    clean = gradients(entry, q, k, mask=mask)
    for content in (math.nan, math.inf, -math.inf, 1e30, -1e30):
        dirty = k.clone()
        dirty[2], dirty[4] = content, content
        for got, want in zip(gradients(entry, q, dirty, mask=mask), clean, strict=True):
            close(got, want, rtol=1e-12, atol=1e-14)
    dirty = k.clone()
    dirty[3] = math.nan  # rows 1 and 2 may attend it, row 0 may not
    p, grad_q, _ = gradients(entry, q, dirty, mask=mask)
    close(p[0], clean[0][0], rtol=1e-12, atol=1e-14)
    close(grad_q[0], clean[1][0], rtol=1e-12, atol=1e-14)
    assert p[1:][mask[1:]].isnan().all()


def non_finite_data_give_rows_of_nan(entry, oracle):
    for bad in (math.nan, math.inf, -math.inf):
        q, k = gaussian(3, 2), gaussian(4, 2, seed=1)
        clean = entry.weights(q, k)
        q[1, 0] = bad
        p = entry.weights(q, k)
        assert p[1].isnan().all()
        close(p[[0, 2]], clean[[0, 2]])
        k[3, 1] = bad
        assert entry.weights(q, k).isnan().all()
        p = entry.weights(gaussian(4, 2), k, causal=True)
        assert p[3].isnan().all()
        assert p[:3].isfinite().all()


def scale_invariance_holds_exactly_where_declared(entry, oracle):
    q, k = gaussian(6, 5, 3), gaussian(6, 7, 3, seed=1)
    per_query = gaussian(6, 5, 1, seed=2).exp()
    for factor_q, factor_k in ((per_query, 1.0), (1.0, 3.7), (1.0, 0.2)):
        options = {entry.invariant_up_to: 1e-30} if entry.invariant_up_to else {}
        p, scaled = entry.weights(q, k, **options), entry.weights(q * factor_q, k * factor_k, **options)
        deviation = (p - scaled).abs().max()
        assert deviation < 1e-12 if entry.scale_invariant else deviation > 0.01
        if entry.invariant_up_to:
            assert 0 < (entry.weights(q, k) - entry.weights(q * factor_q, k * factor_k)).abs().max() < 0.01


def one_key_and_one_feature_are_no_special_case(entry, oracle):
    for n, m, d in ((1, 1, 1), (3, 1, 2), (2, 3, 1), (1, 4, 2)):
        q, k = gaussian(n, d), gaussian(m, d, seed=5)
        p, grad_q, grad_k = gradients(entry, q, k)
        close(p, expected(oracle, q, k), rtol=1e-12, atol=1e-14)
        assert grad_q.isfinite().all()
        assert grad_k.isfinite().all()


def zero_and_constant_vectors_have_finite_gradients(entry, oracle):
    for q, k in (
        (torch.zeros(2, 3), torch.zeros(3, 3)),
        (torch.ones(2, 3), torch.ones(3, 3)),
        (torch.zeros(2, 3), gaussian(3, 3)),
    ):
        p, grad_q, grad_k = gradients(entry, q, k)
        close(p, expected(oracle, q, k), rtol=1e-12, atol=1e-14)
        assert grad_q.isfinite().all()
        assert grad_k.isfinite().all()


def huge_logits_give_right_values_and_gradients(entry, oracle):
    spread = torch.tensor([[1.0], [-1.0], [0.0], [1e-15], [-1e-15]])
    pairs = [(spread * 1e15, spread * 1e15), (spread * 1e15, spread[:1] * 1e15)]
    inputs = [(q, k, dtype) for q, k in pairs for dtype in (torch.float32, torch.float64)]
    inputs += [(a * spread, b * spread, torch.float64) for a, b in ((1e30, 1.0), (1.0, 1e30), (1e15, 1.0))]
    for q, k, dtype in inputs:
        p, grad_q, grad_k = gradients(entry, q.to(dtype), k.to(dtype))
        truth = expected(oracle, q.to(dtype), k.to(dtype)).to(dtype)
        close(p, truth, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-40)
        assert p.isfinite().all() or dtype == torch.float32
        exact = [g.to(dtype) for g in gradients(entry, q.to(dtype).double(), k.to(dtype).double())[1:]]
        for gradient, reference in zip((grad_q, grad_k), exact, strict=True):
            assert not gradient.isnan().any()
            assert (gradient.isfinite() | ~reference.isfinite()).all()


def half_precision_is_computed_in_float32(entry, oracle):
    for dtype, rtol in ((torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        for size in (1.0, 200.0):  # 200²·4 is beyond float16
            q, k = (size * gaussian(4, 4)).to(dtype), (size * gaussian(5, 4, seed=1)).to(dtype)
            p, grad_q, grad_k = gradients(entry, q, k)
            assert p.dtype == grad_q.dtype == grad_k.dtype == dtype
            truth = expected(oracle, q, k).to(dtype)
            close(p, truth, rtol=rtol * (1 + size / 20), atol=1e-6)
            assert p.isfinite().all() == truth.isfinite().all()
            assert not grad_q.isnan().any()
            assert not grad_k.isnan().any()


def float32_in_float32_out(entry, oracle):
    q, k = gaussian(4, 3, dtype=torch.float32), gaussian(5, 3, seed=1, dtype=torch.float32)
    p = entry.weights(q, k)
    assert p.dtype == torch.float32
    close(p.double(), expected(oracle, q, k), rtol=2e-5, atol=1e-7)


def batch_axes_broadcast(entry, oracle):
    q, k = gaussian(2, 1, 3, 2), gaussian(4, 5, 2, seed=1)
    mask = gaussian(4, 1, 5, seed=2) < 0.5
    p = entry.weights(q, k, mask=mask)
    assert p.shape == (2, 4, 3, 5)
    for i, j in itertools.product(range(2), range(4)):
        close(p[i, j], entry.weights(q[i, 0], k[j], mask=mask[j]), rtol=1e-12, atol=1e-14)
    assert entry.weights(q[:, :, :0], k).shape == (2, 4, 0, 5)


def causal_is_the_causal_mask(entry, oracle):
    for n, m in ((4, 4), (2, 5), (5, 2)):
        q, k = gaussian(n, 3), gaussian(m, 3, seed=1)
        past = torch.tensor([[j <= i + m - n for j in range(m)] for i in range(n)])
        p = entry.weights(q, k, causal=True)
        close(p, expected(oracle, q, k, past), rtol=1e-12, atol=1e-14)
        padding = torch.arange(m) != 1
        close(
            entry.weights(q, k, causal=True, mask=padding),
            expected(oracle, q, k, past & padding),
            rtol=1e-12,
            atol=1e-14,
        )


def logits_are_bounded_exactly_as_declared(entry, oracle):
    if entry.bounded_logits is None:
        if entry.score is not None:
            far = 1e3 * gaussian(3, 3)
            assert entry.logits(far, -far).abs().max() > 1e3
        return
    for d in (2, 3, 8):
        bound = entry.bounded_logits(d)
        q = 1e6 * gaussian(400, d, seed=d)
        z = entry.logits(q, torch.cat([q, -q]))
        assert z.abs().max() <= bound * (1 + 1e-12)
        assert z.max() > bound * (1 - 1e-6)
        assert z.min() < -bound * (1 - 1e-6)


def declared_facts_fit_together(entry, oracle):
    assert entry.name.isidentifier()
    assert entry.name == entry.name.lower()
    assert entry.label
    assert entry.source
    assert (entry.score is None) == (entry.logits is None)
    assert entry.linear_time == (entry.feature_map is not None) == (entry.scaled_features is not None)
    assert entry.invariant_up_to is None or (entry.scale_invariant and entry.invariant_up_to in entry.options)
    assert set(entry.options) <= set(OPTION_VALUES)
    logit_options = set(LOGIT_OPTIONS) if entry.score else set()
    assert set(entry.options) == logit_options | set(entry.checks)
    for fact in (entry.row_stochastic, entry.scale_invariant, entry.linear_time, entry.may_have_dead_rows):
        assert isinstance(fact, bool)


def default_options_are_what_one_gets_without_options(entry, oracle):
    q, k = gaussian(4, 3), gaussian(5, 3, seed=1)
    assert torch.equal(entry.weights(q, k), entry.weights(q, k, **entry.options))


PROPERTIES = (
    agrees_with_the_oracle,
    agrees_with_the_oracle_at_defaults,
    weights_are_non_negative_and_zero_where_forbidden,
    live_rows_sum_to_one_or_the_row_declares_otherwise,
    dead_rows_exist_exactly_where_declared,
    keys_and_queries_are_interchangeable,
    gradients_agree_with_finite_differences,
    forbidden_keys_and_fully_masked_rows_have_no_gradient,
    dead_rows_have_no_gradient,
    what_a_query_may_not_attend_cannot_matter,
    non_finite_data_give_rows_of_nan,
    scale_invariance_holds_exactly_where_declared,
    one_key_and_one_feature_are_no_special_case,
    zero_and_constant_vectors_have_finite_gradients,
    huge_logits_give_right_values_and_gradients,
    half_precision_is_computed_in_float32,
    float32_in_float32_out,
    batch_axes_broadcast,
    causal_is_the_causal_mask,
    logits_are_bounded_exactly_as_declared,
    declared_facts_fit_together,
    default_options_are_what_one_gets_without_options,
)


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", REWEIGHTINGS)
def test_property(name, check):
    check(REWEIGHTINGS[name], ORACLES[name])


# --- the table ---


def test_the_table_holds_the_thirteen_mechanisms_and_an_oracle_for_each():
    assert set(REWEIGHTINGS) == set(ORACLES)
    assert len(REWEIGHTINGS) == 13
    assert all(name == entry.name for name, entry in REWEIGHTINGS.items())
    assert len({entry.label for entry in REWEIGHTINGS.values()}) == 13


@pytest.mark.parametrize("fact", ["row_stochastic", "scale_invariant", "linear_time", "may_have_dead_rows"])
def test_a_mechanism_cannot_be_left_unclassified(fact):
    facts = {f.name: getattr(REWEIGHTINGS["softmax"], f.name) for f in dataclasses.fields(Reweighting)}
    del facts[fact]
    with pytest.raises(TypeError, match=fact):
        Reweighting(**facts)


def test_entries_and_their_options_are_frozen():
    entry = REWEIGHTINGS["softmax"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "other"
    with pytest.raises(TypeError):
        entry.options["temperature"] = 2.0


def test_defaults_are_those_of_the_sources():
    own = {
        name: {option: value for option, value in entry.options.items() if LOGIT_OPTIONS.get(option, "own") != value}
        for name, entry in REWEIGHTINGS.items()
    }
    assert own == {
        **{name: {} for name in REWEIGHTINGS},
        "qk_layernorm": {"qk_norm": True, "gain": None, "epsilon": 1e-5},
        "cosine": {"scale": 10.0},
        "soft_cap": {"soft_cap": 50.0},
        "ssmax": {"s": 1.0},
        "softpick": {"epsilon": 1e-8},
        "p_softmax": {"norm_order": 2.0, "per_root_n": False},
    }


# --- options that are tensors ---

WITH_LOGITS = [name for name, entry in REWEIGHTINGS.items() if entry.score]


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_tensor_options_agree_with_the_oracle_and_have_gradients(name):
    q, k = gaussian(3, 4), gaussian(5, 4, seed=1)
    bias = gaussian(3, 5, seed=2)
    temperature = 0.7

    def truth(bias, temperature):
        return expected(ORACLES[name], q, k, bias=bias.tolist(), temperature=temperature)

    leaves = bias.clone().requires_grad_(), torch.tensor(temperature, requires_grad=True)
    p = REWEIGHTINGS[name].weights(q, k, bias=leaves[0], temperature=leaves[1])
    close(p, truth(bias, temperature), rtol=1e-11, atol=1e-13)
    direction = gaussian(3, 5, seed=3)
    by_bias, by_temperature = torch.autograd.grad(p, leaves, direction)
    h = 1e-6
    slope = ((truth(bias, temperature + h) - truth(bias, temperature - h)) * direction).sum() / (2 * h)
    close(by_temperature, slope, rtol=1e-6, atol=1e-8)
    for i, j in ((0, 0), (2, 4)):
        shift = torch.zeros(3, 5)
        shift[i, j] = h
        slope = ((truth(bias + shift, temperature) - truth(bias - shift, temperature)) * direction).sum() / (2 * h)
        close(by_bias[i, j], slope, rtol=1e-6, atol=1e-8)


def test_temperature_may_differ_along_a_leading_axis():
    q, k = gaussian(2, 3, 4), gaussian(2, 5, 4, seed=1)
    both = REWEIGHTINGS["softmax"].weights(q, k, temperature=torch.tensor([0.5, 2.0])[:, None, None])
    for i, temperature in enumerate((0.5, 2.0)):
        close(both[i], REWEIGHTINGS["softmax"].weights(q[i], k[i], temperature=temperature))


def test_gain_per_feature_multiplies_normalised_queries_and_keys():
    q, k, gain = gaussian(3, 4), gaussian(5, 4, seed=1), torch.tensor([1.0, 0.5, 2.0, -1.0])
    rows, columns = (
        [[g * a for g, a in zip(gain.tolist(), oracles.layer_norm(x), strict=True)] for x in tokens.tolist()]
        for tokens in (q, k)
    )
    want = oracles.softmax(rows, columns, [[True] * 5] * 3)
    close(REWEIGHTINGS["qk_layernorm"].weights(q, k, gain=gain), torch.tensor(want), rtol=1e-12, atol=1e-14)


def test_logits_are_what_enters_the_reweighting():
    q, k = gaussian(3, 4), gaussian(5, 4, seed=1)
    for name in WITH_LOGITS:
        entry = REWEIGHTINGS[name]
        if entry.row_stochastic and "s" not in entry.options:
            close(torch.softmax(entry.logits(q, k), -1), entry.weights(q, k))
    close(REWEIGHTINGS["softmax"].logits(q, k), q @ k.mT / 2)
    close(REWEIGHTINGS["soft_cap"].logits(q, k, soft_cap=0.5, bias=3.0), 0.5 * torch.tanh(q @ k.mT) + 3)
    normed = REWEIGHTINGS["qk_layernorm"].logits(q, k, epsilon=1e-2)
    close(normed, torch.tensor(oracles.logits_of(oracles.dot, q.tolist(), k.tolist(), qk_norm=True, epsilon=1e-2)))
    close(REWEIGHTINGS["softpick"].logits(q, k, epsilon=1e-2), q @ k.mT / 2)
    assert REWEIGHTINGS["softmax"].logits(q.half(), k.half()).dtype == torch.float16
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got temperature=0"):
        REWEIGHTINGS["softmax"].logits(q, k, temperature=0)


# --- corners in closed form ---


@pytest.mark.parametrize(
    "name", [name for name, entry in REWEIGHTINGS.items() if entry.row_stochastic and not entry.may_have_dead_rows]
)
def test_a_zero_query_attends_uniformly_to_keys_of_equal_length(name):
    k = torch.tensor([[3.0, 4.0], [-5.0, 0.0], [0.0, 5.0], [4.0, -3.0]])
    p = REWEIGHTINGS[name].weights(torch.zeros(1, 2), k)
    if REWEIGHTINGS[name].feature_map is None:
        close(p, torch.full((1, 4), 0.25), rtol=1e-14, atol=0)
    else:  # a zero query has features (1, 1): it weighs keys by the sum of theirs
        sums = torch.tensor([4.0 + 5.0, math.exp(-5) + 1, 1 + 6.0, 5 + math.exp(-3)])
        close(p, (sums / sums.sum())[None], rtol=1e-14, atol=0)


def test_sigmoid_of_zero_logits_is_one_over_n_plus_one():
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    p = REWEIGHTINGS["sigmoid"].weights(torch.zeros(2, 3), gaussian(4, 3), mask=mask)
    close(p, torch.tensor([[1 / 5] * 4, [1 / 3, 1 / 3, 0, 0]]))


def test_sigmoid_has_slope_one_quarter_at_a_logit_of_zero():
    q, k = torch.zeros(1, 4), torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    q.requires_grad_()
    (slope,) = torch.autograd.grad(REWEIGHTINGS["sigmoid"].weights(q, k, bias=0.0).sum(), q)
    close(slope, k / 2 / 4, rtol=1e-14, atol=0)  # z = q·k/2


def test_p_softmax_has_rows_of_unit_norm_and_is_softmax_at_order_one():
    q, k = gaussian(3, 4), gaussian(5, 4, seed=1)
    p_softmax = REWEIGHTINGS["p_softmax"]
    close(p_softmax.weights(q, k).norm(dim=-1), torch.ones(3))
    close(p_softmax.weights(q, k, norm_order=3.0).pow(3).sum(-1), torch.ones(3))
    close(p_softmax.weights(q, k, norm_order=1.0), torch.softmax(q @ k.mT / 2, -1))
    mask = torch.tensor([True, True, False, True, False])
    close(p_softmax.weights(q, k, mask=mask, per_root_n=True).norm(dim=-1), torch.full((3,), 3**-0.5))


def test_softpick_by_hand():
    softpick = REWEIGHTINGS["softpick"]
    ln2, ln3 = math.log(2), math.log(3)
    q, k = torch.ones(1, 1), torch.tensor([[ln2], [ln3], [-ln2], [0.0]])  # e^z − 1 = 1, 2, −1/2, 0
    close(softpick.weights(q, k, epsilon=0.0), torch.tensor([[1 / 3.5, 2 / 3.5, 0, 0]]), rtol=1e-14, atol=0)
    close(softpick.weights(q, k, epsilon=0.5), torch.tensor([[1 / 4, 2 / 4, 0, 0]]), rtol=1e-14, atol=0)
    tiny = softpick.weights(q, torch.tensor([[1e-12], [3e-12]]), epsilon=0.0)
    close(tiny, torch.tensor([[0.25, 0.75]]), rtol=1e-11, atol=0)
    p, grad_q, grad_k = gradients(softpick, torch.zeros(1, 1), k, epsilon=0.0)
    assert (p == 0).all()
    assert grad_q.isfinite().all()
    assert grad_k.isfinite().all()


def test_ssmax_scales_by_the_log_of_the_allowed_keys():
    q, k = gaussian(2, 3), gaussian(6, 3, seed=1)
    mask = torch.tensor([[True] * 6, [True, False, True, False, False, True]])
    p = REWEIGHTINGS["ssmax"].weights(q, k, mask=mask, s=0.43)
    z = q @ k.mT / math.sqrt(3)
    close(p[0], torch.softmax(0.43 * math.log(6) * z[0], -1))
    close(p[1, mask[1]], torch.softmax(0.43 * math.log(3) * z[1, mask[1]], -1))


@pytest.mark.parametrize(("d", "printed"), [(3, "0.627"), (5, "0.822"), (8, "0.938"), (64, "0.999998")])
def test_qk_layernorm_attains_a_bound_on_its_largest_weight_that_grows_with_the_width(d, printed):
    direction = gaussian(d)
    k = torch.cat([direction[None], (-direction).expand(19, d)]) * 1e6
    p = REWEIGHTINGS["qk_layernorm"].weights(direction[None] * 1e6, k)
    bound = 1 / (1 + 19 * math.exp(-2 * math.sqrt(d)))
    assert f"{bound:.{len(printed) - 2}f}" == printed
    close(p.max(), torch.tensor(bound), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("n_keys", "d"), [(1, 1), (1, 3), (2, 2), (3, 2), (2, 3)])
def test_relu_kernel_rows_die_with_the_stated_probability(n_keys, d):
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d * (n_keys + 1)))).reshape(-1, n_keys + 1, d)
    p = REWEIGHTINGS["relu_kernel"].weights(signs[:, :1], signs[:, 1:])
    dead = (p == 0).all(-1).double().mean().item()  # every sign pattern once: exact
    assert dead == pytest.approx(((1 + 2.0**-n_keys) / 2) ** d, rel=1e-14)


def test_elu_feature_map_stays_positive_in_float32():
    x = torch.tensor([-80.0, -17.0, -1.0, 0.0, 2.0], dtype=torch.float32, requires_grad=True)
    y = elu_feature_map(x)
    close(y.detach().double(), torch.tensor([math.exp(-80), math.exp(-17), math.exp(-1), 1.0, 3.0]), rtol=1e-6, atol=0)
    (slope,) = torch.autograd.grad(y.sum(), x)
    close(slope.double(), torch.tensor([math.exp(-80), math.exp(-17), math.exp(-1), 1.0, 1.0]), rtol=1e-6, atol=0)
    assert elu_feature_map(torch.tensor([1e30, -1e30])).tolist() == [1e30, 0.0]
    assert relu_feature_map(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_feature_maps_give_the_weights():
    q, k = gaussian(4, 3), gaussian(5, 3, seed=1)
    for entry in REWEIGHTINGS.values():
        if entry.feature_map is not None:
            products = entry.feature_map(q) @ entry.feature_map(k).mT
            total = products.sum(-1, keepdim=True)
            close(entry.weights(q, k), torch.where(total > 0, products / total, 0.0))


def test_cosine_sees_directions_only_down_to_the_smallest_vectors():
    q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0], [0.0, 0.0]])
    for factor in (1e-300, 1.0, 1e300):
        close(REWEIGHTINGS["cosine"].logits(factor * q, k / factor), torch.tensor([[9.6, 0.0]]), rtol=1e-14, atol=0)
    _, grad_q, grad_k = gradients(REWEIGHTINGS["cosine"], torch.zeros(1, 2), k)
    assert (grad_q == 0).all()
    assert (grad_k == 0).all()


def test_overflowing_logits_take_their_limit_or_become_nan():
    big = torch.tensor([[1e30]], dtype=torch.float32)
    p, grad_q, grad_k = gradients(REWEIGHTINGS["softmax"], big, torch.cat([-big, 0 * big]))
    assert p.tolist() == [[0.0, 1.0]]
    assert (grad_q == 0).all()
    assert (grad_k == 0).all()
    assert REWEIGHTINGS["softmax"].weights(big, torch.cat([big, 0 * big])).isnan().all()
    assert REWEIGHTINGS["elu_kernel"].weights(big, torch.cat([big, -big])).tolist() == [[1.0, 0.0]]
    assert REWEIGHTINGS["elu_kernel"].weights(-big, torch.cat([-big, -big])).tolist() == [[0.5, 0.5]]
    assert REWEIGHTINGS["relu_kernel"].weights(big, torch.cat([big, big])).tolist() == [[0.5, 0.5]]


# --- masks ---


def test_causal_mask_aligns_the_last_query_with_the_last_key():
    assert causal_mask(2, 3).tolist() == [[True, True, False], [True, True, True]]
    assert causal_mask(3, 2).tolist() == [[False, False], [True, False], [True, True]]
    assert causal_mask(0, 2).shape == (0, 2)
    assert causal_mask(1, 1).dtype == torch.bool


def test_allowed_keys_counts():
    assert allowed_keys(causal_mask(3, 2)).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", REWEIGHTINGS)
def test_masks_of_any_broadcastable_shape_mean_the_same(name):
    q, k = gaussian(2, 3, 4), gaussian(2, 5, 4, seed=1)
    keys = torch.tensor([True, False, True, True, False])
    rows = torch.tensor([True, False, True])[:, None]
    for mask in (keys, rows, torch.tensor(True), torch.tensor([[[True]], [[False]]])):
        full = mask.expand(2, 3, 5).clone()
        entry = REWEIGHTINGS[name]
        close(entry.weights(q, k, mask=mask), entry.weights(q, k, mask=full), rtol=1e-13, atol=1e-15)


# --- linear time ---

LINEAR = [name for name, entry in REWEIGHTINGS.items() if entry.linear_time]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_equals_the_quadratic_form_in_values_and_gradients(name, causal):
    for n, m in ((1, 1), (5, 5), (150, 150), (70, 200), (200, 70)):
        inputs = gaussian(2, n, 3), gaussian(2, m, 3, seed=1), gaussian(2, m, 2, seed=2)
        for key_mask in (None, gaussian(2, m, seed=3) < 0.3, torch.zeros(m, dtype=torch.bool)):
            leaves, twins = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
            mask = None if key_mask is None else key_mask.unsqueeze(-2)
            fast = linear_attention(*leaves, mechanism=name, key_mask=key_mask, causal=causal)
            slow = REWEIGHTINGS[name].weights(*twins[:2], mask=mask, causal=causal) @ twins[2]
            close(fast, slow, rtol=1e-11, atol=1e-12)
            direction = gaussian(*fast.shape, seed=4)
            got, want = (torch.autograd.grad(o, x, direction) for o, x in ((fast, leaves), (slow, twins)))
            for a, b in zip(got, want, strict=True):
                close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_agrees_with_the_oracle(name, causal):
    q, k, v = gaussian(7, 2), gaussian(9, 2, seed=1), gaussian(9, 4, seed=2)
    keep = torch.tensor([False, True, True, False, True, True, True, False, True])
    allowed = (causal_mask(7, 9) if causal else torch.ones(7, 9, dtype=torch.bool)) & keep
    want = expected(ORACLES[name], q, k, allowed) @ v
    close(linear_attention(q, k, v, mechanism=name, key_mask=keep, causal=causal), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_keeps_the_conventions(name):
    q, k, v = gaussian(4, 2), gaussian(4, 2, seed=1), gaussian(4, 3, seed=2)
    dead = linear_attention(q, k, v, mechanism=name, key_mask=torch.zeros(4, dtype=torch.bool))
    assert (dead == 0).all()
    clean = linear_attention(q, k, v, mechanism=name, causal=True)
    dirty = k.clone()
    dirty[2] = math.inf
    out = linear_attention(q, dirty, v, mechanism=name, causal=True)
    close(out[:2], clean[:2])
    assert out[2:].isnan().all()
    hidden = torch.tensor([True, True, False, True])
    seen = linear_attention(q, dirty, v, mechanism=name, key_mask=hidden)
    close(seen, linear_attention(q, k, v, mechanism=name, key_mask=hidden))
    half = linear_attention(q.half(), k.half(), v.half(), mechanism=name)
    assert half.dtype == torch.float16
    close(
        half.double(),
        linear_attention(q.half().double(), k.half().double(), v.half().double(), mechanism=name),
        rtol=2e-3,
        atol=1e-3,
    )
    huge = linear_attention(1e30 * q.abs().float(), 1e30 * k.abs().float(), v.float(), mechanism=name)
    close(huge, (REWEIGHTINGS["relu_kernel"].weights(q.abs(), k.abs()) @ v).float(), rtol=1e-5, atol=1e-6)
    assert linear_attention(q[:0], k, v, mechanism=name, causal=True).shape == (0, 3)


# --- bad input ---

Q, K = torch.zeros(2, 3, 4, dtype=torch.float64), torch.zeros(2, 5, 4, dtype=torch.float64)


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temprature": 1.0}, "temprature must be an option of softmax .*, got temprature=1.0"),
        ({"temperature": 0.0}, "temperature must be finite and > 0, got temperature=0.0"),
        ({"temperature": math.nan}, "temperature must be finite and > 0, got temperature=nan"),
        ({"temperature": zeros(7)}, r"temperature must be broadcastable to \(2, 3, 5\), got temperature=\(7,\)"),
        (
            {"temperature": zeros(1, dtype=torch.long)},
            "temperature must be a floating-point tensor, got temperature=torch.int64",
        ),
        ({"scale": math.inf}, "scale must be a finite number, got scale=inf"),
        ({"bias": math.nan}, "bias must be a finite number, got bias=nan"),
        ({"soft_cap": -1.0}, "soft_cap must be finite and > 0, got soft_cap=-1.0"),
        ({"mask": zeros(3, 5)}, "mask must be a boolean tensor, got mask=torch.float64"),
        ({"mask": zeros(3, 4) == 0}, r"mask must be broadcastable to \(2, 3, 5\), got mask=\(3, 4\)"),
        ({"mask": zeros(7, 2, 3, 5) == 0}, r"mask must be broadcastable to .*got mask=\(7, 2, 3, 5\)"),
        ({"q": zeros(4)}, r"q must be of shape \(\*batch, tokens, features\), got q=\(4,\)"),
        ({"q": zeros(3, 4, dtype=torch.long)}, "q must be a floating-point tensor, got q=torch.int64"),
        ({"k": zeros(5, 4, dtype=torch.float32)}, "k must be of the dtype of q, torch.float64, got k=torch.float32"),
        ({"k": zeros(2, 5, 3)}, r"k must be of as many features as q, 4, got k=\(2, 5, 3\)"),
        ({"k": zeros(2, 0, 4)}, r"k must be of at least one key, got k=\(2, 0, 4\)"),
        (
            {"k": zeros(3, 5, 4)},
            r"k must be of batch axes that broadcast with those of q, \(2, 3, 4\), got k=\(3, 5, 4\)",
        ),
        ({"q": zeros(3, 0), "k": zeros(5, 0)}, r"q must be of at least one feature, got q=\(3, 0\)"),
    ],
)
def test_bad_input_is_refused_by_name_and_value(arguments, message):
    arguments = {"q": Q, "k": K, **arguments}
    with pytest.raises(ValueError, match=message):
        REWEIGHTINGS["softmax"].weights(**arguments)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("qk_layernorm", "epsilon", 0.0),
        ("qk_layernorm", "gain", math.inf),
        ("qk_layernorm", "gain", zeros(3)),
        ("softpick", "epsilon", -1e-9),
        ("ssmax", "s", math.nan),
        ("p_softmax", "norm_order", 0),
        ("p_softmax", "norm_order", math.inf),
        ("relu_kernel", "temperature", 1.0),
    ],
)
def test_bad_values_of_own_options_are_refused(name, option, value):
    with pytest.raises(ValueError, match=rf"{option} must be .*, got {option}="):
        REWEIGHTINGS[name].weights(Q, K, **{option: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mechanism": "softmax"}, "mechanism must be one of 'relu_kernel', 'elu_kernel', got mechanism='softmax'"),
        ({"v": zeros(2, 4, 4)}, r"v must be of shape \(\*batch, 5, features\), got v=\(2, 4, 4\)"),
        (
            {"v": zeros(2, 5, 4, dtype=torch.float32)},
            "v must be a tensor of the dtype of q, torch.float64, got v=torch.float32",
        ),
        ({"v": zeros(3, 5, 4)}, r"v must be of batch axes that broadcast with \(2,\), got v=\(3, 5, 4\)"),
        ({"key_mask": zeros(5)}, "key_mask must be a boolean tensor, got key_mask=torch.float64"),
        ({"key_mask": zeros(4) == 0}, r"key_mask must be broadcastable to \(2, 5\), got key_mask=\(4,\)"),
        ({"k": zeros(2, 0, 4), "v": zeros(2, 0, 4)}, "k must be of at least one key"),
    ],
)
def test_linear_attention_refuses_bad_input(arguments, message):
    arguments = {"q": Q, "k": K, "v": K, **arguments}
    with pytest.raises(ValueError, match=message):
        linear_attention(**arguments)


def test_causal_mask_refuses_bad_sizes():
    with pytest.raises(ValueError, match="m must be an integer >= 1, got m=0"):
        causal_mask(3, 0)
    with pytest.raises(ValueError, match="n must be an integer >= 0, got n=-1"):
        causal_mask(-1, 3)


WRONG_TYPES = """
import torch
from lipattn.reweighting import REWEIGHTINGS, linear_attention

q = torch.zeros(3, 4)
for name, arguments in (
    ("softmax", {"temperature": "hot"}),
    ("softmax", {"temperature": None}),
    ("softmax", {"scale": True}),
    ("softmax", {"qk_norm": 1}),
    ("softmax", {"causal": None}),
    ("softmax", {"mask": [[True]]}),
    ("softmax", {"k": [[1.0]]}),
    ("p_softmax", {"per_root_n": 1.0}),
    ("linear", {"key_mask": [True]}),
    ("linear", {"v": [[1.0]]}),
    ("linear", {"causal": 1}),
):
    try:
        if name == "linear":
            linear_attention(**{"q": q, "k": q, "v": q, **arguments})
        else:
            REWEIGHTINGS[name].weights(**{"q": q, "k": q, **arguments})
    except ValueError as error:
        print(error)
"""


def test_wrong_types_are_refused_where_no_type_checker_runs():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", WRONG_TYPES],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines() == [
        "temperature must be a number, got temperature='hot'",
        "temperature must be a number, got temperature=None",
        "scale must be a number, got scale=True",
        "qk_norm must be True or False, got qk_norm=1",
        "causal must be True or False, got causal=None",
        "mask must be a boolean tensor, got mask=[[True]]",
        "k must be a floating-point tensor, got k=[[1.0]]",
        "per_root_n must be True or False, got per_root_n=1.0",
        "key_mask must be a boolean tensor, got key_mask=[True]",
        "v must be a tensor of the dtype of q, torch.float32, got v=[[1.0]]",
        "causal must be True or False, got causal=1",
    ]
