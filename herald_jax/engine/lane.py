"""The host lane: a thread that keeps finished blocks and recalls selected ones.

Who owns what:

- The worker alone reads and writes the pinned pool, through its `HostStore`. Jobs run one after
  the other in the order in which they were submitted, so a recall sees every append before it.
- A job's arrays belong to the job (`lane_jobs`).
- A chunk of a recall is a slot of the staging ring. The dispatching thread sends it between two
  steps, or releases it; the slot is filled again once the sent arrays are ready.

A stay is one request's time in a row, told apart by its epoch. An exception in a job is kept in
its handle, and every later job of the same stay fails with it, as its tokens are incomplete;
other stays go on. Cancelling ends a stay: its jobs that wait are dropped, a running one ends at
the next layer, and chunks that were not taken are released.

Nothing here is called from a compiled program, and the worker needs the interpreter lock only
between layers.
"""

from __future__ import annotations

import atexit
import collections
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int

from herald_jax.cache.host import StagingRing, start_copy
from herald_jax.engine.lane_jobs import (
    Append,
    Job,
    LaneError,
    PositionRecall,
    Recall,
    RecallChunk,
)
from herald_jax.retrieval.recall import HostStore
from herald_jax.retrieval.scan import set_threads

if TYPE_CHECKING:
    from herald_jax.engine.trace import Trace

COLLECT_SECONDS = 0.005
"""Pause between two looks of an idle worker at arrays that are on their way to the device."""


