"""A record of what device and host did when, for Chrome's trace viewer (or ui.perfetto.dev).

    llm.engine.trace = Trace()
    llm.generate(prompts)
    llm.engine.trace.save("trace.json")

Ownership: the engine's thread and the host lane's thread both write; a deque takes appends from
either. Without a trace nothing is measured that is not measured anyway.

There are three kinds of track. `device` has the steps: a step begins when it was dispatched or,
if that is later, when the one before was read. `host lane` has the jobs of the lane. Each row
has its blocks, from the block before to its commit, with what the block attended to and what
its pool took. The host sees the end of a step when it reads it, so the end of a block is up to
`run_ahead` steps late.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from herald_jax.engine.lane_jobs import Job, Recall
from herald_jax.engine.slot_runner import CommittedBlock

MOST_EVENTS = 1 << 20
"""The oldest events are dropped beyond so many."""

DEVICE, LANE = "device", "host lane"


@runtime_checkable
class Traced(Protocol):
    """A part of the engine that has something to tell on a thread of its own."""

    def set_trace(self, trace: Trace | None) -> None:
        """Tells this trace from now on."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        track: Where it happened.
        name: What it was.
        begin: Seconds.
        end: Seconds.
        facts: Numbers that go with it.
    """

    track: str
    name: str
    begin: float
    end: float
    facts: dict[str, Any]


class Sent(NamedTuple):
    """A step that was sent: when, its rows, and seconds for which it waited for a pool."""

    at: float
    rows: int
    waited: float


class Trace:
    """Collects spans of one engine.

    Attributes:
        spans: The spans so far.
    """

    def __init__(self) -> None:
        self.spans: collections.deque[Span] = collections.deque(maxlen=MOST_EVENTS)
        self._step_read = 0.0
        # By row: the epoch of its stay, and when the stay's last block ended.
        self._block_ends: dict[int, tuple[int, float]] = {}
        # By row: when pools were full, by epoch and block.
        self._pool_ends: dict[int, dict[tuple[int, int], float]] = {}

    def now(self) -> float:
        """Seconds on the clock of all spans."""
        return time.perf_counter()

    def on_step(self, sent: Sent) -> None:
        """Notes a step that was just read."""
        now = self.now()
        begin = min(max(sent.at, self._step_read), now)
        facts = {"rows": sent.rows, "exposed_wait_ms": 1e3 * sent.waited}
        self.spans.append(Span(DEVICE, "step", begin, now, facts))
        self._step_read = now

    def on_start(self, row: int, epoch: int) -> None:
        """Notes that a row begins to decode."""
        self._block_ends[row] = (epoch, self.now())
        self._pool_ends[row] = {}

    def on_block(self, block: CommittedBlock) -> None:
        """Notes a block that was just read."""
        now = self.now()
        epoch, begin = self._block_ends.get(block.row, (block.epoch, now))
        if epoch != block.epoch:
            return  # of a stay that has ended
        facts: dict[str, Any] = {"index": block.index, "steps": block.block.steps}
        ready = self._pool_ends.get(block.row, {}).pop((epoch, block.index), None)
        if ready is not None:
            facts["exposed_wait_ms"] = 1e3 * max(ready - begin, 0.0)
        account = block.block.account
        if account is not None:
            facts |= {**dataclasses.asdict(account.counts), "attended": account.counts.attended}
            if account.recall is not None:
                facts |= dataclasses.asdict(account.recall)
        self.spans.append(Span(f"row {block.row}", f"block {block.index}", begin, now, facts))
        self._block_ends[block.row] = (epoch, now)

    def on_job(self, job: Job, begin: float, end: float, *, failed: bool) -> None:
        """Notes a job of the host lane; on its thread."""
        facts: dict[str, Any] = {"row": job.row, "failed": failed}
        if isinstance(job, Recall):
            facts |= {"target": job.target, **dataclasses.asdict(job.notes)}
            self._pool_ends.setdefault(job.row, {})[job.epoch, job.target] = end
        self.spans.append(Span(LANE, type(job).__name__, begin, end, facts))

    def events(self) -> list[dict[str, Any]]:
        """The spans as events of Chrome's trace format, in the order of their ends."""
        spans = list(self.spans)
        rows = {span.track for span in spans} - {DEVICE, LANE}
        ordered = [DEVICE, LANE, *sorted(rows, key=lambda name: int(name.removeprefix("row ")))]
        numbers = {track: at for at, track in enumerate(ordered)}
        origin = min((span.begin for span in spans), default=0.0)
        named = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": at, "args": {"name": track}}
            for track, at in numbers.items()
        ]
        return named + [
            {
                "name": span.name,
                "ph": "X",
                "pid": 0,
                "tid": numbers[span.track],
                "ts": 1e6 * (span.begin - origin),
                "dur": 1e6 * (span.end - span.begin),
                "args": span.facts,
            }
            for span in spans
        ]

    def save(self, path: str | Path) -> None:
        """Writes all events to a file."""
        text = json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"})
        Path(path).write_text(text, encoding="utf-8")
