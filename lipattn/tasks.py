r"""In-context linear regression: the task on which the runs of the book live or die.

Each prompt hides its own weights w. The model reads N pairs (x_j, y_j) and a query (x, 0), and must say wᵀx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipattn._validate import integer, refuse
from lipattn.philox import normal

__all__ = [
    "EVALUATION",
    "TRAINING",
    "Prompts",
    "gradient_step_prediction",
    "least_squares_loss",
    "least_squares_prediction",
    "linear_attention_optimum",
    "null_loss",
    "sample_prompts",
    "seed_tensor",
]

TRAINING, EVALUATION = 0, 1  # streams of the generator


class Prompts(NamedTuple):
    """A batch of prompts for each run.

    Attributes:
        tokens: rows (x_j, y_j), the query last as (x, 0).
        targets: wᵀx of the query.
    """

    tokens: Float[Tensor, "runs batch tokens width"]
    targets: Float[Tensor, "runs batch"]


def seed_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Seeds as the int64 tensor that the generator takes.

    Raises:
        ValueError: if there are none, one is not an integer in [0, 2⁶³), or two are equal.
    """
    checked = [integer("seed", s, minimum=0, maximum=2**63 - 1) for s in seeds]
    if not checked:
        raise refuse("seeds", "a non-empty sequence of integers", seeds)
    if len(set(checked)) < len(checked):
        raise refuse("seeds", "all different (equal seeds are the same run)", seeds)
    return torch.tensor(checked, dtype=torch.int64, device=device)


def sample_prompts(
    seeds: Sequence[int],
    step: int,
    *,
    n_context: int,
    d: int,
    batch: int,
    stream: int = TRAINING,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Prompts:
    r"""Fresh prompts for every run at one step.

    .. math:: w, x_j, x \sim \mathcal N(0, I_d), \qquad y_j = w^\top x_j

    A prompt depends on its seed, step and index in the batch alone: more runs, a larger batch or a longer context leave
    the numbers that were there before unchanged.

    Args:
        seeds: one a run.
        step: which batch.
        n_context: N, pairs in the prompt.
        d: dimension of x; tokens have width d + 1.
        batch: prompts a run.
        stream: `TRAINING` or `EVALUATION`; the two share no number.
        dtype, device: of the result; the numbers are drawn in float64 and rounded once.

    Raises:
        ValueError: if a size is below 1, `step` < 0 or a seed is bad.

    Source: hong2024transformer (setting, as its reviewers describe it); garg2022what.
    """
    integer("n_context", n_context, minimum=1)
    integer("d", d, minimum=1)
    integer("batch", batch, minimum=1)
    integer("step", step, minimum=0, maximum=2**32 - 1)
    key = seed_tensor(seeds, device)
    index = torch.arange(batch, device=device)
    z = normal((n_context + 2) * d, key[:, None], (torch.full_like(key, step)[:, None], index), stream)
    w, query, context = z.split((d, d, n_context * d), dim=-1)
    x = torch.cat((context, query), dim=-1).unflatten(-1, (n_context + 1, d))
    y = torch.einsum("rbnd,rbd->rbn", x, w)
    targets = y[..., -1].clone()
    y[..., -1] = 0
    return Prompts(torch.cat((x, y[..., None]), dim=-1).to(dtype), targets.to(dtype))


def null_loss(d: int) -> float:
    """Mean squared error of predicting 0: E (wᵀx)² = d.

    Raises:
        ValueError: if `d` < 1.

    Source: ours, chapter 4.
    """
    return float(integer("d", d, minimum=1))


def linear_attention_optimum(n_context: int, d: int) -> float:
    r"""Best loss of one layer of *unnormalised* linear attention, which is one step of gradient descent from 0.

    .. math:: \min_a \mathbb E\|(I - aS)w\|^2 = \frac{d(d+1)}{N+d+1}, \quad S = \frac1N\sum_j x_jx_j^\top,
              \quad a^\ast = \frac{N}{N+d+1}

    Row-normalised attention cannot reach it. Between 0 (N → ∞) and the null loss d.

    Raises:
        ValueError: if an argument is below 1.

    Source: ahn2023transformers; mahankali2024one; vonoswald2023transformers.
    """
    n, d = integer("n_context", n_context, minimum=1), integer("d", d, minimum=1)
    return d * (d + 1) / (n + d + 1)


def least_squares_loss(n_context: int, d: int) -> float:
    """Loss of the least-squares predictor of smallest norm, which is Bayes-optimal here: max(d − N, 0).

    There is no noise, so d pairs determine w; with fewer, the part of w outside their span is not seen.

    Raises:
        ValueError: if an argument is below 1.

    Source: garg2022what (the baseline); the value: ours, chapter 4.
    """
    return float(max(integer("d", d, minimum=1) - integer("n_context", n_context, minimum=1), 0))


def least_squares_prediction(prompts: Prompts) -> Float[Tensor, "runs batch"]:
    """Prediction of the least-squares fit of smallest norm on each prompt's context.

    Source: garg2022what.
    """
    context, query = prompts.tokens[..., :-1, :], prompts.tokens[..., -1, :-1]
    w = torch.linalg.lstsq(context[..., :-1], context[..., -1:], driver="gelsd").solution
    return (query * w[..., 0]).sum(-1)


def gradient_step_prediction(prompts: Prompts, step_size: float) -> Float[Tensor, "runs batch"]:
    r"""Prediction after one step of gradient descent from w = 0 on each prompt's context.

    .. math:: \hat y = \frac{a}{N}\sum_j y_j\, x_j^\top x

    With a = N/(N+d+1) its loss is :func:`linear_attention_optimum`.

    Source: vonoswald2023transformers.
    """
    context, query = prompts.tokens[..., :-1, :], prompts.tokens[..., -1, :-1]
    scores = torch.einsum("rbnd,rbd->rbn", context[..., :-1], query)
    return step_size * (scores * context[..., -1]).mean(-1)
