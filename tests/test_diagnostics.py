"""Diagnostics against scipy, closed forms, finite differences and the corners where attention collapses."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from lipattn import diagnostics as dg
from lipattn.diagnostics import CollapseKind

NAN = math.nan
STOCHASTIC_ROW_FUNCTIONS = (dg.entropy, dg.normalized_entropy, dg.renyi2_entropy, dg.sum_of_squares)


def rows(generator, *shape, std=2.0):
    return torch.softmax(std * torch.randn(*shape, generator=generator), -1)


def grad_of(function, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).nansum(), x)
    return gradient


def one_hot(choices, m):
    return torch.nn.functional.one_hot(torch.as_tensor(choices), m).double()


def equal(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)


# Entropy of weights


def test_entropy_agrees_with_scipy_also_for_rows_that_do_not_sum_to_one(generator):
    p = rows(generator, 3, 5, 7)
    equal(dg.entropy(p), scipy.stats.entropy(p.numpy(), axis=-1))
    equal(dg.entropy(0.03 * p), scipy.stats.entropy(p.numpy(), axis=-1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=9).filter(lambda row: max(row) > 1e-200))
def test_entropies_lie_between_zero_and_log_of_keys(row):
    p = torch.tensor(row)
    h, h2 = dg.entropy(p), dg.renyi2_entropy(p)
    assert 0 <= h <= math.log(len(row)) + 1e-12
    assert -1e-12 <= h2 <= h + 1e-12


@pytest.mark.parametrize("m", [1, 2, 21])
def test_entropy_corners_one_hot_and_uniform(m):
    p = torch.stack([one_hot(0, m), torch.full((m,), 1 / m)])
    equal(dg.entropy(p), [0.0, math.log(m)])
    equal(dg.renyi2_entropy(p), [0.0, math.log(m)])
    equal(dg.sum_of_squares(p), [1.0, 1 / m])
    assert not torch.signbit(dg.entropy(p)).any()
    equal(dg.normalized_entropy(p), [NAN, NAN] if m == 1 else [0.0, 1.0])


def test_entropy_gradient_is_the_closed_form_and_finite_differences(generator):
    p = rows(generator, 4, 6) * torch.tensor([[0.3], [1.0], [1.0], [2.5]])
    total = p.sum(-1, keepdim=True)
    closed = -((p / total).log() + dg.entropy(p)[:, None]) / total
    equal(grad_of(dg.entropy, p), closed)
    for function in STOCHASTIC_ROW_FUNCTIONS:
        assert gradcheck(function, p.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(dg.entropy, p.clone().requires_grad_())


def test_entropy_gradient_at_one_hot_rows_is_zero_and_zero_weights_are_constants():
    equal(grad_of(dg.entropy, one_hot([0, 2], 3)), torch.zeros(2, 3))
    # two equal weights and a zero: the entropy is at its largest in the two, and the zero gets nothing
    equal(grad_of(dg.entropy, torch.tensor([0.5, 0.5, 0.0])), [0.0, 0.0, 0.0])
    p = torch.tensor([0.8, 0.2, 0.0])
    h = -0.8 * math.log(0.8) - 0.2 * math.log(0.2)
    equal(grad_of(dg.entropy, p), [-math.log(0.8) - h, -math.log(0.2) - h, 0.0])


def test_entropy_does_not_overflow_where_the_row_is_finite():
    for dtype in (torch.float32, torch.float64):
        big = torch.finfo(dtype).max
        equal(dg.entropy(torch.tensor([big, big], dtype=dtype)), math.log(2), 1e-6)


def test_dead_rows_are_nan_with_zero_gradient_and_leave_the_others_alone(generator):
    p = rows(generator, 3, 4)
    p[1] = 0
    alone = p[[0, 2]]
    for function in STOCHASTIC_ROW_FUNCTIONS:
        value, gradient = function(p), grad_of(function, p)
        assert value[1].isnan()
        equal(value[[0, 2]], function(alone))
        equal(gradient[1], torch.zeros(4))
        equal(gradient[[0, 2]], grad_of(function, alone))
        assert function(alone).abs().min() > 0.01


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_rows_with_non_finite_data_are_nan_and_touch_no_other(generator, bad):
    p = rows(generator, 3, 4)
    p[1, 2] = bad
    for function in (dg.entropy, dg.normalized_entropy, dg.renyi2_entropy):
        assert function(p).isnan().tolist() == [False, True, False]
    assert dg.live_rows(p).all()
    assert dg.logit_variance(p).isnan().tolist() == [False, True, False]
    assert dg.entropy_from_logits(p).isnan().tolist() == [False, True, False]
    both = torch.stack([p, rows(generator, 3, 4)])
    for function in (dg.frobenius_norm, dg.spectral_norm):
        assert function(both).isnan().tolist() == [True, False]
    assert dg.spectral_norm(p).isnan()
    assert dg.collapse_kind(both)[0] == CollapseKind.UNDEFINED


# Entropy of logits


def test_entropy_from_logits_agrees_with_scipy_and_with_entropy_of_the_softmax(generator):
    z = 3 * torch.randn(4, 5, 8, generator=generator)
    p = scipy.special.softmax(z.numpy(), axis=-1)
    equal(dg.entropy_from_logits(z), scipy.stats.entropy(p, axis=-1))
    equal(dg.entropy_from_logits(z), dg.entropy(torch.softmax(z, -1)))


def test_entropy_from_logits_gradient_is_the_closed_form_and_finite_differences(generator):
    z = 2 * torch.randn(3, 6, generator=generator)
    mask = torch.rand(3, 6, generator=generator) < 0.7
    mask[:, 0] = True
    p = torch.softmax(z, -1)
    equal(grad_of(dg.entropy_from_logits, z), -p * (z - (p * z).sum(-1, keepdim=True)))
    assert gradcheck(dg.entropy_from_logits, z.clone().requires_grad_())
    assert gradcheck(lambda x: dg.entropy_from_logits(x, mask), z.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x: dg.entropy_from_logits(x, mask), z.clone().requires_grad_())


@pytest.mark.parametrize(
    ("logits", "value"),
    [
        ([0.0, 200.0, -200.0], 0.0),
        ([0.0, 800.0, -800.0], 0.0),
        ([1e30, -1e30, 0.0], 0.0),
        ([-1e30, -1e30, -1e30], math.log(3)),
        ([1e30, 1e30, -1e30], math.log(2)),
        ([7.0], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_from_logits_and_its_gradient_at_total_collapse(logits, value, dtype):
    z = torch.tensor(logits, dtype=dtype)
    equal(dg.entropy_from_logits(z), value, 1e-6)
    gradient = grad_of(dg.entropy_from_logits, z)
    assert gradient.dtype == dtype
    equal(gradient, torch.zeros_like(z), 1e-6)


def test_entropy_from_logits_keeps_tiny_entropies_to_full_relative_accuracy():
    # p = (1, e^-40, 0): H = e^-40 (1 + 40) to first order
    h = dg.entropy_from_logits(torch.tensor([200.0, 160.0, -600.0]))
    assert h.item() == pytest.approx(41 * math.exp(-40), rel=1e-9, abs=2e-16)


@pytest.mark.parametrize("garbage", [0.0, 1e30, -1e30, NAN, math.inf, -math.inf])
def test_masked_keys_count_for_nothing_whatever_they_hold(generator, garbage):
    z = 2 * torch.randn(3, 5, generator=generator)
    mask = torch.tensor([[True, True, False, True, False]] * 2 + [[False] * 5])
    filled = torch.where(mask, z, garbage)
    kept = z[:2][:, [0, 1, 3]]
    for function in (dg.entropy_from_logits, dg.logit_variance):
        value = function(filled, mask)
        equal(value, torch.cat([function(kept), torch.tensor([NAN])]))
        gradient = grad_of(lambda x, f=function: f(x, mask), filled)
        equal(gradient[:2][:, [0, 1, 3]], grad_of(function, kept))
        equal(gradient[:2][:, [2, 4]], torch.zeros(2, 2))
        equal(gradient[2], torch.zeros(5))


def test_entropy_from_logits_at_the_edge_of_the_dtype():
    for dtype in (torch.float32, torch.float64):
        big = torch.finfo(dtype).max
        z = torch.tensor([[big, -big], [-big, -big]], dtype=dtype)
        equal(dg.entropy_from_logits(z), [0.0, math.log(2)], 1e-6)
        equal(grad_of(dg.entropy_from_logits, z), torch.zeros_like(z))


def test_a_masked_key_does_not_count_when_all_allowed_logits_are_far_below_it():
    z, mask = torch.tensor([-1e30, -1e30, 0.0]), torch.tensor([True, True, False])
    equal(dg.entropy_from_logits(z, mask), math.log(2))
    equal(grad_of(lambda x: dg.entropy_from_logits(x, mask), z), torch.zeros(3))


def test_a_logit_of_minus_infinity_is_an_additive_mask(generator):
    z = torch.randn(2, 5, generator=generator)
    z[0, 1:3] = -math.inf
    z[1] = -math.inf
    mask = z.isfinite()
    equal(dg.entropy_from_logits(z), dg.entropy_from_logits(z, mask))
    equal(grad_of(dg.entropy_from_logits, z), grad_of(lambda x: dg.entropy_from_logits(x, mask), z))
    assert dg.entropy_from_logits(z).isnan().tolist() == [False, True]


def test_entropy_falls_with_the_logit_scale_at_minus_the_variance_under_p(generator):
    z = torch.randn(6, 9, generator=generator)
    log_scale = torch.tensor(0.3, requires_grad=True)
    (slope,) = torch.autograd.grad(dg.entropy_from_logits(z * log_scale.exp()).sum(), log_scale)
    y = (z * log_scale.exp()).detach()
    p = torch.softmax(y, -1)
    variance = (p * y.square()).sum(-1) - (p * y).sum(-1).square()
    equal(slope, -variance.sum())


def test_normalized_entropy_counts_allowed_keys(generator):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    p = mask / mask.sum(-1, keepdim=True)
    equal(dg.normalized_entropy(p, mask), [NAN, 1.0, 1.0, 1.0])
    equal(dg.normalized_entropy(p), [0.0, 0.5, math.log(3) / math.log(4), 1.0])
    equal(dg.live_mean(dg.normalized_entropy(p, mask), p, where=mask.sum(-1) > 1), 1.0)
    equal(grad_of(lambda x: dg.normalized_entropy(x, mask), p)[0], torch.zeros(4))


# Norms


def test_squared_frobenius_norm_is_the_sum_of_exp_minus_renyi_entropy(generator):
    p = rows(generator, 5, 6, 8)
    equal(dg.frobenius_norm(p).square(), dg.renyi2_entropy(p).neg().exp().sum(-1))
    equal(dg.frobenius_norm(p).square(), dg.sum_of_squares(p).sum(-1))
    n = 6
    assert (n * (-dg.entropy(p).mean(-1)).exp() <= dg.frobenius_norm(p).square()).all()
    assert (dg.frobenius_norm(p).square() <= n).all()


def test_norms_agree_with_numpy_for_every_shape(generator):
    for shape in [(4, 6), (6, 4), (1, 5), (5, 1), (1, 1), (3, 2, 5, 5)]:
        a = torch.randn(*shape, generator=generator)
        equal(dg.spectral_norm(a), np.linalg.norm(a.numpy(), ord=2, axis=(-2, -1)))
        equal(dg.frobenius_norm(a), np.linalg.norm(a.numpy(), axis=(-2, -1)))


def test_norms_at_the_corners_where_frobenius_cannot_tell_what_spectral_can():
    n = 9
    uniform, identity, sink = torch.full((n, n), 1 / n), torch.eye(n), one_hot([4] * n, n)
    p = torch.stack([uniform, identity, sink, torch.zeros(n, n)])
    equal(dg.frobenius_norm(p), [1.0, 3.0, 3.0, 0.0])
    equal(dg.spectral_norm(p), [1.0, 1.0, 3.0, 0.0])


def test_spectral_sandwich_by_column_mass(generator):
    p = rows(generator, 50, 12, 12, std=4.0)
    mass, norm = dg.column_mass(p), dg.spectral_norm(p)
    assert (mass.square().mean(-1).sqrt() <= norm + 1e-12).all()
    assert (norm <= mass.amax(-1).sqrt() + 1e-12).all()
    maps = one_hot(torch.randint(0, 12, (50, 12), generator=generator), 12)
    equal(dg.spectral_norm(maps), dg.column_mass(maps).amax(-1).sqrt())


def test_norm_gradients_by_finite_differences_and_at_zero(generator):
    for shape in [(3, 4), (4, 3), (2, 3, 3)]:
        a = torch.randn(*shape, generator=generator, requires_grad=True)
        assert gradcheck(dg.spectral_norm, a)
        assert gradcheck(dg.frobenius_norm, a)
    for function in (dg.spectral_norm, dg.frobenius_norm):
        equal(grad_of(function, torch.zeros(3, 4)), torch.zeros(3, 4))
    poisoned = torch.stack([torch.full((3, 3), NAN), torch.eye(3) * torch.tensor([1.0, 2.0, 4.0])])
    top = torch.stack([torch.zeros(3, 3), torch.diag(torch.tensor([0.0, 0.0, 1.0]))])
    equal(grad_of(dg.spectral_norm, poisoned), top)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_do_not_overflow_or_vanish_in_float32(generator, scale):
    a = torch.randn(5, 5, generator=generator)
    b = (a * scale).float()
    assert dg.frobenius_norm(b).item() == pytest.approx(np.linalg.norm(b.double().numpy()), rel=1e-5)
    assert dg.spectral_norm(b).item() == pytest.approx(np.linalg.norm(b.double().numpy(), 2), rel=1e-5)
    total = dg.gradient_norms({"W": b}, run_axes=0)["total"]
    assert total.item() == pytest.approx(np.linalg.norm(b.double().numpy()), rel=1e-5)


@pytest.mark.parametrize(
    ("s", "share", "frobenius", "spectral", "largest"),
    [
        (0.1, 0.9986, 1.005, 1.000, 1.04),
        (1.0, 0.8695, 1.523, 1.022, 1.51),
        (2.0, 0.6132, 2.695, 1.139, 2.16),
        (4.0, 0.3115, 4.075, 1.449, 2.84),
        (8.0, 0.1419, 4.881, 1.666, 3.22),
        (16.0, 0.0662, 5.279, 1.780, 3.42),
    ],
)
def test_the_path_of_the_logit_scale_at_32_tokens(generator, s, share, frobenius, spectral, largest):
    z = s * torch.randn(1000, 32, 32, generator=generator)
    p = torch.softmax(z, -1)
    measured = [
        (dg.normalized_entropy(p).flatten(), share, 5e-5),
        (dg.frobenius_norm(p), frobenius, 5e-4),
        (dg.spectral_norm(p), spectral, 5e-4),
        (dg.column_mass(p).amax(-1), largest, 5e-3),
    ]
    for values, expected, rounding in measured:
        # 5 standard errors of ours and as much again for a table that was sampled too
        error = 10 * values.std().item() / math.sqrt(values.numel())
        assert values.mean().item() == pytest.approx(expected, abs=rounding + min(error, 0.01 * expected))


# Variance, column mass, live rows


def test_logit_variance_is_the_biased_variance(generator):
    z = 3 * torch.randn(2, 4, 7, generator=generator)
    equal(dg.logit_variance(z), z.numpy().var(axis=-1))
    mask = torch.ones(4, 7, dtype=torch.bool).tril()
    for i in range(4):
        equal(dg.logit_variance(z, mask)[:, i], z[:, i, : i + 1].numpy().var(axis=-1))
    equal(dg.logit_variance(torch.tensor([[5.0, 5.0], [1e30, 1e30], [-1.0, 1.0]])), [0.0, 0.0, 1.0])
    assert gradcheck(lambda x: dg.logit_variance(x, mask), z.clone().requires_grad_())


def test_column_mass_sums_to_the_number_of_live_rows(generator):
    p = rows(generator, 3, 5, 4)
    p[0, 1] = 0
    p[2] = 0
    equal(dg.column_mass(p), p.numpy().sum(axis=1))
    equal(dg.column_mass(p).sum(-1), [4.0, 5.0, 0.0])
    assert dg.live_rows(p).sum(-1).tolist() == [4, 5, 0]
    assert dg.dead_row_count(p).tolist() == [1, 0, 5]


def test_live_mean_leaves_dead_rows_out_and_keeps_the_sick_ones(generator):
    p = rows(generator, 3, 4, 6)
    p[0, 1] = 0
    p[1] = 0
    p[2, 3, 0] = NAN
    h = dg.entropy(p)
    equal(dg.live_mean(h, p), [h[0, [0, 2, 3]].mean().item(), NAN, NAN])
    kept = torch.tensor([[True, True, False, False]] * 3)
    equal(dg.live_mean(h, p, where=kept), [h[0, 0].item(), NAN, h[2, :2].mean().item()])
    x = torch.randn(3, 4, generator=generator)
    equal(grad_of(lambda x: dg.live_mean(x, p), x), [[1 / 3, 0, 1 / 3, 1 / 3], [0.0] * 4, [0.25] * 4])


# Kinds of collapse


def test_kinds_of_collapse_at_the_corners():
    for n in (3, 7, 21, 64):
        cases = {
            CollapseKind.PERMUTATION_LIKE: torch.eye(n).roll(1, 0),
            CollapseKind.SINK_LIKE: one_hot([1] * n, n),
            CollapseKind.NOT_COLLAPSED: torch.full((n, n), 1 / n),
            CollapseKind.UNDEFINED: torch.zeros(n, n),
        }
        assert dg.collapse_kind(torch.stack(list(cases.values()))).tolist() == [int(kind) for kind in cases]
    for pairs, kind in [
        (3, CollapseKind.PERMUTATION_LIKE),
        (4, CollapseKind.RANDOM_MAP),
        (16, CollapseKind.RANDOM_MAP),
    ]:
        choices = [j // 2 for j in range(2 * pairs)] + list(range(pairs, 32 - pairs))  # κ = 2·pairs/31
        assert dg.collapse_kind(one_hot(choices, 32)).item() == kind
    twelve_of_21 = one_hot([5] * 12 + list(range(6, 15)), 21)
    assert dg.collapse_kind(twelve_of_21).item() == CollapseKind.SINK_LIKE


def test_the_limit_of_a_sink_is_chernoffs_bound():
    def load(c, n):
        return one_hot([0] * c + [1 + j // 2 for j in range(n - c)], n)

    for n, limit in [(21, 7.0145), (32, 7.2291), (128, 7.9140)]:
        assert math.log(n) + limit - 1 - limit * math.log(limit) == pytest.approx(math.log(0.01), abs=2e-3)
        assert dg.collapse_kind(load(math.ceil(limit), n)).item() == CollapseKind.SINK_LIKE
        assert dg.collapse_kind(load(math.floor(limit), n)).item() != CollapseKind.SINK_LIKE
    # the bound holds: the exact chance of a load of 8 among 32, summed over the keys, is below the level
    assert 32 * scipy.stats.binom.sf(7, 32, 1 / 32) < 0.01


@pytest.mark.parametrize(
    ("n", "permutation_rate", "sink_rate"), [(8, 0.006, 0.001), (21, 5e-4, 1e-3), (32, 5e-4, 1e-3)]
)
def test_random_maps_are_seldom_taken_for_another_kind(generator, n, permutation_rate, sink_rate):
    maps = one_hot(torch.randint(0, n, (5000, n), generator=generator), n)
    kinds = dg.collapse_kind(maps)
    assert (kinds == CollapseKind.PERMUTATION_LIKE).double().mean() <= permutation_rate
    assert (kinds == CollapseKind.SINK_LIKE).double().mean() <= sink_rate
    assert (kinds == CollapseKind.RANDOM_MAP).double().mean() >= 1 - permutation_rate - sink_rate


def test_largest_column_of_a_random_map_is_about_three_and_a_half_of_32(generator):
    maps = one_hot(torch.randint(0, 32, (6000, 32), generator=generator), 32)
    # exact mean by the multinomial: E max = Σ_c P(max > c), P(max <= c) = n! [x^n] (Σ_{k<=c} x^k/k!)^n / n^n
    mean = 0.0
    for c in range(32):
        power = np.array([1.0])
        for _ in range(32):
            power = np.convolve(power, [1 / math.factorial(k) for k in range(c + 1)])[:33]
        below = power[32] * math.factorial(32) / 32**32 if power.size > 32 else 0.0
        mean += 1 - below
    assert mean == pytest.approx(3.53, abs=0.01)
    assert dg.column_mass(maps).amax(-1).mean().item() == pytest.approx(mean, abs=0.04)


def test_soft_versions_of_the_three_kinds_are_told_apart(generator):
    n = 32
    noise = torch.randn(200, n, n, generator=generator)
    permutation = torch.softmax(9 * torch.eye(n) + noise, -1)
    sink = torch.softmax(9 * one_hot([3] * n, n) + noise, -1)
    random = torch.softmax(16 * noise, -1)
    soft = torch.softmax(noise, -1)
    wanted = [
        CollapseKind.PERMUTATION_LIKE,
        CollapseKind.SINK_LIKE,
        CollapseKind.RANDOM_MAP,
        CollapseKind.NOT_COLLAPSED,
    ]
    for p, kind in zip([permutation, sink, random, soft], wanted, strict=True):
        assert (dg.collapse_kind(p) == kind).double().mean() >= 0.99


def test_collapse_under_a_causal_mask_is_judged_by_what_the_mask_allows(generator):
    n = 32
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    logits = 30 * torch.randn(400, n, n, generator=generator)
    random = torch.softmax(logits.masked_fill(~mask, -math.inf), -1)
    kinds = dg.collapse_kind(random, mask)
    assert (kinds == CollapseKind.RANDOM_MAP).double().mean() >= 0.97
    assert dg.collapse_kind(torch.eye(n), mask).item() == CollapseKind.PERMUTATION_LIKE
    assert dg.collapse_kind(one_hot([0] * n, n), mask).item() == CollapseKind.SINK_LIKE
    assert dg.collapse_kind(mask / mask.sum(-1, keepdim=True), mask).item() == CollapseKind.NOT_COLLAPSED


def test_collapse_leaves_dead_rows_out():
    n = 21
    sink, permutation = one_hot([2] * n, n), torch.eye(n)
    for p, kind in [(sink, CollapseKind.SINK_LIKE), (permutation, CollapseKind.PERMUTATION_LIKE)]:
        q = p.clone()
        q[::3] = 0
        assert dg.collapse_kind(q).item() == kind
    q = torch.zeros(n, n)
    q[4, 2] = 1
    assert dg.collapse_kind(q).item() == CollapseKind.UNDEFINED


# Gradient norms


def test_gradient_norms_by_run_and_in_total(generator):
    gradients = {"W_Q": torch.randn(4, 2, 3, 3, generator=generator), "W_V": torch.randn(4, 5, generator=generator)}
    gradients["W_V"][2] = math.inf
    norms = dg.gradient_norms(gradients)
    assert list(norms) == ["W_Q", "W_V", "total"]
    for run in (0, 1, 3):
        parts = [np.linalg.norm(g[run].numpy().ravel()) for g in gradients.values()]
        equal(norms["W_Q"][run], parts[0])
        equal(norms["W_V"][run], parts[1])
        equal(norms["total"][run], math.hypot(*parts))
    assert norms["W_Q"][2].isfinite()
    assert not norms["total"][2].isfinite()
    equal(dg.gradient_norms({"b": torch.zeros(3, 2)})["total"], torch.zeros(3))
    equal(dg.gradient_norms({"b": torch.tensor([3.0, -4.0])}, run_axes=0)["total"], 5.0)
    equal(dg.gradient_norms({"b": torch.tensor([3.0, -4.0])})["b"], [3.0, 4.0])


# Refusals and dtypes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dg.entropy(torch.ones(2, 0)), r"p\.shape must be .*\(2, 0\)"),
        (lambda: dg.renyi2_entropy(torch.ones(0)), r"p\.shape"),
        (lambda: dg.sum_of_squares(torch.ones(2, 0)), r"p\.shape"),
        (lambda: dg.normalized_entropy(torch.ones(2, 0)), r"p\.shape"),
        (lambda: dg.entropy_from_logits(torch.ones(2, 0)), r"logits\.shape"),
        (lambda: dg.logit_variance(torch.ones(2, 0)), r"logits\.shape"),
        (lambda: dg.frobenius_norm(torch.ones(2, 0)), r"p\.shape"),
        (lambda: dg.spectral_norm(torch.ones(0, 2)), r"p\.shape"),
        (lambda: dg.column_mass(torch.ones(0, 2)), r"p\.shape"),
        (lambda: dg.dead_row_count(torch.ones(3, 0)), r"p\.shape"),
        (lambda: dg.collapse_kind(torch.ones(3, 0)), r"p\.shape"),
        (lambda: dg.live_mean(torch.ones(3), torch.ones(3, 0)), r"p\.shape"),
        (lambda: dg.entropy_from_logits(torch.ones(2, 3), torch.ones(4, dtype=torch.bool)), r"mask\.shape .*\(4,\)"),
        (lambda: dg.collapse_kind(torch.eye(3), entropy_threshold=1.5), r"entropy_threshold=1\.5"),
        (lambda: dg.collapse_kind(torch.eye(3), sink_level=-0.1), r"sink_level=-0\.1"),
        (lambda: dg.collapse_kind(torch.eye(3), coincidence_threshold=2.0), r"coincidence_threshold=2"),
        (lambda: dg.gradient_norms({}), r"gradients must be at least one block"),
        (lambda: dg.gradient_norms({"total": torch.ones(2)}), r"gradients must be"),
        (lambda: dg.gradient_norms({"a": torch.ones(2, 3), "b": torch.ones(3, 3)}), r"gradients\['b'\]\.shape"),
        (lambda: dg.gradient_norms({"a": torch.ones(2)}, run_axes=-1), r"run_axes=-1"),
        (lambda: dg.gradient_norms({"a": torch.ones(2)}, run_axes=2), r"gradients\['a'\]\.shape"),
    ],
)
def test_bad_shapes_and_settings_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_are_computed_wide_and_come_back_in_their_own_type(generator, dtype):
    p = rows(generator, 4, 4).to(dtype)
    functions = [dg.entropy, dg.normalized_entropy, dg.renyi2_entropy, dg.sum_of_squares, dg.entropy_from_logits]
    for function in [*functions, dg.logit_variance, dg.frobenius_norm, dg.spectral_norm, dg.column_mass]:
        value = function(p)
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), function(p.double()), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert dg.live_mean(dg.entropy(p), p).dtype == dtype
    assert dg.gradient_norms({"p": p})["total"].dtype == dtype


def test_float16_logits_beyond_its_exponential_range_are_right():
    z = torch.tensor([[30000.0, -30000.0, 30000.0]], dtype=torch.float16)
    equal(dg.entropy_from_logits(z), [math.log(2)], 1e-3)
