"""Prompts whose keys and values are still in a row of the sparse layers' store.

A prompt goes through the layers in chunks, with full attention, so a chunk's keys depend on the
tokens up to its end and on nothing else, and they stay where they are until the row gets another
prompt: a decoding row writes behind its prompt, and a row that nobody has is not written at all. A
prompt that begins with the same whole chunks can thus take them over, bit for bit. What decoding
wrote is never taken over: its keys come from attention to a selection.

Each chunk must begin and end where it did, or other programs would compute what follows.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer


class KnownPrefix(NamedTuple):
    """First `tokens` tokens of a prompt that are in the store's row `row`."""

    row: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    epoch: int
    tokens: Integer[np.ndarray, " P"]


class KeptPrompts:
    """What the rows of a store hold, by row; plain accounts, no arrays of the device.

    Args:
        chunk_tokens: Tokens that go through a layer at a time.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._kept: dict[int, _Kept] = {}

    def put(self, row: int, epoch: int, tokens: Integer[np.ndarray, " P"]) -> None:
        """Says that a row holds the keys and values of a stay's prompt in every sparse layer."""
        self._kept[row] = _Kept(epoch, tokens)

    def drop(self, row: int, epoch: int | None = None) -> None:
        """Forgets a row, unless another stay than `epoch` has filled it since."""
        kept = self._kept.get(row)
        if kept is not None and epoch in (None, kept.epoch):
            del self._kept[row]

    def clear(self) -> None:
        """Forgets everything, as new parameters and a new cache require."""
        self._kept.clear()

    def match(self, tokens: Integer[np.ndarray, " P"]) -> KnownPrefix | None:
        """The row that holds the most whole chunks of a prompt; `None` if none holds one."""
        known = [KnownPrefix(row, self._common(kept.tokens, tokens)) for row, kept in self._rows()]
        best = max(known, key=lambda one: one.tokens, default=None)
        return best if best is not None and best.tokens > 0 else None

    def _rows(self) -> list[tuple[int, _Kept]]:
        return list(self._kept.items())

    def _common(self, kept: np.ndarray, tokens: np.ndarray) -> int:
        """Tokens of the leading chunks that both have, each with the same end."""
        length = min(len(kept), len(tokens))
        differing = np.flatnonzero(kept[:length] != tokens[:length])
        equal = int(differing[0]) if differing.size else length
        if equal == len(kept) == len(tokens):
            return equal  # the last chunk ends in both where it is not whole
        return equal // self._chunk_tokens * self._chunk_tokens
