"""Attention of one block a slot over segments of keys: a Mosaic GPU kernel for Hopper.

The queries of all heads that read one KV head are the rows of one matrix, so that a block of 32
tokens with 4 heads a KV head fills the matrix unit. One warpgroup copies keys and values into a
ring of buffers, the others multiply; `schedule` says which tiles a program visits. A piece is
written as its weighted mean (fp32) and the log-sum-exp of its scores, and `merge` joins the
pieces of a unit.

Pools stay where they are: a pool [N, K, S, D] is read as the matrix [N * K * S, D], in tiles
that may run past the end of a slot's keys into whatever lies there. Scores of such keys are set
to -inf and their values to zero, because 0 * NaN is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import tiles as mosaic
from pallas_kernels.hopper.merge import merge_pieces
from pallas_kernels.hopper.tiles import COPY_ALIGNMENT, LOG2_E, SHARED_BYTES, WARPGROUP_ROWS
from pallas_kernels.reference import PagedSegment, Segment
from pallas_kernels.schedule import Schedule, make_schedule

COPY_ROWS = 64
"""Keys that one command of the copy engine fetches; fewer where pages are smaller."""

OUT_COLUMNS = 64
"""Columns of a result that pass through shared memory at a time on their way out."""


class Tiles(NamedTuple):
    """How a kernel cuts its work up; the defaults of `tiles_for` are what measured best."""

    warpgroups: int
    """Warpgroups that multiply, 64 query rows each."""
    keys: int
    """Keys of a tile."""
    stages: int
    """Tiles of keys, and of values, in the ring of buffers."""
    takes_turns: bool
    """Whether two warpgroups alternate at the matrix unit."""
    programs: int
    """Programs that share the work: one for every multiprocessor."""


def tiles_for(rows: int, dim: int, programs: int) -> Tiles:
    """The cut for `rows` query rows a unit and heads of size `dim`."""
    warpgroups = min(-(-rows // WARPGROUP_ROWS), 3)
    if rows > 3 * WARPGROUP_ROWS:
        warpgroups = 2
    # Three warpgroups leave each thread 160 registers: scores of 64 keys and no more.
    keys = 64 if warpgroups == 3 else 128
    fixed = warpgroups * WARPGROUP_ROWS * (2 * dim + 4 * OUT_COLUMNS)
    stages = (SHARED_BYTES - fixed) // (4 * keys * dim)
    return Tiles(warpgroups, keys, min(stages, 6), warpgroups == 2, programs)


class _Source(NamedTuple):
    """Where a segment's keys lie in its pool, seen as a matrix of rows."""

    k: Any
    v: Any
    table: Any
    """Row of the pool of each slot [M], or its page table, row after row [M * W]."""
    row_tokens: int
    """Tokens of a row of the pool, or of a page."""
    width: int
    """Pages of a slot's table; 0 without pages."""


def _source(segment: Segment | PagedSegment, tile: int) -> _Source:
    """A segment's operands; a pool smaller than a tile is filled up with zeros."""
    rows, kv_heads, tokens, dim = segment.k.shape
    missing = -tokens % COPY_ALIGNMENT
    size = rows * kv_heads * (tokens + missing)

    def flat(pool: jax.Array) -> jax.Array:
        if missing:
            pool = jnp.pad(pool, ((0, 0), (0, 0), (0, missing), (0, 0)))
        matrix = pool.reshape(size, dim)
        return jnp.pad(matrix, ((0, tile - size), (0, 0))) if size < tile else matrix

    k, v, tokens = flat(segment.k), flat(segment.v), tokens + missing
    if isinstance(segment, PagedSegment):
        # Entries past a slot's pages may hold anything; what they point to is masked.
        table = jnp.clip(segment.tables, 0, rows - 1).reshape(-1)
        return _Source(k, v, table.astype(jnp.int32), tokens, segment.tables.shape[1])
    return _Source(k, v, segment.rows.astype(jnp.int32), tokens, 0)


def _copy_rows(sources: Sequence[_Source]) -> int:
    """The keys of one copy: no copy may cross from one page into another."""
    return min([COPY_ROWS, *(source.row_tokens for source in sources if source.width)])


