r"""Attention-only stacks with a leading ``runs`` axis: many independent models as one tensor program.

Weights are a dict of three tensors ``(runs, layers, heads, D, D)``; tokens are ``(runs, batch, tokens, D)``. No run
ever meets another: every operation is batched over the leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipattn._validate import choice, integer, non_negative, refuse
from lipattn.philox import normal
from lipattn.reweighting import REWEIGHTINGS
from lipattn.tasks import seed_tensor

__all__ = [
    "BLOCKS",
    "FIXED_ATTENTION",
    "Attention",
    "expected_logit_std",
    "fixed_attention_weights",
    "forward",
    "init_std_for",
    "init_weights",
    "predict",
]

BLOCKS = ("W_Q", "W_K", "W_V")
FIXED_ATTENTION = ("uniform", "one_token", "cyclic")
_INIT_STREAM = 16  # W_Q, W_K, W_V use streams 16, 17, 18

Weights = Mapping[str, Tensor]


class Attention(NamedTuple):
    """What one layer did.

    Attributes:
        p: attention probabilities.
        scores: q kᵀ/√D, what softmax would take as logits; kernels and variants start from the same q and k.
    """

    p: Float[Tensor, "runs heads batch queries tokens"]
    scores: Float[Tensor, "runs heads batch queries tokens"]


def init_weights(
    seeds: Sequence[int],
    *,
    width: int,
    layers: int = 1,
    heads: int = 1,
    init_std: float | Mapping[str, float] = 0.5,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Float[Tensor, "runs layers heads width width"]]:
    """Gaussian initial weights, each a function of (seed, block, layer, head, place) alone.

    Args:
        seeds: one a run.
        width: D; every W is D×D.
        layers, heads: of the stack; adding either leaves the weights that were there unchanged.
        init_std: standard deviation of every entry, or one for each block.
        dtype, device: of the result.

    Raises:
        ValueError: if a size is below 1, a std is negative or not finite, or a block is missing.

    Source: ours; the default 0.5 is the setting of chapter 4.
    """
    integer("width", width, minimum=1)
    integer("layers", layers, minimum=1)
    integer("heads", heads, minimum=1)
    std = dict.fromkeys(BLOCKS, init_std) if not isinstance(init_std, Mapping) else dict(init_std)
    if set(std) != set(BLOCKS):
        raise refuse("init_std", f"a number or one for each of {BLOCKS}", init_std)
    key = seed_tensor(seeds, device)[:, None, None]
    layer = torch.arange(layers, device=device)[:, None]
    head = torch.arange(heads, device=device)
    weights = {}
    for number, block in enumerate(BLOCKS):
        z = normal(width * width, key, (layer, head), _INIT_STREAM + number)
        weights[block] = (non_negative("init_std", std[block]) * z).unflatten(-1, (width, width)).to(dtype)
    return weights


def expected_logit_std(init_std: float, d: int) -> float:
    r"""Root-mean-square initial logit of the query over the context tokens.

    .. math:: \sigma^2 = \mathbb E\Big[\frac{(z_q^\top W_Q W_K^\top z_j)^2}{D}\Big]
              = s^4\, \mathbb E\|z_q\|^2\, \mathbb E\|z_j\|^2 = 2 d^2 s^4

    with s the standard deviation of the entries of W_Q and W_K, z_q = (x, 0), z_j = (x_j, y_j). Given the prompt's w
    the z_j are independent with mean zero, so this is also the expected population variance of one query's logits.

    Source: ours, chapter 4.
    """
    return non_negative("init_std", init_std) ** 2 * integer("d", d, minimum=1) * math.sqrt(2)


def init_std_for(logit_std: float, d: int) -> float:
    """The standard deviation of W_Q and W_K that gives :func:`expected_logit_std` = `logit_std`.

    Source: ours, chapter 4.
    """
    return math.sqrt(non_negative("logit_std", logit_std) / (integer("d", d, minimum=1) * math.sqrt(2)))


def fixed_attention_weights(
    kind: str, tokens: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Float[Tensor, "tokens tokens"]:
    """P that does not look at the tokens.

    ``uniform``: every entry 1/n. ``one_token``: all rows attend to token 0 (sink-like, rank one). ``cyclic``: row i
    attends to token i + 1 modulo n (a permutation); the query, which is last, attends to token 0.

    Raises:
        ValueError: if `kind` is none of these, or `tokens` < 1.
    """
    choice("fixed_attention", kind, FIXED_ATTENTION)
    n = integer("tokens", tokens, minimum=1)
    if kind == "uniform":
        return torch.full((n, n), 1 / n, dtype=dtype, device=device)
    p = torch.zeros(n, n, dtype=dtype, device=device)
    rows = torch.arange(n, device=device)
    p[rows, torch.zeros_like(rows) if kind == "one_token" else (rows + 1) % n] = 1
    return p


def _layer(
    tokens: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    query_only: bool,
    reweighting: str,
    options: Mapping[str, Any],
    fixed_attention: str | None,
    want_scores: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One layer's output (runs, batch, queries, D), its P, and its scores when wanted."""
    runs, batch, n, width = tokens.shape
    heads = w_q.shape[1]
    flat = tokens.reshape(runs, 1, batch * n, width)

    def project(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).view(runs, heads, batch, -1, width)

    queries = tokens[:, :, -1:].reshape(runs, 1, batch, width) if query_only else flat
    if fixed_attention is None or want_scores:
        q, k = project(queries, w_q), project(flat, w_k)
    if fixed_attention is None:
        p = REWEIGHTINGS[reweighting].weights(q, k, **options)
    else:
        p = fixed_attention_weights(fixed_attention, n, tokens.dtype, tokens.device)
        p = p[-1:] if query_only else p
        p = p.expand(runs, heads, batch, *p.shape)
    output = (p @ project(flat, w_v)).sum(1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(width) if want_scores else None
    return output, p, scores


def forward(
    weights: Weights,
    tokens: Float[Tensor, "runs batch tokens width"],
    *,
    reweighting: str = "softmax",
    options: Mapping[str, Any] | None = None,
    residual: bool = True,
    fixed_attention: str | None = None,
) -> tuple[Float[Tensor, "runs batch tokens width"], list[Attention]]:
    r"""The whole stack, with every layer's attention.

    .. math:: X \leftarrow [X +] \sum_h P_h X W_V^{(h)}, \quad P_h = P(X W_Q^{(h)}, X W_K^{(h)})

    Args:
        weights: as :func:`init_weights` returns.
        tokens: the prompts.
        reweighting: a name in `REWEIGHTINGS`; `options` goes to its ``weights``.
        residual: whether X is added to each layer's output.
        fixed_attention: None, or a P that replaces the mechanism's (see :func:`fixed_attention_weights`).

    Raises:
        ValueError: if the name is unknown or the shapes do not fit.

    Source: hong2024transformer (attention-only stack, as its reviewers describe it).
    """
    _check(weights, tokens, reweighting, fixed_attention)
    layers = []
    for l in range(weights["W_Q"].shape[1]):  # noqa: E741
        out, p, scores = _layer(
            tokens,
            *(weights[b][:, l] for b in BLOCKS),
            query_only=False,
            reweighting=reweighting,
            options=options or {},
            fixed_attention=fixed_attention,
            want_scores=True,
        )
        assert scores is not None
        layers.append(Attention(p, scores))
        tokens = tokens + out if residual else out
    return tokens, layers


def predict(
    weights: Weights,
    tokens: Float[Tensor, "runs batch tokens width"],
    *,
    reweighting: str = "softmax",
    options: Mapping[str, Any] | None = None,
    residual: bool = True,
    fixed_attention: str | None = None,
) -> Float[Tensor, "runs batch"]:
    """The prediction: last coordinate of the query token after the last layer.

    Equal to ``forward(...)[0][:, :, -1, -1]``; the last layer computes its query row only, since nothing else is read.
    With one layer the residual adds 0 (the query's y is 0).
    """
    _check(weights, tokens, reweighting, fixed_attention)
    depth = weights["W_Q"].shape[1]
    for l in range(depth):  # noqa: E741
        last = l == depth - 1
        out, _, _ = _layer(
            tokens,
            *(weights[b][:, l] for b in BLOCKS),
            query_only=last,
            reweighting=reweighting,
            options=options or {},
            fixed_attention=fixed_attention,
            want_scores=False,
        )
        tokens = (tokens[:, :, -1:] if last else tokens) + out if residual else out
    return tokens[:, :, -1, -1]


def _check(weights: Weights, tokens: Tensor, reweighting: str, fixed_attention: str | None) -> None:
    choice("reweighting", reweighting, REWEIGHTINGS)
    if fixed_attention is not None:
        choice("fixed_attention", fixed_attention, FIXED_ATTENTION)
    if set(weights) != set(BLOCKS):
        raise refuse("weights", f"a dict of {BLOCKS}", sorted(weights))
    shape = weights["W_Q"].shape
    if any(weights[b].shape != shape for b in BLOCKS) or len(shape) != 5 or shape[-1] != shape[-2]:
        raise refuse("weights", "of shape (runs, layers, heads, D, D)", [tuple(weights[b].shape) for b in BLOCKS])
    if tokens.shape[0] != shape[0] or tokens.shape[-1] != shape[-1]:
        raise refuse("tokens", f"of shape ({shape[0]}, batch, tokens, {shape[-1]})", tuple(tokens.shape))
