"""A device without a model, which runs the scheduler's plans and checks every one of them.

`FakeDevice` follows `decoding.slots.run_slots` row by row. In place of keys and values a page
holds, for each block, a chain of the tokens up to the block's end, and every pass compares the
chain of the row's whole prefix with that of the text that the sample would get alone. A page
that is shared wrongly, handed out too early, filled out of order or overwritten thus fails at
once, and so does a text that depends on scheduling.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import zlib
from typing import Any, Literal, cast

import numpy as np

from herald_jax.engine.pages import PageAllocator
from herald_jax.engine.plan import StepPlan
from herald_jax.engine.request import RowBlock, RowProgress
from herald_jax.engine.sample import Sample
from herald_jax.engine.scheduler import Scheduler
from herald_jax.sampling import SamplingParams

STOP_ID = 1
"""Stops a row on the device, as a stop id does."""

HOST_STOP_ID = 2
"""Ends a sample on the host only, as a stop string does."""

PROVISIONAL = -1
"""What a denoising pass leaves in the cache."""

Owners = collections.defaultdict[int, set[int]]
"""Epochs of the stays that have a page in their table."""


class FakeText:
    """Stands for a `TextStream` that finds a stop string at `HOST_STOP_ID`."""

    def __init__(self) -> None:
        self.stop_string: str | None = None

    def push(self, ids: list[int]) -> int | None:
        if HOST_STOP_ID not in ids:
            return None
        self.stop_string = "stop"
        return ids.index(HOST_STOP_ID)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One sample to decode. `stop_rate` is the share of tokens that are a stop of some kind."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    min_steps: int = 1
    max_steps: int = 4
    stop_rate: float = 0.0

    def progress(self) -> RowProgress:
        return RowProgress(
            SamplingParams(max_tokens=self.max_tokens), (STOP_ID,), cast(Any, FakeText())
        )


class Text:
    """What a job decodes to when nothing disturbs it, grown on demand."""

    def __init__(self, job: Job, block_length: int) -> None:
        self.job = job
        self._block_length = block_length
        self.first_block = len(job.prompt) // block_length
        self.chains: list[int] = []
        self.blocks: list[tuple[tuple[int, ...], int]] = []  # ids and denoising steps
        for index in range(self.first_block):
            self._append(job.prompt[index * block_length : (index + 1) * block_length], 0)

    def _append(self, ids: tuple[int, ...], steps: int) -> None:
        self.chains.append(chain(self.chains[-1] if self.chains else 0, ids))
        self.blocks.append((ids, steps))

    def grow(self, blocks: int) -> None:
        job = self.job
        while len(self.blocks) < blocks:
            index = len(self.blocks)
            before = self.chains[-1] if self.chains else 0
            draw = random.Random(hash((job.seed, before, index)))
            tail = job.prompt[index * self._block_length :]
            ids = tail + tuple(
                draw.choice((STOP_ID, HOST_STOP_ID))
                if draw.random() < job.stop_rate
                else draw.randrange(3, 40)
                for _ in range(self._block_length - len(tail))
            )
            self._append(ids, draw.randint(job.min_steps, job.max_steps))

    def row_block(self, index: int) -> RowBlock:
        self.grow(index + 1)
        ids, steps = self.blocks[index]
        tail = max(len(self.job.prompt) - index * self._block_length, 0)
        is_generated = np.arange(self._block_length) >= tail
        zeros = np.zeros(self._block_length, np.float32)
        return RowBlock(
            token_ids=np.asarray(ids, np.int32),
            is_generated=is_generated,
            unmask_steps=np.where(is_generated, 0, -1).astype(np.int32),
            confidences=zeros,
            logprobs=zeros,
            steps=steps,
        )

    @functools.cached_property
    def outcome(self) -> tuple[list[int], str]:
        """Token ids and finish reason of the job alone."""
        progress, index = self.job.progress(), self.first_block
        while progress.finish_reason is None:
            progress.accept(self.row_block(index))
            index += 1
        return progress.token_ids, progress.finish_reason

    @functools.cached_property
    def steps_per_block(self) -> list[int]:
        """Denoising steps of each block that the job alone takes."""
        generated = len(self.job.prompt) + len(self.outcome[0])
        return [
            steps
            for _, steps in self.blocks[self.first_block : -(-generated // self._block_length)]
        ]


def chain(before: int, ids: tuple[int, ...]) -> int:
    """Stands for the keys and values of a block: they depend on all tokens up to its end."""
    return hash((before, ids)) & (2**62 - 1)


@dataclasses.dataclass
class _Row:
    text: Text
    index: int
    steps_left: int
    is_stopped: bool = False


@dataclasses.dataclass
class DeviceCounts:
    """Steps, row passes planned and those that did something, prompt blocks."""

    steps: int = 0
    decode_slots: int = 0
    useful_passes: int = 0
    prefill_slots: int = 0


class FakeDevice:
    """Pages, row states and tables, and one step after another."""

    def __init__(self, num_pages: int, page_tokens: int, block_length: int) -> None:
        self._block_length = block_length
        self._per_page = page_tokens // block_length
        self._memory: list[list[int | None]] = [[None] * self._per_page for _ in range(num_pages)]
        self._tables: dict[int, tuple[int, ...]] = {}
        self._rows: dict[int, _Row] = {}
        self._owners: Owners = collections.defaultdict(set)
        self._owners_before = self._owners
        self.counts = DeviceCounts()

    def _at(self, row: int, index: int) -> tuple[int, int]:
        return self._tables[row][index // self._per_page], index % self._per_page

    def _write(self, row: int, epoch: int, index: int, value: int) -> None:
        page, at = self._at(row, index)
        owners = self._owners[page]
        # Others may have joined with this very plan, to read what it writes.
        strangers = [other for other in owners & self._owners_before[page] if other != epoch]
        assert epoch in owners and not strangers, f"a pass writes page {page} of {owners}"
        if value == PROVISIONAL:
            assert len(owners) == 1, f"page {page} is shared before it is final"
        self._memory[page][at] = value

    def _require_prefix(self, row: int, text: Text, blocks: int) -> None:
        table, memory, per_page = self._tables[row], self._memory, self._per_page
        for index in range(blocks):
            found = memory[table[index // per_page]][index % per_page]
            assert found == text.chains[index], f"row {row} reads a wrong block {index}"

    def run(
        self, plan: StepPlan, texts: dict[int, Text], owners: Owners
    ) -> list[tuple[int, int, int, RowBlock]]:
        """Row, epoch, index and content of the blocks that the step committed."""
        self._owners_before, self._owners = self._owners, owners
        for table in plan.tables:
            self._tables[table.row] = table.pages
        self.counts.steps += 1
        self.counts.decode_slots += len(plan.decode)
        self.counts.prefill_slots += len(plan.prefill)
        for prefill in plan.prefill:
            text = texts[prefill.epoch]
            text.grow(prefill.index + 1)
            self._require_prefix(prefill.row, text, prefill.index)
            assert text.blocks[prefill.index][0] == prefill.token_ids
            self._write(prefill.row, prefill.epoch, prefill.index, text.chains[prefill.index])
        for start in plan.starts:
            text = texts[start.epoch]
            text.grow(start.index + 1)
            ids, steps = text.blocks[start.index]
            assert ids[: len(start.tail)] == start.tail
            self._rows[start.row] = _Row(text, start.index, steps)
        committed = []
        for slot in plan.decode:
            row = self._rows[slot.row]
            assert row.text is texts[slot.epoch], f"row {slot.row} was not started"
            if row.is_stopped or row.index >= slot.block_limit:
                continue
            self.counts.useful_passes += 1
            self._require_prefix(slot.row, row.text, row.index)
            if row.steps_left > 0:
                row.steps_left -= 1
                self._write(slot.row, slot.epoch, row.index, PROVISIONAL)
                continue
            self._write(slot.row, slot.epoch, row.index, row.text.chains[row.index])
            block = row.text.row_block(row.index)
            committed.append((slot.row, slot.epoch, row.index, block))
            row.is_stopped = STOP_ID in block.token_ids[block.is_generated]
            row.index += 1
            row.text.grow(row.index + 1)
            row.steps_left = row.text.blocks[row.index][1]
        return committed


class Simulation:
    """A scheduler, a fake device and steps that are read late."""

    def __init__(
        self,
        *,
        block_length: int = 4,
        page_tokens: int = 8,
        num_pages: int = 40,
        max_rows: int = 4,
        step_blocks: int = 6,
        max_model_len: int = 128,
        run_ahead: int = 2,
        share_prefixes: bool = True,
        max_waiting: int = 64,
        aging_ticks: int = 16,
        is_checked: bool = True,
    ) -> None:
        self.pool = PageAllocator(num_pages, page_tokens, share_prefixes=share_prefixes)
        self.scheduler = Scheduler(
            self.pool,
            block_length=block_length,
            max_rows=max_rows,
            max_step_tokens=step_blocks * block_length,
            max_model_len=max_model_len,
            run_ahead=run_ahead,
            max_waiting=max_waiting,
            aging_ticks=aging_ticks,
        )
        self.device = FakeDevice(num_pages, page_tokens, block_length)
        self.block_length = block_length
        self.max_rows = max_rows
        self.texts: dict[Sample, Text] = {}
        self.finished_at: dict[Sample, int] = {}
        self.trace = 0
        self._step_blocks = step_blocks
        self._is_checked = is_checked
        self.texts_by_epoch: dict[int, Text] = {}
        self._unread: collections.deque[list[tuple[int, int, int, RowBlock]]] = collections.deque()

    @property
    def is_done(self) -> bool:
        return self.scheduler.is_idle and not self._unread

    def add(self, name: str, *jobs: Job, priority: int = 0) -> tuple[Sample, ...]:
        """Adds a request of one job for each sample."""
        samples = self.scheduler.add(
            name,
            jobs[0].prompt,
            [job.progress() for job in jobs],
            max_tokens=jobs[0].max_tokens,
            priority=priority,
        )
        for sample, job in zip(samples, jobs, strict=True):
            self.texts[sample] = Text(job, self.block_length)
        return samples

    def abort(self, name: str) -> tuple[Sample, ...]:
        """Aborts a request; what it has so far must be the beginning of its text."""
        samples = self.scheduler.abort(name)
        for sample in samples:
            progress = cast(RowProgress, sample.progress)
            assert progress.finish_reason == "abort"
            assert progress.token_ids == self.texts[sample].outcome[0][: len(progress.token_ids)]
        return samples

    def tick(self) -> StepPlan | None:
        """Plans a step, runs it, and reads what must be read before the next one."""
        queue = self.scheduler.waiting
        plan = self.scheduler.schedule()
        if plan is not None:
            self._check_plan(plan, queue)
            owners: Owners = collections.defaultdict(set)
            for sample in self.scheduler.running:
                for page in sample.pages:
                    owners[page].add(sample.epoch)
            self._unread.append(self.device.run(plan, self.texts_by_epoch, owners))
        while self._unread and (plan is None or len(self._unread) >= self.scheduler.run_ahead):
            self._read()
        if self._is_checked:
            self.scheduler.check()
        return plan

    def drain(self, limit: int = 100_000) -> int:
        """Runs until nothing is left; returns the number of ticks."""
        for ticks in range(limit):
            if self.is_done:
                assert self.scheduler.schedule() is None
                return ticks
            self.tick()
        raise AssertionError(f"not idle after {limit} ticks")

    def _read(self) -> None:
        for row, epoch, index, block in self._unread.popleft():
            sample = self.scheduler.on_block(row, epoch, index, block)
            if sample is None or sample.progress.finish_reason is None:
                continue
            progress = cast(RowProgress, sample.progress)
            outcome = progress.token_ids, progress.finish_reason
            assert outcome == self.texts[sample].outcome, "the text depends on scheduling"
            self.finished_at[sample] = self.scheduler.tick

    def _check_plan(self, plan: StepPlan, queue: tuple[Sample, ...]) -> None:
        self.trace = zlib.crc32(repr(plan).encode(), self.trace)
        assert 0 < plan.query_blocks <= self._step_blocks, "the token budget is exceeded"
        running = {sample.epoch: sample for sample in self.scheduler.running}
        for epoch, sample in running.items():
            self.texts_by_epoch[epoch] = self.texts[sample]
        rows = [slot.row for slot in plan.decode]
        assert rows == sorted(set(rows)) and all(0 <= row < self.max_rows for row in rows)
        for slot in plan.decode:
            sample = running[slot.epoch]
            capacity = len(sample.pages) * self.pool.page_tokens // self.block_length
            assert slot.row == sample.row
            assert sample.next_block < slot.block_limit <= min(capacity, sample.end_block)
        assert {start.row for start in plan.starts} <= set(rows)
        # Nobody is passed over: those who left the queue stood at its head.
        admitted = [sample in queue and sample.row >= 0 for sample in queue]
        assert admitted == sorted(admitted, reverse=True), "the queue's order is not kept"


Policy = Literal["continuous", "static", "lockstep"]


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What a policy made of a list of jobs.

    `utilization` is the share of row passes that did something, where every step costs all rows.
    """

    steps: int
    useful_passes: int
    tokens: int
    utilization: float

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


