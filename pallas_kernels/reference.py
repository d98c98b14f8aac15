"""Plain-JAX attention: the meaning of every kernel, and the path on machines without one.

Shape letters: R rows, Q queries of a block or chunk, S cache slots, H query heads, K KV
heads, G = H / K, D head size; M slots, W pages of a table, N pages of a pool. The cache is
head-major, [R, K, S, D]; fresh keys and values of the running block or chunk come as the
projections leave them, [R, Q, K, D]. Scores, softmax and accumulation are fp32 whatever the
storage dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

PREFIX_TILE = 1024
"""Cache slots that `prefill_attention` scores at a time."""


Pooling = Literal["max", "mean"]


def _by_head(x: Float[Array, "R Q H D"], num_kv_heads: int) -> Float[Array, "R K G Q D"]:
    """Splits query heads by the KV head they read."""
    rows, queries, heads, dim = x.shape
    grouped = x.reshape(rows, queries, num_kv_heads, heads // num_kv_heads, dim)
    return grouped.transpose(0, 2, 3, 1, 4)


def _group(q: Float[Array, "R Q H D"], num_kv_heads: int) -> Float[Array, "R K G Q D"]:
    """The same of queries, scaled by D^-0.5."""
    return _by_head(q, num_kv_heads) * jnp.asarray(q.shape[3] ** -0.5, q.dtype)


def _ungroup(out: Float[Array, "R K G Q D"], dtype: jnp.dtype) -> Float[Array, "R Q H D"]:
    rows, kv_heads, group, queries, dim = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, queries, kv_heads * group, dim).astype(dtype)


def _scores(q: Float[Array, "R K G Q D"], k: Float[Array, "R K N D"]) -> Float[Array, "R K G Q N"]:
    return jnp.einsum("rkgqd,rknd->rkgqn", q, k, preferred_element_type=jnp.float32)


def _weighted(p: Float[Array, "R K G Q N"], v: Float[Array, "R K N D"]) -> jax.Array:
    return jnp.einsum("rkgqn,rknd->rkgqd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def block_attention(
    q: Float[Array, "R Q H D"],
    k_prefix: Float[Array, "R K S D"],
    v_prefix: Float[Array, "R K S D"],
    prefix_lengths: Int[Array, " R"],
    k_block: Float[Array, "R Q K D"],
    v_block: Float[Array, "R Q K D"],
) -> Float[Array, "R Q H D"]:
    """Attention of one block of each row over that row's finished prefix and the block itself.

    Every query sees the first `prefix_lengths[r]` cache slots of its row and all positions
    of its own block, under one softmax.
    """
    queries = _group(q, k_prefix.shape[1])
    is_visible = jnp.arange(k_prefix.shape[2]) < prefix_lengths[:, None]
    prefix = _scores(queries, k_prefix)
    prefix = jnp.where(is_visible[:, None, None, None, :], prefix, -jnp.inf)
    block = _scores(queries, k_block.transpose(0, 2, 1, 3))
    top = jnp.maximum(prefix.max(-1), block.max(-1))[..., None]
    prefix, block = jnp.exp(prefix - top), jnp.exp(block - top)
    total = prefix.sum(-1) + block.sum(-1)
    out = _weighted(prefix, v_prefix) + _weighted(block, v_block.transpose(0, 2, 1, 3))
    return _ungroup(out / total[..., None], q.dtype)


def _online_update(carry: tuple, scores: jax.Array, v: jax.Array) -> tuple:
    """Adds one tile of keys to a running softmax (max, sum, weighted values)."""
    top, total, out = carry
    new_top = jnp.maximum(top, scores.max(-1))
    # A query that has seen no key yet keeps -inf as its maximum; exp(-inf - -inf) is NaN.
    shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
    decay = jnp.exp(top - shift)
    weights = jnp.exp(scores - shift[..., None])
    out = out * decay[..., None] + _weighted(weights, v)
    return new_top, total * decay + weights.sum(-1), out


def prefill_attention(
    q: Float[Array, "R Q H D"],
    k_prefix: Float[Array, "R K S D"],
    v_prefix: Float[Array, "R K S D"],
    prefix_length: Int[Array, ""],
    k_chunk: Float[Array, "R Q K D"],
    v_chunk: Float[Array, "R Q K D"],
    block_length: int,
) -> Float[Array, "R Q H D"]:
    """Block-causal attention of a chunk of whole blocks over the cache so far and itself.

    All rows stand at the same position: the chunk starts at `prefix_length`, a multiple of
    `block_length`, and sees every cache slot before it. Within the chunk a query sees its
    own block and the blocks before it. Tiles past the prefix are not visited, so the cost
    follows the text and not the capacity of the cache.
    """
    queries = _group(q, k_prefix.shape[1])
    rows, kv_heads, slots, dim = k_prefix.shape
    tile = min(PREFIX_TILE, slots)
    chunk_block = jnp.arange(q.shape[1]) // block_length
    is_visible: Bool[Array, "Q Q"] = chunk_block[None, :] <= chunk_block[:, None]
    own = jnp.where(is_visible, _scores(queries, k_chunk.transpose(0, 2, 1, 3)), -jnp.inf)
    stats = own.shape[:-1]
    carry = (jnp.full(stats, -jnp.inf), jnp.zeros(stats), jnp.zeros((*stats, dim)))
    carry = _online_update(carry, own, v_chunk.transpose(0, 2, 1, 3))

    def visit(index: jax.Array, carry: tuple) -> tuple:
        # The last tile is moved back to stay inside the cache; slots that an earlier tile
        # covered are then masked.
        start = jnp.minimum(index * tile, slots - tile)
        size = (rows, kv_heads, tile, dim)
        k = lax.dynamic_slice(k_prefix, (0, 0, start, 0), size)
        v = lax.dynamic_slice(v_prefix, (0, 0, start, 0), size)
        position = start + jnp.arange(tile)
        is_new = (position >= index * tile) & (position < prefix_length)
        return _online_update(carry, jnp.where(is_new, _scores(queries, k), -jnp.inf), v)

    tiles = (prefix_length + tile - 1) // tile
    _, total, out = lax.fori_loop(0, tiles, visit, carry)
    return _ungroup(out / total[..., None], q.dtype)


class Segment(NamedTuple):
    """Keys that slots read from rows of a pool.

    Slot m sees the first `lengths[m]` entries of row `rows[m]`.
    """

    k: Float[Array, "N K S D"]
    v: Float[Array, "N K S D"]
    rows: Int[Array, " M"]
    lengths: Int[Array, " M"]


class PagedSegment(NamedTuple):
    """Keys that slots read through page tables: slot m sees the first `lengths[m]` tokens."""

    k: Float[Array, "N K page D"]
    v: Float[Array, "N K page D"]
    tables: Int[Array, "M W"]
    lengths: Int[Array, " M"]


def _reader(segment: Segment | PagedSegment) -> tuple[int, int, Callable]:
    """Keys of a tile, keys of all tiles, and what gives a pool's tile and its first key's number.

    A tile is [M, K, tile, D].
    """
    if isinstance(segment, PagedSegment):
        return _paged_reader(segment)
    capacity = segment.k.shape[2]
    tile = min(PREFIX_TILE, capacity)

    def read(pool: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The last tile is moved back to stay inside the pool and repeats some keys.
        start = jnp.minimum(index * tile, capacity - tile)
        return lax.dynamic_slice_in_dim(pool, start, tile, axis=2)[segment.rows], start

    return tile, capacity, read


def _paged_reader(segment: PagedSegment) -> tuple[int, int, Callable]:
    slots, width = segment.tables.shape
    _, kv_heads, page_tokens, dim = segment.k.shape
    pages = min(max(PREFIX_TILE // page_tokens, 1), width)
    tile = pages * page_tokens
    # Whole tiles only: the table is filled up with its last page, whose tokens are then masked.
    tables = jnp.pad(segment.tables, ((0, 0), (0, -width % pages)), mode="edge")

    def read(pool: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids = lax.dynamic_slice(tables, (0, index * pages), (slots, pages))
        picked = pool[ids].transpose(0, 2, 1, 3, 4)
        return picked.reshape(slots, kv_heads, tile, dim), index * tile

    return tile, tables.shape[1] * page_tokens, read


def _visit_tiles(
    carry: tuple, queries: Float[Array, "M K G B D"], segment: Segment | PagedSegment
) -> tuple:
    """Adds the keys of a segment, tile by tile up to the longest slot, to a running softmax.

    A tile that a slot does not reach leaves its result bit for bit as it was, so a slot's result
    does not depend on its neighbours.
    """
    tile, _, read = _reader(segment)

    def body(index: jax.Array, carry: tuple) -> tuple:
        (k, start), (v, _) = read(segment.k, index), read(segment.v, index)
        position = start + jnp.arange(tile)
        # Keys before `index * tile` were seen in an earlier tile.
        is_visible = (position >= index * tile) & (position < segment.lengths[:, None])
        scores = jnp.where(is_visible[:, None, None, None, :], _scores(queries, k), -jnp.inf)
        # Weight 0 is not enough: what another request left behind may be inf or NaN.
        return _online_update(carry, scores, jnp.where(is_visible[:, None, :, None], v, 0))

    return lax.fori_loop(0, (segment.lengths.max() + tile - 1) // tile, body, carry)


@overload
def segment_attention(
    q: Float[Array, "M B H D"], segments: Sequence[Segment | PagedSegment]
) -> Float[Array, "M B H D"]: ...
@overload
def segment_attention(
    q: Float[Array, "M B H D"],
    segments: Sequence[Segment | PagedSegment],
    with_lse: Literal[True],
) -> tuple[Float[Array, "M B H D"], Float[Array, "M B H"]]: ...
def segment_attention(
    q: Float[Array, "M B H D"],
    segments: Sequence[Segment | PagedSegment],
    with_lse: bool = False,
) -> Any:
    """Attention of one block a slot over the keys of several segments, under one softmax.

    Segments may lie in different pools: pages of the full cache, selected rows, recent blocks,
    the block itself, another slot's fresh keys. A slot that sees no key gives zeros.

    With `with_lse`, the second result is the natural log-sum-exp of each query's scores in fp32,
    -inf where a slot sees no key.
    """
    queries = _group(q, segments[0].k.shape[1])
    stats = queries.shape[:-1]
    carry = (jnp.full(stats, -jnp.inf), jnp.zeros(stats), jnp.zeros(queries.shape))
    for segment in segments:
        carry = _visit_tiles(carry, queries, segment)
    top, total, out = carry
    out = _ungroup(out / jnp.maximum(total, 1e-30)[..., None], q.dtype)
    if not with_lse:
        return out
    return out, _ungroup((top + jnp.log(total))[..., None], jnp.dtype(jnp.float32))[..., 0]


def key_importance(
    q: Float[Array, "M B H D"],
    lse: Float[Array, "M B H"],
    segment: Segment | PagedSegment,
    pooling: Pooling,
) -> Float[Array, "M K S"]:
    """How much attention each key of a segment gets from a block, by KV head, in fp32.

    A key's share of the softmax whose log-sum-exp is `lse` is averaged over the query heads that
    read its KV head; the largest or the mean of the block's positions counts. Keys past a slot's
    length get 0. The matrix of all scores is never held: only a tile of keys at a time.

    Args:
        q: Queries of the blocks, as in `segment_attention`.
        lse: What `segment_attention` gave for the same queries, over this segment at least.
        segment: The keys.
        pooling: `max` or `mean`.
    """
    queries = _group(q, segment.k.shape[1])
    heights = _by_head(lse[..., None], segment.k.shape[1])
    tile, size, read = _reader(segment)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        k, start = read(segment.k, index)
        is_visible = start + jnp.arange(tile) < segment.lengths[:, None]
        share = jnp.exp(_scores(queries, k) - heights).mean(2)
        share = share.max(2) if pooling == "max" else share.mean(2)
        share = jnp.where(is_visible[:, None], share, 0.0)
        return lax.dynamic_update_slice(out, share, (0, 0, start))

    out = jnp.zeros((*queries.shape[:2], size), jnp.float32)
    out = lax.fori_loop(0, (segment.lengths.max() + tile - 1) // tile, body, out)
    if isinstance(segment, PagedSegment):
        return out[..., : segment.tables.shape[1] * segment.k.shape[2]]
    return out


def paged_attention(
    q: Float[Array, "M B H D"],
    k_pages: Float[Array, "N K page D"],
    v_pages: Float[Array, "N K page D"],
    tables: Int[Array, "M W"],
    lengths: Int[Array, " M"],
) -> Float[Array, "M B H D"]:
    """Attention of one block a slot over the first `lengths[m]` tokens of its page table.

    The block's own keys and values are in its pages already.
    """
    return segment_attention(q, [PagedSegment(k_pages, v_pages, tables, lengths)])


def gather_rows(
    pool: Float[Array, "N K S D"], rows: Int[Array, " M"], index: Int[Array, "M K C"]
) -> Float[Array, "M K C D"]:
    """Entries `index[m, k]` of head k of row `rows[m]`, for every slot m: a compact pool."""
    heads = jnp.arange(pool.shape[1])[None, :, None]
    return pool[rows[:, None, None], heads, index]


def append_kv(
    pool: Float[Array, "N K S D"],
    new: Float[Array, "M K B D"],
    rows: Int[Array, " M"],
    starts: Int[Array, " M"],
) -> Float[Array, "N K S D"]:
    """The pool with `new[m]` at entries `starts[m]` and on of row `rows[m]`.

    What would lie outside the pool is dropped: a row of -1 writes nothing.
    """
    outside = pool.shape[0]
    rows = jnp.where(rows < 0, outside, rows)[:, None]
    place = starts[:, None] + jnp.arange(new.shape[2])
    place = jnp.where(place < 0, pool.shape[2], place)
    return pool.at[rows, :, place].set(new.transpose(0, 2, 1, 3), mode="drop")


class HeadNorms(NamedTuple):
    """Gains of the norms of query and key heads, and what is added to the mean square."""

    q: Float[Array, " D"]
    k: Float[Array, " D"]
    epsilon: float


def _normed(x: Float[Array, "M B N D"], gain: Float[Array, " D"], epsilon: float) -> jax.Array:
    """Root-mean-square norm in fp32, cast before the gain."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return wide.astype(x.dtype) * gain


