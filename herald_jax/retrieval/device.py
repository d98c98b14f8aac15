"""Selection over keys on the device: scores, the best of them, and the pools that they fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from herald_jax.cache.budget import Budget
from herald_jax.cache.key_index import KeyIndex
from herald_jax.cache.sparse import LayerPool
from herald_jax.retrieval import select
from herald_jax.retrieval.queries import query_positions
from herald_jax.retrieval.settings import SelectionConfig

SEARCHED_SCORES = 1 << 26
"""Most scores that are searched at once: 256 MB, and twice as much on the way."""


class BudgetTable(NamedTuple):
    """A budget's numbers by the index of the block that is selected for."""

    candidates: Int[Array, " N"]
    wanted: Int[Array, " N"]
    pooled: Int[Array, " N"]

    @classmethod
    def of(cls, budget: Budget, blocks: int) -> BudgetTable:
        """The numbers of the first `blocks` blocks."""

        def ints(values: list[int]) -> np.ndarray:
            return np.asarray(values, np.int32)

        each = range(blocks)
        return cls(
            ints([budget.candidates(index) for index in each]),  # type: ignore[arg-type]
            ints([min(budget.wanted(index), 2**31 - 1) for index in each]),  # type: ignore[arg-type]
            ints([budget.counts(index).pooled for index in each]),  # type: ignore[arg-type]
        )

    def at(self, index: Int[Array, " M"]) -> BudgetTable:
        """The numbers of some blocks."""
        return jax.tree.map(lambda x: jnp.take(jnp.asarray(x), index, mode="clip"), self)


@dataclasses.dataclass(frozen=True, slots=True)
class Selector:
    """What chooses the entries of a pool.

    Attributes:
        spec: How keys are scored.
        block_length: B.
        sinks: First candidates that are always taken.
        capacity: Entries that a pool has room for, C.
    """

    spec: SelectionConfig
    block_length: int
    sinks: int
    capacity: int

    def queries(
        self, q: Float[Array, "M B H D"], first_mask: Int[Array, " M"]
    ) -> Float[Array, "M n H D"]:
        """The queries that score, of blocks whose first masked positions are given.

        The named positions are squeezed into the masked part: what is known before it needs no
        keys, and a set that is dense at the block's front would waste itself there.
        """
        places = np.asarray(query_positions(self.spec.queries, self.block_length))
        free = self.block_length - first_mask[:, None]
        places = first_mask[:, None] + places * free // self.block_length
        return jnp.take_along_axis(q, places[:, :, None, None], axis=1)

    def scores(
        self,
        picked: Float[Array, "M n H D"],
        keys: Float[Array, "R K S D"] | KeyIndex,
        rows: Int[Array, " M"],
        budget: BudgetTable,
    ) -> Float[Array, "M K S"]:
        """Scores of the keys of each slot's row; a number past the last row gives anything."""
        total, kv_heads = jax.tree.leaves(keys)[0].shape[:2]
        spec, heads = self.spec, picked.shape[2]
        group = select.column_group(spec, heads, kv_heads)
        columns, candidates = select.columns(picked, kv_heads, spec.heads), budget.candidates
        is_everyone = total == rows.shape[0]
        if is_everyone:  # the slots are sorted, which is cheaper than a copy of their keys
            columns = jnp.zeros_like(columns).at[rows].set(columns, mode="drop")
            candidates = jnp.zeros_like(candidates).at[rows].set(candidates, mode="drop")
        else:
            keys = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), keys)
        if isinstance(keys, KeyIndex):
            logits = keys.logits(columns)
        else:
            logits = select.logits(columns, keys)
        score = select.importance_of_logits(logits, candidates, spec, group)
        return jnp.take(score, rows, axis=0, mode="clip") if is_everyone else score

    def choose(
        self, scores: Sequence[Float[Array, "M K S"]], budget: BudgetTable
    ) -> list[Int[Array, "M K C"]]:
        """By layer the positions of the entries, ascending; 0 past each slot's number of them.

        Layers are searched together, because the search takes dozens of small kernels whatever
        it is given, as far as their scores are a modest array.
        """
        kv_heads, found = scores[0].shape[1], []
        together = max(SEARCHED_SCORES // scores[0].size, 1)
        for first in range(0, len(scores), together):
            score = jnp.concatenate(scores[first : first + together], axis=1)
            index, _ = select.choose(
                score, budget.candidates, self.sinks, budget.wanted, self.capacity
            )
            found += jnp.split(index, index.shape[1] // kv_heads, axis=1)
        return found

    def refill(
        self,
        pools: Sequence[LayerPool],
        pool_rows: Int[Array, " M"],
        queries: Sequence[Float[Array, "M B H D"]],
        first_mask: Int[Array, " M"],
        texts: Sequence[LayerPool],
        rows: Int[Array, " M"],
        budget: BudgetTable,
    ) -> tuple[LayerPool, ...]:
        """The pools of some layers with some rows filled anew.

        Args:
            pools: Pools of all rows, by layer.
            pool_rows: Which of them to fill; numbers past the last are dropped.
            queries: Rotated queries of the blocks that will read them, by layer.
            first_mask: Where each block's masks begin.
            texts: Keys and values of the texts, by layer.
            rows: Row of each slot's text.
            budget: Numbers of each slot.
        """
        scores = [
            self.scores(self.queries(q, first_mask), text.k, rows, budget)
            for q, text in zip(queries, texts, strict=True)
        ]

        def filled(pool: LayerPool, text: LayerPool, index: jax.Array) -> LayerPool:
            last = jnp.minimum(rows, text.k.shape[0] - 1)[:, None, None]
            at = (last, jnp.arange(text.k.shape[1])[:, None], index)
            return LayerPool(
                *(
                    old.at[pool_rows].set(values[at], mode="drop")
                    for old, values in zip(pool, text, strict=True)
                )
            )

        chosen = self.choose(scores, budget)
        return tuple(map(filled, pools, texts, chosen))
