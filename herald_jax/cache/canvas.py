"""Keys and values of finished text for canvas models: causal with a window, read by canvases.

Layers differ in their heads and in what they see. Finished text is causal; in layers with a
window a token sees the last `window` positions, its own included. A canvas sees itself both ways
and the text before it, all of its positions the same part of it: `canvas_window` positions in
layers with a window. Nothing that a canvas computes enters the cache.

Ownership is as for the dense cache. Slots at or past a row's length hold leftovers of padding or
of finished rows and are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import check_index_range
from herald_jax.configs import ModelConfig
from herald_jax.models.attention import Attend, FreshKV
from herald_jax.models.canvas import body_of, layer_heads

CANVAS_WINDOW_SHORTFALL = 1
"""Positions by which a canvas sees less of the text than the window of a layer.

The cache of transformers keeps window - 1 positions, as a token of the text counts itself, and
canvases read just that: 1023 of 1024. The JAX code of the model's makers keeps all 1024. Which of
them the published weights were trained with is not known; this follows transformers.
"""


class _Seen(NamedTuple):
    """Keys and values with who may see them."""

    k: Float[Array, "R K S D"]
    v: Float[Array, "R K S D"]
    visible: Bool[Array, "R Q S"]


def canvas_window(config: ModelConfig) -> int:
    """Positions of the text that a canvas sees in a layer with a window."""
    return body_of(config).window - CANVAS_WINDOW_SHORTFALL


def empty_cache(config: ModelConfig, rows: int, capacity: int, dtype: Any) -> DenseCache:
    """A cache of `capacity` token slots a row whose layers have their own heads."""

    def zeros(layer: int) -> jax.Array:
        heads, dim = layer_heads(config, layer)
        shape = rows, heads, capacity, dim
        check_index_range("one layer's cache", shape)
        return jnp.zeros(shape, dtype)

    layers = range(config.num_layers)
    return DenseCache(tuple(map(zeros, layers)), tuple(map(zeros, layers)))


def text_attend(config: ModelConfig, cache: DenseCache, starts: Int[Array, " R"]) -> Attend:
    """Causal attention of text that begins at `starts` and follows what is in the cache."""
    body = body_of(config)

    def attend(layer: int, q: Float[Array, "R Q H D"], fresh: FreshKV) -> jax.Array:
        k, v = cache.k[layer], cache.v[layer]
        at = starts[:, None] + jnp.arange(q.shape[1])
        window = q.shape[1] + k.shape[2] if layer in body.full_layers else body.window

        def sees(keys: Int[Array, "R S"]) -> Bool[Array, "R Q S"]:
            ahead = at[:, :, None] - keys[:, None, :]
            return (ahead >= 0) & (ahead < window)

        slots = jnp.broadcast_to(jnp.arange(k.shape[2]), (len(starts), k.shape[2]))
        stored = sees(slots) & (slots < starts[:, None])[:, None, :]
        return _attention(q, [_Seen(k, v, stored), _fresh(fresh, sees(at))])

    return attend


def canvas_attend(config: ModelConfig, cache: DenseCache, starts: Int[Array, " R"]) -> Attend:
    """Attention of canvases that begin at `starts`, over the text before them and themselves."""
    body, window = body_of(config), canvas_window(config)

    def attend(layer: int, q: Float[Array, "R B H D"], fresh: FreshKV) -> jax.Array:
        k, v = cache.k[layer], cache.v[layer]
        first, count = jnp.zeros_like(starts), k.shape[2]
        if layer not in body.full_layers and window < count:
            # Only the part that is seen is read, not a whole row with most of it hidden.
            first, count = jnp.maximum(starts - window, 0), window
            k, v = _cut(k, first, count), _cut(v, first, count)
        slots = first[:, None] + jnp.arange(count)
        is_text = slots < starts[:, None]
        if layer not in body.full_layers:
            is_text &= slots >= starts[:, None] - window
        stored = jnp.broadcast_to(is_text[:, None, :], (len(starts), q.shape[1], count))
        everything = jnp.ones((len(starts), q.shape[1], q.shape[1]), bool)
        return _attention(q, [_Seen(k, v, stored), _fresh(fresh, everything)])

    return attend


def _cut(x: Float[Array, "R K S D"], first: Int[Array, " R"], count: int) -> jax.Array:
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count, axis=1))(x, first)


def _fresh(fresh: FreshKV, visible: Bool[Array, "R Q Q"]) -> _Seen:
    k, v = (new.transpose(0, 2, 1, 3) for new in fresh)
    return _Seen(k, v, visible)


def _attention(q: Float[Array, "R Q H D"], parts: Sequence[_Seen]) -> Float[Array, "R Q H D"]:
    """Attention with unscaled scores and one fp32 softmax over all parts."""
    rows, queries, heads, dim = q.shape
    kv_heads = parts[0].k.shape[1]
    grouped = q.reshape(rows, queries, kv_heads, heads // kv_heads, dim)

    def scores(part: _Seen) -> jax.Array:
        found = jnp.einsum("rqkgd,rksd->rkgqs", grouped, part.k, preferred_element_type=jnp.float32)
        return jnp.where(part.visible[:, None, None], found, -jnp.inf)

    weights = jax.nn.softmax(jnp.concatenate([scores(part) for part in parts], -1), axis=-1)
    out, begin = jnp.zeros((), jnp.float32), 0
    for part in parts:
        end = begin + part.k.shape[2]
        share = weights[..., begin:end].astype(part.v.dtype)
        out = out + jnp.einsum(
            "rkgqs,rksd->rqkgd", share, part.v, preferred_element_type=jnp.float32
        )
        begin = end
    return out.reshape(rows, queries, heads, dim).astype(q.dtype)