def _rotated(x: Float[Array, "M B N D"], cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    parts = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate([*(part.astype(x.dtype) for part in parts), x[..., 2 * half :]], -1)


def fused_qkv_rope_append(
    q: Float[Array, "M B H D"],
    k: Float[Array, "M B K D"],
    v: Float[Array, "M B K D"],
    norms: HeadNorms,
    cos: Float[Array, "M B half"],
    sin: Float[Array, "M B half"],
    k_pool: Float[Array, "N K S D"],
    v_pool: Float[Array, "N K S D"],
    rows: Int[Array, " M"],
    starts: Int[Array, " M"],
) -> tuple[Float[Array, "M B H D"], Float[Array, "N K S D"], Float[Array, "N K S D"]]:
    """Queries normed and rotated, and the pools with the keys (likewise) and values appended.

    Appending is that of `append_kv`; feature i rotates with feature i + half.
    """
    queries = _rotated(_normed(q, norms.q, norms.epsilon), cos, sin)
    keys = _rotated(_normed(k, norms.k, norms.epsilon), cos, sin)
    k_pool = append_kv(k_pool, keys.transpose(0, 2, 1, 3), rows, starts)
    return queries, k_pool, append_kv(v_pool, v.transpose(0, 2, 1, 3), rows, starts)


class GreedyHead(NamedTuple):
    """What a greedy step needs of each row's logits."""

    token: Int[Array, " rows"]
    """Id of the largest logit; the lowest of equal ones."""
    logprob: Float[Array, " rows"]
    entropy: Float[Array, " rows"]


def greedy_head(
    x: Float[Array, "rows E"], w: Float[Array, "E V"], mask_id: int, end: int
) -> GreedyHead:
    """Greedy token, its log-probability and the entropy of each row's fp32 logits `x @ w`.

    Neither `mask_id` nor ids from `end` on are chosen or counted.
    """
    logits = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    ids = jnp.arange(w.shape[1])
    log_p = jax.nn.log_softmax(jnp.where((ids == mask_id) | (ids >= end), -jnp.inf, logits))
    entropy = -jnp.where(jnp.isneginf(log_p), 0.0, jnp.exp(log_p) * log_p).sum(-1)
    return GreedyHead(jnp.argmax(log_p, -1).astype(jnp.int32), log_p.max(-1), entropy)
