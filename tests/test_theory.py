"""The laws against the numbers of the book's science, other quadratures, sampling with its error, and autograd."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, stats

from lipattn import theory


def panels(low: float, high: float, count: int, nodes: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the Gauss–Legendre rule on `count` equal panels."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    half = (high - low) / (2 * count)
    centres = low + half * (2 * np.arange(count) + 1)
    return (centres[:, None] + half * x).ravel(), np.tile(half * w, count)


def published(digits: int) -> float:
    """Half a unit of the last printed digit."""
    return 0.51 * 10.0**-digits


def entropy(p: np.ndarray) -> np.ndarray:
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# --- scales of the condensation law --------------------------------------------------------------------------------

CONDENSATION = [  # N, σ_c, b_N, σ, E Σp²: exact, with σ_c, with b_N; E H: exact, with σ_c, with b_N
    (21, 2.468, 1.729, 6.0, (0.6939, 0.589, 0.712), (0.6045, 1.005, 0.610)),
    (128, 3.115, 2.455, 8.0, (0.6811, 0.611, 0.693), (0.6576, 0.925, 0.663)),
    (1024, 3.723, 3.123, 8.0, (0.6017, 0.535, 0.610), (0.8988, 1.225, 0.929)),
    (16384, 4.405, 3.860, 16.0, (0.7528, 0.725, 0.759), (0.4924, 0.575, 0.487)),
]


@pytest.mark.parametrize(("n", "sigma_c", "b_n", "sigma", "sums", "entropies"), CONDENSATION)
def test_condensation_table(n, sigma_c, b_n, sigma, sums, entropies):
    assert theory.critical_sigma(n) == pytest.approx(sigma_c, abs=published(3))
    assert theory.finite_size_sigma(n) == pytest.approx(b_n, abs=published(3))
    assert theory.expected_sum_of_squares(n, sigma) == pytest.approx(sums[0], abs=published(4))
    assert theory.condensed_sum_of_squares(n, sigma, finite_size=False) == pytest.approx(sums[1], abs=published(3))
    assert theory.condensed_sum_of_squares(n, sigma) == pytest.approx(sums[2], abs=published(3))
    assert theory.expected_entropy(n, sigma) == pytest.approx(entropies[0], abs=published(4))
    assert theory.condensed_entropy(n, sigma, finite_size=False) == pytest.approx(entropies[1], abs=published(3))
    assert theory.condensed_entropy(n, sigma) == pytest.approx(entropies[2], abs=published(3))


def test_the_finite_size_scale_tells_where_the_largest_of_n_gaussians_lies():
    # the Gumbel limit: N(1 − Φ(b_N)) → 1, slowly, like (ln ln N)²/ln N
    counts = [n * stats.norm.sf(theory.finite_size_sigma(n)) for n in (10**3, 10**6, 10**12, 10**100)]
    assert all(abs(b - 1) < abs(a - 1) for a, b in itertools.pairwise(counts))
    assert counts[-1] == pytest.approx(1, abs=0.02)


def test_condensed_laws_are_the_large_n_limit():
    n, x = 10**9, 4.0
    assert theory.condensed_sum_of_squares(n, x * theory.critical_sigma(n)) == pytest.approx(
        theory.expected_sum_of_squares(n, x * theory.critical_sigma(n)), abs=3e-3
    )
    # m = 1/2: ψ(1) − ψ(1/2) = 2 ln 2
    assert theory.condensed_entropy(n, 2 * theory.finite_size_sigma(n)) == pytest.approx(2 * math.log(2), rel=1e-12)


def test_a_law_is_nan_outside_its_regime_and_keeps_the_shape():
    n = 1024
    sigma_c, b = theory.critical_sigma(n), theory.finite_size_sigma(n)
    grid = np.array([[0.0, 0.999 * b], [1.001 * b, 20.0]])
    for law in (theory.condensed_entropy, theory.condensed_sum_of_squares):
        assert np.isnan(law(n, grid)).tolist() == [[True, True], [False, False]]
        assert np.isnan(law(n, sigma_c * np.array([0.999, 1.001]), finite_size=False)).tolist() == [True, False]
        assert math.isnan(law(n, 1))
    for law, end in ((theory.typical_entropy, sigma_c), (theory.annealed_sum_of_squares, sigma_c / math.sqrt(3))):
        assert np.isnan(law(n, end * np.array([0.0, 0.999, 1.001, 9.0]))).tolist() == [False, False, True, True]
    assert theory.annealed_sigma(n) == pytest.approx(math.sqrt(2 / 3 * math.log(n)), rel=1e-14)


@pytest.mark.parametrize("law", [theory.condensed_entropy, theory.condensed_sum_of_squares])
def test_condensed_laws_start_where_two_keys_do(law):
    assert math.isfinite(law(2, 3.0))
    assert math.isfinite(law(2, 3.0, finite_size=False))
    for finite_size in (True, False):
        with pytest.raises(ValueError, match=r"n must be an integer >= 2, got n=1"):
            law(1, 3.0, finite_size=finite_size)


# --- exact finite-N values -----------------------------------------------------------------------------------------

NORMALISED = {  # N: E H / ln N at σ/σ_c = 0.25, 0.5, 1, 2
    64: ((0.9394, 4), (0.7788, 4), (0.454, 3), (0.204, 3)),
    256: ((0.9381, 4), (0.7658, 4), (0.408, 3), (0.168, 3)),
    1024: ((0.9377, 4), (0.7586, 4), (0.374, 3), (0.143, 3)),
    16384: ((0.9375, 4), (0.7525, 4), (0.326, 3), (0.110, 3)),
}


@pytest.mark.parametrize("n", NORMALISED)
def test_normalised_entropy_along_the_transition(n):
    for ratio, (value, digits) in zip((0.25, 0.5, 1, 2), NORMALISED[n], strict=True):
        h = theory.expected_entropy(n, ratio * theory.critical_sigma(n)) / math.log(n)
        assert h == pytest.approx(value, abs=published(digits)), ratio


def integrals_as_printed(n: int, sigma: float) -> tuple[float, float, float]:
    """E ln Z, E H, E Σp² from the three integrals of the docstrings: adaptive in t, Gauss–Legendre in x."""
    x, weight = panels(-13.0, 13.0, 150)
    weight = weight * stats.norm.pdf(x)
    z = sigma * x

    def power(t, k):
        complement = -np.expm1(-np.exp(np.minimum(t + z, 100))) @ weight
        return math.exp(k * math.log1p(-min(complement, 1 - 1e-16)))

    def log_partition(t):
        return math.exp(-math.exp(t)) - power(t, n)

    def square(t):
        w = np.exp(np.minimum(t + z, 100))
        return n * (w**2 * np.exp(-w)) @ weight * power(t, n - 1)

    def mean_logit(t):
        w = np.exp(np.minimum(t + z, 100))
        return n * (z * w * np.exp(-w)) @ weight * power(t, n - 1)

    top = 8.5 * sigma + 5
    edges = np.linspace(-(top + 30 + math.log(n)), top, 9)

    def integral(f):
        return sum(
            integrate.quad(f, a, b, limit=400, epsabs=1e-11, epsrel=1e-11)[0] for a, b in itertools.pairwise(edges)
        )

    log_z = integral(log_partition)
    return log_z, log_z - integral(mean_logit), integral(square)


@pytest.mark.parametrize(("n", "sigma"), [(2, 0.3), (21, 1.01), (1024, 0.99), (16384, 3.0), (16384, 30.0)])
def test_quadratures_agree_with_the_integrals_as_printed(n, sigma):
    log_z, h, squares = integrals_as_printed(n, sigma)
    assert theory.expected_log_partition(n, sigma) == pytest.approx(log_z, rel=1e-9)
    assert theory.expected_entropy(n, sigma) == pytest.approx(h, rel=2e-8)
    assert theory.expected_sum_of_squares(n, sigma) == pytest.approx(squares, rel=1e-9)


@pytest.mark.parametrize("sigma", [1e-3, 0.5, 1.0, 1.5, 6.0, 30.0])
def test_two_keys_reduce_to_one_integral(sigma):
    # p = 1/(1 + e^{-g}) with g ~ N(0, 2σ²)
    def mean(f):
        width = math.sqrt(2) * sigma
        points = [x for x in (1 / width, 5 / width, 40 / width) if x < 10]
        return 2 * integrate.quad(lambda x: f(width * x) * stats.norm.pdf(x), 0, 10, points=points, epsabs=1e-14)[0]

    def h(g):
        return math.log1p(math.exp(-g)) + g * math.exp(-g) / (1 + math.exp(-g))

    assert theory.expected_entropy(2, sigma) == pytest.approx(mean(h), rel=1e-10)
    squares = mean(lambda g: (1 + math.exp(-2 * g)) / (1 + math.exp(-g)) ** 2)
    assert theory.expected_sum_of_squares(2, sigma) == pytest.approx(squares, rel=1e-10)


@pytest.mark.parametrize("n", [2, 21, 128, 1024, 16384, 10**6])
def test_gaussian_integration_by_parts_ties_the_three_quadratures(n):
    # E Σ p z = σ² (1 − E Σp²): an identity that none of the three uses
    sigma = np.array([1e-3, 0.2, 0.999, 1.001, 2.0, 5.0, 12.0, 30.0])
    gap = theory.expected_log_partition(n, sigma) - theory.expected_entropy(n, sigma)
    assert gap == pytest.approx(sigma**2 * (1 - theory.expected_sum_of_squares(n, sigma)), rel=1e-10, abs=1e-12)


def test_quadratures_agree_with_sampling_within_its_error():
    n, sigma, rows = 50, 2.5, 40_000
    p = softmax(sigma * np.random.default_rng(7).standard_normal((rows, n)))
    for sample, exact in (
        (entropy(p), theory.expected_entropy(n, sigma)),
        ((p**2).sum(-1), theory.expected_sum_of_squares(n, sigma)),
    ):
        assert abs(sample.mean() - exact) < 4 * sample.std() / math.sqrt(rows)


def test_corners_are_exact():
    for sigma in (0, 0.5, 30.0):
        assert theory.expected_log_partition(1, sigma) == 0
        assert theory.expected_entropy(1, sigma) == 0
        assert theory.expected_sum_of_squares(1, sigma) == 1
    for n in (1, 2, 21, 16384):
        assert theory.expected_entropy(n, 0.0) == math.log(n)
        assert theory.expected_log_partition(n, 0.0) == math.log(n)
        assert theory.expected_sum_of_squares(n, 0.0) == 1 / n
    values = theory.expected_entropy(21, np.array([[0.0, 0.5], [1.0, 6.0]]))
    assert values.shape == (2, 2)
    assert values[1, 1] == theory.expected_entropy(21, 6.0)
    assert theory.critical_sigma(1) == 0


def test_along_the_logit_scale_of_a_32_row_matrix():
    # H/ln N and ‖P‖_F of one drawn P: the law gives their means, the table one draw
    table = [(0.1, 0.9986, 1.005), (1, 0.8695, 1.523), (2, 0.6132, 2.695), (4, 0.3115, 4.075), (8, 0.1419, 4.881)]
    for s, h, frobenius in [*table, (16, 0.0662, 5.279)]:
        assert theory.expected_entropy(32, s) / math.log(32) == pytest.approx(h, abs=published(4))
        assert math.sqrt(32 * theory.expected_sum_of_squares(32, s)) == pytest.approx(frobenius, rel=4e-3)


# --- expansions ----------------------------------------------------------------------------------------------------


def test_expansion_values_at_21_keys():
    assert theory.expected_entropy(21, 0.5) == pytest.approx(2.92780, abs=published(5))
    assert theory.entropy_expansion(21, 0.5) == pytest.approx(2.9276, abs=published(4))
    assert theory.expected_entropy(21, 1) == pytest.approx(2.6123, abs=published(4))
    assert theory.entropy_expansion(21, 1, terms=2) == pytest.approx(2.5683, abs=published(4))
    assert theory.entropy_expansion(21, 1, terms=3) == pytest.approx(math.log(21) - 20 / 42 + 60 / 1764, rel=1e-14)
    assert theory.entropy_expansion(21, 1, terms=3) == pytest.approx(2.6023, abs=published(4))
    assert theory.entropy_expansion(21, 1, terms=1) == math.log(21)


@pytest.mark.parametrize("n", [2, 7, 21, 300])
def test_each_term_of_the_expansion_removes_one_order_of_the_error(n):
    for terms in (1, 2, 3):
        near, far = (abs(theory.expected_entropy(n, s) - theory.entropy_expansion(n, s, terms)) for s in (0.05, 0.1))
        assert math.log2(far / near) == pytest.approx(2 * terms, abs=0.1)


def test_resummed_entropy_at_forty_percent_of_the_transition():
    n = 1024
    sigma = 0.4 * theory.critical_sigma(n)  # 1.489
    assert theory.expected_entropy(n, sigma) == pytest.approx(5.8367, abs=published(4))
    assert theory.entropy_resummed(n, sigma) == pytest.approx(5.8383, abs=published(4))
    assert theory.entropy_resummed(n, np.array([0.0, 40.0])).tolist() == [math.log(n), math.inf]


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0])
def test_resummed_entropy_is_the_first_order_in_one_over_n(sigma):
    errors = [theory.expected_entropy(n, sigma) - theory.entropy_resummed(n, sigma) for n in (4000, 8000, 16000)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.02)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.02)


def test_laws_below_condensation_are_the_large_n_limit():
    assert theory.expected_entropy(16384, 1.0) == pytest.approx(theory.typical_entropy(16384, 1.0), abs=2e-4)
    assert theory.typical_entropy(16384, 2.0) == pytest.approx(math.log(16384) - 2, rel=1e-14)
    assert theory.annealed_sum_of_squares(10**6, math.sqrt(2)) == pytest.approx(math.e**2 * 1e-6, rel=1e-13)
    assert theory.expected_sum_of_squares(10**6, 1.0) == pytest.approx(math.e * 1e-6, rel=1e-4)


# --- sensitivity ---------------------------------------------------------------------------------------------------


def entropy_at(logits: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(beta * logits, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("beta", [0.3, 1, 2.5])
def test_entropy_sensitivity_is_the_derivative_of_the_entropy(beta, generator):
    logits = torch.randn(3, 4, 6, generator=generator)
    rate = theory.entropy_sensitivity(logits, beta)
    assert rate.shape == (3, 4)
    betas = torch.full((3, 4, 1), float(beta), requires_grad=True)
    exact = torch.autograd.grad(entropy_at(logits, betas).sum(), betas)[0].squeeze(-1)
    torch.testing.assert_close(rate, exact, rtol=1e-10, atol=1e-12)
    step = 1e-5
    difference = (entropy_at(logits, torch.tensor(beta + step)) - entropy_at(logits, torch.tensor(beta - step))) / (
        2 * step
    )
    torch.testing.assert_close(rate, difference, rtol=1e-6, atol=1e-8)
    assert theory.entropy_sensitivity(logits, 0).abs().max() == 0


def test_entropy_sensitivity_survives_collapse_and_masks():
    logits = torch.tensor([[0.0, 200.0, -200.0], [1e30, -1e30, 1e30], [2.0, 2.0, -math.inf], [0.0, 1.0, -math.inf]])
    for dtype in (torch.float32, torch.float64):
        z = logits.to(dtype).requires_grad_()
        rate = theory.entropy_sensitivity(z, 1.0)
        p = 1 / (1 + math.exp(-1))
        assert rate.dtype == dtype
        assert rate.tolist() == pytest.approx([0, 0, 0, -p * (1 - p)], abs=1e-6)
        (gradient,) = torch.autograd.grad(rate.sum(), z)
        assert gradient.isfinite().all()
    assert theory.entropy_sensitivity(torch.full((1, 3), -math.inf), 1.0).isnan().all()
    assert theory.entropy_sensitivity(torch.zeros(2, 1), 1.0).tolist() == [0, 0]
    with pytest.raises(ValueError, match="logits must be an array with at least one key"):
        theory.entropy_sensitivity(torch.zeros(2, 0), 1.0)


def test_entropy_sensitivity_has_the_right_gradient(generator):
    z = torch.randn(2, 5, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: theory.entropy_sensitivity(s, 1.3), z)


# --- bounded logits ------------------------------------------------------------------------------------------------


def test_range_floor_values():
    spread = 2 * math.sqrt(3)
    assert theory.range_entropy_minimiser(20, spread) == 2
    assert theory.range_entropy_floor(20, spread) == pytest.approx(1.703, abs=published(3))
    assert theory._range_entropy(20, spread, 1) == pytest.approx(1.759, abs=published(3))


@pytest.mark.parametrize("n", [1, 2, 3, 20, 101])
def test_range_floor_is_the_least_over_all_numbers_of_tied_keys(n):
    for spread in (0, 1e-3, 0.3, 1, 2, 3.2, 3.4641, 4, 5, 9, 50, 2000):
        logits = [np.repeat([spread, 0.0], [m, n - m]) for m in range(1, max(2, n))]
        every = [entropy(softmax(z)) for z in logits]
        assert theory.range_entropy_floor(n, spread) == pytest.approx(min(every), rel=1e-12, abs=1e-14)
        m = theory.range_entropy_minimiser(n, spread)
        assert isinstance(m, int)
        assert 1 <= m <= max(1, n - 1)
        assert every[m - 1] == pytest.approx(min(every), rel=1e-12, abs=1e-14)


def test_no_logits_of_that_range_go_below_the_floor():
    rng = np.random.default_rng(3)
    for n, spread in ((3, 2.0), (8, 3.0), (20, 2 * math.sqrt(3))):
        z = spread * rng.beta(0.3, 0.3, size=(20_000, n))
        assert entropy(softmax(z)).min() >= theory.range_entropy_floor(n, spread)


@pytest.mark.parametrize("n", [2, 5, 40])
def test_zhai_bound_holds_and_is_attained(n):
    rng = np.random.default_rng(n)
    spectral = np.array([0.0, 0.5, 2.0, 5.0, 400.0])
    worst = np.full(n, -1 / (n - 1))
    worst[0] = 1.0
    worst /= np.linalg.norm(worst)
    bound = theory.zhai_entropy_bound(n, spectral)
    attained = entropy(softmax(spectral[:, None] * worst))
    assert bound == pytest.approx(attained, rel=1e-12, abs=1e-15)
    z = rng.standard_normal((5000, n))
    z /= np.linalg.norm(z, axis=-1, keepdims=True)
    for s, b in zip(spectral, bound, strict=True):
        assert (entropy(softmax(s * z)) >= b - 1e-12).all()
    assert theory.zhai_entropy_bound(1, spectral).tolist() == [0] * 5
    assert theory.zhai_entropy_bound(n, 2) == bound[2]


def test_qk_layernorm_largest_weight():
    printed = {3: (0.627, 3), 5: (0.822, 3), 8: (0.938, 3), 64: (0.999998, 6)}
    for d_k, (value, digits) in printed.items():
        weight = theory.qk_layernorm_max_weight(20, d_k)
        assert weight == pytest.approx(value, abs=published(digits))
        r = math.sqrt(d_k)
        assert weight == pytest.approx(softmax(np.array([r] + 19 * [-r]))[0], rel=1e-13)
    assert theory.qk_layernorm_max_weight(1, 1) == 1


# --- normalised kernels --------------------------------------------------------------------------------------------


def test_dead_row_probabilities():
    assert theory.dead_row_probability(20, 3) == pytest.approx(0.125, abs=published(3))
    assert theory.dead_row_probability(20, 5) == pytest.approx(0.031, abs=published(3))
    assert theory.dead_row_probability(1, 3) == pytest.approx(0.42, abs=published(2))
    assert theory.dead_row_probability(1, 1) == 0.75
    for n, d in ((1, 2), (2, 2), (3, 1)):  # every pattern of signs alike
        signs = list(itertools.product((0, 1), repeat=d * (n + 1)))
        dead = sum(not any(s[i] and s[d * (j + 1) + i] for i in range(d) for j in range(n)) for s in signs)
        assert theory.dead_row_probability(n, d) == pytest.approx(dead / len(signs), rel=1e-14)


def test_relu_kernel_deficits_at_20_keys():
    deficit = {d: math.log(20) - theory.relu_kernel_entropy(20, d) for d in (3, 5, 16, 64, 256)}
    for d, (value, error) in {
        3: (0.767, 1.1e-3),  # sampled values: the last digit may be off
        5: (0.590, published(3)),
        16: (0.209, published(3)),
        64: (0.0506, 6e-5),
        256: (0.0125, published(4)),
    }.items():
        assert deficit[d] == pytest.approx(value, abs=error), d
    for d, value, error in ((5, 0.572, published(3)), (3, 0.669, 1.3e-3)):  # dead rows counted as uniform
        assert deficit[d] * (1 - theory.dead_row_probability(20, d)) == pytest.approx(value, abs=error)
    # the first-order law: exact to the next order in 1/d_k, which halves when d_k doubles
    ratios = [deficit[d] / theory.relu_kernel_entropy_deficit(20, d) - 1 for d in (64, 256)]
    assert ratios[0] == pytest.approx(4 * ratios[1], rel=0.05)
    assert ratios[1] == pytest.approx(0, abs=0.004)
    assert theory.relu_kernel_entropy_deficit(1, 3) == theory.relu_kernel_entropy(1, 3) == 0


def test_relu_kernel_entropy_of_two_keys_and_one_coordinate_is_an_integral_over_an_angle():
    # both keys live: their ratio is the tangent of a uniform angle; one live: entropy 0; of live rows 1 in 3 has both
    def h(angle):
        p = math.cos(angle) / (math.cos(angle) + math.sin(angle))
        return -p * math.log(p) - (1 - p) * math.log1p(-p)

    mean = 2 / math.pi * integrate.quad(h, 0, math.pi / 2, epsabs=1e-12)[0]
    assert theory.relu_kernel_entropy(2, 1) == pytest.approx(mean / 3, abs=4e-9)


def sampled_kernel_entropy(n: int, d: int, rows: int) -> tuple[float, float]:
    rng = np.random.default_rng(100 * n + d)
    q, k = np.maximum(rng.standard_normal((rows, 1, d)), 0), np.maximum(rng.standard_normal((rows, n, d)), 0)
    weight = (q * k).sum(-1)
    total = weight.sum(-1, keepdims=True)
    live = total[:, 0] > 0
    h = entropy(weight[live] / total[live])
    return h.mean(), h.std() / math.sqrt(live.sum())


@pytest.mark.parametrize(("n", "d"), [(2, 3), (20, 3), (20, 1)])
def test_relu_kernel_entropy_agrees_with_sampling_within_its_error(n, d):
    mean, error = sampled_kernel_entropy(n, d, 60_000)
    assert abs(theory.relu_kernel_entropy(n, d) - mean) < 4 * error


@pytest.mark.parametrize("mu", [0.0, 0.5, 20.0, 49.9, 50.0, 70.0, 1e5])
def test_relu_slope_on_both_sides_of_its_switch(mu):
    from scipy.special import erfcx

    with mpmath.workdps(50):
        m = mpmath.mpf(mu)
        exact = 1 / mpmath.sqrt(2 * mpmath.pi) - m / 2 * mpmath.erfc(m / mpmath.sqrt(2)) * mpmath.exp(m**2 / 2)
        exact = float(exact)
    value = theory._relu_slope(np.array([mu]), erfcx(np.array([mu]) / math.sqrt(2)))[0]
    assert value == pytest.approx(exact, rel=3e-11 if mu >= 50 else 3e-12, abs=0)


def test_elu_kernel_entropy_limit():
    assert theory.relu_kernel_entropy(20, 3) == pytest.approx(2.230, abs=published(3))
    assert theory.elu_kernel_entropy_limit(20, 3) == pytest.approx(2.203, abs=published(3))
    h3, h1 = theory.relu_kernel_entropy(20, 3), theory.relu_kernel_entropy(20, 1)
    assert theory.elu_kernel_entropy_limit(20, 3) == pytest.approx(7 / 8 * h3 + h1 / 8, rel=1e-14)
    rng = np.random.default_rng(11)
    scale, rows = 1e4, 40_000
    q, k = scale * rng.standard_normal((rows, 1, 3)), scale * rng.standard_normal((rows, 20, 3))

    def log_phi(x):  # ELU+1 in logarithms: e^{x} of a negative coordinate underflows at this scale
        return np.where(x > 0, np.log1p(np.maximum(x, 0)), x)

    h = entropy(softmax(np.logaddexp.reduce(log_phi(q) + log_phi(k), axis=-1)))
    assert abs(theory.elu_kernel_entropy_limit(20, 3) - h.mean()) < 4 * h.std() / math.sqrt(rows) + 1e-3


def test_softmax_over_dot_products_in_the_setting_of_the_kernels():
    # q, k ~ N(0, s²I₃): given the query the logits are i.i.d. N(0, σ²) with σ = s²|q|/√3
    for s, value, digits in ((0.3, 2.992, 3), (1, 2.597, 3), (3, 0.54, 2), (10, 0.044, 3)):
        r, weight = panels(0.0, 9.0, 3)
        h = theory.expected_entropy(20, s**2 * r / math.sqrt(3)) @ (weight * stats.chi.pdf(r, 3))
        assert h == pytest.approx(value, abs=2 * published(digits)), s


# --- norms of P ----------------------------------------------------------------------------------------------------


def row_stochastic(generator, *shape, scale=2.0):
    return torch.softmax(scale * torch.randn(*shape, generator=generator), dim=-1)


def test_spectral_sandwich(generator):
    for shape in ((5, 6, 6), (5, 3, 7), (5, 7, 3), (2, 2, 4, 4)):
        p = row_stochastic(generator, *shape)
        bounds = theory.spectral_norm_bounds(p)
        norm = torch.linalg.matrix_norm(p, ord=2)
        assert bounds.lower.shape == shape[:-2]
        assert (bounds.lower <= norm + 1e-12).all()
        assert (norm <= bounds.upper + 1e-12).all()
        column = p.numpy().sum(-2)
        assert bounds.lower.numpy() == pytest.approx(np.sqrt((column**2).sum(-1) / shape[-2]), rel=1e-13)
        assert bounds.upper.numpy() == pytest.approx(np.sqrt(column.max(-1)), rel=1e-13)


def test_spectral_sandwich_is_attained():
    n = 5
    sink = torch.zeros(n, n).index_fill(1, torch.tensor([2]), 1)
    assert [float(b) for b in theory.spectral_norm_bounds(sink)] == pytest.approx([math.sqrt(n)] * 2)
    mixing = 0.3 * torch.eye(n) + 0.7 * torch.eye(n).roll(1, 0)
    assert [float(b) for b in theory.spectral_norm_bounds(mixing)] == pytest.approx([1, 1])
    one_hot = torch.eye(n)[[0, 0, 1, 3, 0]]
    assert float(theory.spectral_norm_bounds(one_hot).upper) == pytest.approx(math.sqrt(3))
    assert float(torch.linalg.matrix_norm(one_hot, ord=2)) == pytest.approx(math.sqrt(3))


def test_frobenius_norm_lies_between_its_bounds_and_reaches_both(generator):
    p = row_stochastic(generator, 50, 8, 8, scale=3.0)
    h = entropy(p.numpy())
    bounds = theory.frobenius_bounds(8, h.mean(-1))
    squares = (p.numpy() ** 2).sum((-1, -2))
    assert (bounds.lower <= squares).all()
    assert (squares <= bounds.upper).all()
    # uniform over 4 of 8 keys: H = ln 4, ‖P‖_F² = 8/4
    assert theory.frobenius_bounds(8, math.log(4)) == pytest.approx((2, 8), rel=1e-14)
    assert theory.frobenius_bounds(8, 0) == (8, 8)


def test_mean_trace_of_the_jacobian(generator):
    p = row_stochastic(generator, 3, 4, 6)
    jacobian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    trace = jacobian.diagonal(dim1=-2, dim2=-1).sum(-1).mean(-1)
    torch.testing.assert_close(theory.softmax_trace_identity(p), trace, rtol=1e-13, atol=1e-14)
    assert float(theory.softmax_trace_identity(torch.eye(4))) == 0


def test_query_key_starvation_and_condensation_are_one_number():
    # E tr J = 1 − E Σp² → m
    n, sigma = 10**9, 40.0
    m = theory.finite_size_sigma(n) / sigma
    assert 1 - theory.expected_sum_of_squares(n, sigma) == pytest.approx(m, rel=0.02)


# --- gradients -----------------------------------------------------------------------------------------------------


def head(generator, *batch, n=5, d=3, e=4, f=2):
    shapes = {"x": (*batch, n, d), "w_q": (d, e), "w_k": (d, e), "w_v": (d, f), "grad_output": (*batch, n, f)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def attention(x, w_q, w_k, w_v, scale):
    p = torch.softmax(scale * (x @ w_q) @ (x @ w_k).mT, dim=-1)
    return p, p @ x @ w_v


@pytest.mark.parametrize("scale", [0.5, 1, 1.7])
def test_attention_gradients_are_those_of_autograd(scale, generator):
    h = head(generator, 2, 3)
    inputs = {name: h[name].expand(2, 3, -1, -1).clone().requires_grad_() for name in ("w_v", "w_q", "w_k", "x")}
    p, output = attention(**{k: inputs[k] for k in ("x", "w_q", "w_k", "w_v")}, scale=scale)
    exact = torch.autograd.grad((output * h["grad_output"]).sum(), list(inputs.values()))
    formulas = theory.attention_gradients(p=p.detach(), scale=scale, **h)
    for name, value, expected in zip(formulas._fields, formulas, exact, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-11, msg=name)


def test_attention_gradients_are_those_of_finite_differences(generator):
    h = head(generator)
    blocks = ("w_v", "w_q", "w_k", "x")

    def loss(changed):
        values = {**h, **changed}
        return float((attention(*(values[k] for k in ("x", "w_q", "w_k", "w_v")), 0.5)[1] * h["grad_output"]).sum())

    p = attention(*(h[k] for k in ("x", "w_q", "w_k", "w_v")), 0.5)[0]
    formulas = theory.attention_gradients(p=p, scale=0.5, **h)
    for name in blocks:
        direction = torch.randn(*h[name].shape, generator=generator)
        step = 1e-5
        slope = (loss({name: h[name] + step * direction}) - loss({name: h[name] - step * direction})) / (2 * step)
        assert float((getattr(formulas, name) * direction).sum()) == pytest.approx(slope, rel=1e-7)


def test_query_jacobian_is_a_covariance(generator):
    h = head(generator)
    q, k, v = h["x"] @ h["w_q"], h["x"] @ h["w_k"], h["x"] @ h["w_v"]
    p = torch.softmax(0.7 * q @ k.mT, dim=-1)
    full = torch.autograd.functional.jacobian(lambda q: torch.softmax(0.7 * q @ k.mT, dim=-1) @ v, q)
    own = torch.stack([full[i, :, i] for i in range(len(q))])
    value = theory.query_jacobian(p, k, v, 0.7)
    torch.testing.assert_close(value, own, rtol=1e-11, atol=1e-12)
    assert theory.query_jacobian(torch.eye(5), k, v, 1).abs().max() < 1e-14
    # ∂L/∂q_i = c·Cov_p(k, v·g_i) is T's row times the keys
    through_logits = 0.7 * theory.logit_gradient(p, h["grad_output"], v) @ k
    torch.testing.assert_close(torch.einsum("ned,ne->nd", value, h["grad_output"]), through_logits)


def test_value_gradient_bounds_hold_and_neither_form_is_always_smaller(generator):
    x, g = torch.randn(40, 6, 3, generator=generator), torch.randn(40, 6, 2, generator=generator)
    p = row_stochastic(generator, 40, 6, 6)
    bounds = theory.value_gradient_bounds(x, p, g)
    norm = torch.linalg.matrix_norm(x.mT @ p.mT @ g)
    for bound in bounds:
        assert (norm <= bound).all()

    def norms(a):
        s = np.linalg.svd(a.numpy(), compute_uv=False)
        return s.max(-1), np.sqrt((s**2).sum(-1))

    (x2, _), (p2, pf), (g2, gf) = norms(x), norms(p), norms(g)
    assert bounds.frobenius_form.numpy() == pytest.approx(x2 * pf * g2, rel=1e-12)
    assert bounds.spectral_form.numpy() == pytest.approx(x2 * p2 * gf, rel=1e-12)
    sink = torch.zeros(6, 6).index_fill(1, torch.tensor([0]), 1)
    with_sink, with_identity = (theory.value_gradient_bounds(x[0], q, g[0]) for q in (sink, torch.eye(6)))
    assert with_sink.frobenius_form < with_sink.spectral_form
    assert with_identity.spectral_form < with_identity.frobenius_form
    # attained: one feature, P = I and G along X
    column = x[0, :, :1]
    for bound in theory.value_gradient_bounds(column, torch.eye(6), column)[1:]:
        assert float(bound) == pytest.approx(float(torch.linalg.matrix_norm(column.mT @ column)), rel=1e-12)


@pytest.mark.parametrize("scale", [0.5, 3])
def test_query_and_key_gradient_bounds_hold_in_order(scale, generator):
    h = head(generator, 60)
    p = attention(h["x"], h["w_q"], h["w_k"], h["w_v"], scale)[0]
    gradients = theory.attention_gradients(p=p, scale=scale, **h)
    shared = {"x": h["x"], "p": p, "w_v": h["w_v"], "grad_output": h["grad_output"], "scale": scale}
    x2 = np.linalg.norm(h["x"].numpy(), ord=2, axis=(-2, -1))
    t = theory.logit_gradient(p, h["grad_output"], h["x"] @ h["w_v"]).numpy()
    for gradient, bounds, other in (
        (gradients.w_q, theory.query_gradient_bounds(w_k=h["w_k"], **shared), h["w_k"]),
        (gradients.w_k, theory.key_gradient_bounds(w_q=h["w_q"], **shared), h["w_q"]),
    ):
        assert (torch.linalg.matrix_norm(gradient) <= bounds.from_logit_gradient).all()
        assert (bounds.from_logit_gradient <= bounds.from_probabilities * (1 + 1e-12)).all()
        expected = scale * x2**2 * np.linalg.norm(other.numpy(), ord=2) * np.linalg.norm(t, axis=(-2, -1))
        assert bounds.from_logit_gradient.numpy() == pytest.approx(expected, rel=1e-12)


def test_the_bound_through_probabilities_is_attained_with_two_keys_and_zero_at_one_hot(generator):
    h = head(generator, 7, n=2)
    p = attention(h["x"], h["w_q"], h["w_k"], h["w_v"], 0.5)[0]
    shared = {"x": h["x"], "w_k": h["w_k"], "w_v": h["w_v"], "grad_output": h["grad_output"], "scale": 0.5}
    bounds = theory.query_gradient_bounds(p=p, **shared)
    torch.testing.assert_close(bounds.from_probabilities, bounds.from_logit_gradient, rtol=1e-11, atol=1e-12)
    one_hot = theory.query_gradient_bounds(p=torch.eye(2).expand(7, 2, 2), **shared)
    assert all(float(b.abs().max()) == 0 for b in one_hot)


def test_the_bound_through_probabilities_uses_the_largest_weight_when_rows_are_spread(generator):
    h = head(generator, n=6)
    p = torch.full((6, 6), 1 / 6)
    m = h["grad_output"] @ (h["x"] @ h["w_v"]).mT
    bounds = theory.query_gradient_bounds(h["x"], p, h["w_k"], h["w_v"], h["grad_output"], 1.0)
    # uniform rows: T = (M − mean)/6 exactly, and p_max = 1/6 < 2·(1/6)(5/6)
    assert float(bounds.from_probabilities) == pytest.approx(float(bounds.from_logit_gradient), rel=1e-12)
    t = theory.logit_gradient(p, h["grad_output"], h["x"] @ h["w_v"])
    torch.testing.assert_close(t, (m - m.mean(-1, keepdim=True)) / 6)


# --- curvature -----------------------------------------------------------------------------------------------------


def all_sign_prompts(n: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every prompt whose x_j, w and query have coordinates ±1: the second moments are those of N(0, I), exactly."""
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=(n + 2) * d))).view(-1, n + 2, d)
    x, query, w = signs[:, :n], signs[:, n], signs[:, n + 1]
    y = torch.einsum("rnd,rd->rn", x, w)
    context = torch.cat([x, y.unsqueeze(-1)], -1)
    asked = torch.cat([query, torch.zeros(len(query), 1)], -1)
    return torch.cat([context, asked.unsqueeze(1)], 1), (query * w).sum(-1)


