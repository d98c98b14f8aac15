"""All-position logits from the decoder in three ways: at once, in chunks, block by block."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.models import bind


@functools.partial(jax.jit, static_argnums=0)
def _whole(config: ModelConfig, params: Any, tokens: Any) -> Any:
    decoder = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    block = jnp.arange(tokens.shape[1]) // config.block_length
    is_visible = (block[None, :] <= block[:, None]) | config.is_bidirectional

    def attend(layer: int, q: Any, fresh: Any) -> Any:
        group = config.heads_per_kv_head
        k, v = (jnp.repeat(x, group, axis=2) for x in fresh)
        scores = jnp.einsum("rqhd,rkhd->rhqk", q, k) * config.head_dim**-0.5
        p = jax.nn.softmax(jnp.where(is_visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("rhqk,rkhd->rqhd", p, v)

    hidden, _ = decoder(tokens, positions, attend)
    return decoder.logits(hidden)


@functools.partial(jax.jit, static_argnums=0)
def _chunk(config: ModelConfig, params: Any, cache: DenseCache, tokens: Any, start: Any) -> Any:
    decoder = bind(config, params)
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, fresh = decoder(tokens, positions, cache.prefill_attend(start, config.block_length))
    return decoder.logits(hidden), cache.append_chunk(fresh, start)


@functools.partial(jax.jit, static_argnums=0)
def _block(config: ModelConfig, params: Any, cache: DenseCache, tokens: Any, starts: Any) -> Any:
    decoder = bind(config, params)
    positions = starts[:, None] + jnp.arange(tokens.shape[1])
    hidden, fresh = decoder(tokens, positions, cache.block_attend(starts))
    appended = cache.append_blocks(fresh, starts, jnp.ones(len(tokens), bool))
    return decoder.logits(hidden), appended


def _start(config: ModelConfig, tokens: np.ndarray) -> tuple[DenseCache, Any]:
    capacity = -(-tokens.shape[1] // config.block_length) * config.block_length
    cache = DenseCache.zeros(config, len(tokens), capacity, jnp.float32)
    return cache, jnp.asarray(tokens, jnp.int32)


def whole_logits(config: ModelConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """One pass over [R, n] tokens with an attention of our own and no cache."""
    return np.asarray(_whole(config, params, jnp.asarray(tokens, jnp.int32)))


def prefill_logits(
    config: ModelConfig, params: Any, tokens: np.ndarray, chunk_blocks: int
) -> np.ndarray:
    """Chunks of whole blocks, each over the cache of those before it."""
    cache, ids = _start(config, tokens)
    found = []
    size = chunk_blocks * config.block_length
    for start in range(0, ids.shape[1], size):
        logits, cache = _chunk(
            config, params, cache, ids[:, start : start + size], jnp.int32(start)
        )
        found.append(np.asarray(logits))
    return np.concatenate(found, 1)


def block_logits(config: ModelConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """One block at a time over the cache; the last may be a part of one."""
    cache, ids = _start(config, tokens)
    found = []
    for start in range(0, ids.shape[1], config.block_length):
        starts = jnp.full(len(tokens), start, jnp.int32)
        piece = ids[:, start : start + config.block_length]
        logits, cache = _block(config, params, cache, piece, starts)
        found.append(np.asarray(logits))
    return np.concatenate(found, 1)
