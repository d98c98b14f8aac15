"""Paired differences between an arm and the dense one, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964


def paired_share_difference(
    ours: Sequence[bool], theirs: Sequence[bool]
) -> tuple[float, float, float]:
    """Difference of two shares over the same prompts, and its 95 % interval.

    The interval is Bonett and Price's adjusted Wald interval for paired proportions (2012): one
    is added to both kinds of disagreement, so it does not shrink to a point where there is none.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} outcomes are no pairs")
    number = len(ours)
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    up, down = (gained + 1) / (number + 2), (lost + 1) / (number + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (number + 2))
    middle = up - down
    return (gained - lost) / number, max(middle - half, -1.0), min(middle + half, 1.0)


def paired_mean_difference(
    ours: Sequence[float], theirs: Sequence[float]
) -> tuple[float, float, float]:
    """Mean difference over the same prompts, and its normal 95 % interval."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} values are no pairs")
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = sum(gaps) / len(gaps)
    if len(gaps) == 1:
        return mean, -math.inf, math.inf
    variance = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
    half = Z * math.sqrt(variance / len(gaps))
    return mean, mean - half, mean + half


def pack_bits(flags: Sequence[bool]) -> str:
    """Outcomes as hexadecimal digits, four to a digit, the first one highest; zeros at the end."""
    text = "".join("1" if flag else "0" for flag in flags)
    text += "0" * (-len(text) % 4)
    return "".join(f"{int(text[at : at + 4], 2):x}" for at in range(0, len(text), 4))


def unpack_bits(digits: str, number: int) -> list[bool]:
    """What `pack_bits` packed."""
    text = "".join(f"{int(digit, 16):04b}" for digit in digits)
    return [bit == "1" for bit in text[:number]]
