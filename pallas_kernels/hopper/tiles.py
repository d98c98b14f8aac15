"""What the Mosaic GPU kernels share: memory tilings, and one softmax step over a tile of keys.

`interpreted` kernels run in the interpreter of `plgpu.kernel`, which knows neither register
accumulators nor layouts; there the products are plain ones and everything else is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP_ROWS = 64
"""Query rows of a warpgroup: the height of a Hopper matrix instruction."""

COPY_ALIGNMENT = 8
"""Rows of a pool that the copy engine counts as one: a copy starts at a multiple of it."""

SHARED_BYTES = 222 * 1024
"""What a program may fill of a Hopper multiprocessor's 227 KB, barriers and scratch left out."""

LOG2_E = math.log2(math.e)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """A shared-memory buffer in the layout that the matrix unit and the copy engine agree on."""
    itemsize = jnp.dtype(dtype).itemsize
    width = next(width for width in (128, 64, 32) if shape[-1] * itemsize % width == 0)
    transforms = (plgpu.TilingTransform((8, width // itemsize)), plgpu.SwizzleTransform(width))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def compiler_params() -> Any:
    """Settings that all kernels use; spelled out because their defaults differ by release."""
    return plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    )


def interpreter() -> Any:
    """The parameters that run a kernel on a CPU, with a check for races."""
    # A public name from jax 0.11 on.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # A copy may run past the end of a pool; the hardware fills in zeros, the interpreter NaN.
    return InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized")


def per_row(x: jax.Array, interpreted: bool) -> jax.Array:
    """A value per query row, held where the matrix unit leaves that row's products."""
    return x if interpreted else plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1))


def per_column(x: jax.Array, interpreted: bool) -> jax.Array:
    """A value per column of a product, held where the matrix unit leaves that column."""
    return x if interpreted else plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(0))


def per_product(x: jax.Array, interpreted: bool) -> jax.Array:
    """A tile held as the matrix unit leaves it."""
    return x if interpreted else plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def iota(shape: tuple[int, ...], axis: int, interpreted: bool) -> jax.Array:
    """Row (axis 0) or column (axis 1) numbers of a tile."""
    if interpreted:
        return lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def start_softmax(dim: int, interpreted: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The running softmax of a warpgroup's rows before any key: (weighted sum, maximum, sum)."""
    rows = WARPGROUP_ROWS
    return (
        per_product(jnp.full((rows, dim), 0, jnp.float32), interpreted),
        per_row(jnp.full((rows,), -jnp.inf, jnp.float32), interpreted),
        per_row(jnp.full((rows,), 0, jnp.float32), interpreted),
    )


def across(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats a value per row over the columns of a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def scores_of(q: Any, k: Any, interpreted: bool, issued: Callable[[], None]) -> jax.Array:
    """The products of 64 query rows with a tile of keys, both in shared memory.

    `issued` is called when the product is under way.
    """
    if interpreted:
        issued()
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def product(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, q, k.transpose((1, 0)))
        issued()
        return accumulator[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((q.shape[0], k.shape[0]), jnp.float32))


def add_weighted(
    total: jax.Array,
    weights: jax.Array,
    v: Any,
    interpreted: bool,
    issued: Callable[[], None] = lambda: None,
) -> jax.Array:
    """Adds a tile of values, in shared memory, weighted by row and key.

    `issued` is called when the product is under way.
    """
    if interpreted:
        issued()
        return total + jnp.dot(weights, v[...], preferred_element_type=jnp.float32)

    def product(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, v)
        issued()

    accumulate: Any = pl.run_state(product)
    return accumulate(plgpu.WGMMAAccumulatorRef.init(total))


def add_product(total: jax.Array, x: Any, w: Any, interpreted: bool) -> jax.Array:
    """Adds the product of two tiles in shared memory."""
    if interpreted:
        return total + jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)
    accumulate: Any = pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, x, w))
    return accumulate(plgpu.WGMMAAccumulatorRef.init(total))


def softmax_step(scores: jax.Array, scale: float, carry: tuple, dtype: Any) -> tuple:
    """Takes a tile's scores into the running softmax: ((sum so far, max, sum), the weights).

    Maxima are kept in units of log 2, because the GPU has an instruction for 2^x alone.
    """
    total, top, norm = carry
    scale = scale * LOG2_E
    new_top = jnp.maximum(top, scores.max(axis=1) * scale)
    decay = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores * scale - across(new_top, scores.shape))
    norm = norm * decay + weights.sum(axis=1)
    total = total * across(decay, total.shape)
    return (total, new_top, norm), weights.astype(dtype)


class Turns:
    """Makes two warpgroups alternate: one multiplies while the other does its softmax.

    Without a barrier (one warpgroup, or three) nobody waits.
    """

    def __init__(self, barrier: Any) -> None:
        self.barrier = barrier

    def hand_over(self) -> None:
        """Tells the other warpgroup that the matrix unit is free."""
        if self.barrier is not None:
            plgpu.barrier_arrive(self.barrier)

    def wait(self) -> None:
        """Waits for the other warpgroup to hand over."""
        if self.barrier is not None:
            plgpu.barrier_wait(self.barrier)

    def swap(self) -> None:
        """Hands over, and waits until the other warpgroup does."""
        self.hand_over()
        self.wait()


