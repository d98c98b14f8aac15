"""Single rows of pools, read and written in place on a GPU: Triton-style Pallas kernels.

The copy engine of a Hopper GPU moves tiles and not single rows, so these kernels use ordinary
loads and stores, which also reach pinned host memory over the link without a copy in between.
Triton-style kernels are deprecated in Pallas: what replaces this file need only keep its
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

from pallas_kernels.reference import HeadNorms

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
    interpret: bool = False,
) -> tuple[Float[Array, "M B H D"], Float[Array, "N K S D"], Float[Array, "N K S D"]]:
    """`reference.fused_qkv_rope_append` on a GPU, for heads that rotate whole.

    One program takes one head of one slot; pools that are donated are written in place.
    """
    slots, block, heads, dim = q.shape
    kv_heads, half = k.shape[2], dim // 2
    pool_rows, _, capacity, _ = k_pool.shape
    width = pl.next_power_of_2(block)
    each = heads + 2 * kv_heads

    def body(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        q_gain_ref: Any,
        k_gain_ref: Any,
        cos_ref: Any,
        sin_ref: Any,
        rows_ref: Any,
        starts_ref: Any,
        _: Any,
        __: Any,
        out_ref: Any,
        k_out_ref: Any,
        v_out_ref: Any,
    ) -> None:
        unit = pl.program_id(0)
        slot, head = lax.div(unit, each), lax.rem(unit, each)
        number = jnp.arange(width)
        is_real = jnp.broadcast_to((number < block)[:, None], (width, half))
        tokens, first = _grid(number, half)
        row, start = rows_ref[slot], starts_ref[slot]
        place = start + number
        is_kept = (number < block) & (place >= 0) & (place < capacity)
        is_kept &= (row >= 0) & (row < pool_rows)
        is_kept = jnp.broadcast_to(is_kept[:, None], (width, half))
        places = jnp.broadcast_to(place[:, None], (width, half))

        def load(ref: Any, head: Any) -> list[jax.Array]:
            """The halves of a head."""
            return [
                plt.load(ref.at[slot, tokens, head, first + at], mask=is_real, other=0)
                for at in (0, half)
            ]

        def turned(ref: Any, head: Any, gain_ref: Any) -> list[jax.Array]:
            """The halves of a head, normed and rotated."""
            halves = [part.astype(jnp.float32) for part in load(ref, head)]
            square = sum((part * part).sum(axis=1, keepdims=True) for part in halves)
            scale = lax.rsqrt(square / dim + norms.epsilon)
            features = jnp.arange(half)
            gains = [plt.load(gain_ref.at[features + at]) for at in (0, half)]
            a, b = (
                ((part * scale).astype(q.dtype) * gain[None, :]).astype(jnp.float32)
                for part, gain in zip(halves, gains, strict=True)
            )
            cosine, sine = (
                plt.load(ref.at[slot, tokens, first], mask=is_real, other=0)
                for ref in (cos_ref, sin_ref)
            )
            return [a * cosine - b * sine, b * cosine + a * sine]

        def append(pool_ref: Any, head: Any, halves: list[jax.Array]) -> None:
            for at, part in zip((0, half), halves, strict=True):
                target = pool_ref.at[row, head, places, first + at]
                plt.store(target, part.astype(pool_ref.dtype), mask=is_kept)

        @pl.when(head < heads)
        def _() -> None:
            for at, part in zip((0, half), turned(q_ref, head, q_gain_ref), strict=True):
                target = out_ref.at[slot, tokens, head, first + at]
                plt.store(target, part.astype(out_ref.dtype), mask=is_real)

        @pl.when((head >= heads) & (head < heads + kv_heads))
        def _() -> None:
            append(k_out_ref, head - heads, turned(k_ref, head - heads, k_gain_ref))

        @pl.when(head >= heads + kv_heads)
        def _() -> None:
            at = head - heads - kv_heads
            append(v_out_ref, at, load(v_ref, at))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k_pool, v_pool)]
    run = _call(body, slots * each, interpret, out_shape=shapes, input_output_aliases={9: 1, 10: 2})
    return tuple(run(q, k, v, norms.q, norms.k, cos, sin, rows, starts, k_pool, v_pool))
