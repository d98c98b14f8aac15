"""The attention sub-layer: projections, per-head norm and rotation around a caller's cache.

The layer does not know where keys and values live. It hands its queries and fresh keys and
values to an `Attend` function and gives the fresh ones back, so a dense, sparse or offloaded
cache is a different function and not a different layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from herald_jax.configs import ModelConfig
from herald_jax.models.layers import RMSNorm, linear
from herald_jax.models.rope import Phases, rotate


class FreshKV(NamedTuple):
    """Keys (rotated) and values that one layer computed for the tokens of this pass."""

    k: Float[Array, "R Q K D"]
    v: Float[Array, "R Q K D"]


Attend = Callable[[int, Float[Array, "R Q H D"], FreshKV], Float[Array, "R Q H D"]]
"""(layer index, rotated queries, fresh keys and values) -> attention output."""


class Attention(nnx.Module):
    """Grouped-query attention with optional biases and per-head query/key norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        inner, kv_inner = config.num_heads * dim, config.num_kv_heads * dim
        bias = config.qkv_bias
        self.q_proj = linear(
            hidden, inner, ("embed", "heads"), use_bias=bias, dtype=dtype, rngs=rngs
        )
        self.k_proj = linear(
            hidden,
            kv_inner,
            ("embed", "kv_heads"),
            use_bias=bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.v_proj = linear(
            hidden,
            kv_inner,
            ("embed", "kv_heads"),
            use_bias=bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.o_proj = linear(inner, hidden, ("heads", "embed"), dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype, "head_dim")
            self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype, "head_dim")
        self.head_dim = dim
        self.qk_norm = config.qk_norm

    def __call__(
        self, layer: int, x: Float[Array, "R Q E"], phases: Phases, attend: Attend
    ) -> tuple[Float[Array, "R Q E"], FreshKV]:
        """Returns the sub-layer's output and the fresh keys and values of its tokens."""
        split = (*x.shape[:2], -1, self.head_dim)
        q: jax.Array = self.q_proj(x).reshape(split)
        k: jax.Array = self.k_proj(x).reshape(split)
        v: jax.Array = self.v_proj(x).reshape(split)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        fresh = FreshKV(rotate(k, phases), v)
        out = attend(layer, rotate(q, phases), fresh)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), fresh
