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
from pallas_kernels.hopper.merge import merge_in_place, merge_pieces
from pallas_kernels.hopper.query_rows import QueryRows, Rectangle
from pallas_kernels.hopper.sources import Source, copy_rows
from pallas_kernels.hopper.tiles import LOG2_E, SHARED_BYTES, WARPGROUP_ROWS
from pallas_kernels.reference import PagedSegment, Segment
from pallas_kernels.schedule import Schedule, make_schedule

OUT_COLUMNS = 64
"""Columns of a result that pass through shared memory at a time on their way out."""


class Tiles(NamedTuple):
    """How a kernel cuts its work up.

    `tiles_for` gives what measured best. The switches that it leaves off after `slack` are right
    in the interpreter but have no figure yet: `python -m benchmarks kernels` measures them.
    """

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
    is_direct: bool = False
    """Whether queries are read and results written where they lie, without transposes, and a
    unit that is one piece is written at once."""
    slack: int = -1
    """Tiles beyond its equal share that a program may get so that units stay whole; -1 for none."""
    is_ordered: bool = False
    """Whether a tile's softmax is finished before the other warpgroup's turn."""
    lists_units: bool = False
    """Whether the merge runs over a list of the units that need it, instead of over all."""
    waits_ahead: bool = False
    """Whether a tile's keys are waited for while the values before them are multiplied."""
    splits_tails: bool = False
    """Whether tiles that all rows see whole have a loop of their own, without masks."""


