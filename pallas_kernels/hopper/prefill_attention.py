"""Block-causal attention of a chunk of a prompt: a Mosaic GPU kernel for Hopper.

One program takes 128 query rows (tokens, and in them the heads of one KV head), first over the
cache so far, then over the chunk's own keys up to the end of its last token's block. Programs
that run at the same time read the same keys, so that these come from the L2 cache. The programs
with most keys start first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import tiles as mosaic
from pallas_kernels.hopper.tiles import COPY_ALIGNMENT, SHARED_BYTES, WARPGROUP_ROWS

NO_LIMIT = 1 << 30
"""More keys than there are: what a query sees of the cache."""


class Cut(NamedTuple):
    """How the work is cut up."""

    warpgroups: int = 2
    """Warpgroups that multiply, 64 query rows each."""
    keys: int = 128
    """Keys of a tile."""
    stages: int = 2
    """Tiles of keys, and of values, in the ring of buffers."""
    takes_turns: bool = True
    """Whether two warpgroups alternate at the matrix unit."""


def cut_for(dim: int) -> Cut:
    """The cut for heads of size `dim`."""
    keys, groups = 128, 2
    left = SHARED_BYTES - groups * WARPGROUP_ROWS * 2 * dim
    return Cut(groups, keys, min(left // (4 * keys * dim), 4))


class _Sizes(NamedTuple):
    rows: int
    kv_heads: int
    slots: int
    chunk: int
    """Tokens of the chunk."""
    padded_chunk: int
    """The same in the matrix of the chunk's keys, where a head's keys start aligned."""
    group: int
    block_length: int
    row_tiles: int


def _keys_seen(sizes: _Sizes, row_tile: Any, height: int) -> tuple[Any, Any]:
    """Chunk keys that all rows of a tile see, and those that any row sees."""

    def block_end(row: Any) -> Any:
        block = lax.div(row, jnp.int32(sizes.group * sizes.block_length))
        return jnp.minimum((block + 1) * sizes.block_length, sizes.chunk)

    first = row_tile * height
    return block_end(first), block_end(first + height - 1)


def _kernel(
    q_ref: Any,
    prefix_ref: Any,
    k_ref: Any,
    v_ref: Any,
    k_chunk_ref: Any,
    v_chunk_ref: Any,
    out_ref: Any,
    q_s: Any,
    q_full: Any,
    ring: mosaic.Ring,
    tail: Any,
    turn: Any,
    *,
    sizes: _Sizes,
    cut: Cut,
    interpreted: bool,
) -> None:
    """The kernel's body: one unit of query rows."""
    dim = q_ref.shape[-1]
    group, program = lax.axis_index("group"), lax.axis_index("program")
    height = cut.warpgroups * WARPGROUP_ROWS
    head = lax.div(program, jnp.int32(sizes.row_tiles))  # of a row of the batch
    row_tile = sizes.row_tiles - 1 - lax.rem(program, jnp.int32(sizes.row_tiles))
    unit = head * sizes.row_tiles + row_tile
    prefix = prefix_ref[0]
    prefix_tiles = lax.div(prefix + cut.keys - 1, jnp.int32(cut.keys))
    seen_by_all, seen_by_any = _keys_seen(sizes, row_tile, height)
    steps = prefix_tiles + lax.div(seen_by_any + cut.keys - 1, jnp.int32(cut.keys))
    turns = mosaic.Turns(turn if cut.takes_turns else None)
    done = None if cut.takes_turns else tail

    @pl.when(group == cut.warpgroups)
    def _() -> None:
        if not interpreted:
            plgpu.set_max_registers(40, action="decrease")

        def from_cache(t: Any, _: None) -> None:
            ring.fill(t, k_ref, v_ref, [head * sizes.slots + t * cut.keys])

        def from_chunk(t: Any, _: None) -> None:
            row = head * sizes.padded_chunk + (t - prefix_tiles) * cut.keys
            ring.fill(t, k_chunk_ref, v_chunk_ref, [row])

        lax.fori_loop(0, prefix_tiles, from_cache, None)
        lax.fori_loop(prefix_tiles, steps, from_chunk, None)
        ring.drain(steps)

    @pl.when(group < cut.warpgroups)
    def _() -> None:
        if not interpreted:
            plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(group * WARPGROUP_ROWS, WARPGROUP_ROWS)
        q = q_s.at[group]
        plgpu.copy_gmem_to_smem(q_ref.at[unit, rows], q, q_full.at[group])
        plgpu.barrier_wait(q_full.at[group])
        pl.when(group == 1)(turns.swap)
        first_row = row_tile * height + group * WARPGROUP_ROWS

        def visit(t: Any, carry: tuple) -> tuple:
            in_chunk = t >= prefix_tiles
            first = jnp.where(in_chunk, t - prefix_tiles, t) * cut.keys
            # Keys from `left` on do not exist; before it, those of later blocks are hidden.
            left = jnp.where(in_chunk, sizes.chunk, prefix) - first
            later = jnp.where(in_chunk, 0, NO_LIMIT)
            shown = jnp.where(in_chunk, seen_by_all, prefix) - first

            def hide(scores: jax.Array) -> jax.Array:
                key = mosaic.iota(scores.shape, 1, interpreted)
                row = mosaic.iota(scores.shape, 0, interpreted) + first_row
                block = lax.div(row, jnp.int32(sizes.group * sizes.block_length))
                end = (block + 1) * sizes.block_length + (later - first)
                end = jnp.minimum(end, left)
                return jnp.where(key < end, scores, -jnp.inf)

            def clear(v: Any) -> None:
                mosaic.clear_hidden(v, left, group, cut.warpgroups, done, interpreted)

            return ring.attend(
                t,
                q,
                carry,
                lambda scores: lax.cond(shown < cut.keys, hide, lambda scores: scores, scores),
                lambda v: pl.when(left < cut.keys)(lambda: clear(v)),
                turns,
                interpreted,
            )

        start = mosaic.start_softmax(dim, interpreted)
        total, _, norm = lax.fori_loop(0, steps, visit, start)
        pl.when(group == 0)(turns.swap)
        q_s[group] = (total * mosaic.across(1.0 / norm, total.shape)).astype(q_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out_ref.at[unit, rows])
        plgpu.wait_smem_to_gmem(0)


