"""Runs rows through the runner in static batches, in plain Python without JAX.

Ownership: `run_rows` owns the batch that is running. However the loop ends, by an error, an
interrupt or a consumer that stops listening, every row of the batch is marked finished before
the generator returns, so nothing of it is decoded later.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from herald_jax.engine.request import RowBlock, RowProgress
from herald_jax.sampling import SamplingParams


@runtime_checkable
class BatchLike(Protocol):
    """What of `engine.runner.Batch` is used here."""

    is_active: Bool[np.ndarray, " R"]
    kv_device_bytes: int
    kv_host_bytes: int
    prefill_seconds: float

    def finish(self, row: int) -> None:
        """Takes a row out."""
        ...


@runtime_checkable
class RunnerLike(Protocol):
    """What of `engine.runner.Runner` the engine uses; tests put scripted runners in its place."""

    params: Any
    max_model_len: int
    max_num_seqs: int

    def fit(self, rows: Any) -> int:
        """How many of the first rows make up the next batch."""
        ...

    def warmup(self, rows: Any) -> None:
        """Compiles what a batch of these rows will run, as far as it is not compiled."""
        ...

    def start(self, rows: Any) -> Any:
        """A batch whose prompts are in the cache."""
        ...

    def decode_block(self, batch: Any) -> Any:
        """The next block of every active row."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Row:
    """One sample of one request on its way through the engine.

    Attributes:
        request_index: Number of the request within the call.
        sample_index: Number of the sample within the request.
        request: What the runner gets, a `RowRequest`.
        sampling: The request's options.
        progress: What of the finished blocks counts.
        batch_number: Number of the batch that held the row, -1 before.
        compile_seconds: Time that the batch's programs took to compile, 0 if they were there.
        prefill_seconds: Time of that batch's prefill.
        decode_seconds: Time from the end of the prefill to the row's latest block.
        kv_device_bytes: KV bytes of that batch on the device.
        kv_host_bytes: KV bytes of that batch in host memory.
    """

    request_index: int
    sample_index: int
    request: Any
    sampling: SamplingParams
    progress: RowProgress
    batch_number: int = -1
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_device_bytes: int = 0
    kv_host_bytes: int = 0

    @property
    def program(self) -> tuple[str, str]:
        """Rows of one batch share this: it selects what is compiled."""
        return self.sampling.strategy, self.sampling.confidence


def run_rows(runner: RunnerLike, rows: Iterable[Row]) -> Iterator[Row]:
    """Decodes all rows and yields a row whenever one of its blocks is finished.

    The first row that waits always gets into the next batch; rows behind it join as far as they
    share its program and fit. A row that ended idles until its batch has ended.

    Args:
        runner: Compiled programs.
        rows: Rows in the order in which they should be served.

    Yields:
        The row that got a block, its `progress` brought up to date.
    """
    queues: dict[tuple[str, str], collections.deque[tuple[int, Row]]] = {}
    for order, row in enumerate(rows):
        queues.setdefault(row.program, collections.deque()).append((order, row))
    batch_number = 0
    while queues:
        program = min(queues, key=lambda name: queues[name][0][0])
        queue = queues[program]
        waiting = [queue[at][1] for at in range(min(len(queue), runner.max_num_seqs))]
        count = runner.fit([row.request for row in waiting])
        if not 1 <= count <= len(waiting):
            raise RuntimeError(f"the runner fits {count} of {len(waiting)} waiting rows")
        for _ in range(count):
            queue.popleft()
        if not queue:
            del queues[program]
        yield from _run_batch(runner, waiting[:count], batch_number)
        batch_number += 1


def _run_batch(runner: RunnerLike, rows: Sequence[Row], batch_number: int) -> Iterator[Row]:
    requests = [row.request for row in rows]
    begin = time.perf_counter()
    runner.warmup(requests)  # so that no compilation is counted as prefill or decoding
    compile_seconds = time.perf_counter() - begin
    batch: BatchLike = runner.start(requests)
    started = time.perf_counter()
    for row in rows:
        row.compile_seconds = compile_seconds
        row.batch_number = batch_number
        row.prefill_seconds = batch.prefill_seconds
        row.kv_device_bytes = batch.kv_device_bytes
        row.kv_host_bytes = batch.kv_host_bytes
    try:
        while batch.is_active.any():
            active = [at for at in range(len(rows)) if batch.is_active[at]]
            result = runner.decode_block(batch)
            elapsed = time.perf_counter() - started
            # Every row takes its block before anybody hears of one: whoever stops listening
            # then finds all rows at the same block.
            for at in active:
                rows[at].decode_seconds = elapsed
                rows[at].progress.accept(_row_block(result, at))
                if rows[at].progress.finish_reason is not None:
                    batch.finish(at)
            for at in active:
                yield rows[at]
    finally:
        for at in range(len(rows)):
            batch.finish(at)


def _row_block(result: Any, at: int) -> RowBlock:
    return RowBlock(
        token_ids=result.token_ids[at],
        is_generated=result.is_generated[at],
        unmask_steps=result.unmask_steps[at],
        confidences=result.confidences[at],
        logprobs=result.logprobs[at],
        steps=int(result.steps[at]),
    )
