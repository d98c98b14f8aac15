"""The plain-JAX attention against NumPy float64 over awkward sizes."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PagedSegment, Segment, block_attention, prefill_attention, reference


def attend_plainly(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, is_visible: np.ndarray
) -> np.ndarray:
    """One row: q [Q, H, D], keys and values [N, K, D], visibility [Q, N]."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[2])
        scores = np.where(is_visible, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head // group]
    return out


def inputs(rows: int, queries: int, slots: int, kv_heads: int, group: int, dim: int) -> Any:
    """Values that differ by row, head, slot and feature; scores spread over a few units."""
    rng = np.random.default_rng([rows, queries, slots, kv_heads, group, dim])

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) * 1.5

    return (
        draw(rows, queries, kv_heads * group, dim),
        draw(rows, kv_heads, slots, dim),
        draw(rows, kv_heads, slots, dim),
        draw(rows, queries, kv_heads, dim),
        draw(rows, queries, kv_heads, dim),
    )


def spoil(cache: np.ndarray, lengths: Any, value: float) -> np.ndarray:
    """The cache with a value in every slot past each row's length."""
    is_past = np.arange(cache.shape[2]) >= np.asarray(lengths).reshape(-1, 1)
    return np.where(is_past[:, None, :, None], np.float32(value), cache)


GARBAGE = 3e18
"""Stands in every slot past a length; it must not leak."""