def _as_matrix(pool: Float[Array, "R K S D"], keys: int) -> Float[Array, "rows D"]:
    """A pool as a matrix of rows in which a tile of `keys` rows exists."""
    matrix = pool.reshape(-1, pool.shape[-1])
    return jnp.pad(matrix, ((0, max(keys - matrix.shape[0], 0)), (0, 0)))


def prefill_attention(
    q: Float[Array, "R Q H D"],
    k_prefix: Float[Array, "R K S D"],
    v_prefix: Float[Array, "R K S D"],
    prefix_length: Int[Array, ""],
    k_chunk: Float[Array, "R Q K D"],
    v_chunk: Float[Array, "R Q K D"],
    block_length: int,
    cut: Cut | None = None,
    interpret: Any = None,
) -> Float[Array, "R Q H D"]:
    """`reference.prefill_attention` on a GPU."""
    batch, chunk, heads, dim = q.shape
    _, kv_heads, slots, _ = k_prefix.shape
    group = heads // kv_heads
    cut = cut or cut_for(dim)
    height = cut.warpgroups * WARPGROUP_ROWS
    row_tiles = -(-chunk * group // height)
    units = batch * kv_heads * row_tiles
    sizes = _Sizes(
        rows=batch,
        kv_heads=kv_heads,
        slots=slots,
        chunk=chunk,
        padded_chunk=chunk + -chunk % COPY_ALIGNMENT,
        group=group,
        block_length=block_length,
        row_tiles=row_tiles,
    )
    # Rows run over tokens, then over the heads of the KV head, which lie side by side.
    rows = q.reshape(batch, chunk, kv_heads, group * dim).transpose(0, 2, 1, 3)
    rows = rows.reshape(batch * kv_heads, chunk * group, dim)
    rows = jnp.pad(rows, ((0, 0), (0, row_tiles * height - chunk * group), (0, 0)))
    rows = rows.reshape(units, height, dim)

    def chunk_matrix(x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 1, 3)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, sizes.padded_chunk - chunk), (0, 0)))
        return _as_matrix(x, cut.keys)

    def body(*refs: Any) -> None:
        _kernel(*refs, sizes=sizes, cut=cut, interpreted=interpret is not None)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(rows.shape, q.dtype),
        grid=(units,),
        grid_names=("program",),
        num_threads=cut.warpgroups + 1,
        thread_name="group",
        scratch_types=[
            mosaic.swizzled((cut.warpgroups, WARPGROUP_ROWS, dim), q.dtype),
            plgpu.Barrier(num_barriers=cut.warpgroups),
            mosaic.ring_scratch(cut.stages, cut.keys, dim, q.dtype, cut.warpgroups, 1),
            plgpu.Barrier(num_arrivals=cut.warpgroups),
            plgpu.Barrier(num_arrivals=cut.warpgroups),
        ],
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )
    out = kernel(
        rows,
        prefix_length.astype(jnp.int32).reshape(1),
        _as_matrix(k_prefix, cut.keys),
        _as_matrix(v_prefix, cut.keys),
        chunk_matrix(k_chunk),
        chunk_matrix(v_chunk),
    )
    out = out.reshape(batch, kv_heads, row_tiles * height, dim)[:, :, : chunk * group]
    out = out.reshape(batch, kv_heads, chunk, group * dim).transpose(0, 2, 1, 3)
    return out.reshape(q.shape)
