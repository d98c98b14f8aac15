"""The Mosaic GPU kernels on a CPU: tiny cases in the interpreter, and lowering for CUDA.

The interpreter simulates warpgroups, barriers and copies, so a deadlock or a missing barrier
shows here. It fills what a copy reads past the end of a pool with NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PagedSegment, Segment, reference
from pallas_kernels.hopper import block_attention, prefill_attention, tiles
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
def test_prefill_attention() -> None:
    k, v = draw(1, 1, 1, 88, 64), draw(2, 1, 1, 88, 64)
    k, v = k.at[:, :, 72:].set(jnp.nan), v.at[:, :, 72:].set(jnp.inf)
    inputs: Any = (draw(3, 1, 40, 2, 64), k, v, jnp.asarray(72, jnp.int32))
    inputs = (*inputs, draw(4, 1, 40, 1, 64), draw(5, 1, 40, 1, 64))
    cut = prefill_attention.Cut(2, 64, 2, True)
    got = prefill_attention.prefill_attention(*inputs, 8, cut, tiles.interpreter())
    clean = (inputs[0], k.at[:, :, 72:].set(0), v.at[:, :, 72:].set(0), *inputs[3:])
    assert difference(got, reference.prefill_attention(*clean, 8)) < 0.01


def lower(function: Any, *operands: Any) -> None:
    jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))


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
    lower(block_attention.segment_attention, shape(3, block, 2 * group, dim), segments)


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