class HostLane:
    """Runs jobs on a thread of its own; its methods are for one dispatching thread.

    Args:
        store: The finished blocks; from now on only the worker may use it.
        ring: Where recalled entries are staged; its slots must have room for every recall.
        sharding: Host memory for the copies of appended tokens.
        threads: Most threads of a scan; what the store finds best if left out.
        before_job: Called on the worker before each job, which it may delay or fail.
        clock: Gives seconds.

    Attributes:
        trace: Is told of every job, on the worker; nobody, if `None`.
    """

    def __init__(
        self,
        store: HostStore,
        ring: StagingRing,
        sharding: SingleDeviceSharding,
        *,
        threads: int | None = None,
        before_job: Callable[[Job], None] = lambda job: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.trace: Trace | None = None
        self._store, self._ring, self._sharding = store, ring, sharding
        self._threads = threads
        self._before_job = before_job
        self._changed = threading.Condition()
        # All of these, and what jobs say of themselves, belong to the condition.
        self._queue: collections.deque[Job] = collections.deque()
        self._running: Job | None = None
        self._filled: list[Recall] = []
        self._ended: list[tuple[int, int]] = []
        self._broken: dict[tuple[int, int], LaneError] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="herald-host-lane", daemon=True)
        self._thread.start()
        # Before the device goes away under a job that runs.
        atexit.register(self.close)

    @property
    def pending(self) -> int:
        """Jobs that wait or run."""
        with self._changed:
            return len(self._queue) + (self._running is not None)

    def append(
        self,
        row: int,
        epoch: int,
        layer: int,
        start: int,
        k: Float[Array, "N K T D"],
        v: Float[Array, "N K T D"],
        *,
        tokens: int | None = None,
    ) -> Append:
        """Starts to bring tokens of N layers, from `layer` on, into the pool.

        Args:
            row: The row.
            epoch: The stay.
            layer: First layer.
            start: Position of the first token; where the stay's last append ended.
            k: Rotated keys on the device. They may be donated afterwards.
            v: Values.
            tokens: How many of the T tokens count; all if left out.
        """
        copies = (start_copy(k, self._sharding), start_copy(v, self._sharding))
        tokens = k.shape[2] if tokens is None else tokens
        return self._submit(Append(self, row, epoch, layer, start, tokens, copies))

    def recall(
        self,
        row: int,
        epoch: int,
        target: int,
        columns: Float[Array, "L K c D"],
        candidates: int,
        wanted: int,
    ) -> Recall:
        """Starts to fill the pool of block `target`.

        Args:
            row: The row.
            epoch: The stay, which must have appended all candidates by then.
            target: Index of the block.
            columns: What `select.columns` gave, of every layer.
            candidates: First tokens that may be chosen.
            wanted: Entries to choose besides the sinks.

        Raises:
            ValueError: If the shapes do not fit the store, or the entries a staging slot.
        """
        shape = self._store.shape
        expected = (shape.layers, shape.kv_heads, self._store.columns, shape.head_dim)
        if columns.shape != expected:
            raise ValueError(f"columns are {list(columns.shape)} instead of {list(expected)}")
        return self._submit(self._recall(Recall, row, epoch, target, columns, candidates, wanted))

    def recall_positions(
        self,
        row: int,
        epoch: int,
        target: int,
        positions: Int[Array, "L K C"],
        candidates: int,
        wanted: int,
    ) -> PositionRecall:
        """Starts to fill the pool of block `target` with entries that were chosen elsewhere.

        Args:
            row: The row.
            epoch: The stay, which must have appended all candidates by then.
            target: Index of the block.
            positions: Of every layer, ascending; those past the entries are not looked at.
            candidates: First tokens that may have been chosen.
            wanted: Entries besides the sinks.

        Raises:
            ValueError: If there are fewer positions, or the entries do not fit a staging slot.
        """
        shape = self._store.shape
        job = self._recall(PositionRecall, row, epoch, target, positions, candidates, wanted)
        number = job.sinks + job.selected
        if positions.shape[:2] != (shape.layers, shape.kv_heads) or positions.shape[2] < number:
            raise ValueError(
                f"positions are {list(positions.shape)} instead of "
                f"[{shape.layers}, {shape.kv_heads}, {number} or more]"
            )
        return self._submit(job)

    def _recall(
        self,
        kind: type[Any],
        row: int,
        epoch: int,
        target: int,
        asked: jax.Array,
        candidates: int,
        wanted: int,
    ) -> Any:
        numbers = (candidates, wanted, self._store.sinks, self.clock())
        return kind(self, self._ring, row, epoch, target, asked, *numbers)

    def submit(self, job: Any) -> Any:
        """Queues a job of another kind."""
        return self._submit(job)

    def _submit(self, job: Any) -> Any:
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the host lane is closed")
            self._queue.append(job)
            self._changed.notify_all()
        return job

    def wait(self, jobs: Iterable[Job], timeout: float | None = None) -> bool:
        """Waits until one of some jobs has news; false if none has within `timeout` seconds."""
        jobs = list(jobs)
        with self._changed:
            return self._changed.wait_for(lambda: any(job.has_news for job in jobs), timeout)

    def collect(self) -> None:
        """Lets go of sent arrays that have arrived on the device."""
        self._ring.collect()

    def cancel(self, row: int, epoch: int) -> None:
        """Ends a stay. It may be called at any time, and more than once."""
        with self._changed:
            self._cancel(lambda job: (job.row, job.epoch) == (row, epoch))
            self._broken.pop((row, epoch), None)
            self._ended.append((row, epoch))
            self._changed.notify_all()
        self._ring.is_quiet()

    def _cancel(self, belongs: Callable[[Job], bool]) -> None:
        for job in [job for job in self._queue if belongs(job)]:
            self._queue.remove(job)
            job.is_cancelled = job.is_done = True
            job.drop_arrays()
        if self._running is not None and belongs(self._running):
            self._running.is_cancelled = True
        for recall in [recall for recall in self._filled if belongs(recall)]:
            recall.is_cancelled = True
            self._drop_chunks(recall)

    def _drop_chunks(self, recall: Recall) -> None:
        chunks, recall.chunks = recall.chunks, []
        for chunk in chunks:
            chunk.release()
        if recall in self._filled:
            self._filled.remove(recall)

    def close(self) -> None:
        """Cancels everything and ends the thread. Chunks that were taken stay usable."""
        with self._changed:
            self._is_closing = True
            self._cancel(lambda job: True)
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> HostLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows is for jobs.

    def is_over(self, job: Job) -> bool:
        """True if the worker should leave a job as it is."""
        return job.is_cancelled or self._is_closing

    def publish(self, recall: Recall, chunk: RecallChunk) -> bool:
        """Offers a full chunk to the dispatching thread; false if nobody wants it any more."""
        with self._changed:
            if self.is_over(recall):
                return False
            recall.chunks.append(chunk)
            if recall not in self._filled:
                self._filled.append(recall)
            self._changed.notify_all()
            return True

    def take_chunks(self, recall: Recall) -> list[RecallChunk]:
        """Hands a recall's chunks over."""
        with self._changed:
            chunks, recall.chunks = recall.chunks, []
            if recall in self._filled:
                self._filled.remove(recall)
        self._ring.collect()
        return chunks

    def _run(self) -> None:
        try:
            if self._threads is None:
                self._store.calibrate_threads()
            else:
                set_threads(self._threads)
            while (job := self._next()) is not None:
                begin, error = self.clock(), self._do(job)
                if self.trace is not None:
                    self.trace.on_job(job, begin, self.clock(), failed=error is not None)
                self._finish(job, error)
                del job, error
        finally:  # nobody shall wait for a thread that has ended
            with self._changed:
                self._is_closing = True
                self._cancel(lambda job: True)
                if self._running is not None:
                    self._running.is_done = True
                self._changed.notify_all()

    def _finish(self, job: Job, error: LaneError | None) -> None:
        with self._changed:
            if error is not None and not job.is_cancelled:
                job.error = error
                self._broken.setdefault((job.row, job.epoch), error)
                if isinstance(job, Recall):  # half a pool is of no use
                    self._drop_chunks(job)
            job.drop_arrays()
            job.is_done, self._running = True, None
            self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                # Before any job of the stay that has the row now.
                for row, epoch in self._ended:
                    self._store.forget(row, epoch)
                self._ended.clear()
                if self._is_closing:
                    return None
                if self._queue:
                    self._running = self._queue.popleft()
                    return self._running
                # What was sent last must not stay on the device until the next recall.
                self._changed.wait(None if self._ring.is_quiet() else COLLECT_SECONDS)

    def _do(self, job: Job) -> LaneError | None:
        try:
            self._before_job(job)
            if not self.is_over(job):
                before = self._broken.get((job.row, job.epoch))
                if before is not None:
                    raise before.__cause__ or before
                job.run(self._store)
        except Exception as raised:
            return LaneError(job.row, job.epoch, raised)
        return None
