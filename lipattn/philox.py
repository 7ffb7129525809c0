r"""Philox4x32-10: random numbers as a function of where they are used.

A counter-based generator has no state to advance: a key (the run's seed) and a counter (step, prompt, place) go in,
four 32-bit words come out. So a run's data depend on its seed, step and place alone, never on which other runs train
beside it, and the same function in another language gives the same words.

Source: Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011, section 3.3.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from lipattn._validate import integer, refuse

__all__ = ["normal", "philox4x32", "uniform"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as 32-bit fractions


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for each counter and key, all as int64 tensors that broadcast together.

    Args:
        counter: four words, each in [0, 2³²).
        key: two words, each in [0, 2³²).
        rounds: 10 in everything the book computes.

    Returns:
        Four words in [0, 2³²), as int64.

    Source: Salmon et al. 2011, section 3.3; checked against the authors' known-answer vectors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap modulo 2^64, which leaves both 32-bit halves right once they are masked
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _words(count: int, seed: Tensor, place: tuple[Tensor, Tensor], stream: int) -> Tensor:
    integer("count", count, minimum=1)
    integer("stream", stream, minimum=0, maximum=_WORD)
    if seed.dtype != torch.int64:
        raise refuse("seed", "an int64 tensor", seed.dtype)
    device = seed.device
    block = torch.arange(-(-count // 4), device=device)
    step, prompt = (torch.as_tensor(p, dtype=torch.int64, device=device) for p in place)
    shape = torch.broadcast_shapes(seed.shape, step.shape, prompt.shape)
    seed, step, prompt = (x.expand(shape).unsqueeze(-1) for x in (seed, step, prompt))
    counter = (block, prompt & _WORD, step & _WORD, torch.full((), stream, dtype=torch.int64, device=device))
    return torch.stack(philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD)), dim=-1)  # (*shape, blocks, 4)


def uniform(
    count: int, seed: Int[Tensor, "*runs"], place: tuple[Tensor, Tensor], stream: int
) -> Float64[Tensor, "*places count"]:
    """`count` numbers uniform on (0, 1), never 0 or 1, for each seed and place.

    Args:
        count: how many; a larger count extends a smaller one.
        seed: the key.
        place: (step, prompt), two int64 tensors that broadcast with `seed`.
        stream: keeps data, initial weights and evaluation apart.

    Returns:
        (word + 1/2) / 2³², float64: the same numbers on every device.

    Raises:
        ValueError: if `count` < 1, `stream` is out of range or `seed` is not int64.

    Source: Salmon et al. 2011.
    """
    return (_words(count, seed, place, stream).flatten(-2)[..., :count].double() + 0.5) / 2.0**32


def normal(
    count: int, seed: Int[Tensor, "*runs"], place: tuple[Tensor, Tensor], stream: int
) -> Float64[Tensor, "*places count"]:
    r"""`count` standard normal numbers for each seed and place.

    .. math:: z_{2i} = \sqrt{-2\ln u_{2i}}\cos 2\pi u_{2i+1}, \quad z_{2i+1} = \sqrt{-2\ln u_{2i}}\sin 2\pi u_{2i+1}

    Args:
        count, seed, place, stream: as in :func:`uniform`.

    Returns:
        float64, \|z\| ≤ 6.8 (32-bit uniforms).

    Raises:
        ValueError: as :func:`uniform`.

    Source: Box and Muller 1958.
    """
    u = (_words(count, seed, place, stream).double() + 0.5) / 2.0**32
    radius, angle = (-2 * u[..., 0::2].log()).sqrt(), 2 * math.pi * u[..., 1::2]
    z = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)
    return z.flatten(-3)[..., :count]
