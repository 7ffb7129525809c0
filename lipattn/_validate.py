"""Argument checks with one form of message: ``name must be …, got name=value``."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

__all__ = ["choice", "finite", "fraction", "integer", "non_negative", "positive", "refuse"]


def refuse(name: str, requirement: str, value: Any) -> ValueError:
    """The error to raise: names the argument, what it must be, and the value it had."""
    return ValueError(f"{name} must be {requirement}, got {name}={value!r}")


def _real(value: Any) -> float:
    """`value` as a float; NaN, which no range holds, if it is not a real number."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def finite(name: str, value: Any) -> float:
    """`value` as a float, if it is a finite real number."""
    if not math.isfinite(_real(value)):
        raise refuse(name, "a finite number", value)
    return float(value)


def positive(name: str, value: Any) -> float:
    """`value` as a float, if it is finite and > 0."""
    if not 0 < _real(value) < math.inf:
        raise refuse(name, "finite and > 0", value)
    return float(value)


def non_negative(name: str, value: Any) -> float:
    """`value` as a float, if it is finite and >= 0."""
    if not 0 <= _real(value) < math.inf:
        raise refuse(name, "finite and >= 0", value)
    return float(value)


def fraction(name: str, value: Any) -> float:
    """`value` as a float, if it lies in [0, 1]."""
    if not 0 <= _real(value) <= 1:
        raise refuse(name, "in [0, 1]", value)
    return float(value)


def integer(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """`value` as an int, if it is a whole number in [minimum, maximum]."""
    wanted = f"an integer >= {minimum}" if maximum is None else f"an integer in [{minimum}, {maximum}]"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refuse(name, wanted, value)
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        raise refuse(name, wanted, value)
    return number


def choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """`value`, if it is one of `allowed`."""
    if value not in allowed:
        raise refuse(name, "one of " + ", ".join(map(repr, allowed)), value)
    return value
