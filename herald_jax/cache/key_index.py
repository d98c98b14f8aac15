"""An 8-bit copy of keys, which stays on the device to be scored while the keys are elsewhere.

Ownership is that of the cache it is a part of: programs that write take it by donation.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from herald_jax.cache.layout import check_index_range
from herald_jax.configs import ModelConfig

LARGEST_CODE = 127
"""Codes are symmetric: -128 is not used."""


class KeyIndex(NamedTuple):
    """Keys of rows of one layer: `codes * scale`, one scale for each key."""

    codes: Int8[Array, "N K S D"]
    scale: Float[Array, "N K S"]

    @classmethod
    def zeros(cls, config: ModelConfig, rows: int, tokens: int, dtype: Any) -> Self:
        """An empty index; `dtype` is that of the scales."""
        shape = (rows, config.num_kv_heads, tokens, config.head_dim)
        check_index_range("one layer's key index", shape)
        return cls(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3], dtype))

    @classmethod
    def of(cls, k: Float[Array, "N K S D"]) -> Self:
        """The index of some keys. A key that is not all numbers gets a scale that is none."""
        wide = k.astype(jnp.float32)
        # Rounded before it divides, so that codes and scale belong together.
        scale = (jnp.abs(wide).max(-1) / LARGEST_CODE).astype(k.dtype)
        # Said outright: whether a maximum passes a NaN on is up to the backend.
        scale = jnp.where(jnp.isfinite(wide).all(-1), scale, jnp.nan)
        divisor = jnp.where(scale > 0, scale, 1).astype(jnp.float32)[..., None]
        codes = jnp.clip(jnp.round(wide / divisor), -LARGEST_CODE, LARGEST_CODE)
        return cls(jnp.nan_to_num(codes).astype(jnp.int8), scale)

    def write(self, rows: Int[Array, " M"], start: Int[Array, " M"], new: KeyIndex) -> KeyIndex:
        """The index with `new[m]` at `start[m]` of row `rows[m]`.

        Numbers of rows past the last are dropped.
        """
        tokens = new.codes.shape[2]
        slots = start[:, None] + jnp.arange(tokens)
        codes, scale = new.codes.transpose(0, 2, 1, 3), new.scale.transpose(0, 2, 1)
        return KeyIndex(
            self.codes.at[rows[:, None], :, slots].set(codes, mode="drop"),
            self.scale.at[rows[:, None], :, slots].set(scale, mode="drop"),
        )

    def logits(self, cols: Float[Array, "N K c D"]) -> Float[Array, "N K c S"]:
        """Products of columns and keys in fp32."""
        products = jnp.einsum(
            "mkcd,mksd->mkcs",
            cols,
            self.codes.astype(cols.dtype),
            preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
        )
        return products * self.scale[:, :, None].astype(jnp.float32)
