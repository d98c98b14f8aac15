"""Samples on their way through the engine: when they did what, and what it cost."""

from __future__ import annotations

import dataclasses

from herald_jax.engine.request import RowProgress
from herald_jax.outputs import CompletionOutput, SampleStats


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class LiveSample:
    """One sample of a request on its way through the engine.

    Times are of the engine's clock, which stands still while a program compiles; they are `None`
    until the event has happened. A sample that was preempted keeps the times of its first stay.

    Attributes:
        request_id: The request's name.
        sample_index: Number of the sample within the request.
        seed: Seed of its random stream.
        progress: What of the finished blocks counts.
        arrived: When the request was added.
        admitted: When its prefill was first planned.
        started: When its first block began on the device, as far as the host can tell.
        first_block: When its first block was read.
        ended: When it ended.
        reused_tokens: Prompt tokens whose keys and values were there already.
        preemptions: How often it was set back to its last finished block.
        peak_pages: Most pages that it held at a time, shared ones included.
        compile_seconds: Time for which it waited for programs to compile.
    """

    request_id: str
    sample_index: int
    seed: int
    progress: RowProgress
    arrived: float
    admitted: float | None = None
    started: float | None = None
    first_block: float | None = None
    ended: float | None = None
    reused_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    compile_seconds: float = 0.0

    def output(self) -> CompletionOutput:
        """The result of a sample that has ended."""
        if self.ended is None:
            raise RuntimeError("the sample is still running")
        admitted = self.ended if self.admitted is None else self.admitted
        started = self.ended if self.started is None else self.started
        first = self.first_block
        stats = SampleStats(
            steps_per_block=list(self.progress.steps_per_block),
            generated_tokens=len(self.progress.token_ids),
            queue_seconds=admitted - self.arrived,
            prefill_seconds=started - admitted,
            decode_seconds=self.ended - started,
            ttft_seconds=None if first is None else first - self.arrived,
            reused_tokens=self.reused_tokens,
            preemptions=self.preemptions,
            accounts=list(self.progress.accounts),
        )
        return self.progress.output(self.sample_index, self.seed, stats)


@dataclasses.dataclass(frozen=True, slots=True)
class SampleEvent:
    """A sample got a block, or ended. `error` is set if a failure ended it."""

    sample: LiveSample
    error: Exception | None = None
