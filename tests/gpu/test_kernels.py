"""Every kernel on the GPU against its plain form in fp32, over awkward sizes.

Keys that must not be seen are NaN and their values inf, so that a leak shows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import (
    PagedSegment,
    Segment,
    append_kv,
    gather_rows,
    reference,
)

pytestmark = pytest.mark.gpu

BF16 = jnp.bfloat16
TOLERANCE = 5e-3
"""Relative error of a bf16 result; that of a right one is about 2e-3."""


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, BF16)


def plainly(function: Any, *inputs: Any, **settings: Any) -> np.ndarray:
    """The plain form's result in fp32, from the CPU."""
    return plainly_all(function, *inputs, **settings)


def plainly_all(function: Any, *inputs: Any, **settings: Any) -> Any:
    """All results of a plain form in fp32, from the CPU."""
    cpu = jax.devices("cpu")[0]
    inputs = jax.device_put(inputs, cpu)
    inputs = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == BF16 else x, inputs)
    return jax.tree.map(np.asarray, jax.jit(functools.partial(function, **settings))(*inputs))


def spoil(k: jax.Array, v: jax.Array, is_hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pools with keys and values that must not be seen."""
    hidden = is_hidden[:, None, :, None]
    return jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.inf, v)


def assert_close(result: jax.Array, want: np.ndarray) -> None:
    got = np.asarray(result, np.float64)
    assert np.isfinite(got).all()
    scale = np.linalg.norm(want)
    assert np.linalg.norm(got - want) <= TOLERANCE * scale, np.linalg.norm(got - want) / scale


def rows_segment(seed: int, lengths: list[int], heads: int, capacity: int, dim: int) -> Any:
    """A pool with a row to spare, read in a shuffled order: (spoiled, clean)."""
    rng = np.random.default_rng(seed)
    pool_rows = len(lengths) + 1
    rows = rng.permutation(pool_rows)[: len(lengths)]
    seen = np.zeros(pool_rows, np.int64)
    seen[rows] = lengths
    is_hidden = jnp.asarray(np.arange(capacity) >= seen[:, None])
    k, v = (draw(seed + i, pool_rows, heads, capacity, dim) for i in (1, 2))
    index = (jnp.asarray(rows, jnp.int32), jnp.asarray(lengths, jnp.int32))
    return Segment(*spoil(k, v, is_hidden), *index), Segment(k, v, *index)


def paged_segment(seed: int, lengths: list[int], heads: int, page: int, dim: int) -> Any:
    """Pages in a shuffled order; table entries past a slot's pages point anywhere."""
    rng = np.random.default_rng(seed)
    width = max(-(-max(lengths) // page), 1) + 1
    pages = len(lengths) * width
    tables = rng.permutation(pages).reshape(len(lengths), width)
    is_hidden = np.ones((pages, page), bool)
    for table, length in zip(tables, lengths, strict=True):
        for number, entry in enumerate(table):
            is_hidden[entry] = np.arange(page) + number * page >= length
    for row, length in enumerate(lengths):
        tables[row, -(-length // page) :] = [-1, pages + 7][row % 2]
    k, v = (draw(seed + i, pages, heads, page, dim) for i in (1, 2))
    index = (jnp.asarray(tables, jnp.int32), jnp.asarray(lengths, jnp.int32))
    return PagedSegment(*spoil(k, v, jnp.asarray(is_hidden)), *index), PagedSegment(k, v, *index)


CASES = {
    # block, KV heads, group, head size, [lengths of a segment of rows], [of one of pages], page
    "sdar": (32, 8, 4, 128, [[1000, 1, 0], [32, 32, 0]], [200, 63, 0], 64),
    "one-row": (32, 8, 4, 128, [[3000]], None, 64),
    "many-pieces": (32, 1, 4, 128, [[20000]], None, 64),
    "nothing": (8, 2, 2, 64, [[0, 0]], None, 64),
    "group-6": (32, 2, 6, 128, [[640, 129, 0, 63], [32, 32, 32, 32]], None, 64),
    "head-64": (8, 4, 2, 64, [[640, 129, 0, 63, 64], [8, 8, 0, 8, 8]], [1, 0, 65, 64, 9], 32),
    "wide": (64, 2, 8, 64, [[640, 129]], [64, 65], 128),
    "small": (4, 2, 1, 128, [[3], [4]], [9], 8),
    "odd-block": (5, 3, 1, 64, [[37, 1], [5, 5]], None, 64),
    "uneven": (32, 4, 4, 128, [[9000, 3, 700, 128, 127, 0, 64, 1]], None, 64),
}


def case(name: str) -> tuple[jax.Array, list[Any], list[Any]]:
    """Queries, spoiled segments and clean ones."""
    block, kv_heads, group, dim, row_lengths, page_lengths, page = CASES[name]
    pairs = []
    for number, lengths in enumerate(row_lengths):
        capacity = block if number else max(-(-max(lengths) // 8) * 8 + 16, 8)
        pairs.append(rows_segment(10 * number, lengths, kv_heads, capacity, dim))
    if page_lengths is not None:
        pairs.append(paged_segment(50, page_lengths, kv_heads, page, dim))
    slots = len(row_lengths[0])
    q = draw(99, slots, block, kv_heads * group, dim)
    spoiled, clean = ([pair[i] for pair in pairs] for i in (0, 1))
    return q, spoiled, clean


CUTS = {
    "through-transposes": {"is_direct": False, "slack": -1},
    "in-place": {"slack": -1, "is_ordered": True, "lists_units": True},
    "whole": {"slack": 8, "splits_tails": True, "waits_ahead": True},
    "default": {},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_segment_attention(name: str, cut: str) -> None:
    from pallas_kernels.hopper.block_attention import segment_attention, tiles_for

    q, spoiled, clean = case(name)
    rows = q.shape[1] * (q.shape[2] // clean[0].k.shape[1])
    tiles = tiles_for(rows, q.shape[3], 132)._replace(**CUTS[cut])
    kernel = jax.jit(functools.partial(segment_attention, tiles=tiles))
    got = kernel(q, spoiled)
    assert_close(got, plainly(reference.segment_attention, q, clean))
    for _ in range(5):  # a race would show as a result that changes
        again = kernel(q, spoiled)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(again, np.float32))


@pytest.mark.parametrize("name", ["sdar", "nothing", "group-6", "head-64", "wide", "odd-block"])
def test_log_sum_exp_and_importance(name: str) -> None:
    """The log-sum-exp in both layouts; what each key of each segment gets of the attention."""
    from pallas_kernels.hopper.block_attention import segment_attention, tiles_for
    from pallas_kernels.hopper.key_importance import key_importance

    q, spoiled, clean = case(name)
    want, heights = plainly_all(reference.segment_attention, q, clean, with_lse=True)
    rows = q.shape[1] * (q.shape[2] // clean[0].k.shape[1])
    tiles = tiles_for(rows, q.shape[3], 132)
    for cut in (tiles, tiles._replace(is_direct=False)):
        kernel = jax.jit(functools.partial(segment_attention, tiles=cut, with_lse=True))
        out, lse = kernel(q, spoiled)
        assert_close(out, want)
        np.testing.assert_allclose(lse, heights, atol=2e-3)
    lse = jnp.asarray(heights)
    for seen, whole in zip(spoiled, clean, strict=True):
        for pooling in ("max", "mean"):
            got = jax.jit(key_importance, static_argnames="pooling")(q, lse, seen, pooling=pooling)
            shares = plainly_all(reference.key_importance, q, lse, whole, pooling=pooling)
            np.testing.assert_allclose(got, shares, rtol=2e-2, atol=1e-6)


PREFILLS = {
    # rows, chunk, KV heads, group, head size, capacity, block, prefix
    "sdar": (2, 320, 2, 4, 128, 1024, 32, 416),
    "first-chunk": (1, 72, 2, 3, 64, 136, 8, 0),
    "full-cache": (1, 256, 1, 4, 128, 512, 32, 512),
    "odd-block": (1, 100, 1, 5, 64, 136, 4, 132),
    "one-block": (3, 4, 2, 1, 128, 64, 4, 8),
    "long": (1, 512, 1, 8, 128, 8192, 64, 8000 // 64 * 64),
}


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_attention(name: str) -> None:
    from pallas_kernels.hopper.prefill_attention import prefill_attention

    rows, chunk, kv_heads, group, dim, capacity, block, prefix = PREFILLS[name]
    k, v = (draw(i, rows, kv_heads, capacity, dim) for i in (1, 2))
    is_hidden = jnp.broadcast_to(jnp.arange(capacity) >= prefix, (rows, capacity))
    spoiled = spoil(k, v, is_hidden)
    q = draw(3, rows, chunk, kv_heads * group, dim)
    own = [draw(i, rows, chunk, kv_heads, dim) for i in (4, 5)]
    length = jnp.asarray(prefix, jnp.int32)
    kernel = jax.jit(prefill_attention, static_argnums=6)
    got = kernel(q, *spoiled, length, *own, block)
    clean = [jnp.where(is_hidden[:, None, :, None], 0, x) for x in (k, v)]
    want = plainly(reference.prefill_attention, q, *clean, length, *own, block_length=block)
    assert_close(got, want)
    for _ in range(5):
        again = kernel(q, *spoiled, length, *own, block)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(again, np.float32))


def pinned() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("place", ["device", "host"])
def test_gather_rows(place: str) -> None:
    pool = draw(1, 3, 2, 1000, 128)
    rows = jnp.asarray([2, 0], jnp.int32)
    index = jax.random.randint(jax.random.key(2), (2, 2, 777), 0, 1000)
    want = plainly(reference.gather_rows, pool, rows, index)
    source = jax.device_put(pool, pinned()) if place == "host" else pool
    got = jax.jit(gather_rows)(source, rows, index)
    assert got.sharding.memory_kind == "device"
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("place", ["device", "host"])
def test_append_kv(place: str) -> None:
    pool, new = draw(1, 3, 2, 100, 128), draw(2, 4, 2, 12, 128)
    rows, starts = jnp.asarray([2, 0, -1, 1], jnp.int32), jnp.asarray([0, 41, 5, 95], jnp.int32)
    want = plainly(reference.append_kv, pool, new, rows, starts)
    sharding = pinned() if place == "host" else SingleDeviceSharding(jax.devices()[0])
    target = jax.device_put(pool, sharding, may_alias=False)
    target = jax.block_until_ready(target)
    before = target.unsafe_buffer_pointer()
    got = jax.jit(append_kv, donate_argnums=0, out_shardings=sharding)(target, new, rows, starts)
    jax.block_until_ready(got)
    assert got.unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@pytest.mark.parametrize("rows", [1, 64, 100, 256])
@pytest.mark.parametrize("columns", [320, 4096])
def test_skinny_matmul(rows: int, columns: int) -> None:
    from pallas_kernels.hopper.skinny_matmul import greedy_head, matmul

    x, w = draw(1, rows, 1024), draw(2, 1024, columns)
    got = jax.jit(matmul)(x, w)
    assert_close(got, plainly(jnp.matmul, x, w))
    x = x * 0.2
    head = jax.jit(functools.partial(greedy_head, mask_id=3, end=columns - 30))(x, w)
    logits = np.asarray(plainly(jnp.matmul, x, w), np.float64)
    logits[:, 3] = logits[:, columns - 30 :] = -np.inf
    top = logits.max(-1)
    log_p = logits - top[:, None] - np.log(np.exp(logits - top[:, None]).sum(-1))[:, None]
    np.testing.assert_array_equal(head.token, logits.argmax(-1))
    np.testing.assert_allclose(head.logprob, log_p.max(-1), atol=1e-4)
    terms = np.where(np.isinf(log_p), 0, np.exp(log_p) * log_p)
    np.testing.assert_allclose(head.entropy, -terms.sum(-1), atol=1e-3)
