r"""Lipschitz constants of attention: exact ones, upper bounds, lower bounds by search, inputs that show the growth.

A constant names its **map, norm and domain**, or it means nothing: :class:`LipschitzBound` carries all three. Tokens
are the rows of X (n×D); a norm of X or of an output is the Frobenius norm, the Euclidean one over all entries. Weights
act from the right, q = XW_Q, and logits are scaled by 1/√d_k, d_k the width of q.

That softmax is Lipschitz in its logits, that a feature map φ is, and that attention is in its tokens are three
statements. The first two are true here, the third needs a bounded domain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipattn._validate import choice, integer, non_negative, positive, refuse
from lipattn.reweighting import REWEIGHTINGS

__all__ = [
    "JacobianNormBounds",
    "LipschitzBound",
    "LocalLipschitzGrowth",
    "OutputJump",
    "UniformRowWitness",
    "attention",
    "attention_jacobian",
    "attention_local_lipschitz",
    "attention_upper_bound",
    "ball_projection",
    "feature_map_lipschitz_constant",
    "local_lipschitz_growth",
    "qk_layernorm_upper_bound",
    "query_gradient",
    "query_key_value_upper_bound",
    "relu_kernel_jump",
    "row_normalization_lipschitz_constant",
    "search_lower_bound",
    "softmax_jacobian",
    "softmax_jacobian_norm",
    "softmax_jacobian_norm_bounds",
    "softmax_jacobian_trace",
    "softmax_lipschitz_constant",
    "uniform_row_witness",
]

Mechanism = str | Callable[..., Tensor]
"""A key of REWEIGHTINGS, or a function ``(q, k, **options) -> p``."""


@dataclass(frozen=True, kw_only=True)
class LipschitzBound:
    """A Lipschitz constant or a bound on one: ‖f(x) − f(y)‖ ≤ value·‖x − y‖."""

    value: float
    """Unit of the output over unit of the input; ∞ when there is no constant."""
    map: str
    """What is mapped to what."""
    norm: str
    """Norm of inputs and of outputs."""
    domain: str
    """Where the inputs may lie."""
    kind: Literal["exact", "upper", "lower"]
    """"exact" (the smallest constant), "upper" or "lower" bound on it."""
    source: str
    """Bibliography key, or "ours" and the chapter."""
    witness: tuple[Tensor, Tensor] | None = field(default=None, compare=False, repr=False)
    """For lower bounds: two inputs whose slope is the value."""


# --- softmax in its logits -------------------------------------------------------------------------------------------


def softmax_lipschitz_constant(inverse_temperature: float = 1.0, norm: float = 2.0) -> LipschitzBound:
    r"""Exact Lipschitz constant β/2 of z ↦ softmax(βz), for two logits or more, the same in every ℓ_p norm.

    Attained at an entry p_i = 1/2 in ℓ₁ and ℓ_∞ and, with two logits, in all; only approached in ℓ₂ for more than two.

    Args:
        inverse_temperature: β > 0.
        norm: p of the ℓ_p norm, in [1, ∞].

    Raises:
        ValueError: if β is not finite and > 0, or p is not in [1, ∞].

    Source: nair2025softmax (gao2017properties has β, which is not sharp).
    """
    beta = positive("inverse_temperature", inverse_temperature)
    return LipschitzBound(
        value=beta / 2,
        map="logits z to softmax(βz)",
        norm=_norm_name(norm),
        domain="all logits, at least two",
        kind="exact",
        source="nair2025softmax",
    )


def _norm_name(norm: float) -> str:
    if isinstance(norm, bool) or not norm >= 1:
        raise refuse("norm", "the p of an ℓ_p norm, in [1, ∞]", norm)
    return "ℓ_∞" if norm == math.inf else f"ℓ_{norm:g}"


def _check_rows(name: str, x: Tensor) -> None:
    if x.ndim < 1 or x.shape[-1] == 0:
        raise refuse(f"{name}.shape", "(*rows, m) with at least one key", tuple(x.shape))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def softmax_jacobian(logits: Float[Tensor, "*rows m"], inverse_temperature: float = 1.0) -> Float[Tensor, "*rows m m"]:
    r"""Jacobian of z ↦ p = softmax(βz) at the given logits.

    .. math:: J = \beta\,(\mathrm{diag}\,p - p p^\top)

    Symmetric, positive semi-definite, rows sum to 0; 0 at one-hot p.

    Raises:
        ValueError: if there are no keys, or β is not finite and > 0.

    Source: gao2017properties.
    """
    _check_rows("logits", logits)
    beta = positive("inverse_temperature", inverse_temperature)
    p = torch.softmax(beta * _wide(logits), -1)
    return (beta * _covariance(p)).to(logits.dtype)


def _covariance(p: Tensor) -> Tensor:
    """diag p − ppᵀ, with p_i(1 − p_i) on the diagonal as the sum of p_i p_j over the others: nothing cancels."""
    outer = p[..., :, None] * p[..., None, :]
    off = outer - torch.diag_embed(outer.diagonal(dim1=-2, dim2=-1))
    return torch.diag_embed(off.sum(-1)) - off


def softmax_jacobian_norm(p: Float[Tensor, "*rows m"]) -> Float[Tensor, "*rows"]:
    r"""Spectral norm of the softmax Jacobian diag p − ppᵀ (β = 1) at each row of probabilities.

    Returns:
        One value per row in [0, 1/2]: 0 for one-hot rows and for m = 1; 1/2 for (1/2, 1/2, 0, …); 1/m for uniform
        rows, m ≥ 2. NaN for dead rows (no softmax gives them) and for rows with non-finite data.

    Raises:
        ValueError: if there are no keys (m = 0).

    Source: ours, chapter 1.
    """
    _check_rows("p", p)
    wide = _wide(p)
    defined = wide.isfinite().all(-1) & (wide != 0).any(-1)
    top = torch.linalg.eigvalsh(_covariance(torch.where(defined[..., None], wide, 0)))[..., -1]
    return torch.where(defined, top, torch.nan).to(p.dtype)


class JacobianNormBounds(NamedTuple):
    """lower ≤ ‖diag p − ppᵀ‖₂ ≤ upper, one value per row."""

    lower: Tensor
    upper: Tensor


def softmax_jacobian_norm_bounds(p: Float[Tensor, "*rows m"]) -> JacobianNormBounds:
    r"""Sandwich of the softmax Jacobian's spectral norm (β = 1) by the two largest probabilities of each row.

    .. math:: \max(p_{(2)},\ p_{\max}(1 - p_{\max})) \le \|J\|_2 \le \min(p_{\max},\ 2 p_{\max}(1 - p_{\max}))

    The lower end p₍₂₎ is interlacing (J is diag p less a matrix of rank one), p_max(1 − p_max) the largest diagonal
    entry; the upper end p_max is ‖diag p‖₂, and 2p_max(1 − p_max) is Gershgorin's: row i gives 2p_i(1 − p_i), largest
    at p_max since every other p_i is at most min(p_max, 1 − p_max). Both ends are attained: by uniform
    rows (1/m, both), by (1/2, 1/2, 0, …) and by one-hot rows.

    Raises:
        ValueError: if there are no keys (m = 0).

    Source: ours, chapter 1.
    """
    _check_rows("p", p)
    wide = _wide(p)
    top = wide.topk(min(2, p.shape[-1]), dim=-1).values
    largest = top[..., 0]
    second = top[..., 1] if p.shape[-1] > 1 else torch.zeros_like(largest)
    diagonal = largest * (1 - largest)
    return JacobianNormBounds(
        torch.maximum(second, diagonal).to(p.dtype), torch.minimum(largest, 2 * diagonal).to(p.dtype)
    )


def softmax_jacobian_trace(p: Float[Tensor, "*rows m"]) -> Float[Tensor, "*rows"]:
    r"""Trace of the softmax Jacobian (β = 1), :math:`\mathrm{tr}\,J = \sum_i p_i(1 - p_i) = 1 - \sum_i p_i^2`.

    The mean over the n rows of a matrix is 1 − ‖P‖_F²/n: what ‖P‖_F gains, the query and key gradients lose.

    Returns:
        One value per row, for stochastic rows in [0, 1 − 1/m], from one-hot to uniform.

    Raises:
        ValueError: if there are no keys (m = 0).

    Source: ours, chapter 1.
    """
    _check_rows("p", p)
    return (1 - _wide(p).square().sum(-1)).to(p.dtype)


# --- feature maps and row normalisation ------------------------------------------------------------------------------


def feature_map_lipschitz_constant(name: str, domain: tuple[float, float] = (-math.inf, math.inf)) -> LipschitzBound:
    r"""Exact Lipschitz constant of a kernel's feature map, coordinate by coordinate, on an interval [a, b].

    - ``"exp"``: e^b, so ∞ on all of ℝ;
    - ``"relu"``: 1 if b > 0, else 0;
    - ``"elu"`` (ELU+1: x + 1 for x > 0, eˣ otherwise): 1 if b > 0, else e^b.

    The same number holds in every ℓ_p norm for the map applied to each coordinate of a vector in [a, b]^d. It says
    nothing about the attention built from the map: see :func:`relu_kernel_jump`.

    Raises:
        ValueError: if the name is unknown or the domain is not a < b.

    Source: ours, chapter 1.
    """
    choice("name", name, ("exp", "relu", "elu"))
    a, b = domain
    if not (a < b) or a == math.inf or b == -math.inf:
        raise refuse("domain", "an interval (a, b) with a < b", domain)
    if name == "exp":
        value = math.exp(b) if b < 709 else math.inf
    elif b > 0:
        value = 1.0
    else:
        value = 0.0 if name == "relu" else math.exp(b)
    label = {"exp": "eˣ", "relu": "ReLU", "elu": "ELU+1"}[name]
    return LipschitzBound(
        value=value,
        map=f"x to {label}, each coordinate",
        norm="every ℓ_p",
        domain=f"coordinates in [{a:g}, {b:g}]",
        kind="exact",
        source="ours, chapter 1",
    )


def row_normalization_lipschitz_constant(
    m: int, minimum_sum: float, norm: Literal["l1", "l2"] = "l1"
) -> LipschitzBound:
    r"""Exact Lipschitz constant of u ↦ u/Σu, what a normalised kernel does to the row of its scores φ(q)·φ(k_j) ≥ 0.

    The Jacobian is (I − p1ᵀ)/Σu with p = u/Σu. Column j has ℓ₁ norm 2(1 − p_j)/Σu, so the ℓ₁ constant on
    {u ≥ 0, Σu ≥ s₀} is 2/s₀, attained at p_j = 0. I − p1ᵀ is an oblique projection of ℓ₂ norm ‖p‖₂‖1‖₂, so the ℓ₂
    constant is √m/s₀, attained at one-hot p. The domain is convex. As s₀ → 0 both grow without bound: on all of
    {u ≥ 0, u ≠ 0} there is no constant, which is why a Lipschitz φ does not make the attention Lipschitz.

    Args:
        m: number of keys, at least 1 (with one key the map is constant: 0).
        minimum_sum: s₀ ≥ 0; with 0 the value is ∞.

    Raises:
        ValueError: if m < 1, minimum_sum is not finite and ≥ 0, or the norm is neither "l1" nor "l2".

    Source: ours, chapter 1.
    """
    integer("m", m, minimum=1)
    choice("norm", norm, ("l1", "l2"))
    s = non_negative("minimum_sum", minimum_sum)
    if m == 1:
        value = 0.0
    elif s == 0:
        value = math.inf
    else:
        value = (2.0 if norm == "l1" else math.sqrt(m)) / s
    return LipschitzBound(
        value=value,
        map="scores u to u/Σu",
        norm={"l1": "ℓ_1", "l2": "ℓ_2"}[norm],
        domain=f"u ≥ 0 with {m} entries, Σu {'> 0: unbounded, no constant' if s == 0 else f'≥ {s:g}'}",
        kind="exact",
        source="ours, chapter 1",
    )


# --- attention in its tokens: Jacobians ------------------------------------------------------------------------------


def attention(
    x: Float[Tensor, "*batch n d"],
    W_Q: Float[Tensor, "d dk"],
    W_K: Float[Tensor, "d dk"],
    W_V: Float[Tensor, "d dv"],
    mechanism: Mechanism = "softmax",
    **options: Any,
) -> Float[Tensor, "*batch n dv"]:
    r"""One head of self-attention as a map of its tokens, :math:`O = P(XW_Q, XW_K)\,XW_V`.

    Args:
        mechanism: key of REWEIGHTINGS, or a function ``(q, k, **options) → p``.
        options: passed on to the mechanism (mask, causal, temperature, …).

    Raises:
        ValueError: if the mechanism is unknown, or the mechanism refuses its arguments.

    Source: vaswani2017attention, eq. 1.
    """
    weights = mechanism
    if isinstance(mechanism, str):
        weights = REWEIGHTINGS[choice("mechanism", mechanism, REWEIGHTINGS.keys())].weights
    assert callable(weights)
    return weights(x @ W_Q, x @ W_K, **options) @ (x @ W_V)


def attention_jacobian(
    x: Float[Tensor, "n d"],
    W_Q: Float[Tensor, "d dk"],
    W_K: Float[Tensor, "d dk"],
    W_V: Float[Tensor, "d dv"],
    mechanism: Mechanism = "softmax",
    **options: Any,
) -> Float[Tensor, "n dv n d"]:
    r"""Jacobian of :func:`attention` by automatic differentiation: entry [i, a, j, b] is ∂O_ia/∂X_jb.

    At a kink (ReLU at 0) it is the one-sided value that automatic differentiation takes, and at a dead row 0.

    Raises:
        ValueError: as :func:`attention`.

    Source: ours, chapter 1.
    """
    return torch.autograd.functional.jacobian(lambda y: attention(y, W_Q, W_K, W_V, mechanism, **options), x.detach())


def attention_local_lipschitz(
    x: Float[Tensor, "n d"],
    W_Q: Float[Tensor, "d dk"],
    W_K: Float[Tensor, "d dk"],
    W_V: Float[Tensor, "d dv"],
    mechanism: Mechanism = "softmax",
    **options: Any,
) -> float:
    r"""Spectral norm of the whole :func:`attention_jacobian`: the local Lipschitz constant at x in the Frobenius norm.

    Where the map is differentiable on a convex domain, the supremum of this over the domain is the Lipschitz constant.
    NaN if the Jacobian is not finite.

    Raises:
        ValueError: as :func:`attention`.

    Source: kim2021lipschitz, section 2.
    """
    jacobian = attention_jacobian(x, W_Q, W_K, W_V, mechanism, **options)
    n, d_v = jacobian.shape[:2]
    return _matrix_norm(jacobian.reshape(n * d_v, -1))


def _matrix_norm(a: Tensor) -> float:
    return float(torch.linalg.matrix_norm(a, ord=2)) if bool(a.isfinite().all()) else math.nan


def query_gradient(
    p: Float[Tensor, "*batch n m"],
    k: Float[Tensor, "*batch m d"],
    v: Float[Tensor, "*batch m e"],
    grad_output: Float[Tensor, "*batch n e"],
    scale: float,
) -> Float[Tensor, "*batch n d"]:
    r"""Gradient of a loss in each query of softmax attention, as a covariance.

    .. math:: \frac{\partial L}{\partial q_i} = c\,\mathrm{Cov}_{p_i}(k,\ v \cdot g_i)
              = c \sum_j p_{ij} (k_j - \bar k_i)(v_j \cdot g_i), \qquad g_i = \frac{\partial L}{\partial o_i}

    Large where a spread-out row sees keys that vary with their values; 0 for a one-hot row. It is the row i of
    (∂o_i/∂q_i)ᵀ g_i with ∂o_i/∂q_i = c·Cov_{p_i}(v, k), for which see :func:`lipattn.theory.query_jacobian`.

    Raises:
        ValueError: if the scale c is not finite and > 0.

    Source: ours, chapter 1.
    """
    c = positive("scale", scale)
    influence = grad_output @ v.mT
    centred = influence - (p * influence).sum(-1, keepdim=True)
    return c * (p * centred) @ k


# --- softmax attention is not Lipschitz on unbounded tokens ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class UniformRowWitness:
    """Inputs at which the Jacobian of softmax attention is as large as one likes, though a row attends uniformly."""

    inputs: Tensor
    """X, n×D: row 0 is C·e, all others are 0."""
    row: int
    """The zero row whose block ∂O_row/∂X_row is measured; its attention is uniform."""
    predicted: float
    """c·C²·(1/n)(1−1/n)·‖W_QW_Kᵀe‖·‖eᵀW_V‖."""
    tolerance: float
    """‖W_V‖₂/n: the measured norm lies within this of the predicted one."""
    measured: float
    """Spectral norm of the block, by automatic differentiation."""


def uniform_row_witness(
    W_Q: Float[Tensor, "d dk"],
    W_K: Float[Tensor, "d dk"],
    W_V: Float[Tensor, "d dv"],
    C: float,
    n: int,
    direction: Float[Tensor, d] | None = None,
) -> UniformRowWitness:
    r"""The witness that X ↦ P(X)XW_V is not Lipschitz on unbounded tokens: its Jacobian grows like C².

    X has the row C·e and n − 1 zero rows. A zero row i has q_i = 0, so all its logits are 0 and it attends uniformly.
    With rows as vectors and ∂O_i/∂X_i as the d_v×D matrix [a, b] = ∂O_ia/∂X_ib,

    .. math:: \frac{\partial O_i}{\partial X_i}
              = c\,C^2\,\tfrac1n\bigl(1 - \tfrac1n\bigr)\,(W_V^\top e)\,(W_Q W_K^\top e)^\top + \tfrac1n W_V^\top

    The first term is the query's covariance c·Cov(v, k)W_Qᵀ, of rank one; the second is what the token says itself;
    its key changes nothing, since q_i = 0. So this is neither saturation nor collapse: the row's entropy is ln n.

    Args:
        C: length of the one token that is not zero, > 0.
        n: number of tokens, at least 2.
        direction: e, normalised here; by default the direction of the largest ‖W_QW_Kᵀe‖.

    Raises:
        ValueError: if C is not finite and > 0, n < 2, or the direction is zero or not finite.

    Source: kim2021lipschitz, theorem 3.1 (not Lipschitz); this witness and its norm are ours, chapter 1.
    """
    positive("C", C)
    integer("n", n, minimum=2)
    bilinear = W_Q @ W_K.mT
    e = torch.linalg.svd(bilinear).Vh[0] if direction is None else direction
    length = float(torch.linalg.vector_norm(e))
    if not 0 < length < math.inf:
        raise refuse("direction", "finite and not zero", e.tolist())
    e = e / length
    x = torch.zeros(n, W_Q.shape[0], dtype=W_Q.dtype, device=W_Q.device)
    x[0] = C * e
    row = 1
    block = attention_jacobian(x, W_Q, W_K, W_V)[row, :, row, :]
    c = W_Q.shape[1] ** -0.5
    factors = torch.linalg.vector_norm(bilinear @ e) * torch.linalg.vector_norm(e @ W_V)
    return UniformRowWitness(
        inputs=x,
        row=row,
        predicted=float(c * C**2 * (1 / n) * (1 - 1 / n) * factors),
        tolerance=_matrix_norm(W_V) / n,
        measured=_matrix_norm(block),
    )


class LocalLipschitzGrowth(NamedTuple):
    """Local Lipschitz constants along a family of inputs, and the power law through them."""

    sizes: Tensor
    constants: Tensor
    exponent: float


def local_lipschitz_growth(
    mechanism: Mechanism, sizes: Sequence[float], n: int = 4, width: int = 3, **options: Any
) -> LocalLipschitzGrowth:
    r"""Local Lipschitz constant of attention at tokens (C e₁, C e₂, 0, …, 0) for growing C, W_Q = W_K = W_V = I.

    A zero token divides its attention equally between the two large ones, in each mechanism but the ReLU kernel, where
    it is a dead row. There the query's covariance of keys and values grows like

    - C² for softmax (keys and values both grow);
    - C/√ε for QK-LayerNorm (the norm's own ε; the zero query is normalised by √ε, keys do not grow);
    - C for the ELU+1 kernel (the weights depend on ratios of φ(k) only; values grow).

    So none of them is Lipschitz in its tokens.

    Args:
        mechanism: key of REWEIGHTINGS, or a function ``(q, k, **options) → p``.
        sizes: values of C, at least two different ones, each > 0.
        n: number of tokens, at least 3.
        width: D = d_k, at least 2.

    Returns:
        The sizes, the spectral norm of the whole Jacobian at each, and the least-squares slope of ln norm on ln C.

    Raises:
        ValueError: if a setting is out of range or the mechanism is unknown.

    Source: ours, chapter 1.
    """
    integer("n", n, minimum=3)
    integer("width", width, minimum=2)
    if len(set(sizes)) < 2:
        raise refuse("sizes", "at least two different values", sizes)
    identity = torch.eye(width, dtype=torch.float64)
    constants = []
    for length in sizes:
        x = torch.zeros(n, width, dtype=torch.float64)
        x[:2] = positive("sizes", length) * identity[:2]
        constants.append(attention_local_lipschitz(x, identity, identity, identity, mechanism, **options))
    size, constant = (torch.tensor(list(values), dtype=torch.float64) for values in (sizes, constants))
    log_size, log_constant = size.log(), constant.log()
    deviation = log_size - log_size.mean()
    exponent = float((deviation * log_constant).sum() / deviation.square().sum())
    return LocalLipschitzGrowth(size, constant, exponent)


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputJump:
    """Two inputs close together whose attention outputs are far apart."""

    first: Tensor
    second: Tensor
    input_distance: float
    """Frobenius norm of the difference of the inputs."""
    output_distance: float
    """Frobenius norm of the difference of the outputs, at W_Q = W_K = W_V = I."""


def relu_kernel_jump(d_k: int = 2, distance: float = 1e-9, jump: float = 3.0) -> OutputJump:
    r"""Two inputs of the ReLU kernel, as close as one likes, whose outputs are a given distance apart.

    Tokens a·e₁ and a·e₂ with a = jump/√2, and a third token that is δe₁ in one input and δe₂ in the other, δ =
    distance/√2. Its attention has scale 0, so however small δ is, it attends in the direction it points: to a·e₁ in
    the one input (its output is (δ² + a²)/(δ + a) e₁ → a e₁) and to a·e₂ in the other. All rows are live in both: no
    convention for dead rows enters. At the point between, the zero token, the row is dead. With d_k = 1 a live query
    has nowhere to turn.

    Args:
        d_k: width, at least 2; coordinates beyond the second are 0.
        distance: of the inputs, > 0, not above `jump`.
        jump: of the outputs in the limit distance → 0; the distance found is within 2·distance of it.

    Raises:
        ValueError: if a setting is out of range.

    Source: ours, chapter 1.
    """
    integer("d_k", d_k, minimum=2)
    positive("distance", distance)
    if positive("jump", jump) < distance:
        raise refuse("jump", f"at least the distance {distance}", jump)
    identity = torch.eye(d_k, dtype=torch.float64)
    large, small = jump / math.sqrt(2) * identity[:2], distance / math.sqrt(2) * identity[:2]
    first, second = torch.cat([large, small[:1]]), torch.cat([large, small[1:]])
    outputs = [attention(x, identity, identity, identity, "relu_kernel") for x in (first, second)]
    return OutputJump(
        first=first,
        second=second,
        input_distance=float(torch.linalg.vector_norm(first - second)),
        output_distance=float(torch.linalg.vector_norm(outputs[0] - outputs[1])),
    )


# --- upper bounds on bounded domains ---------------------------------------------------------------------------------


def attention_upper_bound(
    W_Q: Float[Tensor, "d dk"], W_K: Float[Tensor, "d dk"], W_V: Float[Tensor, "d dv"], n: int, radius: float
) -> LipschitzBound:
    r"""Upper bound for softmax self-attention on n tokens, each in the ball of radius R.

    .. math:: \mathrm{Lip} \le \|W_V\|_2 \bigl(\sqrt n + c\,\|W_Q W_K^\top\|_2\, R^2\, (1 + \sqrt n)\bigr),
              \qquad c = 1/\sqrt{d_k}

    Proof. Let A = W_QW_Kᵀ, S_ij = c·x_iAx_jᵀ, and δX a change. Row i of δO is
    Σ_j P_ij δv_j + Σ_j P_ij (v_j − o_i) δS_ij with δS_ij = c(δx_iAx_jᵀ + x_iAδx_jᵀ).

    1. *Values.* ‖PδXW_V‖_F ≤ ‖P‖₂‖W_V‖₂‖δX‖_F, and ‖P‖₂ ≤ √(max row sum · max column sum) ≤ √n.
    2. *Queries.* c·Cov_{p_i}(v, x)Aᵀδx_i, with ‖Cov(v, x)‖₂ ≤ ‖W_V‖₂‖Cov(x)‖₂ ≤ ‖W_V‖₂R². The rows do not mix, so
       the Frobenius norm is at most c‖A‖₂‖W_V‖₂R²‖δX‖_F.
    3. *Keys.* By Cauchy–Schwarz under p_i, row i is at most
       c·R‖A‖₂·(Σ_j P_ij‖v_j − o_i‖²)^½·(Σ_j P_ij‖δx_j‖²)^½. The first root is at most ‖W_V‖₂R, since a variance is at
       most a second moment. Squares summed over i give Σ_j c_j‖δx_j‖² ≤ n‖δX‖_F², c_j the column sums.

    With one token both covariances are 0, and the bound is the constant ‖W_V‖₂ itself.

    The domain is convex, so the largest local constant is a global one. It holds under any mask too (rows that are
    fully masked contribute 0). It grows like √n, the order that castin2024smooth gives for moderate n, and is not
    sharp; it says nothing of their second finding, that beyond a length that depends on R the constant stops growing.

    Args:
        n: number of tokens, at least 1.
        radius: R ≥ 0.

    Raises:
        ValueError: if n < 1 or the radius is not finite and ≥ 0.

    Source: ours, chapter 1; compare castin2024smooth.
    """
    integer("n", n, minimum=1)
    r = non_negative("radius", radius)
    c = W_Q.shape[1] ** -0.5
    root = math.sqrt(n)
    covariance = c * _matrix_norm(W_Q @ W_K.mT) * r**2 * (1 + root) if n > 1 else 0.0
    value = _matrix_norm(W_V) * (root + covariance)
    return LipschitzBound(
        value=value,
        map="tokens X to softmax(XW_Q(XW_K)ᵀ/√d_k)XW_V",
        norm="Frobenius",
        domain=f"{n} tokens, each of ℓ_2 norm ≤ {r:g}",
        kind="upper",
        source="ours, chapter 1",
    )


def query_key_value_upper_bound(
    n: int, scale: float, query_radius: float, key_radius: float, value_radius: float
) -> LipschitzBound:
    r"""Upper bound for (q, k, v) ↦ softmax(c·qkᵀ)v with n queries and n keys in balls, all three varying together.

    .. math:: \mathrm{Lip} \le \sqrt{(c R_v R_k)^2 + n\,(c R_v R_q)^2 + n}

    The three terms of :func:`attention_upper_bound` with ‖Cov_{p_i}(v, k)‖₂ ≤ R_vR_k, so that
    ‖δO‖ ≤ cR_vR_k‖δq‖ + √n·cR_vR_q‖δk‖ + √n‖δv‖, and Cauchy–Schwarz over the three.

    Raises:
        ValueError: if n < 1, the scale is not finite and > 0, or a radius is not finite and ≥ 0.

    Source: ours, chapter 1.
    """
    integer("n", n, minimum=1)
    c = positive("scale", scale)
    r_q = non_negative("query_radius", query_radius)
    r_k = non_negative("key_radius", key_radius)
    r_v = non_negative("value_radius", value_radius)
    return LipschitzBound(
        value=math.sqrt((c * r_v * r_k) ** 2 + n * (c * r_v * r_q) ** 2 + n),
        map="(q, k, v) to softmax(c·qkᵀ)v",
        norm="Frobenius",
        domain=f"{n} queries of ℓ_2 norm ≤ {r_q:g}, keys ≤ {r_k:g}, values ≤ {r_v:g}; c = {c:g}",
        kind="upper",
        source="ours, chapter 1",
    )


def qk_layernorm_upper_bound(n: int, d_k: int, value_radius: float, gain: float = 1.0) -> LipschitzBound:
    r"""Upper bound for QK-LayerNorm attention **in its normalised queries and keys** and its values.

    LayerNorm puts q̂ and k̂ in the ball of radius g√d_k (g the largest gain). :func:`query_key_value_upper_bound` with
    c = 1/√d_k then gives √(g²R_v²(1 + n) + n) : no R² of the tokens. In the tokens themselves there is **no** such
    bound: LayerNorm's own Jacobian is up to 1/√ε, and values grow (:func:`local_lipschitz_growth`).

    Raises:
        ValueError: if n < 1, d_k < 1, the radius is not finite and ≥ 0, or the gain is not finite and > 0.

    Source: ours, chapter 1.
    """
    integer("d_k", d_k, minimum=1)
    radius = positive("gain", gain) * math.sqrt(d_k)
    bound = query_key_value_upper_bound(n, d_k**-0.5, radius, radius, value_radius)
    return LipschitzBound(
        value=bound.value,
        map="(q̂, k̂, v) to softmax(q̂k̂ᵀ/√d_k)v, q̂ and k̂ after LayerNorm",
        norm=bound.norm,
        domain=bound.domain,
        kind="upper",
        source=bound.source,
    )


# --- lower bounds by search ------------------------------------------------------------------------------------------


def ball_projection(radius: float) -> Callable[[Tensor], Tensor]:
    """Projection of every row (last axis) to the ball of the given radius: a `project` for :func:`search_lower_bound`.

    Raises:
        ValueError: if the radius is not finite and > 0.
    """
    r = positive("radius", radius)

    def project(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.where(length > r, x * (r / torch.where(length > r, length, 1)), x)

    return project


def search_lower_bound(
    f: Callable[[Tensor], Tensor],
    start: Tensor | Callable[[torch.Generator], Tensor],
    *,
    generator: torch.Generator,
    steps: int = 100,
    starts: int = 4,
    norm: float = 2.0,
    project: Callable[[Tensor], Tensor] | None = None,
    map: str = "f",
    domain: str = "all inputs",
) -> LipschitzBound:
    r"""Lower bound on a Lipschitz constant: the largest slope ‖f(x) − f(y)‖/‖x − y‖ found between two inputs.

    From each start, pairs (x, x + hu) with a small h: the direction u follows power iteration on JᵀJ and the ascent of
    the slope; x follows the ascent of the slope, with a step that grows when it gains and shrinks when it fails. The
    best pair is kept. The slope is lessened by what rounding of f can have added (eight units in the last place of the
    outputs), so it is a true lower bound of the constant as far as f itself is computed to that accuracy.

    Args:
        f: a map of one tensor, differentiable almost everywhere; compute in float64.
        start: the first x, or a function of the generator that draws one for each start.
        generator: the only source of randomness.
        steps: ascent steps from each start, ≥ 0.
        starts: number of starts, ≥ 1 (with a tensor as start they differ in the first direction).
        norm: p of the ℓ_p norm over all entries, of inputs and outputs.
        project: maps any input into the domain; without it, all inputs are in.
        map, domain: names for the result.

    Returns:
        kind "lower", with the pair as witness; 0 if f is constant.

    Raises:
        ValueError: if steps or starts are too few, the norm is not in [1, ∞], or no start has a finite slope.

    Source: ours, chapter 1.
    """
    integer("steps", steps, minimum=0)
    integer("starts", starts, minimum=1)
    name = _norm_name(norm)
    inside = project if project is not None else (lambda x: x)
    best = -math.inf
    witness: tuple[Tensor, Tensor] | None = None
    for _ in range(starts):
        x = inside((start if isinstance(start, Tensor) else start(generator)).detach())
        u = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        slope, pair = _climb(f, x, u, steps, norm, inside)
        if slope > best:
            best, witness = slope, pair
    if witness is None:
        raise refuse("start", "inputs at which f is finite", start)
    return LipschitzBound(
        value=max(best, 0.0), map=map, norm=name, domain=domain, kind="lower", source="search", witness=witness
    )


def _slope(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, norm: float) -> float:
    """Slope between two inputs, less what rounding can have added; −∞ where it is undefined."""
    with torch.no_grad():
        a, b = f(x).flatten(), f(y).flatten()
        gap = float(torch.linalg.vector_norm((x - y).flatten(), ord=norm))
        rise = float(torch.linalg.vector_norm(a - b, ord=norm))
        size = float(torch.linalg.vector_norm(a, ord=norm) + torch.linalg.vector_norm(b, ord=norm))
    if not (gap > 0 and math.isfinite(rise)):
        return -math.inf
    return (rise - 8 * torch.finfo(x.dtype).eps * size) / gap


def _climb(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    u: Tensor,
    steps: int,
    norm: float,
    inside: Callable[[Tensor], Tensor],
) -> tuple[float, tuple[Tensor, Tensor]]:
    """Best slope found from one start, and its pair."""
    reach = torch.finfo(x.dtype).eps ** 0.25
    size = max(float(torch.linalg.vector_norm(x)), 1.0)
    h, step = reach * size, 0.3 * size

    def pair_of(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return x, inside(x + h * u / torch.linalg.vector_norm(u).clamp(min=torch.finfo(u.dtype).tiny))

    pair = pair_of(x, u)
    best = _slope(f, *pair, norm)
    for _ in range(steps):
        near, far = (t.clone().requires_grad_() for t in pair)
        value = f(near)
        if not value.requires_grad:  # f does not look at its input
            break
        rise = torch.linalg.vector_norm((f(far) - value).flatten(), ord=norm)
        gap = torch.linalg.vector_norm((far - near).flatten(), ord=norm)
        difference = (f(far) - value).detach()
        (power,) = torch.autograd.grad(value, near, difference, retain_graph=True)
        g_near, g_far = torch.autograd.grad(rise / gap, (near, far))
        drift, turn = g_near + g_far, g_far
        u = pair[1] - pair[0]
        moves = [(pair[0], power), (pair[0], u / h + turn / _length(turn))]
        moves.append((inside(pair[0] + step * drift / _length(drift)), u))
        moves.append((moves[2][0], power))
        slopes = []
        for base, direction in moves:
            candidate = pair_of(base, direction)
            slopes.append((_slope(f, *candidate, norm), candidate))
        top, candidate = max(slopes, key=lambda item: item[0])
        step *= 1.5 if max(slopes[2][0], slopes[3][0]) > best else 0.5
        if top > best:
            best, pair = top, candidate
    return best, pair


def _length(x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x)
    return torch.where(length > 0, length, 1)
