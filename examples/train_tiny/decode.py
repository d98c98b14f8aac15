"""Reference decoding of a batch of prompts: dense, greedy, low-confidence with a threshold.

Blocks lie on an absolute grid (block = position // 32), so a prompt's tail shares the first block
with masks. A step commits every mask whose probability passes the threshold, at least the surest
one; a finished block is run once more to store its keys and values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.train_tiny import model
from examples.train_tiny.attention import BLOCK, attention
from examples.train_tiny.tokenizer import EOS, MASK, PAD


@functools.partial(jax.jit, static_argnames=("shape", "kernel"))
def prefill(params, tokens, shape: model.Shape, kernel: bool):
    """Keys and values [layers, B, S, H, D] of all whole blocks of the (padded) prompts."""
    rows, length = tokens.shape
    prefix = jnp.broadcast_to(jnp.arange(length // BLOCK, dtype=jnp.int32), (rows, length // BLOCK))
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    tables, hidden = model.rope_tables(positions, shape), jnp.zeros((rows, length), jnp.int32)

    def attend(q, k, v):
        return attention(q, k, v, prefix, hidden, length, kernel=kernel), (k, v)

    x, cache = params["embed"][tokens], []
    for index in range(shape.layers):
        x, kv = model.layer(model.layer_params(params, index), x, tables, attend, shape)
        cache.append(kv)
    return tuple(jnp.stack(part) for part in zip(*cache, strict=True))


def run_block(params, cache, tokens, block, shape: model.Shape):
    """(logits [B, 32, V], this block's keys and values) after `block[b]` cached blocks."""
    rows = tokens.shape[0]
    tables = model.rope_tables(block[:, None] * BLOCK + jnp.arange(BLOCK), shape)
    seen = jnp.arange(cache[0].shape[2]) < block[:, None] * BLOCK

    def attend(index, q, k, v):
        q = q.reshape(rows, BLOCK, shape.kv_heads, -1, shape.head_dim)
        score = functools.partial(
            jnp.einsum, "bthgd,bshd->bhgts", preferred_element_type=jnp.float32
        )
        past = jnp.where(seen[:, None, None, None], score(q, cache[0][index]), -jnp.inf)
        both = jnp.concatenate([past, score(q, k)], axis=-1) * shape.head_dim**-0.5
        weight = jax.nn.softmax(both, axis=-1).astype(v.dtype)
        past, own = weight[..., :-BLOCK], weight[..., -BLOCK:]
        out = jnp.einsum("bhgts,bshd->bthgd", past, cache[1][index])
        return out + jnp.einsum("bhgts,bshd->bthgd", own, v), (k, v)

    x, fresh = params["embed"][tokens], []
    for index in range(shape.layers):
        p = model.layer_params(params, index)
        x, kv = model.layer(p, x, tables, functools.partial(attend, index), shape)
        fresh.append(kv)
    new = tuple(jnp.stack(part) for part in zip(*fresh, strict=True))
    return model.logits(params, x, shape), new


@functools.partial(jax.jit, static_argnames="shape", donate_argnames="cache")
def decode_block(params, cache, tokens, block, threshold, shape: model.Shape):
    """(cache with the block stored, its tokens, denoising steps of each row)."""

    def unfinished(carry):
        return jnp.any(carry[0] == MASK)

    def denoise(carry):
        tokens, steps = carry
        logits, _ = run_block(params, cache, tokens, block, shape)
        probability = jax.nn.softmax(logits.at[..., MASK].set(-jnp.inf), axis=-1)
        masked = tokens == MASK
        confidence = jnp.where(masked, probability.max(axis=-1), -1.0)
        surest = jnp.arange(BLOCK) == jnp.argmax(confidence, axis=-1)[:, None]
        commit = masked & ((confidence > threshold) | surest)
        steps = steps + jnp.any(masked, axis=1)
        return jnp.where(commit, jnp.argmax(probability, axis=-1), tokens), steps

    start = (tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    tokens, steps = lax.while_loop(unfinished, denoise, start)
    _, new = run_block(params, cache, tokens, block, shape)
    store = jax.vmap(lambda a, b, at: lax.dynamic_update_slice_in_dim(a, b, at, 1), (1, 1, 0), 1)
    cache = tuple(store(a, b, block * BLOCK) for a, b in zip(cache, new, strict=True))
    return cache, tokens, steps


def generate(params, prompts, *, shape, length, max_blocks, threshold=0.9, kernel=False):
    """Decodes until every row has its eos or `max_blocks` blocks.

    Args:
      prompts: lists of token ids.
      length: tokens every row is padded to, a multiple of 64 with room for the answers.

    Returns:
      A list of (new tokens up to the first eos, steps of every block used) per prompt.
    """
    tokens = np.full((len(prompts), length), PAD, np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    sizes = np.array([len(ids) for ids in prompts])
    cache = prefill(params, jnp.asarray(tokens), shape, kernel)
    block, done = sizes // BLOCK, np.zeros(len(prompts), bool)
    steps: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_blocks):
        at = block[:, None] * BLOCK + np.arange(BLOCK)
        masked = (at >= sizes[:, None]) & ~done[:, None]
        given = np.where(masked, MASK, np.take_along_axis(tokens, at, 1))
        cache, out, used = decode_block(
            params, cache, jnp.asarray(given), jnp.asarray(block), threshold, shape
        )
        out = np.asarray(out)
        np.put_along_axis(tokens, at, out, 1)
        for row in np.flatnonzero(~done):
            steps[row].append(int(used[row]))
        done |= np.any((out == EOS) & masked, axis=1)
        block = block + ~done
        if done.all():
            break
    results = []
    for row, size, used in zip(tokens, sizes, steps, strict=True):
        new = row[size : (size // BLOCK + len(used)) * BLOCK].tolist()
        results.append((new[: new.index(EOS)] if EOS in new else new, used))
    return results
