"""The dense cache: all keys and values of every layer on the device.

Ownership: whoever runs a program that appends donates the cache to it and keeps only what
comes back. Slots at or past a row's prefix length hold leftovers of padding or of finished
rows; they are never read, because attention is bounded by the prefix length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from herald_jax.cache.layout import check_index_range
from herald_jax.configs import ModelConfig
from herald_jax.models.attention import Attend, FreshKV
from pallas_kernels import block_attention, prefill_attention


class DenseCache(NamedTuple):
    """Keys (rotated) and values, one head-major array per layer."""

    k: tuple[Float[Array, "R K S D"], ...]
    v: tuple[Float[Array, "R K S D"], ...]

    @classmethod
    def zeros(cls, config: ModelConfig, rows: int, capacity: int, dtype: Any) -> Self:
        """An empty cache of `capacity` token slots a row."""
        shape = (rows, config.num_kv_heads, capacity, config.head_dim)
        check_index_range("one layer's cache", shape)
        layers = range(config.num_layers)
        return cls(
            tuple(jnp.zeros(shape, dtype) for _ in layers),
            tuple(jnp.zeros(shape, dtype) for _ in layers),
        )

    @property
    def capacity(self) -> int:
        """Token slots of a row."""
        return self.k[0].shape[2]

    def block_attend(self, prefix_lengths: Int[Array, " R"]) -> Attend:
        """Attention of one block a row over that row's prefix and the block itself."""

        def attend(layer: int, q: Float[Array, "R B H D"], fresh: FreshKV) -> jax.Array:
            k, v = self.k[layer], self.v[layer]
            return block_attention(q, k, v, prefix_lengths, fresh.k, fresh.v)

        return attend

    def prefill_attend(self, prefix_length: Int[Array, ""], block_length: int) -> Attend:
        """Block-causal attention of a chunk that starts at the same place in all rows."""

        def attend(layer: int, q: Float[Array, "R C H D"], fresh: FreshKV) -> jax.Array:
            k, v = self.k[layer], self.v[layer]
            return prefill_attention(q, k, v, prefix_length, fresh.k, fresh.v, block_length)

        return attend

    def append_blocks(
        self, fresh: Sequence[FreshKV], starts: Int[Array, " R"], is_written: Bool[Array, " R"]
    ) -> Self:
        """The cache with one block a row written at that row's own start.

        Rows that are not written keep their slots: their indices point past the capacity,
        where a scatter in `drop` mode writes nothing.
        """
        block = fresh[0].k.shape[1]
        slots = jnp.where(is_written, starts, self.capacity)[:, None] + jnp.arange(block)
        rows = jnp.arange(slots.shape[0])[:, None]

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[rows, :, slots].set(new, mode="drop", unique_indices=True)

        return type(self)(
            tuple(write(old, new.k) for old, new in zip(self.k, fresh, strict=True)),
            tuple(write(old, new.v) for old, new in zip(self.v, fresh, strict=True)),
        )

    def append_chunk(self, fresh: Sequence[FreshKV], start: Int[Array, ""]) -> Self:
        """The cache with a chunk written at the same place in all rows."""

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(old, new.transpose(0, 2, 1, 3), (0, 0, start, 0))

        return type(self)(
            tuple(write(old, new.k) for old, new in zip(self.k, fresh, strict=True)),
            tuple(write(old, new.v) for old, new in zip(self.v, fresh, strict=True)),
        )
