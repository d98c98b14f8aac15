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

    def choose(
        self, picked: Float[Array, "M n H D"], k: Float[Array, "M K S D"], budget: BudgetTable
    ) -> Int[Array, "M K C"]:
        """Positions of the entries, ascending; 0 past each slot's number of them."""
        kv_heads = k.shape[1]
        group = select.column_group(self.spec, picked.shape[2], kv_heads)
        columns = select.columns(picked, kv_heads, self.spec.heads)
        score = select.importance(columns, k, budget.candidates, self.spec, group)
        index, _ = select.choose(score, budget.candidates, self.sinks, budget.wanted, self.capacity)
        return index

    def choose_indexed(
        self,
        picked: Sequence[Float[Array, "1 n H D"]],
        keys: Sequence[KeyIndex],
        budget: BudgetTable,
    ) -> Int[Array, "L K C"]:
        """`choose` for one row of several layers at once, over 8-bit keys."""
        kv_heads = keys[0].codes.shape[1]
        scores = []
        for queries, index in zip(picked, keys, strict=True):
            group = select.column_group(self.spec, queries.shape[2], kv_heads)
            logits = index.logits(select.columns(queries, kv_heads, self.spec.heads))
            scores.append(select.importance_of_logits(logits, budget.candidates, self.spec, group))
        # Together: the search for the best takes dozens of small kernels, whatever it is given.
        score = jnp.concatenate(scores, axis=1)
        chosen, _ = select.choose(
            score, budget.candidates, self.sinks, budget.wanted, self.capacity
        )
        return chosen.reshape(len(keys), kv_heads, self.capacity)

    def refill(
        self,
        pools: LayerPool,
        pool_rows: Int[Array, " M"],
        q: Float[Array, "M B H D"],
        first_mask: Int[Array, " M"],
        prefix: LayerPool,
        budget: BudgetTable,
    ) -> LayerPool:
        """The pools of a layer with some rows filled anew.

        Args:
            pools: Pools of all rows.
            pool_rows: Which of them to fill; numbers past the last are dropped.
            q: Rotated queries of the blocks that will read them.
            first_mask: Where each block's masks begin.
            prefix: Keys and values of each slot's text.
            budget: Numbers of each slot.
        """
        index = self.choose(self.queries(q, first_mask), prefix.k, budget)

        def put(pool: jax.Array, values: jax.Array) -> jax.Array:
            return pool.at[pool_rows].set(select.gather_rows(values, index), mode="drop")

        return LayerPool(put(pools.k, prefix.k), put(pools.v, prefix.v))
