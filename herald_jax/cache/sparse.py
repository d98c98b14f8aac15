"""The device's part of a sparse cache: full keys and values of a few layers, pools of the rest.

Layers below `dense_layers` keep everything, in pages. Of every other layer the device has, for
each row, two pools of selected entries, of which block n reads the one of parity n % 2 while
the other is filled for block n + 1, and a ring of the newest finished blocks. With the store on
the device it has all finished blocks of these layers as well.

Ownership: whoever runs a program that writes takes the whole cache by donation and keeps only
what comes back. An entry of a pool past its block's count, and a ring slot past the number of
finished blocks, hold leftovers; they are hidden by length.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from herald_jax.cache.key_index import KeyIndex
from herald_jax.cache.layout import check_index_range
from herald_jax.cache.paged import PagedCache
from herald_jax.cache.shape import SparseShape
from herald_jax.configs import ModelConfig


class LayerPool(NamedTuple):
    """Keys (rotated) and values of rows of one layer."""

    k: Float[Array, "N K S D"]
    v: Float[Array, "N K S D"]

    @classmethod
    def zeros(cls, config: ModelConfig, rows: int, tokens: int, dtype: Any) -> Self:
        """An empty pool."""
        shape = (rows, config.num_kv_heads, tokens, config.head_dim)
        check_index_range("one layer's pool", shape)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, rows: Int[Array, " M"], start: Int[Array, " M"], new: LayerPool) -> LayerPool:
        """The pool with `new[m]` [M, K, T, D] at `start[m]` of row `rows[m]`.

        Numbers of rows past the last are dropped.
        """
        slots = start[:, None] + jnp.arange(new.k.shape[2])

        def put(pool: jax.Array, values: jax.Array) -> jax.Array:
            values = values.transpose(0, 2, 1, 3)
            return pool.at[rows[:, None], :, slots].set(values, mode="drop")

        return LayerPool(put(self.k, new.k), put(self.v, new.v))


class SparseCache(NamedTuple):
    """All of a sparse cache that is on the device; one entry a sparse layer in the tuples.

    `selected` has 2 R rows: those of parity 0, then those of parity 1. `store` is empty if the
    finished blocks are on the host. `index` has their keys in 8 bits, if they are scored here.
    """

    dense: PagedCache
    selected: tuple[LayerPool, ...]
    recent: tuple[LayerPool, ...]
    store: tuple[LayerPool, ...]
    index: tuple[KeyIndex, ...] = ()

    @classmethod
    def zeros(cls, config: ModelConfig, shape: SparseShape, dtype: Any) -> Self:
        """An empty cache."""
        layers = range(shape.dense_layers, config.num_layers)

        def pools(rows: int, tokens: int) -> tuple[LayerPool, ...]:
            return tuple(LayerPool.zeros(config, rows, tokens, dtype) for _ in layers)

        indexed = layers if shape.has_key_index else ()
        pages = (shape.num_pages, shape.page_tokens)
        return cls(
            PagedCache.zeros(config, *pages, dtype, layers=shape.dense_layers),
            pools(2 * shape.rows, shape.pool_tokens),
            pools(shape.rows, shape.recent_blocks * config.block_length),
            pools(shape.rows, shape.row_tokens) if shape.has_device_store else (),
            tuple(KeyIndex.zeros(config, shape.rows, shape.row_tokens, dtype) for _ in indexed),
        )
