"""How key tiles are shared out: each tile once, equal runs, pieces with consecutive numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.schedule import make_schedule


@settings(max_examples=30)
@given(data=st.data())
def test_every_tile_is_visited_once(data) -> None:
    slots, segments = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    units_per_slot, programs = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    slack = data.draw(st.sampled_from([-1, 0, 3, 100]))
    length = st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 900))
    lengths = [[data.draw(length) for _ in range(slots)] for _ in range(segments)]
    sched = jax.tree.map(
        np.asarray,
        make_schedule(jnp.asarray(lengths, jnp.int32), 64, units_per_slot, programs, slack),
    )
    per_slot = (-(-np.asarray(lengths) // 64)).sum(0)
    total = per_slot.sum() * units_per_slot
    visits, pieces = set(), {}
    for program in range(programs):
        begin, end = sched.bounds[program], sched.bounds[program + 1]
        assert end - begin <= -(-total // programs) + max(slack, 0)
        for unit in range(sched.first_unit[program], sched.last_unit[program] + 1):
            low = max(begin - sched.starts[unit], 0)
            high = min(end - sched.starts[unit], sched.ends[-1, unit // units_per_slot])
            if low < high:
                assert program + unit not in pieces
                pieces[program + unit] = unit
            for tile in range(low, high):
                assert (unit, tile) not in visits
                visits.add((unit, tile))
    expected = np.repeat(per_slot, units_per_slot)
    assert visits == {(unit, tile) for unit, count in enumerate(expected) for tile in range(count)}
    for unit in range(slots * units_per_slot):
        mine = sorted(piece for piece, owner in pieces.items() if owner == unit)
        first = int(sched.first_piece[unit])
        assert mine == list(range(first, first + int(sched.pieces[unit])))


def test_large_numbers_do_not_overflow() -> None:
    lengths = jnp.full((1, 64), 1 << 20, jnp.int32)
    sched = make_schedule(lengths, 64, 64, 132)
    runs = np.diff(np.asarray(sched.bounds, np.int64))
    assert runs.sum() == 64 * 64 * (1 << 14)
    assert runs.max() - runs.min() <= 1


def test_short_rows_stay_whole_where_that_costs_little() -> None:
    """Two units a program are as good as 1.9; three units on two programs are not."""
    sched = make_schedule(jnp.full((1, 32), 8192, jnp.int32), 128, 8, 132, slack=4)
    assert (np.asarray(sched.pieces) == 1).all()
    assert np.diff(np.asarray(sched.bounds)).max() == 128
    uneven = make_schedule(jnp.full((1, 3), 8192, jnp.int32), 128, 1, 2, slack=4)
    assert np.diff(np.asarray(uneven.bounds)).tolist() == [96, 96]
