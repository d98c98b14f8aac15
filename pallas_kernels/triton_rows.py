"""Single rows of pools, read and written in place on a GPU: Triton-style Pallas kernels.

The copy engine of a Hopper GPU moves tiles and not single rows, so these kernels use ordinary
loads and stores, which also reach pinned host memory over the link without a copy in between.
Triton-style kernels are deprecated in Pallas: what replaces this file need only keep the two
functions, whose meaning is in `reference`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

ROWS = 32
"""Rows that a program moves at a time."""

LINK_PROGRAMS = 32
"""Programs that saturate the link to host memory; more only take the GPU from other work."""


def _call(body: Any, programs: int, interpret: bool, **settings: Any) -> Any:
    """A Triton-style kernel; the parameters' type is what says so."""
    params = plt.CompilerParams(num_warps=4, num_stages=2)
    return pl.pallas_call(
        body, grid=(programs,), compiler_params=params, interpret=interpret, **settings
    )


def _grid(rows: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Indices of all features of some rows."""
    shape = (rows.shape[0], dim)
    features = lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.broadcast_to(rows[:, None], shape), features


def gather_rows(
    pool: Float[Array, "N K S D"],
    rows: Int[Array, " M"],
    index: Int[Array, "M K C"],
    programs: int = LINK_PROGRAMS,
    interpret: bool = False,
) -> Float[Array, "M K C D"]:
    """`reference.gather_rows` on a GPU; the pool may lie in pinned host memory."""
    slots, kv_heads, count = index.shape
    dim = pool.shape[3]
    chunks = pl.cdiv(count, ROWS)
    tasks = slots * kv_heads * chunks
    programs = min(programs, max(tasks, 1))

    def body(pool_ref: Any, rows_ref: Any, index_ref: Any, out_ref: Any) -> None:
        program = pl.program_id(0)

        def move(number: Any, _: None) -> None:
            task = number * programs + program
            unit, chunk = lax.div(task, chunks), lax.rem(task, chunks)
            slot, head = lax.div(unit, kv_heads), lax.rem(unit, kv_heads)
            place = chunk * ROWS + jnp.arange(ROWS)
            is_real = place < count
            entry = plt.load(index_ref.at[slot, head, place], mask=is_real, other=0)
            source = pool_ref.at[rows_ref[slot], head, *_grid(entry, dim)]
            target = out_ref.at[slot, head, *_grid(place, dim)]
            mask = jnp.broadcast_to(is_real[:, None], (ROWS, dim))
            plt.store(target, plt.load(source, mask=mask, other=0), mask=mask)

        mine = lax.div(tasks - program + programs - 1, programs)
        lax.fori_loop(0, mine, move, None)

    shape = jax.ShapeDtypeStruct((slots, kv_heads, count, dim), pool.dtype)
    return _call(body, programs, interpret, out_shape=shape)(pool, rows, index)


def append_kv(
    pool: Float[Array, "N K S D"],
    new: Float[Array, "M K B D"],
    rows: Int[Array, " M"],
    starts: Int[Array, " M"],
    interpret: bool = False,
) -> Float[Array, "N K S D"]:
    """`reference.append_kv` on a GPU, in place where the pool is donated, host memory included."""
    slots, kv_heads, block, dim = new.shape
    pool_rows, _, capacity, _ = pool.shape
    width = pl.next_power_of_2(block)

    def body(_: Any, new_ref: Any, rows_ref: Any, starts_ref: Any, out_ref: Any) -> None:
        unit = pl.program_id(0)
        slot, head = lax.div(unit, kv_heads), lax.rem(unit, kv_heads)
        row, start = rows_ref[slot], starts_ref[slot]
        number = jnp.arange(width)
        place = start + number
        is_kept = (number < block) & (place >= 0) & (place < capacity)
        is_kept &= (row >= 0) & (row < pool_rows)
        mask = jnp.broadcast_to(is_kept[:, None], (width, dim))
        values = plt.load(new_ref.at[slot, head, *_grid(number, dim)], mask=mask, other=0)
        plt.store(out_ref.at[row, head, *_grid(place, dim)], values, mask=mask)

    shape = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    run = _call(body, slots * kv_heads, interpret, out_shape=shape, input_output_aliases={0: 0})
    return run(pool, new, rows, starts)