@pytest.mark.parametrize(("d", "p"), [(2, [0.5, 0.2, 0.2, 0.1]), (2, [1.0, 0.0, 0.0, 0.0]), (3, [0.6, 0.3, 0.1])])
def test_value_curvature_is_the_hessian_of_the_regression_loss(d, p):
    p = torch.tensor(p)
    tokens, target = all_sign_prompts(len(p) - 1, d)
    u = torch.einsum("n,rnd->rd", p, tokens)

    def loss(w_v):
        return ((u @ w_v)[:, -1] - target).square().mean()

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(d + 1, d + 1)).reshape((d + 1) ** 2, -1)
    top = float(torch.linalg.eigvalsh(hessian)[-1])
    context = float(p[:-1].square().sum())
    assert theory.value_curvature(context, d) == pytest.approx(top, rel=1e-12)
    assert float(theory.value_curvature_of(u)) == pytest.approx(top, rel=1e-12)
    limit = theory.critical_learning_rate(context, d)
    assert limit == pytest.approx(1 / (d * context), rel=1e-14)
    assert limit == pytest.approx(theory.stable_learning_rate(top), rel=1e-12)
    # gradient descent itself: shrinks below the limit, grows above it
    for rate, grows in ((0.98 * limit, False), (1.03 * limit, True)):
        w_v = torch.randn(d + 1, d + 1, generator=torch.Generator().manual_seed(1))
        norms = []
        for _ in range(150):
            w_v.requires_grad_()
            (gradient,) = torch.autograd.grad(loss(w_v), w_v)
            norms.append(float(torch.linalg.matrix_norm(gradient)))
            w_v = w_v.detach() - rate * gradient
        assert (norms[-1] > norms[0]) == grows


