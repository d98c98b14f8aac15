"""Where the keys of a segment lie, for kernels that read a pool as one matrix of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.tiles import COPY_ALIGNMENT
from pallas_kernels.reference import PagedSegment, Segment

COPY_ROWS = 64
"""Keys that one command of the copy engine fetches; fewer where pages are smaller."""


class Source(NamedTuple):
    """Where a segment's keys lie in its pool, seen as a matrix of rows."""

    k: Any
    v: Any
    table: Any
    """Row of the pool of each slot [M], or its page table, row after row [M * W]."""
    row_tokens: int
    """Tokens of a row of the pool, or of a page."""
    width: int
    """Pages of a slot's table; 0 without pages."""

    @classmethod
    def of(cls, segment: Segment | PagedSegment, tile: int) -> Source:
        """A segment's operands; a pool smaller than a tile is filled up with zeros."""
        rows, kv_heads, tokens, dim = segment.k.shape
        missing = -tokens % COPY_ALIGNMENT
        size = rows * kv_heads * (tokens + missing)

        def flat(pool: jax.Array) -> jax.Array:
            if missing:
                pool = jnp.pad(pool, ((0, 0), (0, 0), (0, missing), (0, 0)))
            matrix = pool.reshape(size, dim)
            return jnp.pad(matrix, ((0, tile - size), (0, 0))) if size < tile else matrix

        k, v, tokens = flat(segment.k), flat(segment.v), tokens + missing
        if isinstance(segment, PagedSegment):
            # Entries past a slot's pages may hold anything; what they point to is masked.
            table = jnp.clip(segment.tables, 0, rows - 1).reshape(-1)
            return cls(k, v, table.astype(jnp.int32), tokens, segment.tables.shape[1])
        return cls(k, v, segment.rows.astype(jnp.int32), tokens, 0)

    def without_arrays(self) -> Source:
        """The sizes alone, which a kernel's body may close over."""
        return self._replace(k=None, v=None, table=None)

    def locator(
        self, table: Any, slot: Any, head: Any, kv_heads: int
    ) -> Callable[[Any], jax.Array]:
        """What gives the row of the pool's matrix that holds a token of the slot."""
        if not self.width:
            first = (table[slot] * kv_heads + head) * self.row_tokens
            return lambda token: first + token

        def in_page(token: Any) -> jax.Array:
            number = jnp.minimum(token // self.row_tokens, self.width - 1)
            page = table[slot * self.width + number]
            return (page * kv_heads + head) * self.row_tokens + token % self.row_tokens

        return in_page


def copy_rows(sources: Sequence[Source]) -> int:
    """The keys of one copy: no copy may cross from one page into another."""
    return min([COPY_ROWS, *(source.row_tokens for source in sources if source.width)])