def tiles_for(rows: int, dim: int, programs: int) -> Tiles:
    """The cut for `rows` query rows a unit and heads of size `dim`."""
    warpgroups = min(-(-rows // WARPGROUP_ROWS), 3)
    if rows > 3 * WARPGROUP_ROWS:
        warpgroups = 2
    # Three warpgroups leave each thread 160 registers: scores of 64 keys and no more.
    keys = 64 if warpgroups == 3 else 128
    fixed = warpgroups * WARPGROUP_ROWS * (2 * dim + 4 * OUT_COLUMNS)
    stages = (SHARED_BYTES - fixed) // (4 * keys * dim)
    turns = warpgroups == 2
    return Tiles(warpgroups, keys, min(stages, 6), turns, programs, is_direct=True, slack=6)


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
    sources: Sequence[Source],
    tiles: Tiles,
    units_per_slot: int,
    kv_heads: int,
    in_place: QueryRows | None,
    writes_whole: bool,
    interpreted: bool,
) -> None:
    """The kernel's body: producer and consumers over the units of one program."""
    count = len(sources)
    q_ref, lengths_ref, sched, tables = refs[0], refs[1], Schedule(*refs[2:9]), refs[9 : 9 + count]
    pools = [(refs[9 + count + 2 * i], refs[10 + count + 2 * i]) for i in range(count)]
    out_ref, lse_ref, *rest = refs[9 + 3 * count :]
    whole_ref = rest.pop(0) if writes_whole else None
    q_s, out_s, lse_s, q_full, ring, tail, turn = rest
    dim = q_s.shape[-1]
    copies = tiles.keys // copy_rows(sources)
    group = lax.axis_index("group")
    row_tiles = units_per_slot // kv_heads
    turns = mosaic.Turns(turn if tiles.takes_turns else None)
    done = None if tiles.takes_turns else tail
    program = lax.axis_index("program")
    all_steps = sched.bounds[program + 1] - sched.bounds[program]
    steps = all_steps if tiles.waits_ahead else None

    def head_of(unit: Any) -> Any:
        return lax.rem(lax.div(unit, jnp.int32(row_tiles)), jnp.int32(kv_heads))

    def rectangles(unit: Any, slot: Any) -> list[Rectangle]:
        assert in_place is not None
        first_row = lax.rem(unit, jnp.int32(row_tiles)) * tiles.warpgroups + group
        return in_place.rectangles(slot, head_of(unit), first_row * WARPGROUP_ROWS)

    def produce(unit: Any, slot: Any, low: Any, high: Any, first_step: Any) -> None:
        head = head_of(unit)
        begin = jnp.int32(0)
        for i, (source, (k_ref, v_ref)) in enumerate(zip(sources, pools, strict=True)):
            end = sched.ends[i, slot]
            row_of = source.locator(tables[i], slot, head, kv_heads)

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
        if in_place is None:
            plgpu.copy_gmem_to_smem(q_ref.at[unit, q_rows], q_s.at[group], q_full.at[group])
        else:
            # The buffer may still hold the results of the unit before.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            places = rectangles(unit, slot)
            in_place.fetch(q_ref, q_s.at[group], q_full.at[group], places)
        # Read before the loop: the compiler does not move loads across barriers.
        limits = [(sched.ends[i, slot], lengths_ref[i, slot]) for i in range(count)]
        plgpu.barrier_wait(q_full.at[group])

        def whole(t: Any, carry: tuple) -> tuple:
            return ring.attend(
                first_step + t,
                q_s.at[group],
                carry,
                lambda scores: scores,
                lambda _: None,
                turns,
                interpreted,
                tiles.is_ordered,
                steps,
            )

        def segment(number: Any, carry: tuple) -> tuple:
            """The tiles of a segment: those that are seen whole, then the last one."""
            begin, end, full = jnp.int32(0), jnp.int32(0), jnp.int32(0)
            at = jnp.int32(0)
            for i, (after, length) in enumerate(limits):
                is_it = number == i
                begin, end = jnp.where(is_it, at, begin), jnp.where(is_it, after, end)
                seen = at + lax.div(length, jnp.int32(tiles.keys))
                full, at = jnp.where(is_it, seen, full), after
            begin, end = jnp.maximum(begin, low), jnp.minimum(end, high)
            split = jnp.clip(full, begin, jnp.maximum(begin, end))
            carry = lax.fori_loop(begin, jnp.minimum(split, end), whole, carry)
            return lax.fori_loop(split, end, body, carry)

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
                tiles.is_ordered,
                steps,
            )

        start = mosaic.start_softmax(dim, interpreted)
        if tiles.splits_tails:
            # A number that is not known before keeps this one loop.
            several = jnp.where(low < high, count, 0)
            total, top, norm = lax.fori_loop(0, several, segment, start)
        else:
            total, top, norm = lax.fori_loop(low, high, body, start)
        mean = total * mosaic.across(1.0 / norm, total.shape)

        def write_piece() -> None:
            piece = lax.axis_index("program") + unit
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

        if in_place is None or whole_ref is None:
            write_piece()
            return
        is_whole = (low == 0) & (high == sched.ends[count - 1, slot])
        pl.when(~is_whole)(write_piece)

        @pl.when(is_whole)
        def _() -> None:
            assert in_place is not None
            q_s[group] = mean.astype(q_s.dtype)
            plgpu.commit_smem()
            in_place.store(q_s.at[group], whole_ref, rectangles(unit, slot), (0, dim))

    @pl.when(group < tiles.warpgroups)
    def _() -> None:
        if not interpreted and tiles.warpgroups > 1:
            plgpu.set_max_registers(232 if tiles.warpgroups == 2 else 160, action="increase")
        if tiles.waits_ahead:
            pl.when(all_steps > 0)(lambda: ring.expect(jnp.int32(0)))
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
        ring.drain(all_steps)


class Pieces(NamedTuple):
    """What `attend_in_pieces` leaves of the units; entries of no piece are undefined."""

    mean: Float[Array, "pieces rows D"]
    lse: Float[Array, "pieces rows"]
    """log2 of the sum of 2^score."""
    whole: Float[Array, "MB HD"] | None
    """Results of the units that are one piece, where they belong."""


