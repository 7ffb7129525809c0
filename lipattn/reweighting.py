"""Attention re-weightings: every map from queries and keys to attention weights, in one table.

A mechanism is a pure function ``(q, k, allowed, **options) -> p`` and one row of `REWEIGHTINGS`. What the row
declares (row-stochastic, scale-invariant, …) is what the tests check, the legends print and the figures group by.

Conventions that hold for all of them:

- Masks are boolean, True = may attend. N is the number of *allowed* keys of a row.
- Fully masked rows and dead rows (every allowed key gets weight 0) attend to nothing: weights exactly 0, gradients 0.
- What a query may not attend cannot matter to it: neither values nor gradients depend on it, whatever it holds (NaN
  and ±inf included).
- A query with non-finite data, or one that may attend a key with non-finite data, has a row of NaN.
- Finite q and k whose logits leave the dtype's range count as logits of ±inf: the weight is the limit where there is
  one (0 at −inf beside a finite logit), NaN where there is none.
- float16 and bfloat16 are computed in float32 and returned in their own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipattn._validate import choice, finite, integer, non_negative, positive, refuse

__all__ = [
    "LOGIT_OPTIONS",
    "REWEIGHTINGS",
    "Reweighting",
    "allowed_keys",
    "causal_mask",
    "elu_feature_map",
    "linear_attention",
    "relu_feature_map",
]

Queries = Float[Tensor, "*#batch n d"]
Keys = Float[Tensor, "*#batch m d"]
Allowed = Bool[Tensor, "*#batch n m"] | None
Weights = Float[Tensor, "*#batch n m"]
Check = Callable[[str, Any], Any]


# --- the table's entry -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Reweighting:
    """One mechanism: its function, its options and the facts declared about it.

    Two entries are equal only if they are the same object.
    """

    name: str
    """Key in `REWEIGHTINGS`, snake_case."""
    label: str
    """What people read."""
    source: str
    """Bibliography key (or "ours") and the equation."""
    function: Callable[..., Tensor]
    """The pure function ``(q, k, allowed, **options) -> p``.

    `allowed` is None (all keys) or a boolean tensor whose last two axes are n, m.
    """
    row_stochastic: bool
    """Rows that are neither dead nor fully masked sum to 1."""
    scale_invariant: bool
    """P does not change when a query, or all keys together, are multiplied by a positive number.

    For some only in a limit, see `invariant_up_to`.
    """
    linear_time: bool
    """`linear_attention` computes P v in O(N d²)."""
    may_have_dead_rows: bool
    """In exact arithmetic an unmasked row of finite data can have all its weights 0."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Option name → the source's default.

    Options that change logits are the same for every mechanism that has logits.
    """
    checks: Mapping[str, Check] = field(default_factory=dict)
    """Option name → what refuses a bad value, for the options that are the mechanism's own."""
    score: Callable[..., Tensor] | None = None
    """``(q, k, **logit options) -> logits``; None for the kernels."""
    score_options: tuple[str, ...] = ()
    """Options of `score` beyond those that every mechanism with logits has."""
    feature_map: Callable[[Tensor], Tensor] | None = None
    """φ of a normalised kernel, p_ij ∝ φ(q_i)·φ(k_j); None for all others."""
    scaled_features: Callable[..., Tensor] | None = None
    """``(x, axes, visible) -> φ(x)`` divided by its largest value over `axes`, so that products cannot overflow.

    P does not notice: it is the same for φ(q_i) times any positive number, and for all φ(k_j) times one.
    """
    invariant_up_to: str | None = None
    """The positive option in whose limit 0 the scale invariance is exact; None if it is exact as it stands."""
    bounded_logits: Callable[[int], float] | None = None
    """Width d_k → bound on the absolute logit at default options, for any q and k; None if there is none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        object.__setattr__(self, "checks", MappingProxyType(dict(self.checks)))

    def weights(
        self, q: Tensor, k: Tensor, *, mask: Tensor | None = None, causal: bool = False, **options: Any
    ) -> Tensor:
        """Attention weights p of queries over keys.

        Args:
            q: queries, ``*batch n d``, float16, bfloat16, float32 or float64.
            k: keys, ``*batch m d``, same dtype; the batch axes of q and k broadcast.
            mask: boolean, broadcastable to ``*batch n m``, True = may attend.
            causal: also forbid keys j > i + (m − n), see `causal_mask`.
            **options: any of `self.options`. Tensors given as options are not searched for bad values.

        Returns:
            ``*batch n m`` in the dtype of q, at least 0, exactly 0 where attending is forbidden. Rows sum to 1 if
            `row_stochastic`; rows that are fully masked or dead are 0 throughout. For other ranges and edge cases see
            the mechanism's function.

        Raises:
            ValueError: unknown option or bad value, shapes that do not fit, no keys (m = 0), d = 0, a dtype that is
                not floating point, a mask that is not boolean.

        Source: `self.source`.
        """
        settings = self._settings(options)
        shape = _check_queries_and_keys(q, k)
        _check_tensor_options(settings, shape, q.shape[-1])
        allowed = _allowed(mask, causal, shape, q.device)
        dtype = q.dtype
        q, k = _contain(_working(q), _working(k), allowed)
        return self.function(q, k, allowed, **settings).to(dtype)

    @property
    def logits(self) -> Callable[..., Tensor] | None:
        """Function ``(q, k, **options) -> logits`` (``*batch n m``), what enters the re-weighting; None for the
        kernels.

        It takes the options of `weights` and refuses the same values; options that do not enter logits (the sigmoid's
        default bias −ln N, SSMax's s ln N) change nothing here. Masks play no part: a mask forbids, it does not
        change a logit.
        """
        return None if self.score is None else self._logits

    def _logits(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        settings = self._settings(options)
        shape = _check_queries_and_keys(q, k)
        _check_tensor_options(settings, shape, q.shape[-1])
        assert self.score is not None
        enters = {name: settings[name] for name in (*LOGIT_OPTIONS, *self.score_options)}
        return self.score(_working(q), _working(k), **enters).to(q.dtype)

    def _settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        settings = dict(self.options)
        for name, value in options.items():
            if name not in settings:
                known = ", ".join(settings) or "none"
                raise ValueError(f"{name} must be an option of {self.name} ({known}), got {name}={value!r}")
            check = self.checks.get(name) or _LOGIT_CHECKS[name]
            settings[name] = check(name, value)
        return settings


# --- masks and input checks ------------------------------------------------------------------------------------------


def causal_mask(n: int, m: int, device: torch.device | str | None = None) -> Bool[Tensor, "n m"]:
    """Mask under which query i may attend keys j ≤ i + (m − n).

    The last query sees every key; with n = m each sees itself and its past. With m < n the first n − m rows attend to
    nothing.

    Raises:
        ValueError: if n < 0 or m < 1.

    Source: vaswani2017attention, section 3.2.3; the alignment to the last key is ours.
    """
    n, m = integer("n", n, minimum=0), integer("m", m, minimum=1)
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


def allowed_keys(mask: Bool[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n"]:
    """Number N of keys that each query may attend, from 0 (a fully masked row) to m, in the default dtype."""
    return mask.sum(-1).to(torch.get_default_dtype())


def _working(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_queries_and_keys(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """The shape of p, if q and k fit together. Looks at shapes and dtypes only."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES:
            raise refuse(name, "a floating-point tensor", x.dtype if isinstance(x, Tensor) else x)
        if x.ndim < 2:
            raise refuse(name, "of shape (*batch, tokens, features)", tuple(x.shape))
    if q.dtype != k.dtype:
        raise refuse("k", f"of the dtype of q, {q.dtype}", k.dtype)
    if q.shape[-1] == 0:
        raise refuse("q", "of at least one feature", tuple(q.shape))
    if k.shape[-1] != q.shape[-1]:
        raise refuse("k", f"of as many features as q, {q.shape[-1]}", tuple(k.shape))
    if k.shape[-2] == 0:
        raise refuse("k", "of at least one key", tuple(k.shape))
    try:
        batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    except RuntimeError:
        raise refuse("k", f"of batch axes that broadcast with those of q, {tuple(q.shape)}", tuple(k.shape)) from None
    return (*batch, q.shape[-2], k.shape[-2])


def _check_broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    try:
        fits = torch.broadcast_shapes(x.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise refuse(name, f"broadcastable to {tuple(shape)}", tuple(x.shape))


def _check_tensor_options(settings: Mapping[str, Any], shape: tuple[int, ...], width: int) -> None:
    for name, value in settings.items():
        if isinstance(value, Tensor):
            _check_broadcast(name, value, (width,) if name == "gain" else shape)


def _allowed(mask: Tensor | None, causal: bool, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """The mask to apply, its last two axes full; None if every key is allowed."""
    n, m = shape[-2:]
    if not isinstance(causal, bool):
        raise refuse("causal", "True or False", causal)
    past = causal_mask(n, m, device) if causal else None
    if mask is None:
        return past
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise refuse("mask", "a boolean tensor", mask.dtype if isinstance(mask, Tensor) else mask)
    _check_broadcast("mask", mask, shape)
    mask = mask.expand(*mask.shape[:-2], n, m)
    return mask if past is None else mask & past


def _contain(q: Tensor, k: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k with non-finite data kept where they belong: in the rows that may see them, and nowhere else.

    A query that is not finite, or that may attend a key that is not, becomes NaN. Such keys, and keys that no query
    may attend, become 0, so that 0·NaN cannot reach the gradients of the other rows.
    """
    if allowed is None:  # every query sees every key: adding 0·x spreads a NaN or ±inf and nothing else
        return q + (q.detach() * 0).sum(-1, keepdim=True) + (k.detach() * 0).sum((-2, -1), keepdim=True), k
    bad_keys = ~k.detach().isfinite().all(-1)
    bad_rows = (allowed & bad_keys.unsqueeze(-2)).any(-1) | ~q.detach().isfinite().all(-1)
    live = allowed.any(-1)
    q = torch.where((bad_rows & live).unsqueeze(-1), math.nan, torch.where(live.unsqueeze(-1), q, 0.0))
    return q, torch.where((bad_keys | ~allowed.any(-2)).unsqueeze(-1), 0.0, k)


# --- options ---------------------------------------------------------------------------------------------------------


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, "True or False", value)
    return value


def _number(check: Check) -> Check:
    def checked(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise refuse(name, "a number", value)
        return check(name, float(value))

    return checked


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _or_tensor(check: Check) -> Check:
    def checked(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                raise refuse(name, "a floating-point tensor", value.dtype)
            return value
        return _number(check)(name, value)

    return checked


LOGIT_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"scale": None, "temperature": 1.0, "bias": None, "soft_cap": None, "qk_norm": False}
)
"""The options that every mechanism with logits takes, with their defaults; `dot_product_logits` says what they do."""

_LOGIT_CHECKS: Mapping[str, Check] = {
    "scale": _or_none(_or_tensor(finite)),
    "temperature": _or_tensor(positive),
    "bias": _or_none(_or_tensor(finite)),
    "soft_cap": _or_none(_number(positive)),
    "qk_norm": _flag,
}


# --- logits ----------------------------------------------------------------------------------------------------------


def dot_product_logits(
    q: Queries,
    k: Keys,
    *,
    scale: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    bias: float | Tensor | None = None,
    soft_cap: float | None = None,
    qk_norm: bool = False,
    gain: float | Tensor | None = None,
    epsilon: float = 1e-5,
) -> Weights:
    r"""Attention logits from dot products.

    .. math:: z_{ij} = \mathrm{cap}\bigl(\tfrac{\text{scale}}{\text{temperature}}\, q_i \cdot k_j\bigr) + b_{ij},
        \qquad \mathrm{cap}(z) = c \tanh(z / c)

    Args:
        q, k: queries and keys.
        scale: default 1/√d_k.
        temperature: divides the scale: one knob under two names.
        bias: added last, so that a cap bounds the content and not the position; a number or a tensor broadcastable to
            the logits.
        soft_cap: c of the cap; none by default.
        qk_norm: LayerNorm of every query and key first, without bias; a vector of equal coordinates becomes 0.
        gain: multiplies normalised queries and normalised keys, each; a number or one per feature; none by default.
        epsilon: the norm's own, inside the root.

    Source: vaswani2017attention, eq. 1; soft_cap gemma2 (gemma2024gemma); qk_norm dehghani2023scaling, section 2.
    """
    if qk_norm:
        q, k = _layer_norm(q, gain, epsilon), _layer_norm(k, gain, epsilon)
    if isinstance(scale, Tensor) or isinstance(temperature, Tensor):
        raw = (q @ k.mT) * (_factor(scale, temperature, q))
    else:
        raw = (q * _factor(scale, temperature, q)) @ k.mT  # scales the smaller tensor
    return _cap_and_bias(raw, soft_cap, bias)


def distance_logits(
    q: Queries,
    k: Keys,
    *,
    scale: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    bias: float | Tensor | None = None,
    soft_cap: float | None = None,
    qk_norm: bool = False,
) -> Weights:
    """Attention logits from squared distances, −scale·‖q_i − k_j‖²/temperature.

    At most 0 without bias, 0 where query and key coincide. Options as in `dot_product_logits`. Memory O(n m d): the
    differences are formed before they are squared, since ‖q‖² − 2q·k + ‖k‖² cancels. What q − k cannot resolve is
    lost: q = 1e15 is as far from 1 as from −1 in float32.

    Source: kim2021lipschitz, L2 attention, P_ij ∝ exp(−‖q_i − k_j‖²/√d_k). That layer is Lipschitz if besides W_Q =
    W_K, which is the caller's.
    """
    if qk_norm:
        q, k = _layer_norm(q), _layer_norm(k)
    raw = -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    return _cap_and_bias(raw * _factor(scale, temperature, q), soft_cap, bias)


def cosine_logits(
    q: Queries,
    k: Keys,
    *,
    scale: float | Tensor | None = 10.0,
    temperature: float | Tensor = 1.0,
    bias: float | Tensor | None = None,
    soft_cap: float | None = None,
    qk_norm: bool = False,
) -> Weights:
    """Attention logits from angles, scale·cos(q_i, k_j)/temperature.

    In [−scale, scale] at temperature 1, attained by parallel and antiparallel vectors. The cosine with a zero vector
    is 0, with gradient 0. Other options as in `dot_product_logits`; `scale=None` means 1/√d_k.

    Source: qi2023lipsformer, scaled cosine similarity attention softmax(τ q̂·k̂), τ = 10 as in the authors' code;
    they also multiply by a number ν and normalise v, which is the caller's. They add an ε under the root, we do not.
    """
    if qk_norm:
        q, k = _layer_norm(q), _layer_norm(k)
    return _cap_and_bias((_unit(q) @ _unit(k).mT) * _factor(scale, temperature, q), soft_cap, bias)


def _factor(scale: float | Tensor | None, temperature: float | Tensor, q: Tensor) -> float | Tensor:
    factor = (q.shape[-1] ** -0.5 if scale is None else scale) / temperature
    return factor.to(q) if isinstance(factor, Tensor) else factor


def _cap_and_bias(raw: Tensor, soft_cap: float | None, bias: float | Tensor | None) -> Tensor:
    z = raw if soft_cap is None else soft_cap * torch.tanh(raw / soft_cap)
    if bias is None:
        return z
    return z + (bias.to(z) if isinstance(bias, Tensor) else bias)


def _layer_norm(x: Tensor, gain: float | Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """(x − mean)/√(var + ε), times the gain.

    Numerator and root are divided by one number, so that squares cannot overflow.
    """
    x = x - x.mean(-1, keepdim=True)
    size = x.detach().abs().amax(-1, keepdim=True).clamp(min=math.sqrt(epsilon))
    y = x / size
    y = y * (y.square().mean(-1, keepdim=True) + epsilon / size.square()).rsqrt()
    if gain is None:
        return y
    return y * (gain.to(y) if isinstance(gain, Tensor) else gain)


def _unit(x: Tensor) -> Tensor:
    """x/‖x‖, and 0 with gradient 0 where x = 0."""
    size = x.detach().abs().amax(-1, keepdim=True)
    zero = size == 0
    y = x / size.masked_fill(zero, 1.0)
    return (y * y.square().sum(-1, keepdim=True).masked_fill(zero, 1.0).rsqrt()).masked_fill(zero, 0.0)


# --- the mechanisms: (q, k, allowed, **options) -> p -----------------------------------------------------------------


def softmax(q: Queries, k: Keys, allowed: Allowed, **logit_options: Any) -> Weights:
    """p_ij = exp(z_ij)/Σ_l exp(z_il), z = `dot_product_logits`.

    In (0, 1); rows sum to 1. Source: vaswani2017attention, eq. 1.
    """
    return _softmax(dot_product_logits(q, k, **logit_options), allowed)


def cosine(q: Queries, k: Keys, allowed: Allowed, **logit_options: Any) -> Weights:
    """Softmax of `cosine_logits`."""
    return _softmax(cosine_logits(q, k, **logit_options), allowed)


def l2(q: Queries, k: Keys, allowed: Allowed, **logit_options: Any) -> Weights:
    """Softmax of `distance_logits`."""
    return _softmax(distance_logits(q, k, **logit_options), allowed)


def ssmax(q: Queries, k: Keys, allowed: Allowed, *, s: float | Tensor, **logit_options: Any) -> Weights:
    """Scalable softmax, softmax(s ln N · z): one allowed key gets weight 1.

    Source: nakanishi2025scalable; s is learned there, from 1 here.
    """
    z = dot_product_logits(q, k, **logit_options)
    log_n = _log_allowed(allowed, z)
    return _softmax(z * ((s.to(z) if isinstance(s, Tensor) else s) * log_n), allowed)


def sigmoid(q: Queries, k: Keys, allowed: Allowed, *, bias: float | Tensor | None, **logit_options: Any) -> Weights:
    """σ(z_ij + b), b = −ln N by default, each weight in (0, 1).

    Source: ramapuram2025theory, whose practice is b = −ln n.
    """
    z = dot_product_logits(q, k, bias=bias, **logit_options)
    if bias is None:
        z = z - _log_allowed(allowed, z)
    # Not torch.sigmoid: its rounding depends on where in the tensor an element lies, so on a run's company.
    e = torch.exp(torch.where(z >= 0, -z, z))  # not of -|z|, whose slope at 0 is 0
    return _masked(torch.where(z >= 0, 1 / (1 + e), e / (1 + e)), allowed)


def relu_pointwise(q: Queries, k: Keys, allowed: Allowed, **logit_options: Any) -> Weights:
    """ReLU(z_ij)/N, at least 0 and unbounded.

    Dead where all z ≤ 0. Source: wortsman2023replacing, ReLU divided by the sequence length.
    """
    z = dot_product_logits(q, k, **logit_options)
    return _masked(torch.relu(z), allowed) / _number_allowed(allowed, z)


def squared_relu_pointwise(q: Queries, k: Keys, allowed: Allowed, **logit_options: Any) -> Weights:
    """ReLU(z_ij)²/N, at least 0 and unbounded.

    Dead where all z ≤ 0. Source: wortsman2023replacing (h = ReLU²), wortsman2024small, 3.2.5.
    """
    z = dot_product_logits(q, k, **logit_options)
    return _masked(torch.relu(z).square(), allowed) / _number_allowed(allowed, z)


def softpick(q: Queries, k: Keys, allowed: Allowed, *, epsilon: float, **logit_options: Any) -> Weights:
    """ReLU(e^z_ij − 1)/(Σ_l |e^z_il − 1| + ε), in [0, 1); row sums in [0, 1); dead where all z ≤ 0.

    Both sides are multiplied by e^{−m}, m = max(z, 0), and e^z − 1 is expm1 for z < 1. ε (1e-8 in the authors' code)
    matters only where all z are near 0; with ε = 0 such a row is dead as well. Source: zuhri2025softpick.
    """
    z = dot_product_logits(q, k, **logit_options)
    z = z if allowed is None else z.masked_fill(~allowed, 0.0)
    top = z.detach().amax(-1, keepdim=True).clamp(min=0.0)
    small = torch.exp(-top)
    lifted = torch.where(z < 1, small * torch.expm1(z.clamp(max=1.0)), torch.exp(z - top) - small)
    total = lifted.abs().sum(-1, keepdim=True) + epsilon * small
    return torch.relu(lifted) / total.masked_fill(total == 0, 1.0)


def p_softmax(
    q: Queries, k: Keys, allowed: Allowed, *, norm_order: float, per_root_n: bool, **logit_options: Any
) -> Weights:
    """e^z_ij/(Σ_l e^{p z_il})^{1/p}, p = `norm_order`, times 1/√N if `per_root_n`.

    In (0, 1]; before that factor rows have ℓ_p norm 1, and p = 1 is softmax.

    Source: *Attention Normalizes the Wrong Norm* (web article, December 2025), p = 2; the factor 1/√N is ours,
    chapter 4.
    """
    z = _log_domain(dot_product_logits(q, k, **logit_options), allowed)
    z = z - z.detach().amax(-1, keepdim=True)
    p = _masked(torch.exp(z) / torch.exp(norm_order * z).sum(-1, keepdim=True) ** (1 / norm_order), allowed)
    return p * _number_allowed(allowed, z) ** -0.5 if per_root_n else p


def relu_kernel(q: Queries, k: Keys, allowed: Allowed) -> Weights:
    """φ(q_i)·φ(k_j)/Σ_l φ(q_i)·φ(k_l), φ = ReLU, in [0, 1].

    Dead where no feature is positive both in the query and in an allowed key. Source: hong2024transformer; the
    normalised kernel is katharopoulos2020transformers, eq. 4.
    """
    visible = None if allowed is None else allowed.any(-2)
    return _kernel(_relu_features(q, -1), _relu_features(k, (-2, -1), visible), allowed)


def elu_kernel(q: Queries, k: Keys, allowed: Allowed) -> Weights:
    """φ(q_i)·φ(k_j)/Σ_l φ(q_i)·φ(k_l), φ = ELU + 1, in (0, 1), never dead in exact arithmetic.

    Features are taken relative to the largest of a query, and of all allowed keys, so that even coordinates of −1e30
    give the right weights; a row whose products sum to less than the dtype's smallest normal number is dead.
    Source: katharopoulos2020transformers, eqs. 4 and 7.
    """
    visible = None if allowed is None else allowed.any(-2)
    return _kernel(_elu_features(q, -1), _elu_features(k, (-2, -1), visible), allowed)


def relu_feature_map(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """φ(x) = max(x, 0). 1-Lipschitz, positively homogeneous. Source: hong2024transformer."""
    return torch.relu(x)


def elu_feature_map(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """φ(x) = ELU(x) + 1: x + 1 for x > 0, exp(x) otherwise. 1-Lipschitz, positive.

    In these two branches since `elu(x) + 1` in float32 is exactly 0 for x ≤ −16.6, where exp(x) is not. Source:
    katharopoulos2020transformers, eq. 7.
    """
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0.0)))


def _masked(p: Tensor, allowed: Tensor | None) -> Tensor:
    return p if allowed is None else p.masked_fill(~allowed, 0.0)


def _log_domain(z: Tensor, allowed: Tensor | None) -> Tensor:
    """Logits with −inf where forbidden, and 0 throughout a fully masked row, whose weights the caller sets to 0."""
    if allowed is None:
        return z
    return z.masked_fill(~allowed & allowed.any(-1, keepdim=True), -math.inf).masked_fill(
        ~allowed.any(-1, keepdim=True), 0.0
    )


def _softmax(z: Tensor, allowed: Tensor | None) -> Tensor:
    return _masked(torch.softmax(_log_domain(z, allowed), dim=-1), allowed)


def _number_allowed(allowed: Tensor | None, like: Tensor) -> Any:
    """N, and 1 for a fully masked row, where nothing depends on it."""
    return like.shape[-1] if allowed is None else allowed.sum(-1, keepdim=True).clamp(min=1).to(like.dtype)


def _log_allowed(allowed: Tensor | None, like: Tensor) -> Any:
    n = _number_allowed(allowed, like)
    return n.log() if isinstance(n, Tensor) else math.log(n)


def _kernel(query_features: Tensor, key_features: Tensor, allowed: Tensor | None) -> Tensor:
    """φ(q_i)·φ(k_j) over its sum, the query's features divided first: no pass over n × m but the product itself.

    A row whose sum is below the dtype's smallest normal number is dead.
    """
    seen = key_features.sum(-2, keepdim=True) if allowed is None else allowed.to(key_features.dtype) @ key_features
    total = (query_features * seen).sum(-1, keepdim=True)
    dead = total < torch.finfo(total.dtype).tiny
    inverse = (1 / total.masked_fill(dead, 1.0)).masked_fill(dead, 0.0)
    return _masked((query_features * inverse) @ key_features.mT, allowed)


def _relu_features(x: Tensor, axes: int | tuple[int, ...], visible: Tensor | None = None) -> Tensor:
    """ReLU(x) over its largest value on `axes` (1 if that is 0). Tokens that are not `visible` count as 0."""
    x = torch.relu(x if visible is None else torch.where(visible.unsqueeze(-1), x, 0.0))
    peak = x.detach().amax(axes, keepdim=True)
    return x / peak.masked_fill(peak == 0, 1.0)


def _elu_features(x: Tensor, axes: int | tuple[int, ...], visible: Tensor | None = None) -> Tensor:
    """ELU(x) + 1 over its largest value on `axes`.

    Tokens that are not `visible` have no say in that value, and features in (0, 1].
    """
    if visible is None:
        peak = x.detach().amax(axes, keepdim=True)
    else:
        shown = torch.where(visible.unsqueeze(-1), x.detach(), -math.inf)
        peak = shown.amax(axes, keepdim=True)
        peak = peak.masked_fill(peak == -math.inf, 0.0)  # nothing is visible: nothing depends on it
        x = torch.where(visible.unsqueeze(-1), x, peak)
    low = peak.clamp(max=0.0)
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0.0) - low)) / (1 + peak.clamp(min=0.0))


# --- the table -------------------------------------------------------------------------------------------------------


def _with(**changes: Any) -> dict[str, Any]:
    return {**LOGIT_OPTIONS, **changes}


REWEIGHTINGS: dict[str, Reweighting] = {
    entry.name: entry
    for entry in (
        Reweighting(
            name="softmax",
            label="softmax",
            source="vaswani2017attention, eq. 1",
            function=softmax,
            score=dot_product_logits,
            options=LOGIT_OPTIONS,
            row_stochastic=True,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=False,
        ),
        Reweighting(
            name="relu_kernel",
            label="ReLU kernel",
            source="hong2024transformer; katharopoulos2020transformers, eq. 4, with φ = ReLU",
            function=relu_kernel,
            feature_map=relu_feature_map,
            scaled_features=_relu_features,
            row_stochastic=True,
            scale_invariant=True,
            linear_time=True,
            may_have_dead_rows=True,
        ),
        Reweighting(
            name="elu_kernel",
            label="ELU+1 kernel",
            source="katharopoulos2020transformers, eqs. 4 and 7",
            function=elu_kernel,
            feature_map=elu_feature_map,
            scaled_features=_elu_features,
            row_stochastic=True,
            scale_invariant=False,
            linear_time=True,
            may_have_dead_rows=False,
        ),
        Reweighting(
            name="qk_layernorm",
            label="QK-LayerNorm",
            source="dehghani2023scaling, section 2: softmax(LN(q)·LN(k)/√d_k)",
            function=softmax,
            score=dot_product_logits,
            score_options=("gain", "epsilon"),
            options=_with(qk_norm=True, gain=None, epsilon=1e-5),
            checks={"gain": _or_none(_or_tensor(finite)), "epsilon": _number(positive)},
            row_stochastic=True,
            scale_invariant=True,
            invariant_up_to="epsilon",
            linear_time=False,
            may_have_dead_rows=False,
            bounded_logits=math.sqrt,
        ),
        Reweighting(
            name="sigmoid",
            label="sigmoid",
            source="ramapuram2025theory: σ(z + b), b = −ln N",
            function=sigmoid,
            score=dot_product_logits,
            options=LOGIT_OPTIONS,
            row_stochastic=False,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=False,
        ),
        Reweighting(
            name="relu_pointwise",
            label="pointwise ReLU",
            source="wortsman2023replacing: ReLU(z)/N",
            function=relu_pointwise,
            score=dot_product_logits,
            options=LOGIT_OPTIONS,
            row_stochastic=False,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=True,
        ),
        Reweighting(
            name="squared_relu_pointwise",
            label="pointwise squared ReLU",
            source="wortsman2023replacing, wortsman2024small, section 3.2.5: ReLU(z)²/N",
            function=squared_relu_pointwise,
            score=dot_product_logits,
            options=LOGIT_OPTIONS,
            row_stochastic=False,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=True,
        ),
        Reweighting(
            name="cosine",
            label="scaled cosine",
            source="qi2023lipsformer, scaled cosine similarity attention: softmax(τ cos(q, k)), τ = 10",
            function=cosine,
            score=cosine_logits,
            options=_with(scale=10.0),
            row_stochastic=True,
            scale_invariant=True,
            linear_time=False,
            may_have_dead_rows=False,
            bounded_logits=lambda d_k: 10.0,
        ),
        Reweighting(
            name="l2",
            label="L2 attention",
            source="kim2021lipschitz, L2 attention: softmax(−‖q − k‖²/√d_k)",
            function=l2,
            score=distance_logits,
            options=LOGIT_OPTIONS,
            row_stochastic=True,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=False,
        ),
        Reweighting(
            name="soft_cap",
            label="soft-cap",
            source="gemma2024gemma: softmax(c tanh(z/c)), c = 50",
            function=softmax,
            score=dot_product_logits,
            options=_with(soft_cap=50.0),
            row_stochastic=True,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=False,
            bounded_logits=lambda d_k: 50.0,
        ),
        Reweighting(
            name="ssmax",
            label="SSMax",
            source="nakanishi2025scalable: softmax(s ln N · z)",
            function=ssmax,
            score=dot_product_logits,
            options=_with(s=1.0),
            checks={"s": _or_tensor(finite)},
            row_stochastic=True,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=False,
        ),
        Reweighting(
            name="softpick",
            label="softpick",
            source="zuhri2025softpick: ReLU(e^z − 1)/(Σ|e^z − 1| + ε), ε = 1e-8",
            function=softpick,
            score=dot_product_logits,
            options=_with(epsilon=1e-8),
            checks={"epsilon": _number(non_negative)},
            row_stochastic=False,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=True,
        ),
        Reweighting(
            name="p_softmax",
            label="p-softmax",
            source="Attention Normalizes the Wrong Norm (web article, December 2025): e^z/‖e^z‖_p, p = 2",
            function=p_softmax,
            score=dot_product_logits,
            options=_with(norm_order=2.0, per_root_n=False),
            checks={"norm_order": _number(positive), "per_root_n": _flag},
            row_stochastic=False,
            scale_invariant=False,
            linear_time=False,
            may_have_dead_rows=False,
        ),
    )
}
"""Every map from q, k to attention weights that the book speaks of. One row = one mechanism."""


# --- linear time -----------------------------------------------------------------------------------------------------

_CHUNK = 64


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mechanism: str = "relu_kernel",
    key_mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    r"""Output P v of a normalised kernel without forming P, in time O((n + m)·d·d_v).

    .. math:: o_i = \frac{\varphi(q_i)^\top \sum_j \varphi(k_j) v_j^\top}{\varphi(q_i)^\top \sum_j \varphi(k_j)}

    Equal to ``REWEIGHTINGS[mechanism].weights(q, k, mask=…, causal=…) @ v`` in values and gradients.

    Args:
        q: ``*batch n d``.
        k: ``*batch m d``.
        v: ``*batch m d_v``, finite; same dtype as q.
        mechanism: a row of `REWEIGHTINGS` that is `linear_time`.
        key_mask: boolean, broadcastable to ``*batch m``, True = may be attended.
        causal: as in `causal_mask`; sums are carried from chunk to chunk of 64 queries.

    Returns:
        ``*batch n d_v``. A convex combination of the values that the row attends to; 0 where the row is dead or fully
        masked.

    Raises:
        ValueError: a mechanism that is not linear-time, shapes that do not fit, no keys, a dtype that is not floating
            point, a mask that is not boolean.

    Source: katharopoulos2020transformers, eqs. 4 to 6 and 9 to 12.
    """
    linear = [name for name, entry in REWEIGHTINGS.items() if entry.linear_time]
    features = REWEIGHTINGS[choice("mechanism", mechanism, linear)].scaled_features
    assert features is not None
    *batch, n, m = _check_queries_and_keys(q, k)
    if not isinstance(v, Tensor) or v.dtype != q.dtype:
        raise refuse("v", f"a tensor of the dtype of q, {q.dtype}", v.dtype if isinstance(v, Tensor) else v)
    if v.ndim < 2 or v.shape[-2] != m:
        raise refuse("v", f"of shape (*batch, {m}, features)", tuple(v.shape))
    _flag("causal", causal)
    if key_mask is not None:
        if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
            raise refuse("key_mask", "a boolean tensor", key_mask.dtype if isinstance(key_mask, Tensor) else key_mask)
        _check_broadcast("key_mask", key_mask, (*batch, m))
    try:
        torch.broadcast_shapes(v.shape[:-2], tuple(batch))
    except RuntimeError:
        raise refuse("v", f"of batch axes that broadcast with {tuple(batch)}", tuple(v.shape)) from None

    dtype = q.dtype
    q, k, v = _working(q), _working(k), _working(v)
    ends = torch.arange(n, device=q.device) + (m - n) if causal else torch.full((n,), m - 1, device=q.device)
    everything = torch.ones(m, dtype=torch.bool, device=q.device)
    visible = everything if key_mask is None else key_mask & everything
    # what `_contain` does for an explicit mask, from running counts
    bad = visible & ~k.detach().isfinite().all(-1)
    seen, seen_bad = (torch.where(ends >= 0, x.cumsum(-1)[..., ends.clamp(min=0)], 0) > 0 for x in (visible, bad))
    bad_rows = (seen_bad | ~q.detach().isfinite().all(-1)) & seen
    q = torch.where(bad_rows.unsqueeze(-1), math.nan, torch.where(seen.unsqueeze(-1), q, 0.0))
    shown = (visible & ~bad).unsqueeze(-1)
    k, v = torch.where(shown, k, 0.0), torch.where(visible.unsqueeze(-1), v, 0.0)

    query_features = features(q, -1)
    key_features = torch.where(shown, features(k, (-2, -1), shown.squeeze(-1)), 0.0)
    one = torch.ones_like(v[..., :1])
    values = torch.cat([v, one], dim=-1)  # the last column of φ(q)ᵀ Σ φ(k) (v, 1)ᵀ is the normaliser
    if causal:
        sums = _causal_sums(query_features, key_features, values, m - n)
    else:
        sums = query_features @ (key_features.mT @ values)
    total = sums[..., -1:]
    dead = total == 0
    return (sums[..., :-1] / total.masked_fill(dead, 1.0)).masked_fill(dead, 0.0).to(dtype)


def _causal_sums(a: Tensor, b: Tensor, values: Tensor, offset: int) -> Tensor:
    """Σ_{j ≤ i + offset} (a_i·b_j) values_j for every i: products within a chunk, a running sum before it."""
    n, m = a.shape[-2], b.shape[-2]
    edges = [*range(0, n, _CHUNK), n]
    # keys before the first query's own, then one block for each chunk of queries; slices would cost O(N) each backward
    key_edges = [0, *(min(max(edge + offset, 0), m) for edge in edges)]
    sizes, key_sizes = ([y - x for x, y in pairwise(bounds)] for bounds in (edges, key_edges))
    first, *key_blocks = b.split(key_sizes, dim=-2)
    first_values, *value_blocks = values.split(key_sizes, dim=-2)
    state = first.mT @ first_values
    chunks = [a[..., :0, :] @ state]
    for start, key_start, a_, b_, values_ in zip(
        edges, key_edges[1:], a.split(sizes, dim=-2), key_blocks, value_blocks, strict=False
    ):
        i = torch.arange(start, start + a_.shape[-2], device=a.device).unsqueeze(-1)
        j = torch.arange(key_start, key_start + b_.shape[-2], device=a.device)
        near = (a_ @ b_.mT).masked_fill(j > i + offset, 0.0)
        chunks.append(a_ @ state + near @ values_)
        state = state + b_.mT @ values_
    return torch.cat(chunks, dim=-2)
