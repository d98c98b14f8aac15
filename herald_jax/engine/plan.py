"""What one device step shall do, as plain data: the scheduler writes it, the engine runs it.

Plans are dispatched in the order in which they were made, each exactly once. The engine reads
the result of decode slot number i as that of `decode[i]` and hands committed blocks back with
its row and epoch; rows may have got another sample by then, which the epoch tells.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class RowTable:
    """The page table of a row, where it changed."""

    row: int
    epoch: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStart:
    """A row that begins to decode before the step.

    `tail` are the prompt tokens at the block's beginning; its other positions are masked.
    """

    row: int
    epoch: int
    index: int
    tail: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeSlot:
    """A row whose running block takes part.

    It may run blocks below `block_limit`, and will never need blocks from `end_block` on.
    """

    row: int
    epoch: int
    block_limit: int
    end_block: int


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillSlot:
    """A whole prompt block that is written to the cache."""

    row: int
    epoch: int
    index: int
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Attributes:
        tick: Number of the `schedule` call that made it.
        tables: Page tables that changed, in row order; they hold for this step.
        starts: Rows that begin; each has a decode slot too.
        decode: Rows that run, in row order.
        prefill: Prompt blocks; blocks of one prompt in their order.
        preempted: Row and epoch of the stays that ended to make room since the last plan.
    """

    tick: int
    tables: tuple[RowTable, ...]
    starts: tuple[BlockStart, ...]
    decode: tuple[DecodeSlot, ...]
    prefill: tuple[PrefillSlot, ...]
    preempted: tuple[tuple[int, int], ...]

    @property
    def query_blocks(self) -> int:
        """Blocks that the step runs; times B these are its query tokens."""
        return len(self.decode) + len(self.prefill)


class PlanDraft:
    """A plan in the making, of at most `slots` blocks."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.starts: list[BlockStart] = []
        self.prefill: list[PrefillSlot] = []
        self.decode: list[DecodeSlot] = []

    @property
    def used_slots(self) -> int:
        """Blocks that the step will run."""
        return len(self.decode) + len(self.prefill)

    @property
    def slots_left(self) -> int:
        """Blocks that may be added."""
        return self._slots - self.used_slots

    def finish(
        self, tick: int, tables: list[RowTable], preempted: list[tuple[int, int]]
    ) -> StepPlan:
        """The plan, with these tables and stays that ended."""
        return StepPlan(
            tick=tick,
            tables=tuple(tables),
            starts=tuple(self.starts),
            decode=tuple(sorted(self.decode, key=lambda slot: slot.row)),
            prefill=tuple(self.prefill),
            preempted=tuple(preempted),
        )