def attend_in_pieces(
    q: jax.Array,
    segments: Sequence[Segment | PagedSegment],
    sched: Schedule,
    tiles: Tiles,
    in_place: QueryRows | None = None,
    writes_whole: bool = False,
    interpret: Any = None,
) -> Pieces:
    """Weighted mean and log2-sum-exp of every piece in `sched`.

    Queries are [units, rows, D], or the matrix [M * B, H * D] of `in_place`.
    """
    units, dim, height = sched.starts.shape[0], q.shape[-1], tiles.warpgroups * WARPGROUP_ROWS
    slots = segments[0].lengths.shape[0]
    kv_heads = segments[0].k.shape[1]
    if in_place is not None:
        dim = in_place.dim
    sources = [Source.of(segment, tiles.keys) for segment in segments]
    lengths = jnp.stack([segment.lengths.astype(jnp.int32) for segment in segments])
    copies = tiles.keys // copy_rows(sources)
    groups = tiles.warpgroups
    body = functools.partial(
        _kernel,
        sources=[source.without_arrays() for source in sources],
        tiles=tiles,
        units_per_slot=units // slots,
        kv_heads=kv_heads,
        in_place=in_place,
        writes_whole=writes_whole,
        interpreted=interpret is not None,
    )
    pieces = tiles.programs + units
    types = [
        jax.ShapeDtypeStruct((pieces, height, dim), jnp.float32),
        jax.ShapeDtypeStruct((pieces, height), jnp.float32),
    ]
    if writes_whole:
        types.append(jax.ShapeDtypeStruct(q.shape, q.dtype))
    kernel = plgpu.kernel(
        body,
        out_type=types,
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=[
            mosaic.swizzled((groups, WARPGROUP_ROWS, dim), q.dtype),
            mosaic.swizzled((groups, WARPGROUP_ROWS, OUT_COLUMNS), jnp.float32),
            plgpu.SMEM((groups, WARPGROUP_ROWS), jnp.float32),
            plgpu.Barrier(
                num_arrivals=1 if in_place is None else in_place.pieces, num_barriers=groups
            ),
            mosaic.ring_scratch(tiles.stages, tiles.keys, dim, q.dtype, groups, copies),
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=mosaic.compiler_params(),
        interpret=interpret,
    )
    tables = [source.table for source in sources]
    pools = [pool for source in sources for pool in (source.k, source.v)]
    mean, lse, *whole = kernel(q, lengths, *sched, *tables, *pools)
    return Pieces(mean, lse, whole[0] if whole else None)


def segment_attention(
    q: Float[Array, "M B H D"],
    segments: Sequence[Segment | PagedSegment],
    tiles: Tiles | None = None,
    programs: int = 132,
    with_lse: bool = False,
    interpret: Any = None,
) -> Any:
    """`reference.segment_attention` on a GPU: `programs` is its number of multiprocessors."""
    slots, queries, heads, dim = q.shape
    kv_heads = segments[0].k.shape[1]
    group = heads // kv_heads
    tiles = tiles or tiles_for(queries * group, dim, programs)
    height = tiles.warpgroups * WARPGROUP_ROWS
    row_tiles = -(-queries * group // height)
    lengths = jnp.stack([segment.lengths.astype(jnp.int32) for segment in segments])
    sched = make_schedule(lengths, tiles.keys, kv_heads * row_tiles, tiles.programs, tiles.slack)
    in_place = QueryRows(queries, group, kv_heads, dim)
    if tiles.is_direct and in_place.is_possible:
        rows = q.reshape(slots * queries, heads * dim)
        # The log-sum-exp of all units comes from the merge.
        parts = attend_in_pieces(rows, segments, sched, tiles, in_place, not with_lse, interpret)
        matrix = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        out, lse = merge_in_place(
            parts.mean,
            parts.lse,
            sched.first_piece,
            sched.pieces,
            in_place,
            matrix,
            parts.whole,
            tiles.lists_units,
            interpret,
        )
        out = out.reshape(q.shape)
        if lse is not None:
            lse = lse.reshape(slots, kv_heads, row_tiles * height)[:, :, : queries * group]
            lse = lse.reshape(slots, heads, queries).transpose(0, 2, 1)
        return (out, lse) if with_lse else out
    # Rows run over tokens, then over the heads of the KV head, which lie side by side.
    rows = q.reshape(slots, queries, kv_heads, group * dim).transpose(0, 2, 1, 3)
    rows = rows.reshape(slots * kv_heads, queries * group, dim)
    rows = jnp.pad(rows, ((0, 0), (0, row_tiles * height - queries * group), (0, 0)))
    rows = rows.reshape(slots * kv_heads * row_tiles, height, dim)
    parts = attend_in_pieces(rows, segments, sched, tiles, interpret=interpret)
    out, lse = merge_pieces(
        parts.mean, parts.lse, sched.first_piece, sched.pieces, q.dtype, with_lse, interpret
    )

    def by_head(x: jax.Array, width: int) -> jax.Array:
        """Values of query rows, `width` each, as [M, B, H, width]."""
        x = x.reshape(slots, kv_heads, row_tiles * height, width)[:, :, : queries * group]
        x = x.reshape(slots, kv_heads, queries, group * width).transpose(0, 2, 1, 3)
        return x.reshape(slots, queries, heads, width)

    out = by_head(out, dim)
    return out if lse is None else (out, by_head(lse, 1)[..., 0])
