"""Named sets of query positions within a block. Plain Python: no JAX."""

from __future__ import annotations

import re

from herald_jax._checks import require, require_int

LOG8 = (0, 1, 2, 3, 5, 8, 14, 23)
"""The positions of `log8` in a block of 32, the length they were chosen at."""

_NAMED = ("all", "centre", "first", "log8")
_EVEN = re.compile(r"even([1-9][0-9]{0,5})")


def check_query_set(name: object, field: str = "queries") -> None:
    """Checks that `name`, the value of `field`, is a set of query positions.

    Raises:
        ConfigError: If it is not.
    """
    is_known = isinstance(name, str) and (name in _NAMED or bool(_EVEN.fullmatch(name)))
    allowed = f"one of {', '.join(_NAMED)} or even<n>, as in even4"
    require(is_known, field, name, allowed)


def query_positions(name: str, block_length: int) -> tuple[int, ...]:
    """The positions of a block that `name` stands for, ascending and distinct.

    `even<n>` starts at the block's first position, which the selection study found to matter.
    `log8` keeps its shape at other block lengths. A block with fewer positions than a set asks
    for has them all.

    Args:
        name: `all`, `centre`, `first`, `log8` or `even<n>`.
        block_length: B.

    Raises:
        ConfigError: If the name is unknown.

    Example:
        >>> query_positions("log8", 32)
        (0, 1, 2, 3, 5, 8, 14, 23)
        >>> query_positions("even4", 32)
        (0, 8, 16, 24)
    """
    check_query_set(name)
    require_int("block_length", block_length, 1)
    if name == "all":
        return tuple(range(block_length))
    if name == "centre":
        return (block_length // 2,)
    if name == "first":
        return (0,)
    if name == "log8":
        return _log8(block_length)
    count = min(int(name.removeprefix("even")), block_length)
    return tuple(index * block_length // count for index in range(count))


def _log8(block_length: int) -> tuple[int, ...]:
    if block_length <= len(LOG8):
        return tuple(range(block_length))
    positions: list[int] = []
    for index, position in enumerate(LOG8):
        # In a short block the front ones fall together: each then takes the next free place,
        # and leaves room for those after it.
        after = positions[-1] + 1 if positions else 0
        last = block_length - (len(LOG8) - index)
        positions.append(min(max(position * block_length // 32, after), last))
    return tuple(positions)
