"""Joins the pieces that `block_attention` leaves of each unit: a Mosaic GPU kernel for Hopper."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import tiles as mosaic
from pallas_kernels.hopper.query_rows import QueryRows
from pallas_kernels.hopper.tiles import LOG2_E, WARPGROUP_ROWS

COLUMNS = 32
"""Columns of a program: few, so that a few units still make many programs."""

PROGRAMS = 264
"""Programs that share the units of a list: two for each multiprocessor of an H200."""

FEW_UNITS = 32
"""Up to so many units have many pieces each, and more of them are fetched at a time."""


class _Target(NamedTuple):
    """Where the results go: by unit, or in the rows of `in_place`."""

    in_place: QueryRows | None
    has_lse: bool


def _kernel(
    parts_ref: Any,
    lse_ref: Any,
    first_ref: Any,
    count_ref: Any,
    out_ref: Any,
    *rest: Any,
    unit: Any,
    number: Any,
    target: _Target,
    row_tiles: int,
    interpreted: bool,
) -> None:
    """The kernel's body: 64 rows and a few columns, by number, of one unit."""
    joined_ref = rest[0] if target.has_lse else None
    part_s, lse_s, out_s, joined_s, full = rest[target.has_lse :]
    stages = part_s.shape[0]
    column_tiles = parts_ref.shape[-1] // COLUMNS
    row_tile = lax.div(number, jnp.int32(column_tiles))
    at_rows = pl.ds(row_tile * WARPGROUP_ROWS, WARPGROUP_ROWS)
    column_tile = lax.rem(number, jnp.int32(column_tiles))
    at_columns = pl.ds(column_tile * COLUMNS, COLUMNS)
    first, count = first_ref[unit], count_ref[unit]

    def fetch(index: Any) -> None:
        stage = lax.rem(index, jnp.int32(stages))
        part = parts_ref.at[first + index, at_rows, at_columns]
        plgpu.copy_gmem_to_smem(part, part_s.at[stage], full.at[stage])
        plgpu.copy_gmem_to_smem(lse_ref.at[first + index, at_rows], lse_s.at[stage], full.at[stage])

    def body(index: Any, carry: tuple) -> tuple:
        total, top, norm = carry
        stage = lax.rem(index, jnp.int32(stages))
        plgpu.barrier_wait(full.at[stage])
        part = mosaic.per_product(part_s[stage], interpreted)
        height = mosaic.per_row(lse_s[stage], interpreted)
        new_top = jnp.maximum(top, height)
        decay, weight = jnp.exp2(top - new_top), jnp.exp2(height - new_top)
        total = total * mosaic.across(decay, total.shape)
        total = total + part * mosaic.across(weight, total.shape)
        # All threads have read the stage before the copy engine writes to it again.
        plgpu.commit_smem()
        pl.when(index + stages < count)(lambda: fetch(index + stages))
        return total, new_top, norm * decay + weight

    lax.fori_loop(0, jnp.minimum(count, stages), lambda index, _: fetch(index), None)
    start = mosaic.start_softmax(COLUMNS, interpreted)
    total, top, norm = lax.fori_loop(0, count, body, start)
    mean = total * mosaic.across(1.0 / jnp.maximum(norm, 1e-30), total.shape)
    out_s[...] = mean.astype(out_s.dtype)
    if joined_ref is not None:
        joined_s[...] = top / LOG2_E + jnp.log(norm)
    plgpu.commit_smem()
    if target.in_place is None:
        plgpu.copy_smem_to_gmem(out_s, out_ref.at[unit, at_rows, at_columns])
    else:
        of_slot = target.in_place.kv_heads * row_tiles
        slot = lax.div(unit, jnp.int32(of_slot))
        head = lax.div(lax.rem(unit, jnp.int32(of_slot)), jnp.int32(row_tiles))
        tiles = parts_ref.shape[1] // WARPGROUP_ROWS
        first_row = lax.rem(unit, jnp.int32(row_tiles)) * tiles + row_tile
        places = target.in_place.rectangles(slot, head, first_row * WARPGROUP_ROWS)
        target.in_place.store(out_s, out_ref, places, (column_tile * COLUMNS, COLUMNS))
    if joined_ref is not None:
        at = joined_ref.at[unit, at_rows]
        pl.when(column_tile == 0)(lambda: plgpu.copy_smem_to_gmem(joined_s, at))

    plgpu.wait_smem_to_gmem(0)


