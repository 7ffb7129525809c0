"""Lipschitz constants against finite differences, closed forms, and a search that must never beat an upper bound."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from lipattn import lipschitz as lip
from lipattn.reweighting import REWEIGHTINGS

NAN = math.nan
ROUNDING = 1 + 1e-9


def equal(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)


def weights(generator, d=3, dk=3, dv=3):
    return [torch.randn(d, e, generator=generator) for e in (dk, dk, dv)]


def numerical_jacobian(f, x, h=1e-6):
    """Central differences: [output..., input...]."""
    columns = []
    for j in range(x.numel()):
        step = torch.zeros(x.numel())
        step[j] = h
        step = step.reshape(x.shape)
        columns.append((f(x + step) - f(x - step)) / (2 * h))
    return torch.stack(columns, -1).reshape(*columns[0].shape, *x.shape)


# Softmax in its logits


@pytest.mark.parametrize("beta", [0.5, 1.0, 3.0])
def test_softmax_jacobian_is_the_derivative(generator, beta):
    z = torch.randn(5, generator=generator)
    equal(lip.softmax_jacobian(z, beta), numerical_jacobian(lambda x: torch.softmax(beta * x, -1), z), 1e-9)
    batch = torch.randn(2, 3, 5, generator=generator)
    equal(lip.softmax_jacobian(batch, beta)[1, 2], lip.softmax_jacobian(batch[1, 2], beta))


@pytest.mark.parametrize("logits", [[0.0, 200.0, -200.0], [1e30, -1e30, 0.0], [7.0]])
def test_softmax_jacobian_vanishes_at_total_collapse(logits):
    j = lip.softmax_jacobian(torch.tensor(logits))
    equal(j, torch.zeros_like(j))


def test_softmax_jacobian_norm_at_the_corners():
    cases = {
        (1.0, 0.0, 0.0): 0.0,
        (0.5, 0.5, 0.0): 0.5,
        (1 / 3, 1 / 3, 1 / 3): 1 / 3,
        (0.0, 0.0, 0.0): NAN,
        (NAN, 0.5, 0.5): NAN,
    }
    equal(lip.softmax_jacobian_norm(torch.tensor(list(cases))), list(cases.values()))
    equal(lip.softmax_jacobian_norm(torch.tensor([1.0])), 0.0)
    lower, upper = lip.softmax_jacobian_norm_bounds(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3] * 3]))
    equal(lower, [0.5, 0.0, 1 / 3])
    equal(upper, [0.5, 0.0, 1 / 3])
    lower, upper = lip.softmax_jacobian_norm_bounds(torch.tensor([0.7, 0.2, 0.1]))
    equal(torch.stack([lower, upper]), [0.21, 0.42])
    equal(torch.stack(lip.softmax_jacobian_norm_bounds(torch.tensor([1.0]))), [0.0, 0.0])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8))
def test_the_jacobian_norm_lies_in_its_sandwich_and_below_one_half(logits):
    p = torch.softmax(torch.tensor(logits), -1)
    norm = lip.softmax_jacobian_norm(p)
    lower, upper = lip.softmax_jacobian_norm_bounds(p)
    assert lower - 1e-14 <= norm <= upper + 1e-14
    assert norm <= 0.5 + 1e-14
    equal(norm, np.linalg.norm(np.diag(p.numpy()) - np.outer(p.numpy(), p.numpy()), 2))


def test_trace_of_the_jacobian_is_one_minus_the_sum_of_squares(generator):
    z = 2 * torch.randn(4, 6, generator=generator)
    p = torch.softmax(z, -1)
    traces = torch.stack([jacobian(lambda x: torch.softmax(x, -1), row).trace() for row in z])
    equal(lip.softmax_jacobian_trace(p), traces)
    equal(lip.softmax_jacobian_trace(p).mean(), 1 - p.square().sum().item() / 4)


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("beta", [1.0, 4.0])
def test_no_search_beats_half_the_inverse_temperature_and_it_comes_close(generator, norm, beta):
    exact = lip.softmax_lipschitz_constant(beta, norm)
    assert exact.kind == "exact"
    assert exact.value == beta / 2
    for m in (2, 4):
        found = lip.search_lower_bound(
            lambda z: torch.softmax(beta * z, -1),
            lambda g, m=m: torch.randn(m, generator=g),
            generator=generator,
            steps=25,
            starts=2,
            norm=norm,
        )
        assert found.kind == "lower"
        assert found.norm == exact.norm
        assert 0.95 * exact.value <= found.value <= exact.value * ROUNDING


@pytest.mark.parametrize(
    ("s", "mean_norm"), [(0.1, 0.038), (1.0, 0.144), (2.0, 0.247), (4.0, 0.256), (8.0, 0.183), (16.0, 0.108)]
)
def test_mean_jacobian_norm_along_the_logit_scale_at_32_keys(generator, s, mean_norm):
    norms = lip.softmax_jacobian_norm(torch.softmax(s * torch.randn(4000, 32, generator=generator), -1))
    error = 4 * norms.std().item() / math.sqrt(4000)
    assert norms.mean().item() == pytest.approx(mean_norm, abs=5e-4 + error)


# Feature maps and row normalisation


def test_feature_map_constants():
    value = lambda *arguments: lip.feature_map_lipschitz_constant(*arguments).value  # noqa: E731
    assert value("exp") == math.inf
    assert value("exp", (-math.inf, 2.0)) == math.exp(2)
    assert value("relu") == value("elu") == 1
    assert value("relu", (-3.0, -1.0)) == 0
    assert value("elu", (-3.0, -1.0)) == math.exp(-1)
    assert value("elu", (-3.0, 0.5)) == 1


@pytest.mark.parametrize("domain", [(-2.0, 1.5), (-3.0, -0.5), (0.5, 2.0)])
@pytest.mark.parametrize(
    ("name", "function"),
    [("exp", torch.exp), ("relu", torch.relu), ("elu", lambda x: torch.nn.functional.elu(x) + 1)],
)
def test_feature_map_constants_are_the_largest_slopes_on_a_grid(name, function, domain):
    x = torch.linspace(*domain, 4001)
    slopes = function(x).diff() / x.diff()
    exact = lip.feature_map_lipschitz_constant(name, domain).value
    assert exact * (1 - 2e-3) <= slopes.max().item() <= exact * ROUNDING + 1e-12


@pytest.mark.parametrize(("norm", "p"), [("l1", 1.0), ("l2", 2.0)])
@pytest.mark.parametrize("m", [2, 5])
def test_row_normalisation_constant_is_attained_and_never_beaten(generator, norm, p, m):
    floor = 0.5

    def inside(u):
        u = u.clamp(min=0)
        lack = (floor - u.sum()).clamp(min=0)
        return u + lack / m

    exact = lip.row_normalization_lipschitz_constant(m, floor, norm)
    assert exact.value == pytest.approx({"l1": 2 / floor, "l2": math.sqrt(m) / floor}[norm], rel=1e-15)
    # attained at one-hot rows of sum s₀
    p0 = torch.eye(m)[0]
    projection = (torch.eye(m) - torch.outer(p0, torch.ones(m))) / floor
    attained = np.linalg.norm(projection.numpy(), {"l1": 1, "l2": 2}[norm])
    assert exact.value == pytest.approx(attained, rel=1e-12)
    equal(jacobian(lambda u: u / u.sum(), floor * p0), projection)
    found = lip.search_lower_bound(
        lambda u: u / u.sum(),
        lambda g: torch.rand(m, generator=g),
        generator=generator,
        steps=60,
        project=inside,
        norm=p,
    )
    assert 0.8 * exact.value <= found.value <= exact.value * ROUNDING


def test_row_normalisation_without_a_floor_has_no_constant():
    bound = lip.row_normalization_lipschitz_constant(3, 0.0)
    assert bound.value == math.inf
    assert "unbounded" in bound.domain
    assert lip.row_normalization_lipschitz_constant(1, 0.0).value == 0


# Attention in its tokens


@pytest.mark.parametrize("mechanism", ["softmax", "elu_kernel", "qk_layernorm"])
def test_attention_jacobian_is_the_derivative_in_the_stated_order(generator, mechanism):
    w = weights(generator, d=3, dk=4, dv=2)
    x = torch.randn(4, 3, generator=generator)
    j = lip.attention_jacobian(x, *w, mechanism)
    assert j.shape == (4, 2, 4, 3)
    equal(j, numerical_jacobian(lambda y: lip.attention(y, *w, mechanism), x), 1e-7)
    assert lip.attention_local_lipschitz(x, *w, mechanism) == pytest.approx(
        np.linalg.norm(j.reshape(8, 12).numpy(), 2), rel=1e-12
    )


def test_attention_takes_a_function_or_a_name_with_options(generator):
    w, x = weights(generator), torch.randn(4, 3, generator=generator)
    q, k, v = (x @ m for m in w)
    by_hand = torch.softmax(q @ k.mT / (2 * math.sqrt(3)), -1) @ v
    equal(lip.attention(x, *w, temperature=2.0), by_hand)
    equal(lip.attention(x, *w, lambda q, k: torch.softmax(q @ k.mT / (2 * math.sqrt(3)), -1)), by_hand)
    equal(lip.attention(x, *w, causal=True)[0], v[0])
    with pytest.raises(ValueError, match="mechanism must be one of"):
        lip.attention(x, *w, "no such thing")


def test_query_gradient_is_a_covariance(generator):
    q, k, v, g = (torch.randn(2, 5, e, generator=generator) for e in (3, 3, 4, 4))
    c = 0.7

    def loss(q):
        return ((torch.softmax(c * q @ k.mT, -1) @ v) * g).sum()

    q.requires_grad_()
    (expected,) = torch.autograd.grad(loss(q), q)
    p = torch.softmax(c * q.detach() @ k.mT, -1)
    equal(lip.query_gradient(p, k, v, g, c), expected)
    one_hot = torch.eye(5).expand(2, 5, 5)
    equal(lip.query_gradient(one_hot, k, v, g, c), torch.zeros(2, 5, 3))


@pytest.mark.parametrize("n", [2, 5, 21])
@pytest.mark.parametrize("C", [0.5, 10.0, 1000.0])
def test_the_uniform_row_witness_grows_like_c_squared(generator, n, C):
    w = weights(generator, d=4, dk=3, dv=2)
    e = torch.randn(4, generator=generator)
    for direction in (e, None):
        witness = lip.uniform_row_witness(*w, C, n, direction)
        assert abs(witness.measured - witness.predicted) <= witness.tolerance * ROUNDING + 1e-9 * witness.predicted
        assert witness.tolerance == pytest.approx(np.linalg.norm(w[2].numpy(), 2) / n)
    # the whole block, by central differences, with the stated transposition
    witness = lip.uniform_row_witness(*w, C, n, e)
    e = e / e.norm()
    block = C**2 / math.sqrt(3) / n * (1 - 1 / n) * torch.outer(w[2].mT @ e, w[0] @ w[1].mT @ e) + w[2].mT / n

    def row(y):
        x = witness.inputs.clone()
        x[witness.row] = y
        return lip.attention(x, *w)[witness.row]

    measured = numerical_jacobian(row, witness.inputs[witness.row], h=1e-6 / C)
    torch.testing.assert_close(measured, block, rtol=1e-5, atol=1e-6)
    p = REWEIGHTINGS["softmax"].weights(witness.inputs @ w[0], witness.inputs @ w[1])
    equal(p[witness.row], torch.full((n,), 1 / n))


@pytest.mark.parametrize(("mechanism", "exponent"), [("softmax", 2.0), ("qk_layernorm", 1.0), ("elu_kernel", 1.0)])
def test_none_of_the_mechanisms_is_lipschitz_in_its_tokens(mechanism, exponent):
    growth = lip.local_lipschitz_growth(mechanism, [1e4, 1e5, 1e6])
    assert growth.exponent == pytest.approx(exponent, abs=1e-3)
    assert all(b > 5 * a for a, b in pairwise(growth.constants.tolist()))


def test_qk_layernorm_grows_like_one_over_the_root_of_its_epsilon():
    growths = [lip.local_lipschitz_growth("qk_layernorm", [1e3, 1e4], epsilon=e) for e in (1e-3, 1e-5, 1e-7)]
    constants = [growth.constants[0].item() for growth in growths]
    assert constants[1] / constants[0] == pytest.approx(10, rel=1e-3)
    assert constants[2] / constants[1] == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize(("d_k", "distance", "jump"), [(2, 1e-9, 3.0), (5, 1e-12, 3.0), (3, 1e-6, 100.0)])
def test_the_relu_kernel_jumps(d_k, distance, jump):
    found = lip.relu_kernel_jump(d_k, distance, jump)
    assert found.input_distance == pytest.approx(distance, rel=1e-12)
    assert (found.first - found.second).norm() <= distance * ROUNDING
    assert abs(found.output_distance - jump) <= 2 * distance + 1e-14 * jump
    for x in (found.first, found.second):
        p = REWEIGHTINGS["relu_kernel"].weights(x, x)
        equal(p.sum(-1), torch.ones(3))


# Upper bounds: never below what a search finds, nor below a local constant


@pytest.mark.parametrize(("n", "radius"), [(1, 2.0), (2, 3.0), (4, 1.0), (8, 0.3)])
def test_softmax_attention_on_balls_stays_below_its_upper_bound(generator, n, radius):
    w = weights(generator, d=3, dk=2, dv=3)
    upper = lip.attention_upper_bound(*w, n, radius)
    assert upper.kind == "upper"
    found = lip.search_lower_bound(
        lambda x, w=w: lip.attention(x, *w),
        lambda g: radius * torch.randn(n, 3, generator=g),
        generator=generator,
        steps=12,
        starts=2,
        project=lip.ball_projection(radius),
    )
    assert all((x.norm(dim=-1) <= radius * ROUNDING).all() for x in found.witness)
    assert 0.05 * upper.value <= found.value <= upper.value * ROUNDING
    x = lip.ball_projection(radius)(3 * radius * torch.randn(n, 3, generator=generator))
    assert lip.attention_local_lipschitz(x, *w) <= upper.value * ROUNDING
    assert lip.attention_local_lipschitz(x, *w, causal=True) <= upper.value * ROUNDING


def test_the_upper_bound_of_attention_has_the_value_of_its_equation():
    w = [torch.diag(torch.tensor(entries)) for entries in ([2.0, 1.0], [3.0, 1.0], [5.0, 1.0])]
    bound = lip.attention_upper_bound(*w, 9, 2.0)
    assert bound.value == pytest.approx(5 * (3 + 6 * 4 * (1 + 3) / math.sqrt(2)), rel=1e-12)
    # one token attends to itself: the bound is the constant ‖W_V‖₂
    assert lip.attention_upper_bound(*w, 1, 7.0).value == pytest.approx(5.0)
    assert lip.attention_local_lipschitz(torch.zeros(1, 2), *w) == pytest.approx(5.0, rel=1e-12)


def test_query_key_value_bounds_stay_above_search(generator):
    n, d = 3, 3
    radius = math.sqrt(d)
    for value_radius in (0.5, 3.0):
        upper = lip.qk_layernorm_upper_bound(n, d, value_radius)
        general = lip.query_key_value_upper_bound(n, d**-0.5, radius, radius, value_radius)
        assert upper.value == general.value == pytest.approx(math.sqrt(value_radius**2 * (1 + n) + n), rel=1e-12)
        inner, values = lip.ball_projection(radius), lip.ball_projection(value_radius)
        found = lip.search_lower_bound(
            lambda x: torch.softmax(x[0] @ x[1].mT / math.sqrt(d), -1) @ x[2],
            lambda g: 2 * torch.randn(3, n, d, generator=g),
            generator=generator,
            steps=30,
            starts=2,
            project=lambda x, inner=inner, values=values: torch.stack([inner(x[0]), inner(x[1]), values(x[2])]),
        )
        assert 0.2 * upper.value <= found.value <= upper.value * ROUNDING
    assert lip.qk_layernorm_upper_bound(n, d, 2.0, gain=2.0).value == pytest.approx(math.sqrt(16 * 4 + 3), rel=1e-12)
    q, k, v = lip.query_key_value_upper_bound(4, 0.5, 3.0, 5.0, 7.0), 0.5 * 7 * 5, 0.5 * 7 * 3
    assert q.value == pytest.approx(math.sqrt(k**2 + 4 * v**2 + 4), rel=1e-12)


# The search itself


def test_search_finds_the_constant_of_a_linear_map_and_keeps_its_witness(generator):
    a = torch.randn(4, 6, generator=generator)
    found = lip.search_lower_bound(
        lambda x: a @ x, torch.zeros(6), generator=generator, steps=100, starts=2, map="Ax", domain="ℝ⁶"
    )
    exact = np.linalg.norm(a.numpy(), 2)
    assert exact * (1 - 1e-4) <= found.value <= exact * ROUNDING
    assert (found.map, found.norm, found.domain) == ("Ax", "ℓ_2", "ℝ⁶")
    x, y = found.witness
    assert (torch.linalg.vector_norm(a @ (x - y)) / torch.linalg.vector_norm(x - y)).item() == pytest.approx(
        found.value, rel=1e-9
    )


def test_search_climbs_to_where_the_map_is_steep(generator):
    found = lip.search_lower_bound(
        lambda x: torch.exp(x), torch.tensor([-1.0]), generator=generator, project=lambda x: x.clamp(-2, 1), steps=40
    )
    assert 0.999 * math.e <= found.value <= math.e * ROUNDING


def test_search_is_reproducible_and_a_constant_map_has_slope_zero(generator):
    def run(seed):
        g = torch.Generator().manual_seed(seed)
        return lip.search_lower_bound(torch.tanh, lambda g: torch.randn(3, generator=g), generator=g, steps=3).value

    assert run(1) == run(1) != run(2)
    for constant in (lambda x: 0 * x + 1, lambda x: torch.ones(3)):
        assert lip.search_lower_bound(constant, torch.zeros(3), generator=generator, steps=3).value == 0


# Refusals and dtypes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lip.softmax_lipschitz_constant(0.0), "inverse_temperature=0.0"),
        (lambda: lip.softmax_lipschitz_constant(1.0, 0.5), "norm=0.5"),
        (lambda: lip.softmax_lipschitz_constant(1.0, NAN), "norm=nan"),
        (lambda: lip.softmax_jacobian(torch.ones(2, 0)), r"logits\.shape"),
        (lambda: lip.softmax_jacobian(torch.ones(2), -1.0), "inverse_temperature=-1.0"),
        (lambda: lip.softmax_jacobian_norm(torch.ones(2, 0)), r"p\.shape"),
        (lambda: lip.softmax_jacobian_norm_bounds(torch.ones(0)), r"p\.shape"),
        (lambda: lip.softmax_jacobian_trace(torch.ones(0)), r"p\.shape"),
        (lambda: lip.feature_map_lipschitz_constant("sine"), "name='sine'"),
        (lambda: lip.feature_map_lipschitz_constant("exp", (1.0, 1.0)), r"domain=\(1\.0, 1\.0\)"),
        (lambda: lip.row_normalization_lipschitz_constant(0, 1.0), "m=0"),
        (lambda: lip.row_normalization_lipschitz_constant(2, -1.0), "minimum_sum=-1.0"),
        (lambda: lip.uniform_row_witness(*[torch.eye(2)] * 3, 1.0, 1), "n=1"),
        (lambda: lip.uniform_row_witness(*[torch.eye(2)] * 3, 0.0, 2), "C=0.0"),
        (lambda: lip.uniform_row_witness(*[torch.eye(2)] * 3, 1.0, 2, torch.zeros(2)), r"direction=\[0\.0, 0\.0\]"),
        (lambda: lip.attention_upper_bound(*[torch.eye(2)] * 3, 0, 1.0), "n=0"),
        (lambda: lip.attention_upper_bound(*[torch.eye(2)] * 3, 2, math.inf), "radius=inf"),
        (lambda: lip.query_key_value_upper_bound(2, 0.0, 1.0, 1.0, 1.0), "scale=0.0"),
        (lambda: lip.query_key_value_upper_bound(2, 1.0, -1.0, 1.0, 1.0), "query_radius=-1.0"),
        (lambda: lip.qk_layernorm_upper_bound(2, 3, 1.0, 0.0), "gain=0.0"),
        (lambda: lip.relu_kernel_jump(1), "d_k=1"),
        (lambda: lip.relu_kernel_jump(2, 2.0, 1.0), "jump=1.0"),
        (lambda: lip.local_lipschitz_growth("softmax", [1.0]), r"sizes=\[1\.0\]"),
        (lambda: lip.local_lipschitz_growth("softmax", [1.0, -2.0]), "sizes=-2.0"),
        (lambda: lip.local_lipschitz_growth("softmax", [1.0, 2.0], n=2), "n=2"),
        (lambda: lip.ball_projection(0.0), "radius=0.0"),
        (lambda: lip.query_gradient(*[torch.eye(2)] * 4, 0.0), "scale=0.0"),
        (lambda: lip.search_lower_bound(torch.sin, torch.ones(2), generator=torch.Generator(), starts=0), "starts=0"),
        (
            lambda: lip.search_lower_bound(torch.log, -torch.ones(2), generator=torch.Generator(), steps=2),
            "start must be inputs at which f is finite",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_come_back_in_their_own_type(generator, dtype):
    p = torch.softmax(torch.randn(4, 5, generator=generator), -1).to(dtype)
    functions = [lip.softmax_jacobian, lip.softmax_jacobian_norm, lip.softmax_jacobian_trace]
    for function in [*functions, lambda p: torch.stack(lip.softmax_jacobian_norm_bounds(p))]:
        value = function(p)
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), function(p.double()), rtol=torch.finfo(dtype).eps, atol=1e-6)