def test_learning_rate_limits_from_uniform_to_one_hot():
    assert theory.critical_learning_rate(1, 2) == 0.5
    assert theory.critical_learning_rate(1, 3) == pytest.approx(1 / 3)
    assert theory.critical_learning_rate(1 / 20, 2) == pytest.approx(10)
    assert theory.critical_learning_rate(np.array([0.0, 1.0]), 2).tolist() == [math.inf, 0.5]
    assert theory.value_curvature(np.array([0.25, 1.0]), 3) == pytest.approx([1.5, 6])
    batch = torch.stack([torch.eye(3), 2 * torch.eye(3)])
    assert theory.value_curvature_of(batch).tolist() == pytest.approx([2 / 3, 8 / 3])


# --- refusals ------------------------------------------------------------------------------------------------------

OF_N_AND_SIGMA = [
    theory.entropy_expansion,
    theory.entropy_resummed,
    theory.typical_entropy,
    theory.annealed_sum_of_squares,
    theory.expected_entropy,
    theory.expected_log_partition,
    theory.expected_sum_of_squares,
]


@pytest.mark.parametrize("law", OF_N_AND_SIGMA)
def test_laws_start_at_one_key_and_refuse_bad_sigma(law):
    assert law(1, 0.0) in (0, 1)
    with pytest.raises(ValueError, match=r"n must be an integer >= 1, got n=0"):
        law(0, 1.0)
    for bad in (-1.0, math.nan, math.inf, np.array([1.0, -2.0])):
        with pytest.raises(ValueError, match=r"sigma must be finite and >= 0, got sigma="):
            law(5, bad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.critical_sigma(0), "n must be an integer >= 1, got n=0"),
        (lambda: theory.finite_size_sigma(1), "n must be an integer >= 2, got n=1"),
        (lambda: theory.condensed_entropy(5, -1.0), "sigma must be finite and >= 0, got sigma=-1.0"),
        (lambda: theory.entropy_expansion(5, 1.0, terms=4), r"terms must be an integer in \[1, 3\], got terms=4"),
        (lambda: theory.entropy_expansion(5, 1.0, terms=0), r"terms must be an integer in \[1, 3\], got terms=0"),
        (lambda: theory.range_entropy_floor(5, -1.0), "logit_range must be finite and >= 0, got logit_range=-1.0"),
        (lambda: theory.range_entropy_floor(0, 1.0), "n must be an integer >= 1, got n=0"),
        (lambda: theory.zhai_entropy_bound(5, -1.0), "spectral must be finite and >= 0, got spectral=-1.0"),
        (lambda: theory.zhai_entropy_bound(0, 1.0), "n must be an integer >= 1, got n=0"),
        (lambda: theory.qk_layernorm_max_weight(5, 0), "d_k must be an integer >= 1, got d_k=0"),
        (lambda: theory.qk_layernorm_max_weight(0, 5), "n must be an integer >= 1, got n=0"),
        (lambda: theory.dead_row_probability(0, 3), "n_keys must be an integer >= 1, got n_keys=0"),
        (lambda: theory.dead_row_probability(3, 0), "d_k must be an integer >= 1, got d_k=0"),
        (lambda: theory.relu_kernel_entropy(0, 3), "n must be an integer >= 1, got n=0"),
        (lambda: theory.relu_kernel_entropy(1, 0), "d_k must be an integer >= 1, got d_k=0"),
        (lambda: theory.relu_kernel_entropy_deficit(5, 0), "d_k must be an integer >= 1, got d_k=0"),
        (lambda: theory.elu_kernel_entropy_limit(5, 0), "d_k must be an integer >= 1, got d_k=0"),
        (lambda: theory.frobenius_bounds(0, 1.0), "n must be an integer >= 1, got n=0"),
        (lambda: theory.frobenius_bounds(5, -0.1), "mean_entropy must be finite and >= 0, got mean_entropy=-0.1"),
        (lambda: theory.spectral_norm_bounds(torch.zeros(0, 3)), r"p must be an array without empty axes"),
        (lambda: theory.softmax_trace_identity(torch.zeros(3, 0)), r"p must be an array without empty axes"),
        (lambda: theory.value_curvature(-1.0, 2), "sum_of_squares must be finite and >= 0"),
        (lambda: theory.value_curvature(1.0, 0), "d must be an integer >= 1, got d=0"),
        (lambda: theory.value_curvature_of(torch.zeros(0, 3)), "u must be an array without empty axes"),
        (lambda: theory.stable_learning_rate(0.0), "curvature must be finite and > 0, got curvature=0.0"),
        (lambda: theory.entropy_sensitivity(torch.zeros(1, 2), -1.0), "inverse_temperature must be finite and >= 0"),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_widths_and_keys_start_at_one():
    assert theory.qk_layernorm_max_weight(2, 1) == pytest.approx(1 / (1 + math.exp(-2)))
    assert theory.relu_kernel_entropy_deficit(2, 1) == pytest.approx(math.pi * (math.pi - 1) / 4)
    assert theory.elu_kernel_entropy_limit(2, 1) == pytest.approx(theory.relu_kernel_entropy(2, 1))
    assert theory.value_curvature(1.0, 1) == 2
    assert theory.frobenius_bounds(1, 0.0) == (1, 1)


def test_every_public_name_exists():
    assert all(hasattr(theory, name) for name in theory.__all__)
    assert theory.__all__ == sorted(theory.__all__)
