"""Share of a block's attention that each key gets: a Mosaic GPU kernel for Hopper.

A second pass over the keys alone, once the log-sum-exp of every query is known. Here the keys
are the rows of the matrix product and the queries its columns, so that what is left of a tile is
one number for each of its rows. Keys go through a ring of buffers that the warpgroup fills
itself; two programs share a multiprocessor, and one multiplies while the other waits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import tiles as mosaic
from pallas_kernels.hopper.sources import Source, copy_rows
from pallas_kernels.hopper.tiles import COPY_ALIGNMENT, LOG2_E, SHARED_BYTES, WARPGROUP_ROWS
from pallas_kernels.reference import PagedSegment, Pooling, Segment

KEYS = WARPGROUP_ROWS
"""Keys of a tile."""

COLUMNS = 128
"""Query rows that are multiplied at a time, of whole heads."""

CHUNK = 16
"""Tiles of a program: the queries are read once for all of them."""


class _Sizes(NamedTuple):
    positions: int
    """Positions of the block, filled up to a multiple of 8."""
    heads: int
    """Query heads of a part, which are multiplied at a time."""
    parts: int
    kv_heads: int
    stages: int
    weight: float
    """What a share counts in the result."""
    pooling: Pooling
    scale: float


def _kernel(
    q_ref: Any,
    lse_ref: Any,
    lengths_ref: Any,
    table_ref: Any,
    k_ref: Any,
    out_ref: Any,
    q_s: Any,
    lse_s: Any,
    k_s: Any,
    out_s: Any,
    q_full: Any,
    k_full: Any,
    *,
    sizes: _Sizes,
    source: Source,
    copies: int,
    interpreted: bool,
) -> None:
    """The kernel's body: some tiles of the keys of one slot and KV head."""
    unit, chunk = lax.axis_index("unit"), lax.axis_index("chunk")
    slot = lax.div(unit, jnp.int32(sizes.kv_heads))
    head = lax.rem(unit, jnp.int32(sizes.kv_heads))
    length = lengths_ref[slot]
    row_of = source.locator(table_ref, slot, head, sizes.kv_heads)
    low = chunk * CHUNK
    tiles = jnp.clip(lax.div(length + KEYS - 1, jnp.int32(KEYS)) - low, 0, CHUNK)
    share = KEYS // copies

    def fetch(t: Any) -> None:
        stage = lax.rem(t, jnp.int32(sizes.stages))
        for number in range(copies):
            row = row_of((low + t) * KEYS + number * share)
            at = k_ref.at[pl.ds(pl.multiple_of(row, COPY_ALIGNMENT), share)]
            to = k_s.at[stage, pl.ds(number * share, share)]
            plgpu.copy_gmem_to_smem(at, to, k_full.at[stage])

    def part_of(k: Any, part: int) -> jax.Array:
        """Shares of a tile's keys, [keys, positions], summed over the heads of a part."""
        scores = mosaic.scores_of(k, q_s.at[part], interpreted, lambda: None)
        heights = mosaic.per_column(lse_s[part], interpreted)
        heights = lax.broadcast_in_dim(heights, scores.shape, [1])
        shares = jnp.exp2(scores * sizes.scale - heights)
        width = sizes.positions
        total = lax.slice(shares, (0, 0), (KEYS, width))
        for number in range(1, sizes.heads):
            first = number * width
            total += lax.slice(shares, (0, first), (KEYS, first + width))
        return total

    def body(t: Any, _: None) -> None:
        stage = lax.rem(t, jnp.int32(sizes.stages))
        plgpu.barrier_wait(k_full.at[stage])
        total = part_of(k_s.at[stage], 0)
        for part in range(1, sizes.parts):
            total += part_of(k_s.at[stage], part)
        key = mosaic.iota(total.shape, 0, interpreted)
        # What lies past the keys may be NaN.
        total = jnp.where(key < length - (low + t) * KEYS, total, 0.0)
        best = total.max(axis=1) if sizes.pooling == "max" else total.sum(axis=1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = best * sizes.weight
        # All threads have read the stage before the copy engine writes to it again.
        plgpu.commit_smem()
        pl.when(t + sizes.stages < tiles)(lambda: fetch(t + sizes.stages))
        plgpu.copy_smem_to_gmem(out_s, out_ref.at[unit, pl.ds((low + t) * KEYS, KEYS)])

    @pl.when(tiles > 0)
    def _() -> None:
        for part in range(sizes.parts):
            plgpu.copy_gmem_to_smem(q_ref.at[unit * sizes.parts + part], q_s.at[part], q_full)
        plgpu.copy_gmem_to_smem(lse_ref.at[unit], lse_s, q_full)
        lax.fori_loop(0, jnp.minimum(tiles, sizes.stages), lambda t, _: fetch(t), None)
        plgpu.barrier_wait(q_full)
        lax.fori_loop(0, tiles, body, None)
        plgpu.wait_smem_to_gmem(0)


def _sizes_for(block: int, group: int, dim: int, kv_heads: int, pooling: Pooling) -> _Sizes:
    positions = block + -block % 8
    heads = max(min(COLUMNS // positions, group), 1)
    parts = -(-group // heads)
    fixed = parts * heads * positions * (2 * dim + 4) + 4 * KEYS
    left = SHARED_BYTES // 2 - fixed
    if left < 4 * KEYS * dim:  # many queries: one program has the multiprocessor to itself
        left = SHARED_BYTES - fixed
    stages = min(left // (2 * KEYS * dim), 5)
    weight = 1.0 / group if pooling == "max" else 1.0 / (group * block)
    return _Sizes(
        positions=positions,
        heads=heads,
        parts=parts,
        kv_heads=kv_heads,
        stages=stages,
        weight=weight,
        pooling=pooling,
        scale=LOG2_E * dim**-0.5,
    )


def key_importance(
    q: Float[Array, "M B H D"],
    lse: Float[Array, "M B H"],
    segment: Segment | PagedSegment,
    pooling: Pooling,
    interpret: Any = None,
) -> Float[Array, "M K S"]:
    """`reference.key_importance` on a GPU."""
    slots, block, query_heads, dim = q.shape
    kv_heads = segment.k.shape[1]
    group = query_heads // kv_heads
    sizes = _sizes_for(block, group, dim, kv_heads, pooling)
    source = Source.of(segment, KEYS)
    copies = KEYS // copy_rows([source])
    if isinstance(segment, PagedSegment):
        tokens = segment.tables.shape[1] * segment.k.shape[2]
    else:
        tokens = segment.k.shape[2]
    units, chunks = slots * kv_heads, -(-tokens // (KEYS * CHUNK))

    def by_part(x: jax.Array, fill: float) -> jax.Array:
        """Values of queries, [M, B, H, ...], as [units, parts, heads * positions, ...]."""
        x = x.reshape(slots, block, kv_heads, group, *x.shape[3:])
        x = jnp.moveaxis(x, 1, 3)
        heads = sizes.parts * sizes.heads - group
        padding = [(0, 0), (0, 0), (0, heads), (0, sizes.positions - block)]
        x = jnp.pad(x, padding + [(0, 0)] * (x.ndim - 4), constant_values=fill)
        return x.reshape(units, sizes.parts, sizes.heads * sizes.positions, *x.shape[4:])

    # 2^(0 - inf) = 0: what fills up the columns counts nothing. A query without keys has -inf,
    # and none of its keys is seen.
    heights = by_part(lse * LOG2_E, math.inf)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            sizes=sizes,
            source=source.without_arrays(),
            copies=copies,
            interpreted=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct((units, chunks * CHUNK * KEYS), jnp.float32),
        grid=(units, chunks),
        grid_names=("unit", "chunk"),
        num_threads=1,
        thread_name="group",
        scratch_types=[
            mosaic.swizzled((sizes.parts, sizes.heads * sizes.positions, dim), q.dtype),
            plgpu.SMEM((sizes.parts, sizes.heads * sizes.positions), jnp.float32),
            mosaic.swizzled((sizes.stages, KEYS, dim), q.dtype),
            plgpu.SMEM((KEYS,), jnp.float32),
            plgpu.Barrier(num_arrivals=sizes.parts + 1),
            plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages),
        ],
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )
    lengths = segment.lengths.astype(jnp.int32)
    queries = by_part(q, 0).reshape(units * sizes.parts, -1, dim)
    out = kernel(queries, heights, lengths, source.table, source.k)
    out = out.reshape(slots, kv_heads, -1)[..., :tokens]
    # Tiles that no slot reaches are not written.
    return jnp.where(jnp.arange(tokens) < lengths[:, None, None], out, 0.0)