def compare(jobs: list[Job], policy: Policy, **settings: Any) -> Throughput:
    """Runs jobs under one policy.

    `continuous` refills rows at block boundaries. `static` refills them once all are done.
    `lockstep` does so too, and in it every block lasts as long as its slowest row needs.
    """
    settings = {"is_checked": False, "max_waiting": len(jobs)} | settings
    simulation = Simulation(**settings)
    rows = simulation.max_rows
    texts = [Text(job, simulation.block_length) for job in jobs]
    tokens = sum(len(text.outcome[0]) for text in texts)
    if policy == "lockstep":
        steps = useful = 0
        for first in range(0, len(texts), rows):
            batch = texts[first : first + rows]
            prompt_blocks = sum(text.first_block for text in batch)
            steps += -(-prompt_blocks // settings.get("step_blocks", 6))
            for at in range(max(len(text.steps_per_block) for text in batch)):
                passes = [
                    text.steps_per_block[at] + 1 for text in batch if at < len(text.steps_per_block)
                ]
                steps += max(passes)
                useful += sum(passes)
        return Throughput(steps, useful, tokens, useful / (steps * rows))
    size = rows if policy == "static" else len(jobs)
    for first in range(0, len(jobs), size):
        for at, job in enumerate(jobs[first : first + size], start=first):
            simulation.add(str(at), job)
        simulation.drain()
    counts = simulation.device.counts
    useful = sum(sum(text.steps_per_block) + len(text.steps_per_block) for text in texts)
    return Throughput(counts.steps, useful, tokens, useful / (counts.steps * rows))