def _merge(
    operands: tuple[Any, ...],
    dtype: Any,
    out_type: list[jax.ShapeDtypeStruct],
    row_tiles: int,
    target: _Target,
    interpret: Any,
    skips_whole: bool = False,
    listing: tuple[Int[Array, " U"], Int[Array, "1"]] | None = None,
) -> list[jax.Array]:
    """Runs the kernel over all units, or over the first of a list and how many these are.

    `row_tiles` are the units of a slot and a KV head. With `skips_whole`, units that are one
    piece are left as they are.
    """
    units, (_, rows, dim) = operands[2].shape[0], operands[0].shape
    stages = 8 if units <= FEW_UNITS else 4
    if target.has_lse:
        out_type = [*out_type, jax.ShapeDtypeStruct((units, rows), jnp.float32)]
    tiles = rows // WARPGROUP_ROWS * dim // COLUMNS
    body = functools.partial(
        _kernel, target=target, row_tiles=row_tiles, interpreted=interpret is not None
    )

    def one(*refs: Any) -> None:
        unit, number = lax.axis_index("unit"), lax.axis_index("tile")
        if skips_whole:
            count_ref = refs[3]
            pl.when(count_ref[unit] != 1)(lambda: body(*refs, unit=unit, number=number))
        else:
            body(*refs, unit=unit, number=number)

    def listed(units_ref: Any, number_ref: Any, *refs: Any) -> None:
        """Every program takes tiles of the first units of a list, which mostly is short."""
        program = lax.axis_index("program")
        left = number_ref[0] * tiles - program

        def visit(index: Any, _: None) -> None:
            item = index * PROGRAMS + program
            unit = units_ref[lax.div(item, jnp.int32(tiles))]
            body(*refs, unit=unit, number=lax.rem(item, jnp.int32(tiles)))

        lax.fori_loop(0, lax.div(left + PROGRAMS - 1, jnp.int32(PROGRAMS)), visit, None)

    scratch = [
        mosaic.swizzled((stages, WARPGROUP_ROWS, COLUMNS), jnp.float32),
        plgpu.SMEM((stages, WARPGROUP_ROWS), jnp.float32),
        mosaic.swizzled((WARPGROUP_ROWS, COLUMNS), dtype),
        plgpu.SMEM((WARPGROUP_ROWS,), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    ]

    def with_scratch(*refs: Any) -> None:
        inner = one if listing is None else listed
        pl.run_scoped(functools.partial(inner, *refs), *scratch, collective_axes="group")

    # Not `plgpu.kernel`, which takes no reference that a kernel may write to.
    kernel: Any = pl.kernel(
        with_scratch,
        out_type=out_type,
        mesh=plgpu.Mesh(
            grid=(units, tiles) if listing is None else (PROGRAMS,),
            grid_names=("unit", "tile") if listing is None else ("program",),
            num_threads=1,
            thread_name="group",
        ),
        compiler_params=mosaic.compiler_params(),
        interpret=interpret if interpret is not None else False,
    )
    return list(kernel(*(listing or ()), *operands))


def merge_pieces(
    parts: Float[Array, "pieces rows D"],
    lse: Float[Array, "pieces rows"],
    first_piece: Int[Array, " U"],
    pieces: Int[Array, " U"],
    dtype: Any,
    with_lse: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "U rows D"], Float[Array, "U rows"] | None]:
    """The mean of each unit's pieces, weighted by 2^lse; zeros for a unit without pieces.

    The second result is the natural log-sum-exp of each row, if asked for.
    """
    shape = (first_piece.shape[0], *parts.shape[1:])
    out, *joined = _merge(
        (parts, lse, first_piece, pieces),
        dtype,
        [jax.ShapeDtypeStruct(shape, dtype)],
        1,
        _Target(None, with_lse),
        interpret,
    )
    return out, joined[0] if joined else None


def merge_in_place(
    parts: Float[Array, "pieces rows D"],
    lse: Float[Array, "pieces rows"],
    first_piece: Int[Array, " U"],
    pieces: Int[Array, " U"],
    in_place: QueryRows,
    matrix: jax.ShapeDtypeStruct,
    whole: Float[Array, "MB HD"] | None,
    lists_units: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "MB HD"], Float[Array, "U rows"] | None]:
    """The same into the rows of a `matrix`; without `whole`, the log-sum-exp comes with it.

    `whole` holds the results of the units that are one piece, and the others are added to it.
    """
    slots = matrix.shape[0] // in_place.block
    row_tiles = first_piece.shape[0] // (slots * in_place.kv_heads)
    operands = (parts, lse, first_piece, pieces)
    if whole is None:
        target = _Target(in_place, True)
        out, joined = _merge(operands, matrix.dtype, [matrix], row_tiles, target, interpret)
        return out, joined
    target = _Target(in_place, False)
    result = jax.new_ref(whole, memory_space=plgpu.GMEM)
    listing = None
    if lists_units:
        is_left = pieces != 1
        after = jnp.cumsum(is_left, dtype=jnp.int32)
        place = jnp.arange(pieces.shape[0], dtype=jnp.int32)
        # Sorting would cost a kernel or two more than counting does.
        listing = (after <= place[:, None]).sum(1, dtype=jnp.int32), after[-1:]
    inputs = ((*operands, result), matrix.dtype, [], row_tiles, target, interpret)
    _merge(*inputs, skips_whole=True, listing=listing)
    return result[...], None
