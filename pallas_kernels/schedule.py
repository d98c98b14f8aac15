"""Shares the key tiles of a batch of slots out evenly over the programs of a kernel.

A *unit* is what shares one running softmax: one slot, one KV head, one tile of query rows. The
tiles of all units are laid end to end and every program takes an equal run of them, so one long
row fills the GPU as well as many short ones do. A program whose run crosses from one unit into
the next makes a *piece* of each; piece `p + u` is what program p leaves of unit u (distinct,
because along the line of tiles either p or u grows from one piece to the next). The pieces of a
unit have consecutive numbers and are merged afterwards.

All of it is a few integer operations on the lengths. They are the same in every layer of a
model, so that XLA computes them once for a whole step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Schedule(NamedTuple):
    """Which tiles a program visits, and which pieces make up a unit.

    Shape letters: P programs, U units, I segments, M slots.
    """

    bounds: Int[Array, " P_plus_1"]
    """Program p visits the tiles `bounds[p]` to `bounds[p + 1]`, of all units' tiles in a line."""
    first_unit: Int[Array, " P"]
    last_unit: Int[Array, " P"]
    """Both inclusive; a program without tiles visits a unit in which it finds nothing to do."""
    starts: Int[Array, " U"]
    """The number of a unit's first tile."""
    ends: Int[Array, "I M"]
    """The tiles of a slot's segments up to and including this one."""
    first_piece: Int[Array, " U"]
    pieces: Int[Array, " U"]


def _whole_bounds(
    per_unit: Int[Array, " U"], starts: Int[Array, " U"], total: Int[Array, ""], programs: int
) -> Int[Array, " P_plus_1"]:
    """Bounds at which the same number of units begins for every program but the last ones."""
    is_real = per_unit > 0
    rank = jnp.cumsum(is_real, dtype=jnp.int32) - 1
    each = (rank[-1] + programs) // programs
    wanted = jnp.arange(programs + 1, dtype=jnp.int32) * each
    is_first = is_real & (rank == wanted[:, None])
    return jnp.where(is_first, starts, total).min(1)


def make_schedule(
    lengths: Int[Array, "I M"], tile: int, units_per_slot: int, programs: int, slack: int = -1
) -> Schedule:
    """The schedule of slots that see `lengths` tokens of each segment.

    Every segment starts a new tile. The units of a slot follow one another. Units stay whole
    where no program then has more than `slack` tiles beyond its equal share.
    """
    ends = jnp.cumsum((lengths + tile - 1) // tile, axis=0, dtype=jnp.int32)
    per_unit = jnp.repeat(ends[-1], units_per_slot)
    after = jnp.cumsum(per_unit, dtype=jnp.int32)
    starts, total = after - per_unit, after[-1]
    # With fewer tiles than programs, the last programs have none: an empty program between two
    # others would leave a gap in the numbers of a unit's pieces.
    sharing = jnp.clip(total, 1, programs)
    index = jnp.minimum(jnp.arange(programs + 1, dtype=jnp.int32), sharing)
    # Quotient and remainder apart: tiles times programs could pass 2^31.
    bounds = total // sharing * index + total % sharing * index // sharing
    if slack >= 0:
        whole = _whole_bounds(per_unit, starts, total, programs)
        longest, share = jnp.diff(whole).max(), jnp.diff(bounds).max()
        bounds = jnp.where(longest <= share + slack, whole, bounds)

    def last_not_after(marks: jax.Array, tiles: jax.Array) -> jax.Array:
        """The number of the last mark at or before each tile."""
        count = (marks[None, :] <= tiles[:, None]).sum(1, dtype=jnp.int32)
        return jnp.maximum(count - 1, 0)

    owner_of_first = last_not_after(bounds[:-1], starts)
    owner_of_last = last_not_after(bounds[:-1], after - 1)
    units = jnp.arange(starts.size, dtype=jnp.int32)
    return Schedule(
        bounds=bounds,
        first_unit=last_not_after(starts, bounds[:-1]),
        last_unit=last_not_after(starts, bounds[1:] - 1),
        starts=starts,
        ends=ends,
        first_piece=owner_of_first + units,
        pieces=jnp.where(per_unit > 0, owner_of_last - owner_of_first + 1, 0),
    )
