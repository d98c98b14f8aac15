"""The requests of one call, from the call's list through the engine to their outputs.

Ownership: a call owns its requests in the engine. However its loop ends, by an error, an
interrupt or a consumer that stops listening, those that have not ended are aborted before the
generator returns, so nothing of them is decoded later.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Generator, Sequence

from herald_jax.engine.live import LiveSample
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.request import Request, RowProgress
from herald_jax.engine.waiting import QueueFull
from herald_jax.outputs import GenerationError, RequestOutput, RequestStats


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class CallRequest:
    """One request of a call.

    Attributes:
        index: Its number within the call.
        request: What was asked for.
        seeds: Seed of each sample.
        progresses: What of each sample's blocks counts.
        samples: The samples in the engine; empty before the engine has taken the request.
        error: The failure that ended it, if one did.
    """

    index: int
    request: Request
    seeds: Sequence[int]
    progresses: Sequence[RowProgress]
    samples: list[LiveSample] = dataclasses.field(default_factory=list)
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """True if all samples have ended."""
        return all(progress.finish_reason is not None for progress in self.progresses)

    def give_up(self, now: float) -> None:
        """Ends the request if the engine has not taken it; else nothing happens."""
        if self.samples:
            return
        for index, (progress, seed) in enumerate(zip(self.progresses, self.seeds, strict=True)):
            progress.abort()
            sample = LiveSample(
                request_id="",
                sample_index=index,
                seed=seed,
                progress=progress,
                arrived=now,
                ended=now,
            )
            self.samples.append(sample)

    def output(self, engine: LLMEngine) -> RequestOutput:
        """The result; all samples have ended."""
        samples = self.samples
        outputs = [sample.output() for sample in samples]
        arrived = min(sample.arrived for sample in samples)
        ended = max(sample.ended for sample in samples if sample.ended is not None)

        def first(times: list[float | None]) -> float:
            return min([time for time in times if time is not None], default=ended)

        admitted = first([sample.admitted for sample in samples])
        started = first([sample.started for sample in samples])
        has_block = any(sample.first_block is not None for sample in samples)
        first_block = first([sample.first_block for sample in samples])
        sizes = engine.sizes
        return RequestOutput(
            index=self.index,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=outputs,
            stats=RequestStats(
                steps_per_block=[output.stats.steps_per_block for output in outputs],
                forwards=sum(output.stats.forwards for output in outputs),
                generated_tokens=sum(output.stats.generated_tokens for output in outputs),
                compile_seconds=max(sample.compile_seconds for sample in samples),
                queue_seconds=admitted - arrived,
                prefill_seconds=started - admitted,
                decode_seconds=ended - started,
                ttft_seconds=first_block - arrived if has_block else None,
                reused_tokens=sum(sample.reused_tokens for sample in samples),
                preemptions=sum(sample.preemptions for sample in samples),
                kv_device_bytes=sizes.kv_bytes,
                kv_host_bytes=sizes.host_bytes,
                kv_request_bytes=sum(sample.peak_pages for sample in samples) * sizes.page_bytes,
            ),
            error=None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        )


def run_call(
    engine: LLMEngine, name: str, requests: Sequence[CallRequest]
) -> Generator[tuple[CallRequest, LiveSample]]:
    """Decodes all requests; yields a request and a sample of it that got a block or ended.

    Requests that find the queue full are kept back, in their order, until there is room.

    Args:
        engine: The engine; nobody else steps it meanwhile.
        name: A name that no other call has.
        requests: The requests, in the order in which they should be served.
    """
    left = collections.deque(requests)
    live: dict[str, CallRequest] = {}
    try:
        while left or live:
            _add(engine, name, left, live)
            events = engine.step()
            # All blocks of a step are taken and its failures noted before anybody hears of one.
            for event in events:
                if event.error is not None and event.sample.request_id in live:
                    live[event.sample.request_id].error = event.error
            for event in events:
                request = live.get(event.sample.request_id)
                if request is not None:
                    yield request, event.sample
            for request_id in {event.sample.request_id for event in events}:
                if request_id in live and live[request_id].is_done:
                    del live[request_id]
    finally:
        for request_id in live:
            engine.abort(request_id)


def _add(
    engine: LLMEngine,
    name: str,
    left: collections.deque[CallRequest],
    live: dict[str, CallRequest],
) -> None:
    while left:
        request = left[0]
        request_id = f"{name}/{request.index}"
        # Before the engine has it: an abort of what the engine does not have does nothing.
        live[request_id] = request
        try:
            request.samples = engine.add_request(
                request_id, request.request, request.progresses, request.seeds
            )
        except QueueFull:
            del live[request_id]
            return
        left.popleft()


def call_outputs(engine: LLMEngine, requests: Sequence[CallRequest]) -> list[RequestOutput]:
    """The results of a call that has ended, of each request as far as it came."""
    for request in requests:
        request.give_up(engine.clock())
    return [request.output(engine) for request in requests]


def raise_failures(engine: LLMEngine, requests: Sequence[CallRequest]) -> None:
    """Raises a `GenerationError` with all outputs if a request of a call that has ended failed."""
    errors = [request.error for request in requests if request.error is not None]
    if errors:
        first, count = errors[0], f"{len(errors)} of {len(requests)}"
        message = f"{count} requests failed, the first with {type(first).__name__}: {first}"
        raise GenerationError(message, call_outputs(engine, requests)) from first
