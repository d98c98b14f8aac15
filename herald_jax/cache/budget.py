"""How many tokens of each kind a block attends to in a sparse layer. Plain Python: no JAX.

A block's prefix falls into three parts: sinks at its beginning, candidates from which the
budget is selected, and the newest finished blocks. No position is in two of them. Everything
follows from the block's index, so device, host and accounts agree without talking.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from herald_jax.cache.layout import round_up

POOL_TOKENS = 64
"""A row's pool of selected entries is a multiple of this."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCounts:
    """Tokens that every query of one block attends to, per KV head of a sparse layer.

    Attributes:
        sinks: First tokens of the prefix, always taken.
        selected: Tokens taken for their importance.
        recent: Tokens of the newest finished blocks.
        block: Tokens of the block itself.
    """

    sinks: int
    selected: int
    recent: int
    block: int

    @property
    def attended(self) -> int:
        """All of them."""
        return self.sinks + self.selected + self.recent + self.block

    @property
    def pooled(self) -> int:
        """Entries of the row's pool."""
        return self.sinks + self.selected


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecallAccount:
    """What it took to fill one row's pool from host memory, all sparse layers together.

    Attributes:
        bytes_scanned: Keys that were scored.
        bytes_gathered: Keys and values copied to where they are sent from.
        bytes_sent: Bytes sent to the device.
        hit_share: Share of the entries that the row's pool before held as well.
        seconds: Time from the request until the last entry was ready to be sent.
        scan_seconds: Part of it in which entries were chosen.
        gather_seconds: Part of it in which they were copied.
    """

    bytes_scanned: int
    bytes_gathered: int
    bytes_sent: int
    hit_share: float
    seconds: float
    scan_seconds: float = 0.0
    gather_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class BlockAccount:
    """What one block attended to in each sparse layer, and what its pool cost.

    Attributes:
        counts: Tokens by kind.
        recall: The recall that filled its pool; `None` if no host memory was read for it.
    """

    counts: BlockCounts
    recall: RecallAccount | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """The rule that gives a block its counts.

    Attributes:
        tokens: A number of tokens, or a share of the prefix at the block's start, rounded up.
        sink_tokens: Sinks of a prefix that has as many candidates.
        recent_blocks: Newest finished blocks that are always attended.
        block_length: B.
    """

    tokens: int | float
    sink_tokens: int
    recent_blocks: int
    block_length: int

    def candidates(self, index: int) -> int:
        """Tokens, from the first, that may be selected for block `index`, sinks included."""
        return max(index - self.recent_blocks, 0) * self.block_length

    def wanted(self, index: int) -> int:
        """Tokens that the budget grants to block `index`."""
        if isinstance(self.tokens, int):
            return self.tokens
        # A share such as 0.05 means the decimal number, not the double next to it.
        return math.ceil(Fraction(repr(self.tokens)) * index * self.block_length)

    def counts(self, index: int) -> BlockCounts:
        """The counts of the block with this index on the grid."""
        candidates = self.candidates(index)
        sinks = min(self.sink_tokens, candidates)
        return BlockCounts(
            sinks=sinks,
            selected=min(self.wanted(index), candidates - sinks),
            recent=index * self.block_length - candidates,
            block=self.block_length,
        )

    def pool_tokens(self, blocks: int) -> int:
        """Entries that a row's pool must have room for in texts of so many blocks."""
        most = max((self.counts(index).pooled for index in range(blocks)), default=0)
        return round_up(max(most, 1), POOL_TOKENS)
