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


def make_schedule(
    lengths: Int[Array, "I M"], tile: int, units_per_slot: int, programs: int
) -> Schedule:
    """The schedule of slots that see `lengths` tokens of each segment.

    Every segment starts a new tile. The units of a slot follow one another.
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
