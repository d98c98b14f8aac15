"""Products of few rows with a large matrix of weights: a Mosaic GPU kernel for Hopper.

With up to 256 rows such a product is bound by reading the weights. Every program takes tiles of
columns, one warpgroup copies weights and rows into a ring of buffers, and the others, of 64 rows
each, multiply. What is done with a finished tile is the `Finish`: `matmul` writes it, and
`greedy_head` keeps of a row's logits what a greedy step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import tiles as mosaic
from pallas_kernels.hopper.tiles import COPY_ALIGNMENT, SHARED_BYTES, WARPGROUP_ROWS
from pallas_kernels.reference import GreedyHead

MAX_ROWS = 4 * WARPGROUP_ROWS

OUT_COLUMNS = 64
"""Columns of a product that pass through shared memory at a time on their way out."""


class Cut(NamedTuple):
    """How a product is cut up."""

    warpgroups: int
    """Warpgroups that multiply, 64 rows each."""
    columns: int
    depth: int
    """Terms of the inner product that a stage of the ring holds."""
    stages: int
    splits: int
    """Parts of the inner product that are summed afterwards, so that there is work for all."""
    programs: int


def cut_for(
    rows: int,
    inner: int,
    columns: int,
    programs: int,
    widths: Sequence[int] = (128, 192, 64),
    splits: Sequence[int] = (1, 2, 4, 8, 16),
) -> Cut:
    """The cut for a product [rows, inner] x [inner, columns], of those that are named."""
    warpgroups = -(-rows // WARPGROUP_ROWS)
    height = warpgroups * WARPGROUP_ROWS
    depth = 128 if warpgroups <= 2 else 64

    def cost(width: int, many: int) -> float:
        """Time of the busiest program in parts of an equal share, and of writing the splits."""
        items = -(-columns // width) * many
        written = 4 * many * height / inner if many > 1 else 0.0
        return -(-items // programs) * programs / items + written

    choices = [(w, many) for w in widths for many in splits if inner % (many * depth) == 0]
    width, many = min(choices, key=lambda choice: cost(*choice))
    stage = 2 * depth * (height + width)
    stages = min((SHARED_BYTES - 4 * height * OUT_COLUMNS) // stage, 8)
    return Cut(warpgroups, width, depth, stages, many, programs)


class Finish(NamedTuple):
    """What becomes of a tile of the product."""

    scratch: Any
    """Types of the shared memory that one warpgroup needs."""
    write: Callable[..., None]
    """`write(scratch, out_ref, product, item, rows, first_column)`: `item` counts the tiles of
    columns within each split."""


class _Ring(NamedTuple):
    x: Any
    w: Any
    full: Any
    free: Any


def run(
    x: Float[Array, "rows E"],
    w: Float[Array, "E N"],
    cut: Cut,
    finish: Finish,
    out_type: jax.ShapeDtypeStruct,
    interpret: Any = None,
) -> jax.Array:
    """The product finished tile by tile; results of rows past those of `x` are undefined."""
    inner, columns = w.shape
    height = cut.warpgroups * WARPGROUP_ROWS
    # What the copy engine leaves of the buffer has no influence on the rows that count.
    x = jnp.pad(x, ((0, -x.shape[0] % COPY_ALIGNMENT), (0, 0)))
    given = x.shape[0]
    tiles = -(-columns // cut.columns)
    steps = inner // (cut.depth * cut.splits)
    interpreted = interpret is not None

    def body(x_ref: Any, w_ref: Any, out_ref: Any, ring: _Ring, scratch: Any) -> None:
        program, group = lax.axis_index("program"), lax.axis_index("group")
        items = lax.div(tiles * cut.splits - program + cut.programs - 1, jnp.int32(cut.programs))

        def stage_of(step: Any) -> Any:
            return lax.rem(step, jnp.int32(cut.stages))

        def item_of(number: Any) -> Any:
            return number * cut.programs + program

        def produce(step: Any, _: None) -> None:
            stage = stage_of(step)
            item = item_of(lax.div(step, jnp.int32(steps)))
            split = lax.div(item, jnp.int32(tiles))
            first = lax.rem(item, jnp.int32(tiles)) * cut.columns
            begin = (split * steps + lax.rem(step, jnp.int32(steps))) * cut.depth
            pl.when(step >= cut.stages)(lambda: plgpu.barrier_wait(ring.free.at[stage]))
            inside = pl.ds(pl.multiple_of(begin, cut.depth), cut.depth)
            at = pl.ds(pl.multiple_of(first, cut.columns), cut.columns)
            plgpu.copy_gmem_to_smem(w_ref.at[inside, at], ring.w.at[stage], ring.full.at[stage])
            to = ring.x.at[stage, pl.ds(0, given)]
            plgpu.copy_gmem_to_smem(x_ref.at[:, inside], to, ring.full.at[stage])

        def consume(number: Any, _: None) -> None:
            rows = pl.ds(group * WARPGROUP_ROWS, WARPGROUP_ROWS)

            def multiply(step: Any, total: jax.Array) -> jax.Array:
                stage = stage_of(number * steps + step)
                plgpu.barrier_wait(ring.full.at[stage])
                x_part, w_part = ring.x.at[stage, rows], ring.w.at[stage]
                total = mosaic.add_product(total, x_part, w_part, interpreted)
                plgpu.barrier_arrive(ring.free.at[stage])
                return total

            zeros = jnp.full((WARPGROUP_ROWS, cut.columns), 0, jnp.float32)
            product = lax.fori_loop(0, steps, multiply, mosaic.per_product(zeros, interpreted))
            item = item_of(number)
            first = lax.rem(item, jnp.int32(tiles)) * cut.columns
            finish.write(scratch.at[group], out_ref, product, item, rows, first)

        @pl.when(group < cut.warpgroups)
        def _() -> None:
            lax.fori_loop(0, items, consume, None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == cut.warpgroups)
        def _() -> None:
            lax.fori_loop(0, items * steps, produce, None)

            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(ring.free.at[stage_of(step)])

            lax.fori_loop(jnp.maximum(items * steps - cut.stages, 0), items * steps, drain, None)

    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(cut.programs,),
        grid_names=("program",),
        num_threads=cut.warpgroups + 1,
        thread_name="group",
        scratch_types=[
            _Ring(
                mosaic.swizzled((cut.stages, height, cut.depth), x.dtype),
                mosaic.swizzled((cut.stages, cut.depth, cut.columns), w.dtype),
                plgpu.Barrier(num_arrivals=2, num_barriers=cut.stages),
                plgpu.Barrier(num_arrivals=cut.warpgroups, num_barriers=cut.stages),
            ),
            finish.scratch,
        ],
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )
    return kernel(x, w)


def matmul(
    x: Float[Array, "rows E"],
    w: Float[Array, "E N"],
    cut: Cut | None = None,
    programs: int = 132,
    interpret: Any = None,
) -> Float[Array, "rows N"]:
    """`x @ w`, accumulated in fp32, in the dtype of `x`."""
    rows, columns = x.shape[0], w.shape[1]
    cut = cut or cut_for(rows, x.shape[1], columns, programs)
    height = rows + -rows % COPY_ALIGNMENT
    dtype = x.dtype if cut.splits == 1 else jnp.dtype(jnp.float32)
    tiles = -(-columns // cut.columns)

    left = height % WARPGROUP_ROWS

    def write(scratch: Any, out_ref: Any, product: Any, item: Any, rows: Any, first: Any) -> None:
        split = lax.div(item, jnp.int32(tiles))
        for column in range(0, cut.columns, OUT_COLUMNS):
            part = lax.slice(product, (0, column), (WARPGROUP_ROWS, column + OUT_COLUMNS))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch[...] = part.astype(dtype)
            plgpu.commit_smem()
            at = pl.ds(pl.multiple_of(first + column, OUT_COLUMNS), OUT_COLUMNS)
            if not left:
                plgpu.copy_smem_to_gmem(scratch, out_ref.at[split, rows, at])
                continue
            # The last warpgroup has fewer rows.
            last = lax.axis_index("group") == cut.warpgroups - 1

            @pl.when(last)
            def _(at: Any = at) -> None:
                few = pl.ds(height - left, left)
                part = scratch.at[pl.ds(0, left)]
                plgpu.copy_smem_to_gmem(part, out_ref.at[split, few, at])

            @pl.when(~last)
            def _(at: Any = at) -> None:
                plgpu.copy_smem_to_gmem(scratch, out_ref.at[split, rows, at])

    scratch = mosaic.swizzled((cut.warpgroups, WARPGROUP_ROWS, OUT_COLUMNS), dtype)
    out_type = jax.ShapeDtypeStruct((cut.splits, height, columns), dtype)
    out = run(x, w, cut, Finish(scratch, write), out_type, interpret)
    return out[0, :rows] if cut.splits == 1 else out[:, :rows].sum(0).astype(x.dtype)


STATISTICS = 4
"""Of a row and a tile: maximum, its column, sum of e^(x - max), the same times (x - max)."""

HIDDEN = -1e30
"""Logit of an id that must not be chosen: finite, because 0 * inf is NaN."""


def greedy_head(
    x: Float[Array, "rows E"],
    w: Float[Array, "E V"],
    mask_id: int,
    end: int,
    programs: int = 132,
    interpret: Any = None,
    cut: Cut | None = None,
) -> GreedyHead:
    """`reference.greedy_head` on a GPU, for at most 256 rows."""
    rows, columns = x.shape[0], w.shape[1]
    cut = cut or cut_for(rows, x.shape[1], columns, programs, (128,), (1,))
    height = cut.warpgroups * WARPGROUP_ROWS
    tiles = -(-columns // cut.columns)
    interpreted = interpret is not None

    def write(scratch: Any, out_ref: Any, product: Any, item: Any, at: Any, first: Any) -> None:
        column = mosaic.iota(product.shape, 1, interpreted)
        is_seen = (column != mask_id - first) & (column < end - first)
        logits = jnp.where(is_seen, product, HIDDEN)
        top = logits.max(axis=1)
        below = logits - mosaic.across(top, logits.shape)
        # No reduction gives a place, but the largest of `columns - place` does.
        place = jnp.where(below == 0, (cut.columns - column).astype(jnp.float32), 0.0)
        weight = jnp.exp(below)
        values = (top, place.max(axis=1), weight.sum(axis=1), (weight * below).sum(axis=1))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, value in enumerate(values):
            scratch[number] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch, out_ref.at[item, :, at])

    scratch = plgpu.SMEM((cut.warpgroups, STATISTICS, WARPGROUP_ROWS), jnp.float32)
    out_type = jax.ShapeDtypeStruct((tiles, STATISTICS, height), jnp.float32)
    statistics = run(x, w, cut, Finish(scratch, write), out_type, interpret)
    top, place, total, weighted = jnp.moveaxis(statistics, 1, 0)[..., :rows]
    tile = jnp.argmax(top, axis=0)
    highest = jnp.max(top, axis=0)
    from_right = jnp.take_along_axis(place, tile[None], 0)[0].astype(jnp.int32)
    token = (tile + 1).astype(jnp.int32) * cut.columns - from_right
    decay = jnp.exp(top - highest)
    norm = (decay * total).sum(0)
    mean = (decay * (weighted + total * jnp.maximum(top - highest, HIDDEN))).sum(0) / norm
    log_norm = jnp.log(norm)
    return GreedyHead(token, -log_norm, log_norm - mean)
