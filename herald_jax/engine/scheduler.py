"""Decides, step by step, which blocks of which samples the device runs; no JAX, no clock.

The denoising of one block is the quantum: a sample leaves its row when a block of it was read
that ends it, and another takes the row in the next step (block-boundary batching after
BlockServe). Every row that can run takes part in every step, prompts are prefilled in whole
blocks with what is left of the step's token budget, and the prefill of a prompt and the first
pass of its first block share a step, since the device writes before it attends.

Order. Everything is ordered by one key that never changes: arrival tick + priority *
`aging_ticks`, then order of arrival. Samples are admitted, prefilled and given pages in that
order, and preempted in the opposite order; the queue's head is never passed over. So waiting
counts as priority, `aging_ticks` ticks for one level.

Fairness bound. A request of priority p that arrives at tick t can be overtaken by a later one
(admitted before it, or given its pages) only if that one has a priority q < p and arrives before
tick t + (p - q) * aging_ticks. Equal priorities are served in order of arrival, and whatever
arrives after that window waits behind it.

Progress. When pages run out, the row with the least key takes them from the row with the
greatest, which drops to its last committed block and waits; a row with no one behind it waits
in place and keeps its pages. The sample with the least key is thus never preempted, and as
`add` refuses what would not fit an empty pool, it always gets to its end. One preemption
suffices unless copies or other samples keep its pages, as a row needs at most one more page for
its next block; and the preempted sample then lacks that page, so it does not come back at once.

Ownership: the scheduler owns rows and pages and gives them back exactly once. They are used
again in the next plan, because plans run in the order of their dispatch; copies that run
outside this order are announced with `hold`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from herald_jax._checks import require, require_int
from herald_jax.engine.counts import SchedulerCounts
from herald_jax.engine.pages import Handle, PageAllocator
from herald_jax.engine.plan import (
    BlockStart,
    DecodeSlot,
    PlanDraft,
    PrefillSlot,
    RowTable,
    StepPlan,
)
from herald_jax.engine.rows import RowPool
from herald_jax.engine.sample import Progress, Sample, SampleState
from herald_jax.engine.sample_pages import SamplePages
from herald_jax.engine.waiting import WaitingQueue, order_key


class Scheduler:
    """Samples on their way through the rows of the device.

    Args:
        pages: The page pool; nobody else allocates from it.
        block_length: B.
        max_rows: Rows of the device's state.
        max_step_tokens: Most query tokens of a step: B for each row that decodes and for each
            prompt block. More than `max_rows` blocks leave room for prefill beside decoding.
        max_model_len: Most tokens of a sample, prompt and generation together. The last block
            is run whole even if it reaches past this.
        run_ahead: Most steps that are dispatched and not yet read, the one about to be
            dispatched included; 1 reads every step before the next.
        max_waiting: Most samples that may wait for their first row.
        aging_ticks: Ticks of waiting that count as one level of priority.
        prefix_root: Stands for the model, its parameters and the block grid in the prefix hash.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        block_length: int,
        max_rows: int,
        max_step_tokens: int,
        max_model_len: int,
        run_ahead: int = 2,
        max_waiting: int = 1024,
        aging_ticks: int = 256,
        prefix_root: bytes = b"",
    ) -> None:
        require_int("block_length", block_length, 1)
        require_int("max_rows", max_rows, 1)
        require_int("max_step_tokens", max_step_tokens, block_length, "A step runs whole blocks.")
        require_int("max_model_len", max_model_len, 1)
        require_int("run_ahead", run_ahead, 1, "1 reads every step before the next.")
        require(
            pages.page_tokens % block_length == 0,
            "page_tokens",
            pages.page_tokens,
            f"a multiple of block_length={block_length}",
        )
        self.block_length = block_length
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.run_ahead = run_ahead
        self.counts = SchedulerCounts()
        self._pool = pages
        self._pages = SamplePages(pages, block_length, prefix_root)
        self._slots = max_step_tokens // block_length
        # A block takes two passes or more, but the first of the unread steps may be the last
        # pass of a block; the step about to be dispatched may run the block behind them.
        self._blocks_ahead = run_ahead // 2 + 1
        self._tick = 0
        self._live: dict[str, list[Sample]] = {}
        self._waiting = WaitingQueue(max_waiting, aging_ticks)
        self._running: list[Sample] = []  # by key
        self._rows = RowPool(max_rows)
        # What the next plan must tell besides its own.
        self._changed_rows: list[int] = []
        self._preempted: list[tuple[int, int]] = []
        self._is_checked = True

    @property
    def tick(self) -> int:
        """How often `schedule` was called."""
        return self._tick

    @property
    def table_pages(self) -> int:
        """Entries that a row's page table must have room for."""
        return self._pages.pages_for(-(-self.max_model_len // self.block_length))

    @property
    def waiting(self) -> tuple[Sample, ...]:
        """Samples without a row, in the order in which they will be admitted."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sample, ...]:
        """Samples with a row, by key."""
        return tuple(self._running)

    @property
    def is_idle(self) -> bool:
        """True if no sample waits or runs."""
        return not self._live

    def sample_at(self, row: int, epoch: int) -> Sample | None:
        """The sample of that stay, or `None` if the stay has ended."""
        sample = self._rows.sample(row)
        return sample if sample is not None and sample.epoch == epoch else None

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        progresses: Sequence[Progress],
        *,
        max_tokens: int,
        priority: int = 0,
    ) -> tuple[Sample, ...]:
        """The samples of a new request, now waiting; all of them or none.

        Args:
            request_id: A name that no live request has.
            prompt_token_ids: The prompt.
            progresses: One fresh progress object for each sample.
            max_tokens: Most tokens to generate.
            priority: Lower goes first.

        Raises:
            ConfigError: If the request could never run under these settings.
            OutOfPages: If one sample alone would not fit the empty pool.
            QueueFull: If too many samples are waiting.
        """
        require_int("max_tokens", max_tokens, 1)
        is_int = isinstance(priority, int) and not isinstance(priority, bool)
        require(is_int, "priority", priority, "an integer", "Lower goes first.")
        require(bool(progresses), "samples", 0, "at least 1")
        require(request_id not in self._live, "request_id", request_id, "a name not in use")
        count, length = len(progresses), len(prompt_token_ids) + max_tokens
        require(
            length <= self.max_model_len,
            "prompt tokens + max_tokens",
            length,
            f"at most max_model_len={self.max_model_len}",
            "Shorten the prompt or lower max_tokens.",
        )
        end_block = -(-length // self.block_length)
        if self._pages.pages_for(end_block) > self._pool.num_pages:
            raise self._pool.out_of_pages(self._pages.pages_for(end_block))
        self._waiting.require_room(count)
        samples = []
        for index, progress in enumerate(progresses):
            sample = Sample(
                request_id=request_id,
                sample_index=index,
                progress=progress,
                block_length=self.block_length,
                prompt_tokens=len(prompt_token_ids),
                end_block=end_block,
                priority=priority,
                key=self._waiting.new_key(self._tick, priority),
                token_ids=[int(token_id) for token_id in prompt_token_ids],
            )
            self._waiting.push(sample)
            samples.append(sample)
        self._live[request_id] = list(samples)
        self._is_checked = False
        return tuple(samples)

    def abort(self, request_id: str) -> tuple[Sample, ...]:
        """The samples that this call ended, in whatever state they were.

        Empty if the request is unknown, has finished or was aborted before. Rows and pages
        are used again once the copies that touch them have ended.
        """
        samples = tuple(self._live.get(request_id, ()))
        for sample in samples:
            self._end(sample)
            sample.progress.abort()
            self.counts.aborted += 1
        return samples

    def set_prefix_root(self, root: bytes) -> None:
        """Forgets shared prefixes, as new parameters require; call it with no plan undispatched.

        Samples that are running go on, but nothing of theirs is shared.
        """
        live = [sample for samples in self._live.values() for sample in samples]
        self._pages.set_root(root, live)

    def hold(self, row: int, epoch: int, handle: Handle) -> None:
        """Keeps a row and its pages from being used by others until a copy has ended.

        Call it before or after the plan that the copy belongs to is dispatched, but before the
        next one is made.
        """
        sample = self.sample_at(row, epoch)
        if sample is None:
            raise RuntimeError(f"a copy was announced for row {row}, whose stay {epoch} has ended")
        self._pool.hold(sample.pages, handle)
        self._rows.hold(row, handle)

    def on_block(self, row: int, epoch: int, index: int, block: Any) -> Sample | None:
        """The sample that got a block, brought up to date; `None` if its stay had ended.

        Args:
            row: Row of the decode slot that was read.
            epoch: Its epoch.
            index: Index of the block that was committed.
            block: What the sample's progress object accepts, with the block's `token_ids`.
        """
        sample = self.sample_at(row, epoch)
        if sample is None:
            self.counts.stale_blocks += 1
            return None
        if sample.state is not SampleState.DECODE or index != sample.next_block:
            raise RuntimeError(
                f"row {row} returned block {index}, but sample {sample.sample_index} of "
                f"{sample.request_id!r} is {sample.state.value} at block {sample.next_block}"
            )
        token_ids = [int(token_id) for token_id in block.token_ids]
        sample.require_block(token_ids)
        sample.progress.accept(block)
        sample.commit(token_ids)
        self.counts.committed_blocks += 1
        sample.prefilled_tokens = sample.prefill_tokens
        self._pages.publish(sample)
        if sample.progress.finish_reason is not None:
            self._end(sample)
            self.counts.finished += 1
        elif sample.next_block >= sample.end_block:
            raise RuntimeError(f"{sample.request_id!r} did not end at its max_tokens")
        return sample

    def schedule(self) -> StepPlan | None:
        """The next step, which must be dispatched; `None` if there is nothing to run now."""
        self._tick += 1
        self._pool.collect()
        self._rows.collect()
        if self.is_idle:
            if not self._is_checked:
                self.check()
                self._is_checked = True
            return None
        draft = PlanDraft(self._slots)
        is_open = self._grow()
        for sample in self._running:
            if sample.state is SampleState.DECODE:
                self._decode(sample, draft)
        # Every running sample has a slot of its own, so these cannot lack one.
        for sample in self._running:
            if sample.state is SampleState.PREFILL and self._is_prefilled(sample):
                self._start(sample, draft)
        self._prefill_and_admit(draft, is_open)
        return self._plan(draft)

    def check(self) -> None:
        """Recounts rows, pages and samples.

        Raises:
            RuntimeError: If an account does not add up.
        """
        self._pages.check(self._running)
        self._rows.check(self._running)

        def claim(condition: bool, what: str) -> None:
            if not condition:
                raise RuntimeError(f"the scheduler's accounts are wrong: {what}")

        live = {id(sample) for samples in self._live.values() for sample in samples}
        queued = [*self._waiting, *self._running]
        claim(live == {id(sample) for sample in queued}, "a live sample is lost")
        claim(len(live) == len(queued), "a sample is queued twice")
        for queue in (list(self._waiting), self._running):
            claim(queue == sorted(queue, key=order_key), "a queue is out of order")
        for sample in self._waiting:
            claim(sample.state is SampleState.WAITING, "a waiting sample runs")
            claim(not sample.pages and sample.row < 0, "a waiting sample has a row or pages")
        for sample in self._running:
            claim(sample.prefilled_tokens <= sample.prefill_tokens, "a sample is ahead of its text")
        claim(len(self._running) <= self._slots, "more rows are taken than a step may run")

    def _is_prefilled(self, sample: Sample) -> bool:
        return sample.prefilled_tokens == sample.prefill_tokens

    def _grow(self) -> bool:
        """Gives decoding rows the pages they need; True if there is room to admit others."""
        is_open = True
        for sample in tuple(self._running):
            if sample.state is not SampleState.DECODE:
                continue  # also those that were preempted just now
            if self._pages.missing(sample, 1) <= 0:
                continue
            # Pages that only wait for a copy are worth waiting for.
            while self._pool.available + self._pool.held == 0 and self._running[-1] is not sample:
                self._preempt(self._running[-1])
                is_open = False
            if self._pool.available > 0:
                self._extend(sample, 1)
            else:
                self.counts.stalled += 1
                is_open = False
        if is_open:
            # What lets rows run on while results are unread is worth no preemption.
            for sample in self._running:
                if sample.state is SampleState.DECODE:
                    count = self._pages.missing(sample, self._blocks_ahead)
                    self._extend(sample, min(count, self._pool.available))
        return is_open

    def _extend(self, sample: Sample, count: int) -> None:
        if count > 0:
            self._pages.extend(sample, count)
            self._changed_rows.append(sample.row)

    def _prefill_and_admit(self, draft: PlanDraft, is_open: bool) -> None:
        prefilling = [sample for sample in self._running if sample.state is SampleState.PREFILL]
        prefilling.reverse()
        while draft.slots_left > 0:
            is_open = is_open and bool(self._waiting)
            if prefilling and not (is_open and self._waiting.head.key < prefilling[-1].key):
                sample = prefilling.pop()
            elif is_open:
                sample = self._waiting.head
                is_open = self._admit(sample)
                if not is_open:
                    continue
            else:
                break
            self._prefill(sample, draft)

    def _admit(self, sample: Sample) -> bool:
        """True if the sample got a row, and pages for its text so far and its next block."""
        if not self._rows.has_free or len(self._running) >= self._slots:
            return False
        # Rows that are about to need a page would take it from the newcomer at once.
        growing = [
            other
            for other in self._running
            if self._pages.missing(other, self._blocks_ahead + 1) > 0
        ]
        taken = self._pages.take(sample, len(growing))
        if taken is None:
            return False
        pages, shared = taken
        self._waiting.remove(sample)
        row, epoch = self._rows.take(sample)
        sample.enter(row, epoch, pages, shared, self._pool.page_tokens)
        bisect.insort(self._running, sample, key=order_key)
        self._changed_rows.append(row)
        self.counts.admitted += 1
        self.counts.reused_tokens += sample.prefilled_tokens
        return True

    def _prefill(self, sample: Sample, draft: PlanDraft) -> None:
        reused = self._pages.reuse(sample)
        if reused:
            self.counts.reused_tokens += reused
            self._changed_rows.append(sample.row)
        while draft.slots_left > 0 and not self._is_prefilled(sample):
            index = sample.prefilled_tokens // self.block_length
            tokens = sample.block_tokens(index)
            draft.prefill.append(PrefillSlot(sample.row, sample.epoch, index, tokens))
            sample.prefilled_tokens += self.block_length
            self.counts.prefill_blocks += 1
        # Who reads a page of this plan does so in this plan or a later one.
        self._pages.publish(sample)
        if draft.slots_left > 0 and self._is_prefilled(sample):
            self._start(sample, draft)

    def _start(self, sample: Sample, draft: PlanDraft) -> None:
        sample.state = SampleState.DECODE
        start = BlockStart(sample.row, sample.epoch, sample.next_block, sample.tail)
        draft.starts.append(start)
        self._decode(sample, draft)

    def _decode(self, sample: Sample, draft: PlanDraft) -> None:
        """Gives a decoding sample its slot, unless it has no page for its next block."""
        limit = self._pages.block_limit(sample, self._blocks_ahead)
        if limit > sample.next_block:
            draft.decode.append(DecodeSlot(sample.row, sample.epoch, limit, sample.end_block))

    def _preempt(self, sample: Sample) -> None:
        self._preempted.append((sample.row, sample.epoch))
        self._leave(sample, SampleState.WAITING)
        sample.preemptions += 1
        self.counts.preempted += 1
        self._waiting.push(sample)

    def _end(self, sample: Sample) -> None:
        if sample.state is SampleState.WAITING:
            self._waiting.remove(sample)
            sample.state = SampleState.FINISHED
        else:
            self._leave(sample, SampleState.FINISHED)
        samples = self._live[sample.request_id]
        samples.remove(sample)
        if not samples:
            del self._live[sample.request_id]

    def _leave(self, sample: Sample, state: SampleState) -> None:
        self._running.remove(sample)
        self._rows.release(sample.row)
        self._pool.release(sample.leave(state))

    def _plan(self, draft: PlanDraft) -> StepPlan | None:
        if not draft.used_slots:
            return None
        tables = []
        for row in sorted(set(self._changed_rows)):
            sample = self._rows.sample(row)
            if sample is not None:
                tables.append(RowTable(row, sample.epoch, tuple(sample.pages)))
        plan = draft.finish(self._tick, tables, self._preempted)
        self.counts.row_steps += len(plan.decode)
        self._changed_rows.clear()
        self._preempted.clear()
        return plan
