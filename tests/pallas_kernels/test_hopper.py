"""The Mosaic GPU kernels on a CPU: tiny cases in the interpreter, and lowering for CUDA.

The interpreter simulates warpgroups, barriers and copies, so a deadlock or a missing barrier
shows here. It fills what a copy reads past the end of a pool with NaN.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PagedSegment, Segment, reference
from pallas_kernels.hopper import (
    block_attention,
    key_importance,
    prefill_attention,
    skinny_matmul,
    tiles,
)
from pallas_kernels.hopper.block_attention import Tiles

BF16 = jnp.bfloat16


def draw(seed: int, *shape: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape), BF16)


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def difference(got: jax.Array, want: jax.Array) -> float:
    return float(np.abs(np.asarray(got, np.float32) - np.asarray(want, np.float32)).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [Tiles(1, 64, 2, False, 2), Tiles(2, 64, 2, True, 2), Tiles(2, 64, 2, False, 5)],
    ids=["one-warpgroup", "turns", "more-programs-than-tiles"],
)
def test_segment_attention(cut: Tiles) -> None:
    """Two tiles of a spoiled row, the block itself and a page; the second slot sees a key."""
    group = 5 * cut.warpgroups
    k, v = draw(1, 2, 1, 88, 64), draw(2, 2, 1, 88, 64)
    k = k.at[1, :, 70:].set(jnp.nan).at[0].set(jnp.nan)
    v = v.at[1, :, 70:].set(jnp.inf).at[0, :, 1:].set(jnp.inf)
    k = k.at[0, :, 0].set(1.0)
    segments: list[Segment | PagedSegment] = [
        Segment(k, v, ints(1, 0), ints(70, 1)),
        Segment(draw(3, 2, 1, 12, 64), draw(4, 2, 1, 12, 64), ints(0, 1), ints(12, 0)),
        PagedSegment(
            draw(5, 3, 1, 16, 64),
            draw(6, 3, 1, 16, 64),
            jnp.stack([ints(2, 9), ints(0, 0)]),
            ints(7, 0),
        ),
    ]
    q = draw(7, 2, 12, group, 64)
    got = block_attention.segment_attention(q, segments, cut, interpret=tiles.interpreter())
    assert difference(got, reference.segment_attention(q, segments)) < 0.01


@pytest.mark.slow
def test_attention_in_place() -> None:
    """Queries and results where they lie: a unit in two pieces, one that is whole, one of pages."""
    k, v = draw(1, 2, 1, 88, 64), draw(2, 2, 1, 88, 64)
    k, v = k.at[1, :, 70:].set(jnp.nan), v.at[1, :, 70:].set(jnp.inf)
    own = Segment(draw(3, 2, 1, 16, 64), draw(4, 2, 1, 16, 64), ints(0, 1), ints(16, 0))
    segments = [Segment(k, v, ints(1, 0), ints(70, 3)), own]
    q = draw(7, 2, 16, 6, 64)
    options = {"is_direct": True, "is_ordered": True, "splits_tails": True}
    cut = Tiles(2, 64, 2, True, 3, lists_units=True, **options)
    kernel = functools.partial(block_attention.segment_attention, interpret=tiles.interpreter())
    got = jax.jit(functools.partial(kernel, tiles=cut))(q, segments)
    want, lse = reference.segment_attention(q, segments, with_lse=True)
    assert difference(got, want) < 0.01
    whole = Tiles(1, 64, 2, False, 2, slack=2, waits_ahead=True, **options)
    got, got_lse = jax.jit(functools.partial(kernel, tiles=whole, with_lse=True))(q, segments)
    assert difference(got, want) < 0.01
    np.testing.assert_allclose(got_lse, lse, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_key_importance(pooling: Literal["max", "mean"]) -> None:
    """Two parts of heads, a spoiled row, a slot that sees one key; and pages."""
    k = draw(1, 2, 1, 88, 64)
    k = k.at[1, :, 70:].set(jnp.nan).at[0, :, 1:].set(jnp.nan)
    row = Segment(k, k, ints(1, 0), ints(70, 1))
    page = draw(5, 3, 1, 16, 64)
    pages = PagedSegment(page, page, jnp.stack([ints(2, 9), ints(0, 0)]), ints(23, 0))
    q = draw(7, 2, 12, 3 if pooling == "max" else 9, 64)
    lse = jnp.asarray(np.random.default_rng(8).uniform(5, 7, q.shape[:3]), jnp.float32)
    for segment in (row, pages):
        want = reference.key_importance(q, lse, segment, pooling)
        got = jax.jit(key_importance.key_importance, static_argnums=(3, 4))(
            q, lse, segment, pooling, tiles.interpreter()
        )
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_skinny_matmul(splits: int) -> None:
    """The last tile of columns is half full; more tiles than programs."""
    x, w = draw(1, 70, 256), draw(2, 256, 320)
    cut = skinny_matmul.Cut(2, 128, 64, 2, splits, 2)
    got = skinny_matmul.matmul(x, w, cut, interpret=tiles.interpreter())
    want = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_greedy_head() -> None:
    """Hidden ids in the middle and at the end, and a tie between two tiles."""
    x, w = draw(1, 66, 128) * 0.2, draw(2, 128, 320)
    w = w.at[:, 9].multiply(4)
    w = w.at[:, 200].set(w[:, 9])
    cut = skinny_matmul.Cut(2, 128, 64, 2, 1, 2)
    got = skinny_matmul.greedy_head(x, w, 7, 290, cut=cut, interpret=tiles.interpreter())
    logits = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    log_p = jax.nn.log_softmax(logits.at[:, 7].set(-jnp.inf).at[:, 290:].set(-jnp.inf))
    np.testing.assert_array_equal(got.token, log_p.argmax(-1))
    assert (np.asarray(got.token) == 9).any()
    np.testing.assert_allclose(got.logprob, log_p.max(-1), atol=1e-5)
    entropy = -jnp.where(jnp.isneginf(log_p), 0, jnp.exp(log_p) * log_p).sum(-1)
    np.testing.assert_allclose(got.entropy, entropy, atol=1e-5)


@pytest.mark.slow
def test_prefill_attention() -> None:
    k, v = draw(1, 1, 1, 88, 64), draw(2, 1, 1, 88, 64)
    k, v = k.at[:, :, 72:].set(jnp.nan), v.at[:, :, 72:].set(jnp.inf)
    inputs: Any = (draw(3, 1, 40, 2, 64), k, v, jnp.asarray(72, jnp.int32))
    inputs = (*inputs, draw(4, 1, 40, 1, 64), draw(5, 1, 40, 1, 64))
    cut = prefill_attention.Cut(2, 64, 2, True)
    got = prefill_attention.prefill_attention(*inputs, 8, cut, tiles.interpreter())
    clean = (inputs[0], k.at[:, :, 72:].set(0), v.at[:, :, 72:].set(0), *inputs[3:])
    assert difference(got, reference.prefill_attention(*clean, 8)) < 0.01


def lower(function: Any, *operands: Any, **named: Any) -> None:
    jax.jit(function).trace(*operands, **named).lower(lowering_platforms=("cuda",))


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 6, 8])
@pytest.mark.parametrize("block", [4, 32, 64])
def test_segment_attention_lowers(dim: int, group: int, block: int) -> None:
    index = shape(3, dtype=jnp.int32)
    row = shape(4, 2, 648, dim)
    own = shape(3, 2, block, dim)
    page = shape(9, 2, 64, dim)
    segments = [
        Segment(row, row, index, index),
        Segment(own, own, index, index),
        PagedSegment(page, page, shape(3, 5, dtype=jnp.int32), index),
    ]
    q = shape(3, block, 2 * group, dim)
    lower(block_attention.segment_attention, q, segments)
    if block % 8 == 0 and group in (4, 6):
        cut = block_attention.tiles_for(block * group, dim, 132)
        cut = cut._replace(is_direct=True, slack=4, is_ordered=True, splits_tails=True)
        lower(functools.partial(block_attention.segment_attention, tiles=cut), q, segments)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group, block", [(1, 4), (6, 32), (8, 64)])
def test_importance_lowers(dim: int, group: int, block: int) -> None:
    index, row, page = shape(3, dtype=jnp.int32), shape(4, 2, 648, dim), shape(9, 2, 32, dim)
    rows = Segment(row, row, index, index)
    pages = PagedSegment(page, page, shape(3, 5, dtype=jnp.int32), index)
    q, lse = shape(3, block, 2 * group, dim), shape(3, block, 2 * group, dtype=jnp.float32)
    lower(functools.partial(key_importance.key_importance, pooling="max"), q, lse, segment=pages)
    lower(functools.partial(block_attention.segment_attention, with_lse=True), q, [rows, pages])


@pytest.mark.parametrize("rows", [32, 128, 256])
def test_skinny_matmul_lowers(rows: int) -> None:
    for inner, columns in ((4096, 12288), (12288, 4096), (4096, 1024)):
        lower(skinny_matmul.matmul, shape(rows, inner), shape(inner, columns))
    head = functools.partial(skinny_matmul.greedy_head, mask_id=5, end=999)
    lower(head, shape(rows, 256), shape(256, 1024))


@pytest.mark.parametrize("dim", [64, 128])
def test_prefill_attention_lowers(dim: int) -> None:
    cache, chunk = shape(2, 3, 648, dim), shape(2, 100, 3, dim)
    lower(
        lambda *inputs: prefill_attention.prefill_attention(*inputs, 4),
        shape(2, 100, 15, dim),
        cache,
        cache,
        shape(dtype=jnp.int32),
        chunk,
        chunk,
    )
