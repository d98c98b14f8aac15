"""Joins the pieces that `block_attention` leaves of each unit: a Mosaic GPU kernel for Hopper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import tiles as mosaic
from pallas_kernels.hopper.tiles import WARPGROUP_ROWS

COLUMNS = 32
"""Columns of a program: few, so that a few units still make many programs."""

FEW_UNITS = 32
"""Up to so many units have many pieces each, and more of them are fetched at a time."""


def merge_pieces(
    parts: Float[Array, "pieces rows D"],
    lse: Float[Array, "pieces rows"],
    first_piece: Int[Array, " U"],
    pieces: Int[Array, " U"],
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "U rows D"]:
    """The mean of each unit's pieces, weighted by 2^lse; zeros for a unit without pieces."""
    interpreted = interpret is not None
    _, rows, dim = parts.shape
    units = first_piece.shape[0]
    row_tiles = rows // WARPGROUP_ROWS
    column_tiles = dim // COLUMNS
    stages = 8 if units <= FEW_UNITS else 4

    def kernel(
        parts_ref: Any,
        lse_ref: Any,
        first_ref: Any,
        count_ref: Any,
        out_ref: Any,
        part_s: Any,
        lse_s: Any,
        out_s: Any,
        full: Any,
    ) -> None:
        unit, number = lax.axis_index("unit"), lax.axis_index("tile")
        at_rows = pl.ds(lax.div(number, jnp.int32(column_tiles)) * WARPGROUP_ROWS, WARPGROUP_ROWS)
        at_columns = pl.ds(lax.rem(number, jnp.int32(column_tiles)) * COLUMNS, COLUMNS)
        first, count = first_ref[unit], count_ref[unit]

        def fetch(index: Any) -> None:
            stage = lax.rem(index, jnp.int32(stages))
            part = parts_ref.at[first + index, at_rows, at_columns]
            plgpu.copy_gmem_to_smem(part, part_s.at[stage], full.at[stage])
            plgpu.copy_gmem_to_smem(
                lse_ref.at[first + index, at_rows], lse_s.at[stage], full.at[stage]
            )

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
        total, _, norm = lax.fori_loop(0, count, body, start)
        mean = total * mosaic.across(1.0 / jnp.maximum(norm, 1e-30), total.shape)
        out_s[...] = mean.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_ref.at[unit, at_rows, at_columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((units, rows, dim), dtype),
        grid=(units, row_tiles * column_tiles),
        grid_names=("unit", "tile"),
        num_threads=1,
        thread_name="group",
        scratch_types=[
            mosaic.swizzled((stages, WARPGROUP_ROWS, COLUMNS), jnp.float32),
            plgpu.SMEM((stages, WARPGROUP_ROWS), jnp.float32),
            mosaic.swizzled((WARPGROUP_ROWS, COLUMNS), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )(parts, lse, first_piece, pieces)
