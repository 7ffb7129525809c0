"""The laws of the book in closed form or by quadrature.

Scalar laws take floats (`sigma` may be an array) and are computed in float64 with numpy and scipy; identities and
bounds for given matrices take torch tensors. A law that holds in one regime alone is NaN outside it, so that a curve
drawn over all of σ stops where the law stops. Entropies are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.special import digamma, erfcx, ndtr
from torch import Tensor

from lipattn._validate import integer, non_negative, positive, refuse

__all__ = [
    "AttentionGradients",
    "Bounds",
    "QueryGradientBounds",
    "ValueGradientBounds",
    "annealed_sigma",
    "annealed_sum_of_squares",
    "attention_gradients",
    "condensed_entropy",
    "condensed_sum_of_squares",
    "critical_learning_rate",
    "critical_sigma",
    "dead_row_probability",
    "elu_kernel_entropy_limit",
    "entropy_expansion",
    "entropy_resummed",
    "entropy_sensitivity",
    "expected_entropy",
    "expected_log_partition",
    "expected_sum_of_squares",
    "finite_size_sigma",
    "frobenius_bounds",
    "key_gradient_bounds",
    "logit_gradient",
    "qk_layernorm_max_weight",
    "query_gradient_bounds",
    "query_jacobian",
    "range_entropy_floor",
    "range_entropy_minimiser",
    "relu_kernel_entropy",
    "relu_kernel_entropy_deficit",
    "softmax_trace_identity",
    "spectral_norm_bounds",
    "stable_learning_rate",
    "typical_entropy",
    "value_curvature",
    "value_curvature_of",
    "value_gradient_bounds",
    "zhai_entropy_bound",
]

Real = float | int
"""A number; the laws accept ints where they accept floats."""
RealOrArray = float | int | Float64[np.ndarray, "..."]
"""A number, or a float64 array of them: the law is applied entry by entry."""
Value = float | Float64[np.ndarray, "..."]
"""A float for a number, an array of the same shape for an array."""


class Bounds(NamedTuple):
    """A lower and an upper bound of one quantity."""

    lower: Value | Tensor
    upper: Value | Tensor


# --- helpers -----------------------------------------------------------------------------------------------------


def _array(name: str, value: RealOrArray) -> np.ndarray:
    """`value` as float64, if all of it is finite and >= 0."""
    array = np.asarray(value, dtype=np.float64)
    if not (np.isfinite(array) & (array >= 0)).all():
        raise refuse(name, "finite and >= 0", value)
    return array


def _value(array: np.ndarray | np.float64) -> Value:
    """A float for a number or an array without axes, else the array."""
    return float(array) if np.ndim(array) == 0 else array


def _where_law_holds(holds: np.ndarray | np.bool, x: np.ndarray, law: Callable[[np.ndarray], np.ndarray]) -> Value:
    """law(x) where `holds`, NaN elsewhere."""
    result = np.full_like(x, np.nan)
    result[holds] = law(x[holds])
    return _value(result)


# --- one row of i.i.d. Gaussian logits: scales ---------------------------------------------------------------------


def critical_sigma(n: int) -> float:
    r"""Standard deviation of logits at which softmax over `n` i.i.d. Gaussian logits condenses, n → ∞.

    .. math:: \sigma_c = \sqrt{2 \ln N}

    Below it a row spreads over a power of N keys, above it a few keys hold all the mass. 0 for n = 1.

    Raises:
        ValueError: if n < 1.

    Source: derrida1981random; for attention giorlandino2025two.
    """
    return math.sqrt(2 * math.log(integer("n", n, minimum=1)))


def finite_size_sigma(n: int) -> float:
    r"""Location of the largest of `n` standard Gaussians, which replaces σ_c at finite N.

    .. math:: b_N = \sigma_c - \frac{\ln\ln N + \ln 4\pi}{2 \sigma_c}

    Below σ_c for every n; with it the condensed phase is quantitative from N = 21 on.

    Raises:
        ValueError: if n < 2 (ln ln 1 is not defined).

    Source: extreme-value theory of the Gaussian; its use here is ours, chapter 2.
    """
    sigma_c = critical_sigma(integer("n", n, minimum=2))
    return sigma_c - (math.log(math.log(n)) + math.log(4 * math.pi)) / (2 * sigma_c)


def annealed_sigma(n: int) -> float:
    r"""Standard deviation up to which E Σp² = e^{σ²}/N holds to leading order, σ_c/√3.

    Beyond it the mean is held by rare rows. For a typical row the law ends at σ_c/2 already.

    Raises:
        ValueError: if n < 1.

    Source: derrida1981random; ours, chapter 2.
    """
    return critical_sigma(n) / math.sqrt(3)


# --- variance to entropy -------------------------------------------------------------------------------------------


def entropy_sensitivity(logits: Float[Tensor, "*batch n m"], inverse_temperature: Real) -> Float[Tensor, "*batch n"]:
    r"""How fast the entropy of softmax(β·logits) changes with β, in nats per unit of β.

    .. math:: \frac{dH}{d\beta} = -\beta \, \mathrm{Var}_p(s), \qquad p \propto e^{\beta s}

    The variance is taken under p itself. Two other forms of the same law: with z = βs, dH/d ln β = −Var_p(z), which is
    β times the value returned; for z = σx, ∂H/∂σ² = −½·Var_p(x), which is the value at β = σ divided by 2σ.
    It is an instantaneous rate: the variance under p changes on the way.

    Returns:
        One value per query, at most 0; 0 for constant logits, for β = 0, and for one key. A logit of −∞ is a masked
        key; a row without any finite logit is NaN.

    Raises:
        ValueError: if there are no keys, or if `inverse_temperature` is negative or not finite.

    Source: ours, chapter 2.
    """
    beta = non_negative("inverse_temperature", float(inverse_temperature))
    if logits.shape[-1] == 0:
        raise refuse("logits", "an array with at least one key", tuple(logits.shape))
    p = torch.softmax(beta * (logits - logits.detach().amax(dim=-1, keepdim=True)), dim=-1)
    attended = p != 0  # true of NaN: a row without finite logits stays NaN
    s = logits.masked_fill(~attended, 0)
    centred = (s - (p * s).sum(dim=-1, keepdim=True)).masked_fill(~attended, 0)
    return -beta * (p * centred.square()).sum(dim=-1)


def entropy_expansion(n: int, sigma: RealOrArray, terms: int = 3) -> Value:
    r"""Mean entropy of softmax over `n` i.i.d. N(0, σ²) logits, expanded at σ → 0 for fixed n; nats.

    .. math:: \mathbb{E} H = \ln N - \frac{N-1}{2N} \sigma^2 + \frac{3(N-1)}{4N^2} \sigma^4 + O(\sigma^6)

    `terms` counts ln N as the first. A polynomial, so for large σ it leaves [0, ln N]. Exact for n = 1 and σ = 0.

    Raises:
        ValueError: if n < 1, sigma is negative or not finite, or terms is not 1, 2 or 3.

    Source: two terms hong2025variance, Theorem 5.1; third ours, chapter 2.
    """
    n = integer("n", n, minimum=1)
    variance = _array("sigma", sigma) ** 2
    coefficients = (math.log(n), -(n - 1) / (2 * n), 3 * (n - 1) / (4 * n**2))
    kept = coefficients[: integer("terms", terms, minimum=1, maximum=len(coefficients))]
    return _value(sum((c * variance**k for k, c in enumerate(kept)), start=np.zeros_like(variance)))


def entropy_resummed(n: int, sigma: RealOrArray) -> Value:
    r"""Mean entropy of softmax over `n` i.i.d. N(0, σ²) logits to first order in 1/n, all orders in σ; nats.

    .. math:: \mathbb{E} H \approx \ln N - \frac{\sigma^2}{2} + \frac{1 + (2\sigma^2 - 1) e^{\sigma^2}}{2N}

    Good up to σ ≈ 0.4 σ_c; beyond, the last term grows without limit (∞ when it overflows).

    Raises:
        ValueError: if n < 1, or sigma is negative or not finite.

    Source: ours, chapter 2.
    """
    n = integer("n", n, minimum=1)
    variance = _array("sigma", sigma) ** 2
    with np.errstate(over="ignore"):
        correction = (1 + (2 * variance - 1) * np.exp(variance)) / (2 * n)
    return _value(math.log(n) - variance / 2 + correction)


def typical_entropy(n: int, sigma: RealOrArray) -> Value:
    r"""Entropy of softmax over `n` i.i.d. N(0, σ²) logits below condensation, leading order in ln N; nats.

    .. math:: H = \ln N - \sigma^2/2, \qquad \sigma \le \sigma_c

    From ln N at σ = 0 to 0 at σ_c; NaN beyond, where the law does not hold. Finite N rounds the transition strongly.

    Raises:
        ValueError: if n < 1, or sigma is negative or not finite.

    Source: derrida1981random; giorlandino2025two.
    """
    x = _array("sigma", sigma)
    return _where_law_holds(x <= critical_sigma(n), x, lambda s: math.log(n) - s**2 / 2)


def annealed_sum_of_squares(n: int, sigma: RealOrArray) -> Value:
    r"""Mean Σp² of softmax over `n` i.i.d. N(0, σ²) logits far below condensation, leading order in N.

    .. math:: \mathbb{E} \textstyle\sum_j p_j^2 = e^{\sigma^2} / N, \qquad \sigma \le \sigma_c / \sqrt 3

    1/N at σ = 0; NaN beyond `annealed_sigma(n)`. A typical row leaves the law earlier, at σ_c/2.

    Raises:
        ValueError: if n < 1, or sigma is negative or not finite.

    Source: derrida1981random; ours, chapter 2.
    """
    x = _array("sigma", sigma)
    return _where_law_holds(x <= annealed_sigma(n), x, lambda s: np.exp(s**2) / n)


def _condensed_m(n: int, sigma: RealOrArray, finite_size: bool, law: Callable[[np.ndarray], np.ndarray]) -> Value:
    """law(m) for m = b_N/σ (σ_c/σ if not `finite_size`) where m < 1, NaN elsewhere."""
    x = _array("sigma", sigma)
    scale = finite_size_sigma(n) if finite_size else critical_sigma(integer("n", n, minimum=2))
    return _where_law_holds(x > scale, x, lambda s: law(scale / s))


def condensed_entropy(n: int, sigma: RealOrArray, finite_size: bool = True) -> Value:
    r"""Mean entropy of softmax over `n` i.i.d. N(0, σ²) logits in the condensed phase; nats.

    .. math:: \mathbb{E} H = \psi(1) - \psi(1 - m), \qquad m = b_N/\sigma < 1

    with ψ the digamma function; m = σ_c/σ, the limit law, when `finite_size` is False. Falls to 0 like π²m/6 as
    σ → ∞; NaN where m ≥ 1, outside the phase.

    Raises:
        ValueError: if n < 2, or sigma is negative or not finite.

    Source: derrida1981random; giorlandino2025two; b_N in place of σ_c ours, chapter 2.
    """
    return _condensed_m(n, sigma, finite_size, lambda m: digamma(1) - digamma(1 - m))


def condensed_sum_of_squares(n: int, sigma: RealOrArray, finite_size: bool = True) -> Value:
    r"""Mean Σp² of softmax over `n` i.i.d. N(0, σ²) logits in the condensed phase.

    .. math:: \mathbb{E} \textstyle\sum_j p_j^2 = 1 - m, \qquad m = b_N/\sigma < 1

    m = σ_c/σ, the limit law, when `finite_size` is False. Hence E tr J = m for the softmax Jacobian: query and key
    gradients fade only like 1/σ on average. A single row is random with this mean. NaN where m ≥ 1.

    Raises:
        ValueError: if n < 2, or sigma is negative or not finite.

    Source: derrida1981random; giorlandino2025two; b_N in place of σ_c ours, chapter 2.
    """
    return _condensed_m(n, sigma, finite_size, lambda m: 1 - m)


# --- one row of i.i.d. Gaussian logits: exact, at any finite n -----------------------------------------------------

# The trapezoidal rule converges geometrically on these integrands: an entire function of t = ln λ that falls like
# a double exponential or a Gaussian. The values below leave errors near 1e-13; finer or wider ones change nothing.
_STEP = 0.25  # of the rule, in units of the narrowest feature
_REACH_GAUSSIAN = 9.0  # standard deviations kept beyond the largest of n
_REACH_EXPONENTIAL = 36.0  # where e^{-reach} is dropped
_REACH_GUMBEL = 4.0  # where e^{-e^{reach}} is dropped
_SWITCH_SIGMA = 1.0  # σ above which the inner rule changes its variable; both are exact around it


class _Moments(NamedTuple):
    log_partition: float
    entropy: float
    sum_of_squares: float


@lru_cache(maxsize=4096)
def _gaussian_moments(n: int, sigma: float) -> _Moments:
    r"""E ln Z, E H and E Σp² by one quadrature over t = ln λ and one over a logit z = σx.

    With w = λe^z, L = E e^{-w} and r = L^{N-1}, and since ∫ e^{-λZ} dλ = 1/Z:

        1      =      N ∫ E[w e^{-w}] r dt                E Σp² =      N ∫ E[w² e^{-w}] r dt
        E ln Z = −γ − N ∫ t E[w e^{-w}] r dt              E H   = −γ − N ∫ E[w ln w e^{-w}] r dt

    These are SCIENCE's integrals after one integration by parts; no difference of large numbers is left in E H.
    For σ ≤ 1 the inner rule runs over x. For σ > 1, where e^{-w} is narrow in x, it runs over s = ln w = t + z, in
    which the integrands w e^{-w} and w² e^{-w} do not depend on σ.
    """
    if n == 1 or sigma == 0:
        return _Moments(math.log(n), math.log(n), 1 / n)
    sigma_c = critical_sigma(n)
    reach_x = _REACH_GAUSSIAN + sigma_c
    reach_t = _REACH_EXPONENTIAL + math.log(n)
    step_t = _STEP * max(1.0, sigma / (1 + sigma_c))
    t = np.arange(-(reach_x * sigma + reach_t), reach_x * sigma + _REACH_GUMBEL, step_t)
    if sigma <= _SWITCH_SIGMA:
        x = np.arange(-reach_x, reach_x, _STEP)
        s = t[:, None] + sigma * x
        w = np.exp(s)
        density = _normal_density(x) * _STEP
        tail = -np.expm1(-w) @ density
        first = w * np.exp(-w) * density
    else:
        s = np.arange(-reach_t, _REACH_GUMBEL, _STEP)
        w = np.exp(s)
        x = (s - t[:, None]) / sigma
        gumbel = w * np.exp(-w) * _STEP
        tail = ndtr(-x) @ gumbel
        first = _normal_density(x) / sigma * gumbel
    # tail = 1 − L; where it rounds to 1 the power below underflows
    r = n * step_t * np.exp((n - 1) * np.log1p(-np.minimum(tail, 1 - np.finfo(float).epsneg)))
    return _Moments(
        log_partition=float(-np.euler_gamma - r @ (t * first.sum(axis=1))),
        entropy=float(-np.euler_gamma - r @ (s * first).sum(axis=1)),
        sum_of_squares=float(r @ (w * first).sum(axis=1)),
    )


def _normal_density(x: np.ndarray) -> np.ndarray:
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _gaussian_expectation(n: int, sigma: RealOrArray, field: str) -> Value:
    n = integer("n", n, minimum=1)
    x = _array("sigma", sigma)
    values = [getattr(_gaussian_moments(n, float(s)), field) for s in x.flat]
    return _value(np.array(values, dtype=np.float64).reshape(x.shape))


def expected_log_partition(n: int, sigma: RealOrArray) -> Value:
    r"""E ln Σ_j e^{z_j} over `n` i.i.d. logits z ~ N(0, σ²), exact at finite n by quadrature; nats.

    .. math:: \mathbb{E}\ln Z = \int_0^\infty \bigl(e^{-\lambda} - L(\lambda)^N\bigr) \frac{d\lambda}{\lambda},
              \qquad L(\lambda) = \mathbb{E}\, e^{-\lambda e^{\sigma x}}

    At least ln N (attained at σ = 0) and at most ln N + σ²/2. 0 for n = 1. To 10 digits or more.

    Raises:
        ValueError: if n < 1, or sigma is negative or not finite.

    Source: ours, chapter 2.
    """
    return _gaussian_expectation(n, sigma, "log_partition")


def expected_entropy(n: int, sigma: RealOrArray) -> Value:
    r"""Mean entropy of softmax over `n` i.i.d. logits z ~ N(0, σ²), exact at finite n by quadrature; nats.

    .. math:: \mathbb{E} H = \mathbb{E}\ln Z
              - N \int_0^\infty \mathbb{E}\bigl[z e^z e^{-\lambda e^z}\bigr] L(\lambda)^{N-1} d\lambda
              = \mathbb{E}\ln Z - \sigma^2 \bigl(1 - \mathbb{E} \textstyle\sum_j p_j^2\bigr)

    In (0, ln N]; ln N at σ = 0; falls like 1/σ as σ → ∞. To 10 digits or more.

    Raises:
        ValueError: if n < 1, or sigma is negative or not finite.

    Source: ours, chapter 2.
    """
    return _gaussian_expectation(n, sigma, "entropy")


def expected_sum_of_squares(n: int, sigma: RealOrArray) -> Value:
    r"""Mean Σp² of softmax over `n` i.i.d. logits z ~ N(0, σ²), exact at finite n by quadrature.

    .. math:: \mathbb{E} \textstyle\sum_j p_j^2
              = N \int_0^\infty \lambda\, \mathbb{E}\bigl[e^{2z} e^{-\lambda e^z}\bigr] L(\lambda)^{N-1} d\lambda

    In [1/N, 1): 1/N at σ = 0, → 1 as σ → ∞. N rows of such logits have E‖P‖_F² = N·E Σp². To 10 digits or more.

    Raises:
        ValueError: if n < 1, or sigma is negative or not finite.

    Source: ours, chapter 2.
    """
    return _gaussian_expectation(n, sigma, "sum_of_squares")


# --- bounded logits ------------------------------------------------------------------------------------------------


def _range_entropy(n: int, spread: float, m: int) -> float:
    """Entropy of softmax when m of n logits stand `spread` above the others."""
    low = math.exp(-spread)
    z = m + (n - m) * low
    return math.log(z) + spread * (n - m) * low / z


def range_entropy_minimiser(n: int, logit_range: Real) -> int:
    r"""Number m of keys tied at the top that gives the least entropy among `n` logits of range Δ.

    The entropy of m keys tied at the top and N − m at the bottom has one stationary point in real m, a minimum:

    .. math:: m^* = \frac{N e^{-\Delta}}{1 - e^{-\Delta}} \Bigl(\frac{\Delta}{1 - e^{-\Delta}} - 1\Bigr)

    at most N/2, so the best integer is one of its two neighbours. Often more than 1; 1 for Δ = 0, where all m tie.

    Raises:
        ValueError: if n < 1, or logit_range is negative or not finite.

    Source: ours, chapter 2.
    """
    n = integer("n", n, minimum=1)
    spread = non_negative("logit_range", float(logit_range))
    if spread == 0:
        return 1
    gain = -math.expm1(-spread)
    stationary = n * math.exp(-spread) / gain * (spread / gain - 1)
    below = max(math.floor(stationary), 1)
    return min((below, below + 1), key=lambda m: _range_entropy(n, spread, m))


def range_entropy_floor(n: int, logit_range: Real) -> float:
    r"""Least entropy of softmax over `n` logits whose largest and smallest differ by at most Δ; nats.

    .. math:: H \ge \min_m \Bigl[\ln Z_m + \frac{\Delta (N-m) e^{-\Delta}}{Z_m}\Bigr],
              \qquad Z_m = m + (N-m) e^{-\Delta}

    Attained by m keys tied at the top and the rest at the bottom, m from `range_entropy_minimiser`. ln N at Δ = 0,
    → 0 as Δ → ∞. Use Δ = 2√d_k for QK-LayerNorm without gain, 2·cap for soft-cap, 2·scale for cosine attention.

    Raises:
        ValueError: if n < 1, or logit_range is negative or not finite.

    Source: ours, chapter 2.
    """
    m = range_entropy_minimiser(n, logit_range)
    return _range_entropy(n, float(logit_range), m)


def zhai_entropy_bound(n: int, spectral: RealOrArray) -> Value:
    r"""Lower bound of a row's entropy from ς = c·‖W_K W_Qᵀ‖₂·‖XXᵀ‖₂; nats.

    .. math:: H \ge \ln(1 + (N-1) b) + \frac{\varsigma \sqrt{N(N-1)}\, b}{1 + (N-1) b},
              \qquad b = e^{-\varsigma \sqrt{N/(N-1)}}

    Holds for any `n` logits of Euclidean norm at most ς. Attained by one logit above N − 1 that tie, centred: a worst
    case, not the typical row. ln N at ς = 0, 0 for n = 1.

    Raises:
        ValueError: if n < 1, or spectral is negative or not finite.

    Source: zhai2023stabilizing, Theorem 3.1.
    """
    n = integer("n", n, minimum=1)
    x = _array("spectral", spectral)
    if n == 1:
        return _value(np.zeros_like(x))
    b = np.exp(-x * math.sqrt(n / (n - 1)))
    return _value(np.log1p((n - 1) * b) + x * math.sqrt(n * (n - 1)) * b / (1 + (n - 1) * b))


def qk_layernorm_max_weight(n: int, d_k: int) -> float:
    r"""Largest attention weight that QK-LayerNorm without gain can give one of `n` keys.

    .. math:: p_{\max} = \frac{1}{1 + (N-1) e^{-2\sqrt{d_k}}}

    since no logit exceeds √d_k in absolute value. Tends to 1 with d_k: that the norm
    forbids collapse is a fact of small width. Attained by a key along the query with all others opposite.

    Raises:
        ValueError: if n < 1 or d_k < 1.

    Source: ours, chapter 2.
    """
    n, d_k = integer("n", n, minimum=1), integer("d_k", d_k, minimum=1)
    return 1 / (1 + (n - 1) * math.exp(-2 * math.sqrt(d_k)))


# --- normalised kernels --------------------------------------------------------------------------------------------


def dead_row_probability(n_keys: int, d_k: int) -> float:
    r"""Chance that a query of the row-normalised ReLU kernel attends to nothing: φ(q)·φ(k_j) = 0 for all keys.

    .. math:: \Bigl(\frac{1 + 2^{-N}}{2}\Bigr)^{d_k}

    for independent coordinates, symmetric about 0, of the query and of `n_keys` keys. In a causal row n_keys is the
    number of allowed keys. Tends to 2^{−d_k} with many keys; (3/4)^{d_k} with one.

    Raises:
        ValueError: if n_keys < 1 or d_k < 1.

    Source: ours, chapter 1.
    """
    n_keys, d_k = integer("n_keys", n_keys, minimum=1), integer("d_k", d_k, minimum=1)
    return ((1 + 0.5**n_keys) / 2) ** d_k


def relu_kernel_entropy_deficit(n: int, d_k: int) -> float:
    r"""ln N minus the mean entropy of the row-normalised ReLU kernel, first order in 1/d_k; nats.

    .. math:: \ln N - \mathbb{E} H \approx \frac{N-1}{N} \, \frac{\pi (\pi - 1)}{2 d_k}

    for isotropic Gaussian q and k, live rows only; whatever their standard deviation, as the kernel is homogeneous.
    `relu_kernel_entropy` has the value to all orders. 0 for n = 1.

    Raises:
        ValueError: if n < 1 or d_k < 1.

    Source: ours, chapter 2.
    """
    n, d_k = integer("n", n, minimum=1), integer("d_k", d_k, minimum=1)
    return (n - 1) / n * math.pi * (math.pi - 1) / (2 * d_k)


_STEP_LAPLACE = 0.35  # of the rules in ln λ and ln ρ
_STEP_QUERY = 0.2  # of the rule in ln a
_REACH_LAPLACE = 26.0  # where e^{-reach} is dropped
_REACH_RATIO = 38.0  # where 1/ρ is dropped
_REACH_QUERY = 2.4  # ln a beyond which e^{-a²/2} is dropped
_SWITCH_SERIES = 50.0  # μ from which the asymptotic series of the slope is used; both are exact around it


def _relu_slope(mu: np.ndarray, scaled: np.ndarray) -> np.ndarray:
    """E[y e^{-μy}] for y = ReLU(x), x standard normal; `scaled` = erfcx(μ/√2)."""
    v = np.maximum(mu, _SWITCH_SERIES) ** -2
    series = v * (1 - 3 * v * (1 - 5 * v * (1 - 7 * v)))
    return np.where(mu < _SWITCH_SERIES, 1 / math.sqrt(2 * math.pi) - mu * scaled / 2, series / math.sqrt(2 * math.pi))


@lru_cache(maxsize=256)
def _relu_kernel_entropy(n: int, d_k: int) -> float:
    r"""E H over live rows, by a rule over t = ln λ, ln ρ and the log of one query coordinate a = φ(q_i).

    Given the query, the y_j = Σ_i a_i φ(k_ji) are independent, and with ℓ(μ) = E e^{-μφ(x)} = ½(1 + erfcx(μ/√2)) the
    means over keys *and* query factorise over the coordinates:

        G(μ, λ) = E[ℓ(μa) ℓ(λa)^{N-1}],  a = ReLU(x);   E e^{-μy_1 - λ(y_2 + ... + y_N)} = G(μ, λ)^{d_k}.

    H = ln Y − Σ (y_j/Y) ln y_j follows from 1/Y = ∫ e^{-λY} dλ, E ln Y = ∫ (e^{-λ} − E e^{-λY}) dλ/λ and
    ln(λy) = ∫ (e^{-ρ} − e^{-ρλy}) dρ/ρ, each with the dead rows (Y = 0) taken out.
    """
    t = np.arange(-(_REACH_LAPLACE + math.log(n * d_k)), _REACH_LAPLACE, _STEP_LAPLACE)
    rho = np.exp(np.arange(-_REACH_LAPLACE, _REACH_RATIO, _STEP_LAPLACE))
    a = np.exp(np.arange(-_REACH_LAPLACE, _REACH_QUERY, _STEP_QUERY))
    weight = _normal_density(a) * a * _STEP_QUERY  # of a > 0; a = 0 has weight ½
    lam = np.exp(t)
    rest = ((1 + erfcx(lam[:, None] * a / math.sqrt(2))) / 2) ** (n - 1)

    def laplace(mu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """E e^{-μy_1 - λ(...)} and λ·E[y_1 e^{-μy_1 - λ(...)}]."""
        scaled = erfcx(mu[:, None] * a / math.sqrt(2))
        g = 1 - (1 - rest * (1 + scaled) / 2) @ weight
        slope = (rest * _relu_slope(mu[:, None] * a, scaled)) @ (weight * a)
        return g**d_k, lam * d_k * g ** (d_k - 1) * slope

    dead = dead_row_probability(n, d_k)
    all_keys, share = laplace(lam)
    log_sum = (1 - dead) * np.exp(-lam) - (all_keys - dead)
    log_weight = -t * share
    for r in rho:
        log_weight += _STEP_LAPLACE * (math.exp(-r) * share - laplace(lam * (1 + r))[1])
    return float(_STEP_LAPLACE * (log_sum - n * log_weight).sum() / (1 - dead))


def relu_kernel_entropy(n: int, d_k: int) -> float:
    r"""Mean entropy of the row-normalised ReLU kernel over `n` keys, exact by quadrature; nats.

    For q and k_j independent, isotropic Gaussian of width `d_k` (any standard deviation: the kernel is homogeneous),
    the mean over **live** rows; the share of dead ones is `dead_row_probability`. In [0, ln N): → ln N as d_k → ∞.
    0 for n = 1. To 8 digits; a third of a second for a new (n, d_k), then remembered.

    Raises:
        ValueError: if n < 1 or d_k < 1.

    Source: ours, chapter 2.
    """
    n, d_k = integer("n", n, minimum=1), integer("d_k", d_k, minimum=1)
    return 0.0 if n == 1 else _relu_kernel_entropy(n, d_k)


def elu_kernel_entropy_limit(n: int, d_k: int) -> float:
    r"""Mean entropy of the row-normalised ELU+1 kernel over `n` keys as the scale of q and k grows; nats,
    up to terms of order 2^{−n}: rows dead under ReLU because of their keys, not of their query, are left out.

    .. math:: (1 - 2^{-d_k}) H_{\mathrm{ReLU}}(d_k) + 2^{-d_k} H_{\mathrm{ReLU}}(1)

    for isotropic Gaussian q and k. Not the ReLU value: a query without a positive coordinate, dead under ReLU, lives
    under ELU+1 by its largest coordinate alone. As the scale tends to 0 the entropy tends to ln N.

    Raises:
        ValueError: if n < 1 or d_k < 1.

    Source: ours, chapter 2.
    """
    negative = 0.5 ** integer("d_k", d_k, minimum=1)
    return (1 - negative) * relu_kernel_entropy(n, d_k) + negative * relu_kernel_entropy(n, 1)


# --- norms of P ----------------------------------------------------------------------------------------------------


def frobenius_bounds(n: int, mean_entropy: RealOrArray) -> Bounds:
    r"""Bounds of ‖P‖_F² for `n` rows that sum to 1, from the mean of their Shannon entropies (nats).

    .. math:: N e^{-\bar H} \le \|P\|_F^2 \le N

    The lower one is attained by rows that are uniform over one same number of keys, the upper by one-hot rows: H̄ → 0
    forces ‖P‖_F → √N, where it stays.

    Raises:
        ValueError: if n < 1, or mean_entropy is negative or not finite.

    Source: ours, chapter 3.
    """
    n = integer("n", n, minimum=1)
    entropy = _array("mean_entropy", mean_entropy)
    return Bounds(_value(n * np.exp(-entropy)), _value(np.full_like(entropy, n)))


def spectral_norm_bounds(p: Float[Tensor, "*batch n m"]) -> Bounds:
    r"""Bounds of ‖P‖₂ from the column sums c_j of attention probabilities.

    .. math:: \sqrt{\textstyle\sum_j c_j^2 / n} \le \|P\|_2 \le \sqrt{\max_j c_j}

    For square P the lower one is √(mean c_j²). Both are 1 for doubly stochastic P, and only then is ‖P‖₂ = 1; one-hot
    P attains the upper one, √n when all rows choose one token. Rows may also sum to less than 1 (dead rows).

    Returns:
        `Bounds` of tensors of shape `*batch`.

    Raises:
        ValueError: if p has no queries or no keys.

    Source: ours, chapter 3.
    """
    _not_empty("p", p)
    column_sums = p.sum(dim=-2)
    lower = (column_sums.square().sum(dim=-1) / p.shape[-2]).sqrt()
    return Bounds(lower, column_sums.amax(dim=-1).sqrt())


def softmax_trace_identity(p: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch"]:
    r"""Mean over rows of the trace of the softmax Jacobian diag(p_i) − p_i p_iᵀ (inverse temperature 1).

    .. math:: \frac1N \sum_i \mathrm{tr}\, J_i = 1 - \frac{\|P\|_F^2}{N}

    In [0, 1 − 1/m]: 0 for one-hot rows, 1 − 1/m for uniform ones. The growth of ‖P‖_F and the starvation of the query
    and key gradients are one number. Rows must sum to 1.

    Raises:
        ValueError: if p has no queries or no keys.

    Source: ours, chapter 3.
    """
    _not_empty("p", p)
    return 1 - p.square().sum(dim=(-2, -1)) / p.shape[-2]


def _not_empty(name: str, x: Tensor) -> None:
    if x.numel() == 0:
        raise refuse(name, "an array without empty axes", tuple(x.shape))


# --- gradients of softmax attention --------------------------------------------------------------------------------


class AttentionGradients(NamedTuple):
    """Gradients of a loss with respect to the blocks of one softmax attention head."""

    w_v: Tensor
    w_q: Tensor
    w_k: Tensor
    x: Tensor


class ValueGradientBounds(NamedTuple):
    """Two upper bounds of ‖∇W_V‖_F; neither is always the smaller."""

    frobenius_form: Tensor
    spectral_form: Tensor


class QueryGradientBounds(NamedTuple):
    """Two upper bounds of ‖∇W_Q‖_F (or ‖∇W_K‖_F), the first never above the second."""

    from_logit_gradient: Tensor
    from_probabilities: Tensor


def logit_gradient(
    p: Float[Tensor, "*batch n m"], grad_output: Float[Tensor, "*batch n e"], v: Float[Tensor, "*batch m e"]
) -> Float[Tensor, "*batch n m"]:
    r"""Gradient of the loss in the logits of softmax attention O = PV.

    .. math:: T = \frac{\partial L}{\partial S} = P \odot (M - \mathrm{rowsum}(P \odot M) 1^\top),
              \qquad M = G V^\top, \; G = \frac{\partial L}{\partial O}

    Rows of T sum to 0. 0 for a one-hot row and for values that all agree.

    Source: ours, chapter 3.
    """
    m = grad_output @ v.mT
    return p * (m - (p * m).sum(dim=-1, keepdim=True))


def query_jacobian(
    p: Float[Tensor, "*batch n m"], k: Float[Tensor, "*batch m d"], v: Float[Tensor, "*batch m e"], scale: Real
) -> Float[Tensor, "*batch n e d"]:
    r"""Jacobian of each output o_i in its own query q_i, for softmax with logits c·q·k.

    .. math:: \frac{\partial o_i}{\partial q_i} = c \, \mathrm{Cov}_{p_i}(v, k)

    Large where a spread-out row sees keys and values that vary together; 0 for a one-hot row.

    Raises:
        ValueError: if scale is not finite and > 0.

    Source: ours, chapter 1.
    """
    c = positive("scale", float(scale))
    second = torch.einsum("...nm,...me,...md->...ned", p, v, k)
    return c * (second - (p @ v).unsqueeze(-1) * (p @ k).unsqueeze(-2))


def attention_gradients(
    x: Float[Tensor, "*batch n d"],
    p: Float[Tensor, "*batch n n"],
    w_q: Float[Tensor, "*#batch d e"],
    w_k: Float[Tensor, "*#batch d e"],
    w_v: Float[Tensor, "*#batch d f"],
    grad_output: Float[Tensor, "*batch n f"],
    scale: Real,
) -> AttentionGradients:
    r"""Gradients of one softmax self-attention head O = P·X·W_V with logits c·X·W_Q·W_Kᵀ·Xᵀ.

    With G = ∂L/∂O (`grad_output`), c = `scale` and T from `logit_gradient`:

    .. math:: \nabla W_V = X^\top P^\top G, \quad \nabla W_Q = c X^\top T X W_K, \quad
              \nabla W_K = c X^\top T^\top X W_Q, \\
              \nabla X = P^\top G W_V^\top + c (T X W_K W_Q^\top + T^\top X W_Q W_K^\top)

    Returns:
        `AttentionGradients` with the shapes of the blocks, one set per batch entry (weights shared by a batch get one
        gradient per entry, not the sum).

    Raises:
        ValueError: if scale is not finite and > 0.

    Source: ours, chapter 3.
    """
    c = positive("scale", float(scale))
    t = logit_gradient(p, grad_output, x @ w_v)
    q, k = x @ w_q, x @ w_k
    return AttentionGradients(
        w_v=x.mT @ p.mT @ grad_output,
        w_q=c * x.mT @ t @ k,
        w_k=c * x.mT @ t.mT @ q,
        x=p.mT @ grad_output @ w_v.mT + c * (t @ k @ w_q.mT + t.mT @ q @ w_k.mT),
    )


def _spectral(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x, ord=2)


def value_gradient_bounds(
    x: Float[Tensor, "*batch m d"], p: Float[Tensor, "*batch n m"], grad_output: Float[Tensor, "*batch n e"]
) -> ValueGradientBounds:
    r"""Two upper bounds of ‖∇W_V‖_F = ‖XᵀPᵀG‖_F.

    .. math:: \|X\|_2 \|P\|_F \|G\|_2 \quad\text{and}\quad \|X\|_2 \|P\|_2 \|G\|_F

    The first is the original paper's form, smaller for a sink; the second is smaller for P = I. They bound a gradient
    and by themselves explain no divergence.

    Returns:
        `ValueGradientBounds` of tensors of shape `*batch`.

    Source: first hong2024transformer; second ours, chapter 3.
    """
    x_norm = _spectral(x)
    return ValueGradientBounds(
        frobenius_form=x_norm * torch.linalg.matrix_norm(p) * _spectral(grad_output),
        spectral_form=x_norm * _spectral(p) * torch.linalg.matrix_norm(grad_output),
    )


def query_gradient_bounds(
    x: Float[Tensor, "*batch n d"],
    p: Float[Tensor, "*batch n n"],
    w_k: Float[Tensor, "*#batch d e"],
    w_v: Float[Tensor, "*#batch d f"],
    grad_output: Float[Tensor, "*batch n f"],
    scale: Real,
) -> QueryGradientBounds:
    r"""Two upper bounds of ‖∇W_Q‖_F for one softmax self-attention head.

    .. math:: \|\nabla W_Q\|_F \le c \|X\|_2^2 \|W_K\|_2 \|T\|_F, \qquad
              \|T_i\| \le \min\bigl(p_{\max}, 2 p_{\max} (1 - p_{\max})\bigr) \|M_i - \bar M_i\|

    with M = G·(X·W_V)ᵀ. The first uses the logit gradient T itself, the second bounds T row by row through the largest
    weight p_max of the row; both are 0 when every row is one-hot.

    Returns:
        `QueryGradientBounds` of tensors of shape `*batch`.

    Raises:
        ValueError: if scale is not finite and > 0.

    Source: ours, chapter 3.
    """
    c = positive("scale", float(scale))
    v = x @ w_v
    m = grad_output @ v.mT
    p_max = p.amax(dim=-1)
    jacobian_norm = torch.minimum(p_max, 2 * p_max * (1 - p_max))
    row_bound = jacobian_norm * torch.linalg.vector_norm(m - m.mean(dim=-1, keepdim=True), dim=-1)
    factor = c * _spectral(x).square() * _spectral(w_k)
    return QueryGradientBounds(
        from_logit_gradient=factor * torch.linalg.matrix_norm(logit_gradient(p, grad_output, v)),
        from_probabilities=factor * torch.linalg.vector_norm(row_bound, dim=-1),
    )


def key_gradient_bounds(
    x: Float[Tensor, "*batch n d"],
    p: Float[Tensor, "*batch n n"],
    w_q: Float[Tensor, "*#batch d e"],
    w_v: Float[Tensor, "*#batch d f"],
    grad_output: Float[Tensor, "*batch n f"],
    scale: Real,
) -> QueryGradientBounds:
    r"""Two upper bounds of ‖∇W_K‖_F: those of `query_gradient_bounds` with W_Q in the place of W_K.

    .. math:: \|\nabla W_K\|_F \le c \|X\|_2^2 \|W_Q\|_2 \|T\|_F

    Raises:
        ValueError: if scale is not finite and > 0.

    Source: ours, chapter 3.
    """
    return query_gradient_bounds(x, p, w_q, w_v, grad_output, scale)


# --- curvature of the value path -----------------------------------------------------------------------------------


def value_curvature(sum_of_squares: RealOrArray, d: int) -> Value:
    r"""Top Hessian eigenvalue in W_V of the in-context regression loss, one layer, weights p that ignore the data.

    .. math:: \lambda_{\max} = 2 d \textstyle\sum_j p_j^2

    The sum runs over the **context** tokens of the query's row: tokens are (x_j, wᵀx_j) with x_j, w ~ N(0, I_d), the
    query's y is 0, the loss is (prediction − y)² with the prediction read from the last coordinate. From 2d/N at
    uniform attention to 2d at one-hot. The eigenvector is the y coordinate; the query's own weight p_0 adds to the x
    coordinates alone, which stay below while Σp² + p_0² ≤ d·Σp².

    Raises:
        ValueError: if sum_of_squares is negative or not finite, or d < 1.

    Source: ours, chapter 3.
    """
    return _value(2 * integer("d", d, minimum=1) * _array("sum_of_squares", sum_of_squares))


def stable_learning_rate(curvature: Real) -> float:
    r"""Learning rate above which gradient descent on a quadratic of top curvature λ diverges.

    .. math:: \eta_c = 2 / \lambda

    Raises:
        ValueError: if curvature is not finite and > 0.

    Source: cohen2021gradient, Section 1.
    """
    return 2 / positive("curvature", float(curvature))


def critical_learning_rate(sum_of_squares: RealOrArray, d: int) -> Value:
    r"""Learning rate below which gradient descent on W_V is stable, for attention weights that ignore the data.

    .. math:: \eta_c = \frac{2}{\lambda_{\max}} = \frac{1}{d \sum_j p_j^2}

    with Σp² over the context tokens, as in `value_curvature`. From N/d at uniform attention down to 1/d at one-hot: at
    hidden width 3, d = 2, one-hot attention gives 0.5. ∞ for Σp² = 0: the context is not attended to.

    Raises:
        ValueError: if sum_of_squares is negative or not finite, or d < 1.

    Source: ours, chapter 3.
    """
    curvature = np.asarray(value_curvature(sum_of_squares, d))
    with np.errstate(divide="ignore"):
        return _value(2 / curvature)


def value_curvature_of(u: Float[Tensor, "*batch samples width"]) -> Float[Tensor, "*batch"]:
    r"""Top Hessian eigenvalue in W_V for given attention outputs u = Σ_j p_j z_j of the query, over samples.

    .. math:: \lambda_V = 2 \lambda_{\max}\bigl(\mathbb{E}[u u^\top]\bigr)

    The extension of `value_curvature` to attention that reads the data: P is frozen at its value on each sample, z_j
    are the tokens. The limit of the learning rate is `stable_learning_rate(λ_V)`.

    Raises:
        ValueError: if there are no samples.

    Source: ours, chapter 3.
    """
    _not_empty("u", u)
    return 2 * torch.linalg.eigvalsh(u.mT @ u / u.shape[-2])[..., -1]