def _locator(
    source: _Source, table: Any, slot: Any, head: Any, kv_heads: int
) -> Callable[[Any], jax.Array]:
    """What gives the row of the pool's matrix that holds a token of the slot."""
    if not source.width:
        first = (table[slot] * kv_heads + head) * source.row_tokens
        return lambda token: first + token

    def in_page(token: Any) -> jax.Array:
        number = jnp.minimum(token // source.row_tokens, source.width - 1)
        page = table[slot * source.width + number]
        return (page * kv_heads + head) * source.row_tokens + token % source.row_tokens

    return in_page


def _for_each_unit(
    sched: Schedule, units_per_slot: int, visit: Callable[[Any, Any, Any, Any, Any], None]
) -> None:
    """Calls `visit(unit, slot, low, high, first_step)` for what this program has of each unit.

    `low` and `high` are tiles of the unit; the tile `t` is this program's step `first_step + t`.
    """
    program = lax.axis_index("program")
    begin, end = sched.bounds[program], sched.bounds[program + 1]

    def body(unit: jax.Array, _: None) -> None:
        slot = lax.div(unit, jnp.int32(units_per_slot))
        start = sched.starts[unit]
        segments = sched.ends.shape[0]
        count = sched.ends[segments - 1, slot]
        low = jnp.maximum(begin - start, 0)
        high = jnp.minimum(end - start, count)
        pl.when(low < high)(lambda: visit(unit, slot, low, high, start - begin))

    lax.fori_loop(sched.first_unit[program], sched.last_unit[program] + 1, body, None)


def _kernel(
    *refs: Any,
    sources: Sequence[_Source],
    tiles: Tiles,
    units_per_slot: int,
    kv_heads: int,
    interpreted: bool,
) -> None:
    """The kernel's body: producer and consumers over the units of one program."""
    count = len(sources)
    q_ref, lengths_ref, sched, tables = refs[0], refs[1], Schedule(*refs[2:9]), refs[9 : 9 + count]
    pools = [(refs[9 + count + 2 * i], refs[10 + count + 2 * i]) for i in range(count)]
    out_ref, lse_ref, *scratch = refs[9 + 3 * count :]
    q_s, out_s, lse_s, q_full, ring, tail, turn = scratch
    dim = q_ref.shape[-1]
    copies = tiles.keys // _copy_rows(sources)
    group = lax.axis_index("group")
    row_tiles = units_per_slot // kv_heads
    turns = mosaic.Turns(turn if tiles.takes_turns else None)
    done = None if tiles.takes_turns else tail

    def produce(unit: Any, slot: Any, low: Any, high: Any, first_step: Any) -> None:
        head = lax.rem(lax.div(unit, jnp.int32(row_tiles)), jnp.int32(kv_heads))
        begin = jnp.int32(0)
        for i, (source, (k_ref, v_ref)) in enumerate(zip(sources, pools, strict=True)):
            end = sched.ends[i, slot]
            row_of = _locator(source, tables[i], slot, head, kv_heads)

            def body(
                t: Any,
                _: None,
                k: Any = k_ref,
                v: Any = v_ref,
                row_of: Callable[[Any], jax.Array] = row_of,
                begin: Any = begin,
            ) -> None:
                token = (t - begin) * tiles.keys
                rows = [row_of(token + number * (tiles.keys // copies)) for number in range(copies)]
                ring.fill(first_step + t, k, v, rows)

            lax.fori_loop(jnp.maximum(low, begin), jnp.minimum(high, end), body, None)
            begin = end

    def visible_keys(limits: Sequence[tuple[Any, Any]], t: Any) -> jax.Array:
        """How many of a tile's keys a slot sees: all but for the last tile of a segment."""
        visible, begin = jnp.int32(0), jnp.int32(0)
        for end, length in limits:
            left = length - (t - begin) * tiles.keys
            visible = jnp.where((t >= begin) & (t < end), left, visible)
            begin = end
        return visible

    def consume(unit: Any, slot: Any, low: Any, high: Any, first_step: Any) -> None:
        q_rows = pl.ds(group * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[unit, q_rows], q_s.at[group], q_full.at[group])
        # Read before the loop: the compiler does not move loads across barriers.
        limits = [(sched.ends[i, slot], lengths_ref[i, slot]) for i in range(count)]
        plgpu.barrier_wait(q_full.at[group])

        def body(t: Any, carry: tuple) -> tuple:
            visible = visible_keys(limits, t)

            def hide(scores: jax.Array) -> jax.Array:
                number = mosaic.iota(scores.shape, 1, interpreted)
                return jnp.where(number < visible, scores, -jnp.inf)

            def clear(v: Any) -> None:
                mosaic.clear_hidden(v, visible, group, tiles.warpgroups, done, interpreted)

            is_tail = visible < tiles.keys
            return ring.attend(
                first_step + t,
                q_s.at[group],
                carry,
                lambda scores: lax.cond(is_tail, hide, lambda scores: scores, scores),
                lambda v: pl.when(is_tail)(lambda: clear(v)),
                turns,
                interpreted,
            )

        start = mosaic.start_softmax(dim, interpreted)
        total, top, norm = lax.fori_loop(low, high, body, start)
        piece = lax.axis_index("program") + unit
        mean = total * mosaic.across(1.0 / norm, total.shape)
        # The buffers may still hold the piece before.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        lse_s[group] = top + jnp.log(norm) * LOG2_E
        for column in range(0, dim, OUT_COLUMNS):
            columns = pl.ds(column, OUT_COLUMNS)
            if column:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_s[group] = lax.slice(mean, (0, column), (WARPGROUP_ROWS, column + OUT_COLUMNS))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[group], out_ref.at[piece, q_rows, columns])
        plgpu.copy_smem_to_gmem(lse_s.at[group], lse_ref.at[piece, q_rows])

    @pl.when(group < tiles.warpgroups)
    def _() -> None:
        if not interpreted and tiles.warpgroups > 1:
            plgpu.set_max_registers(232 if tiles.warpgroups == 2 else 160, action="increase")
        # The second warpgroup runs half a tile behind the first.
        pl.when(group == 1)(turns.swap)
        _for_each_unit(sched, units_per_slot, consume)
        pl.when(group == 0)(turns.swap)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == tiles.warpgroups)
    def _() -> None:
        if not interpreted and tiles.warpgroups > 1:
            plgpu.set_max_registers(40 if tiles.warpgroups == 2 else 24, action="decrease")
        _for_each_unit(sched, units_per_slot, produce)
        program = lax.axis_index("program")
        ring.drain(sched.bounds[program + 1] - sched.bounds[program])


def attend_in_pieces(
    q: Float[Array, "U rows D"],
    segments: Sequence[Segment | PagedSegment],
    sched: Schedule,
    tiles: Tiles,
    interpret: Any = None,
) -> tuple[Float[Array, "pieces rows D"], Float[Array, "pieces rows"]]:
    """Weighted mean and log2-sum-exp of every piece in `sched`; other entries are undefined."""
    units, rows, dim = q.shape
    slots = segments[0].lengths.shape[0]
    kv_heads = segments[0].k.shape[1]
    sources = [_source(segment, tiles.keys) for segment in segments]
    lengths = jnp.stack([segment.lengths.astype(jnp.int32) for segment in segments])
    copies = tiles.keys // _copy_rows(sources)
    groups = tiles.warpgroups
    body = functools.partial(
        _kernel,
        sources=[source._replace(k=None, v=None, table=None) for source in sources],
        tiles=tiles,
        units_per_slot=units // slots,
        kv_heads=kv_heads,
        interpreted=interpret is not None,
    )
    pieces = tiles.programs + units
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((pieces, rows, dim), jnp.float32),
            jax.ShapeDtypeStruct((pieces, rows), jnp.float32),
        ),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=[
            mosaic.swizzled((groups, WARPGROUP_ROWS, dim), q.dtype),
            mosaic.swizzled((groups, WARPGROUP_ROWS, OUT_COLUMNS), jnp.float32),
            plgpu.SMEM((groups, WARPGROUP_ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=groups),
            mosaic.ring_scratch(tiles.stages, tiles.keys, dim, q.dtype, groups, copies),
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )
    tables = [source.table for source in sources]
    pools = [pool for source in sources for pool in (source.k, source.v)]
    return kernel(q, lengths, *sched, *tables, *pools)


def segment_attention(
    q: Float[Array, "M B H D"],
    segments: Sequence[Segment | PagedSegment],
    tiles: Tiles | None = None,
    programs: int = 132,
    interpret: Any = None,
) -> Float[Array, "M B H D"]:
    """`reference.segment_attention` on a GPU: `programs` is its number of multiprocessors."""
    slots, queries, heads, dim = q.shape
    kv_heads = segments[0].k.shape[1]
    group = heads // kv_heads
    tiles = tiles or tiles_for(queries * group, dim, programs)
    height = tiles.warpgroups * WARPGROUP_ROWS
    row_tiles = -(-queries * group // height)
    # Rows run over tokens, then over the heads of the KV head, which lie side by side.
    rows = q.reshape(slots, queries, kv_heads, group * dim).transpose(0, 2, 1, 3)
    rows = rows.reshape(slots * kv_heads, queries * group, dim)
    rows = jnp.pad(rows, ((0, 0), (0, row_tiles * height - queries * group), (0, 0)))
    rows = rows.reshape(slots * kv_heads * row_tiles, height, dim)
    lengths = jnp.stack([segment.lengths.astype(jnp.int32) for segment in segments])
    sched = make_schedule(lengths, tiles.keys, kv_heads * row_tiles, tiles.programs)
    parts, lse = attend_in_pieces(rows, segments, sched, tiles, interpret)
    out = merge_pieces(parts, lse, sched.first_piece, sched.pieces, q.dtype, interpret)
    out = out.reshape(slots, kv_heads, row_tiles * height, dim)[:, :, : queries * group]
    out = out.reshape(slots, kv_heads, queries, group * dim).transpose(0, 2, 1, 3)
    return out.reshape(q.shape)