SIZES = [
    # rows, queries, slots, KV heads, group, head size
    (1, 1, 1, 1, 1, 2),
    (1, 4, 7, 1, 8, 6),
    (3, 5, 13, 2, 3, 10),
    (2, 8, 16, 3, 1, 4),
    (4, 3, 33, 2, 2, 5),
    (2, 7, 9, 1, 5, 3),
    (2, 2, 6, 2, 4, 12),
    (1, 3, 5, 1, 6, 7),
    (2, 3, 5, 1, 7, 7),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_block_attention(size: tuple[int, ...]) -> None:
    q, k, v, k_block, v_block = inputs(*size)
    rows, queries, slots = size[:3]
    lengths = np.array([(0, slots, 1, slots - 1)[row % 4] for row in range(rows)], np.int32)
    if rows == 1:
        lengths[0] = slots // 2
    out = jax.jit(block_attention)(
        q=jnp.asarray(q),
        k_prefix=jnp.asarray(spoil(k, lengths, GARBAGE)),
        v_prefix=jnp.asarray(spoil(v, lengths, -GARBAGE)),
        prefix_lengths=jnp.asarray(lengths),
        k_block=jnp.asarray(k_block),
        v_block=jnp.asarray(v_block),
    )
    for row in range(rows):
        length = lengths[row]
        keys = np.concatenate([k[row].swapaxes(0, 1)[:length], k_block[row]])
        values = np.concatenate([v[row].swapaxes(0, 1)[:length], v_block[row]])
        everything = np.ones((queries, len(keys)), bool)
        expected = attend_plainly(q[row].astype(np.float64), keys, values, everything)
        np.testing.assert_allclose(out[row], expected, atol=2e-5)


PREFILL = [
    # size as above, block length, prefix length, tile
    ((1, 4, 4, 1, 1, 2), 4, 0, 1024),
    ((2, 6, 17, 2, 3, 10), 3, 9, 4),
    ((1, 5, 12, 1, 8, 6), 5, 10, 5),
    ((3, 8, 24, 3, 2, 4), 2, 14, 7),
    ((2, 12, 40, 1, 4, 5), 4, 28, 16),
    ((2, 4, 16, 2, 5, 3), 4, 12, 12),
    ((1, 6, 13, 1, 7, 8), 2, 12, 8),
    ((2, 6, 6, 2, 2, 8), 3, 0, 4),
    ((1, 3, 11, 1, 6, 8), 3, 9, 3),
]


@pytest.mark.parametrize(("size", "block_length", "prefix", "tile"), PREFILL, ids=str)
def test_prefill_attention(
    size: tuple[int, ...],
    block_length: int,
    prefix: int,
    tile: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "PREFIX_TILE", tile)
    q, k, v, k_chunk, v_chunk = inputs(*size)
    rows, queries = size[:2]
    out = jax.jit(reference.prefill_attention, static_argnames="block_length")(
        q=jnp.asarray(q),
        k_prefix=jnp.asarray(spoil(k, [prefix] * rows, GARBAGE)),
        v_prefix=jnp.asarray(spoil(v, [prefix] * rows, -GARBAGE)),
        prefix_length=jnp.int32(prefix),
        k_chunk=jnp.asarray(k_chunk),
        v_chunk=jnp.asarray(v_chunk),
        block_length=block_length,
    )
    place = np.arange(queries) // block_length
    own = place[None, :] <= place[:, None]
    is_visible = np.concatenate([np.ones((queries, prefix), bool), own], 1)
    for row in range(rows):
        keys = np.concatenate([k[row].swapaxes(0, 1)[:prefix], k_chunk[row]])
        values = np.concatenate([v[row].swapaxes(0, 1)[:prefix], v_chunk[row]])
        expected = attend_plainly(q[row].astype(np.float64), keys, values, is_visible)
        np.testing.assert_allclose(out[row], expected, atol=2e-5)


def test_large_scores_do_not_overflow() -> None:
    q, k, v, k_block, v_block = inputs(1, 2, 6, 1, 2, 4)
    arguments = map(jnp.asarray, (q * 300, k, v, np.array([6], np.int32), k_block * 300, v_block))
    assert np.isfinite(block_attention(*arguments)).all()


def test_a_prefix_longer_than_its_tile_is_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot of the prefix weighs in: one value per slot, equal scores."""
    monkeypatch.setattr(reference, "PREFIX_TILE", 4)
    slots, prefix = 11, 10
    k = jnp.zeros((1, 1, slots, 2), jnp.float32)
    v = jnp.broadcast_to(jnp.exp2(jnp.arange(slots, dtype=jnp.float32))[:, None], (1, 1, slots, 2))
    fresh = jnp.zeros((1, 2, 1, 2), jnp.float32)
    out = prefill_attention(fresh, k, v, jnp.int32(prefix), fresh, fresh, 2)
    np.testing.assert_allclose(out * 12, 2.0**prefix - 1, rtol=1e-6)


@pytest.mark.parametrize("which", ["block", "prefill"])
def test_storage_in_bf16_keeps_softmax_in_fp32(which: str) -> None:
    q, k, v, k_new, v_new = (jnp.asarray(x, jnp.bfloat16) for x in inputs(2, 4, 12, 2, 2, 8))
    if which == "block":
        lengths = jnp.array([12, 7], jnp.int32)
        call = functools.partial(block_attention, prefix_lengths=lengths)
        out = call(q=q, k_prefix=k, v_prefix=v, k_block=k_new, v_block=v_new)
    else:
        lengths = jnp.array([12, 12], jnp.int32)
        out = prefill_attention(q, k, v, jnp.int32(12), k_new, v_new, 4)
    assert out.dtype == jnp.bfloat16
    wide = [np.asarray(x, np.float64) for x in (q, k, v, k_new, v_new)]
    for row in range(2):
        length = int(lengths[row])
        keys = np.concatenate([wide[1][row].swapaxes(0, 1)[:length], wide[3][row]])
        values = np.concatenate([wide[2][row].swapaxes(0, 1)[:length], wide[4][row]])
        expected = attend_plainly(wide[0][row], keys, values, np.ones((4, len(keys)), bool))
        np.testing.assert_allclose(np.asarray(out[row], np.float64), expected, atol=0.03)


def test_the_prefix_is_visited_by_tiles_and_not_by_capacity() -> None:
    """Prefill scores no more slots at a time than one tile, however large the cache."""
    heads, queries, slots = 1, 4, 64 * reference.PREFIX_TILE
    q = jax.ShapeDtypeStruct((1, queries, heads, 8), jnp.float32)
    cache = jax.ShapeDtypeStruct((1, heads, slots, 8), jnp.float32)
    program = jax.jit(prefill_attention, static_argnums=6)
    length = jax.ShapeDtypeStruct((), jnp.int32)
    memory = program.lower(q, cache, cache, length, q, q, 4).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * queries * slots


@pytest.mark.parametrize("tile", [3, 8, 1024])
@pytest.mark.parametrize("group", [1, 3])
def test_paged_attention(tile: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages in any order, shared pages, garbage in pages and tails that no slot may see."""
    monkeypatch.setattr(reference, "PREFIX_TILE", tile)
    slots, width, page, kv_heads, dim, queries = 4, 5, 3, 2, 6, 3
    rng = np.random.default_rng([tile, group])
    pool = 16
    k, v = rng.standard_normal((2, pool, kv_heads, page, dim)).astype(np.float32)
    q = rng.standard_normal((slots, queries, kv_heads * group, dim)).astype(np.float32)
    tables = np.stack([rng.permutation(pool - 1)[:width] for _ in range(slots)]).astype(np.int32)
    tables[1, :2] = tables[3, :2]
    lengths = np.array([0, 7, width * page, 1], np.int32)
    is_used = np.zeros((pool, page), bool)
    for slot in range(slots):
        for token in range(lengths[slot]):
            is_used[tables[slot, token // page], token % page] = True
    # Pages go from request to request, so even what is not a number must stay behind.
    spoiled = [np.where(is_used[:, None, :, None], x, np.float32(np.nan)) for x in (k, v)]
    out = jax.jit(reference.paged_attention)(*map(jnp.asarray, (q, *spoiled, tables, lengths)))
    assert not np.asarray(out[0]).any()
    for slot in range(1, slots):
        keys, values = (
            x[tables[slot]].transpose(0, 2, 1, 3).reshape(-1, kv_heads, dim)[: lengths[slot]]
            for x in (k, v)
        )
        everything = np.ones((queries, lengths[slot]), bool)
        expected = attend_plainly(q[slot].astype(np.float64), keys, values, everything)
        np.testing.assert_allclose(out[slot], expected, atol=2e-5)
    alone = jax.jit(reference.paged_attention)(
        *map(jnp.asarray, (q[3:], *spoiled, tables[3:], lengths[3:]))
    )
    np.testing.assert_array_equal(alone[0], out[3])


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_log_sum_exp_and_importance(
    pooling: Literal["max", "mean"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two segments: the height of each query's softmax, and each key's share of it."""
    monkeypatch.setattr(reference, "PREFIX_TILE", 4)
    slots, block, kv_heads, group, dim, page = 3, 5, 2, 3, 6, 3
    rng = np.random.default_rng(3)
    q = rng.standard_normal((slots, block, kv_heads * group, dim)).astype(np.float32)
    row_k = rng.standard_normal((4, kv_heads, 11, dim)).astype(np.float32)
    page_k = rng.standard_normal((7, kv_heads, page, dim)).astype(np.float32)
    rows, tables = np.array([2, 0, 3]), np.array([[5, 1], [0, 2], [6, 3]])
    lengths = {"rows": np.array([11, 0, 7]), "pages": np.array([4, 0, 0])}
    by_page = page_k[tables].transpose(0, 2, 1, 3, 4).reshape(slots, kv_heads, 2 * page, dim)
    keys = {"rows": row_k[rows], "pages": by_page}
    is_seen = {
        name: np.arange(keys[name].shape[2]) < size[:, None] for name, size in lengths.items()
    }
    # Garbage in a row's tail, even what is not a number, must not leak.
    spoiled = row_k.copy()
    for slot, row in enumerate(rows):
        spoiled[row, :, lengths["rows"][slot] :] = np.nan
    segments = {
        "rows": Segment(*map(jnp.asarray, (spoiled, row_k, rows, lengths["rows"]))),
        "pages": PagedSegment(*map(jnp.asarray, (page_k, page_k, tables, lengths["pages"]))),
    }
    out, lse = reference.segment_attention(jnp.asarray(q), list(segments.values()), with_lse=True)
    without = reference.segment_attention(jnp.asarray(q), list(segments.values()))
    np.testing.assert_array_equal(out, without)
    grouped = q.astype(np.float64).reshape(slots, block, kv_heads, group, dim)
    scores = {
        name: np.where(
            is_seen[name][:, None, None, None],
            np.einsum("mbkgd,mksd->mbkgs", grouped, k) / math.sqrt(dim),
            -np.inf,
        )
        for name, k in keys.items()
    }
    with np.errstate(divide="ignore"):
        height = np.log(np.exp(np.concatenate(list(scores.values()), -1)).sum(-1))
    np.testing.assert_allclose(lse, height.reshape(slots, block, -1), atol=1e-5)
    for name, segment in segments.items():
        share = np.zeros(scores[name].shape)
        seen = [0, 2]
        share[seen] = np.exp(scores[name][seen] - height[seen][..., None])
        share = share.mean(3)
        want = share.max(1) if pooling == "max" else share.mean(1)
        got = reference.key_importance(jnp.asarray(q), lse, segment, pooling)
        np.testing.assert_allclose(got, want, atol=1e-6)