class Ring(NamedTuple):
    """Buffers of keys and values in shared memory, with the barriers that say who may use them.

    The copying warpgroup fills a stage and its `full` barrier counts the copies; the multiplying
    ones arrive at `free` when they have read it.
    """

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any

    @property
    def stages(self) -> int:
        """Tiles of keys, and of values, that the ring holds."""
        return self.k.shape[0]

    def stage(self, step: jax.Array) -> jax.Array:
        """The stage that a step uses."""
        return lax.rem(step, jnp.int32(self.stages))

    def fill(self, step: jax.Array, k_pool: Any, v_pool: Any, rows: Sequence[Any]) -> None:
        """Copies a tile from the pools' `rows`, each the first of an equal share of the tile."""
        stage = self.stage(step)
        share = self.k.shape[1] // len(rows)
        for pool, buffer, full, free in (
            (k_pool, self.k, self.k_full, self.k_free),
            (v_pool, self.v, self.v_full, self.v_free),
        ):
            pl.when(step >= self.stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
            for number, row in enumerate(rows):
                at = pool.at[pl.ds(pl.multiple_of(row, COPY_ALIGNMENT), share)]
                to = buffer.at[stage, pl.ds(number * share, share)]
                plgpu.copy_gmem_to_smem(at, to, full.at[stage])

    def drain(self, steps: jax.Array) -> None:
        """Waits until the last of `steps` tiles has been read: no arrival is left behind."""

        def body(step: jax.Array, _: None) -> None:
            plgpu.barrier_wait(self.k_free.at[self.stage(step)])
            plgpu.barrier_wait(self.v_free.at[self.stage(step)])

        lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, body, None)

    def expect(self, step: Any) -> None:
        """Waits for the keys of a step."""
        plgpu.barrier_wait(self.k_full.at[self.stage(step)])

    def attend(
        self,
        step: jax.Array,
        q: Any,
        carry: tuple,
        hide: Callable[[jax.Array], jax.Array],
        prepare: Callable[[Any], None],
        turns: Turns,
        interpreted: bool,
        is_ordered: bool = False,
        steps: jax.Array | None = None,
    ) -> tuple:
        """Takes a tile into the running softmax of the 64 rows `q`.

        `hide` sets the scores of keys that must not be seen to -inf; `prepare` zeroes their
        values in shared memory where those may be NaN. With `is_ordered` the softmax is done
        with before the other warpgroup gets its turn; otherwise the compiler may put it later.
        With the number of all `steps`, the keys of the next one are waited for while values
        are multiplied; those of the first are the caller's to `expect`.
        """
        stage = self.stage(step)
        if steps is None:
            plgpu.barrier_wait(self.k_full.at[stage])
        scores = scores_of(q, self.k.at[stage], interpreted, turns.swap)
        plgpu.barrier_arrive(self.k_free.at[stage])
        scores = hide(scores)
        carry, weights = softmax_step(scores, q.shape[1] ** -0.5, carry, q.dtype)
        if is_ordered:
            carry, weights = lax.optimization_barrier((carry, weights))
        turns.hand_over()
        plgpu.barrier_wait(self.v_full.at[stage])
        turns.wait()
        prepare(self.v.at[stage])

        def expect_next() -> None:
            if steps is not None:
                pl.when(step + 1 < steps)(lambda: self.expect(step + 1))

        v = self.v.at[stage]
        total = add_weighted(carry[0], weights, v, interpreted, expect_next)
        plgpu.barrier_arrive(self.v_free.at[stage])
        return (total, *carry[1:])


def ring_scratch(stages: int, keys: int, dim: int, dtype: Any, readers: int, copies: int) -> Ring:
    """The scratch types of a `Ring` with `readers` warpgroups and `copies` copies a tile."""
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    buffer = swizzled((stages, keys, dim), dtype)
    return Ring(buffer, buffer, full, full, free, free)


def clear_hidden(
    v: Any, visible: jax.Array, group: jax.Array, groups: int, done: Any, interpreted: bool
) -> None:
    """Zeroes the values of a tile from key `visible` on.

    Each of the warpgroups takes its share and waits at the barrier `done` for the others. Where
    they take turns that would be a deadlock, so `done` is None and the first warpgroup does it
    all: the second reads the values only after its turn, which comes later.
    """
    keys, dim = v.shape
    for number in range(keys // WARPGROUP_ROWS):
        first = number * WARPGROUP_ROWS

        def clear(first: int = first) -> None:
            part = v.at[pl.ds(first, WARPGROUP_ROWS)]
            key = iota((WARPGROUP_ROWS, dim), 0, interpreted) + first
            kept = per_product(part[...], interpreted)
            part[...] = jnp.where(key < visible, kept, jnp.zeros_like(kept))

        pl.when(group == (0 if done is None else number % groups))(clear)
    plgpu.commit_smem()
    if done is not None:
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
