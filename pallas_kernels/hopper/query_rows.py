"""Where the query rows of a unit lie in the model's own arrays, for kernels that skip transposes.

Queries [M, B, H, D] are read as the matrix [M * B, H * D]. The rows of a unit run over the heads
of its KV head and, within a head, over the tokens, so that what the copy engine moves at a time
is a rectangle: some tokens of one head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import COPY_ALIGNMENT, WARPGROUP_ROWS


class Rectangle(NamedTuple):
    """Some tokens of one query head."""

    offset: int
    """Its first row among the 64 of a warpgroup."""
    row: Any
    column: Any
    is_real: Any
    """False past the last head: such rows are copied from the last one and written nowhere."""


class QueryRows(NamedTuple):
    """The sizes that say where a unit's rows lie."""

    block: int
    group: int
    kv_heads: int
    dim: int

    @property
    def tokens(self) -> int:
        """Tokens of a rectangle."""
        return min(self.block, WARPGROUP_ROWS)

    @property
    def pieces(self) -> int:
        """Rectangles of a warpgroup's rows."""
        return WARPGROUP_ROWS // self.tokens

    @property
    def is_possible(self) -> bool:
        """Whether the rows of a warpgroup are whole rectangles that the copy engine can move."""
        fits = self.block % WARPGROUP_ROWS == 0 or WARPGROUP_ROWS % self.block == 0
        return fits and self.block % COPY_ALIGNMENT == 0

    def rectangles(self, slot: Any, head: Any, first_row: Any) -> list[Rectangle]:
        """The rectangles that make up 64 rows of the unit of a slot and a KV head."""
        per_head = self.block // self.tokens
        rectangles = []
        for piece in range(self.pieces):
            number = lax.div(first_row, jnp.int32(self.tokens)) + piece
            member = lax.div(number, jnp.int32(per_head))
            row = slot * self.block + lax.rem(number, jnp.int32(per_head)) * self.tokens
            column = (head * self.group + jnp.minimum(member, self.group - 1)) * self.dim
            offset = piece * self.tokens
            rectangles.append(Rectangle(offset, row, column, member < self.group))
        return rectangles

    def fetch(self, matrix: Any, buffer: Any, full: Any, rectangles: list[Rectangle]) -> None:
        """Copies a warpgroup's queries to shared memory; `full` counts the rectangles."""
        for each in rectangles:
            to = buffer.at[pl.ds(each.offset, self.tokens)]
            plgpu.copy_gmem_to_smem(self._at(matrix, each, 0, self.dim), to, full)

    def store(
        self, buffer: Any, matrix: Any, rectangles: list[Rectangle], columns: tuple[Any, int]
    ) -> None:
        """Copies results of 64 rows, in shared memory, to some columns (first, number) of heads."""
        for each in rectangles:

            def copy(each: Rectangle = each) -> None:
                part = buffer.at[pl.ds(each.offset, self.tokens)]
                plgpu.copy_smem_to_gmem(part, self._at(matrix, each, *columns))

            pl.when(each.is_real)(copy)

    def _at(self, matrix: Any, each: Rectangle, first: Any, number: int) -> Any:
        rows = pl.ds(pl.multiple_of(each.row, COPY_ALIGNMENT), self.tokens)
        return matrix.at[rows, pl.ds(pl.multiple_of(each.column + first, number), number)]
