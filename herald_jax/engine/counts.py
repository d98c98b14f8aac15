"""What the scheduler counts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerCounts:
    """What has happened so far.

    Attributes:
        admitted: Stays in a row that began, those after a preemption included.
        finished: Samples that ended by themselves.
        aborted: Samples that were ended.
        preempted: Stays that ended to make room.
        stalled: Rows left out of a step because no page was to be had.
        stale_blocks: Blocks read after the stay they belong to had ended.
        committed_blocks: Blocks read and taken.
        prefill_blocks: Prompt blocks planned.
        row_steps: Decode slots planned: rows, summed over the steps they took part in.
        reused_tokens: Tokens found in shared pages instead.
    """

    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    stalled: int = 0
    stale_blocks: int = 0
    committed_blocks: int = 0
    prefill_blocks: int = 0
    row_steps: int = 0
    reused_tokens: int = 0
