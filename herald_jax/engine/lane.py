"""The host lane: a thread that keeps finished blocks and recalls selected ones.

Who owns what:

- The worker alone reads and writes the pinned pool, through its `HostStore`. Jobs run one after
  the other in the order in which they were submitted, so a recall sees every append before it.
- A job's arrays belong to the job. Their copies to the host are started when it is submitted,
  by the dispatching thread, and depend on the programs that make them; the worker waits.
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
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float

from herald_jax.cache.budget import RecallAccount
from herald_jax.cache.host import StagingRing, StagingSlot, finish_copy, start_copy
from herald_jax.retrieval.recall import HostStore, RecallNotes
from herald_jax.retrieval.scan import default_threads, set_threads


class LaneError(RuntimeError):
    """Raised for, and kept in, a job that failed; the cause is chained.

    Attributes:
        row: Row of the stay that it belongs to.
        epoch: Number of the stay.
    """

    def __init__(self, row: int, epoch: int, cause: Exception) -> None:
        super().__init__(f"host memory of row {row}, stay {epoch}: {cause}")
        self.row, self.epoch = row, epoch
        self.__cause__ = cause


class Job:
    """Work for the lane, and what has become of it; attributes change under the lane's lock.

    Attributes:
        row: Row of the stay.
        epoch: Number of the stay.
        is_done: True once the worker has finished with it, in whatever way.
        is_cancelled: True if its stay was cancelled before it was done.
        error: What made it fail.
    """

    def __init__(self, lane: HostLane, row: int, epoch: int) -> None:
        self.row, self.epoch = row, epoch
        self.is_done = self.is_cancelled = False
        self.error: LaneError | None = None
        self._lane = lane

    @property
    def has_news(self) -> bool:
        """True if a caller who looks now sees something it need not wait for."""
        return self.is_done

    def run(self, store: Any) -> None:
        """Does the work, with the `HostStore`; on the worker."""
        raise NotImplementedError

    def drop_arrays(self) -> None:
        """Lets go of what it was given, once it is done."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for news; false if there are none within `timeout` seconds."""
        return self._lane.wait([self], timeout)


class Append(Job):
    """Tokens on their way into the pool."""

    def __init__(
        self, lane: HostLane, row: int, epoch: int, layer: int, start: int, tokens: int, copies: Any
    ) -> None:
        super().__init__(lane, row, epoch)
        self.layer, self.start, self.tokens = layer, start, tokens
        self._copies: tuple[jax.Array, jax.Array] | None = copies

    def run(self, store: HostStore) -> None:
        """Writes the tokens; on the worker."""
        assert self._copies is not None
        k, v = (finish_copy(copy)[:, :, : self.tokens] for copy in self._copies)
        for at in range(k.shape[0]):
            if self._lane.is_over(self):
                return
            store.append(self.row, self.epoch, self.layer + at, self.start, k[at], v[at])

    def drop_arrays(self) -> None:
        """Lets go of the copies."""
        self._copies = None


class RecallChunk:
    """Recalled entries of some layers, in pinned memory.

    Attributes:
        first_layer: First of the layers.
        count: Layers that are filled; the arrays may have room for more.
    """

    def __init__(self, recall: Recall, slot: StagingSlot, first_layer: int, count: int) -> None:
        self.first_layer, self.count = first_layer, count
        self._recall, self._slot = recall, slot

    def send(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values [layers, K, C, D] on their way to the device.

        They may be passed to programs at once, but not be donated.
        """
        k, v = self._recall.ring.send(self._slot)
        self._recall.bytes_sent += k.nbytes + v.nbytes
        return k, v

    def release(self) -> None:
        """Gives the memory back unsent."""
        self._recall.ring.release(self._slot)


class Recall(Job):
    """The pool of a block that is being filled from host memory.

    Attributes:
        target: Index of the block.
        candidates: First tokens that may be chosen.
        wanted: Entries to choose besides the sinks.
        sinks: Sinks that are taken.
        selected: Further entries, per KV head and layer.
        notes: What the layers so far took.
        bytes_sent: Bytes of the chunks that were sent.
        seconds: Time from submission until it was done.
        wait_seconds: Part of it until the worker had the queries.
        chunks: Chunks that wait to be taken.
        ring: Where the chunks are.
    """

    def __init__(
        self,
        lane: HostLane,
        ring: StagingRing,
        row: int,
        epoch: int,
        target: int,
        columns: jax.Array,
        candidates: int,
        wanted: int,
        sinks: int,
        begin: float,
    ) -> None:
        super().__init__(lane, row, epoch)
        self.ring, self.target, self.candidates, self.wanted = ring, target, candidates, wanted
        self.sinks = min(sinks, candidates)
        self.selected = min(wanted, candidates - self.sinks)
        self.notes = RecallNotes()
        self.bytes_sent, self.seconds, self.wait_seconds = 0, 0.0, 0.0
        self._columns: jax.Array | None = columns
        self._begin = begin
        self.chunks: list[RecallChunk] = []

    @property
    def has_news(self) -> bool:
        """True if there is a chunk to take, or nothing more will come."""
        return self.is_done or bool(self.chunks)

    @property
    def is_taken(self) -> bool:
        """True once all of it is there and every chunk has been taken.

        The pool may then be used, behind the programs that put the chunks into it.
        """
        return self.is_done and not self.is_cancelled and not self.error and not self.chunks

    @property
    def account(self) -> RecallAccount:
        """What it took so far."""
        return RecallAccount(
            bytes_scanned=self.notes.bytes_scanned,
            bytes_gathered=self.notes.bytes_gathered,
            bytes_sent=self.bytes_sent,
            hit_share=self.notes.hit_share,
            seconds=self.seconds,
        )

    def ready_chunks(self) -> list[RecallChunk]:
        """The chunks that have come since the last call, in the order of their layers.

        Each must be sent or released.
        """
        return self._lane.take_chunks(self)

    def run(self, store: HostStore) -> None:
        """Fills chunk after chunk; on the worker."""
        assert self._columns is not None
        columns = np.asarray(self._columns)
        self.wait_seconds = self._lane.clock() - self._begin
        layers = store.shape.layers
        for first in range(0, layers, self.ring.layers):
            slot = self.ring.acquire(lambda: self._lane.is_over(self))
            if slot is None:
                return
            count = min(self.ring.layers, layers - first)
            chunk = RecallChunk(self, slot, first, count)
            is_full = False
            try:
                is_full = self._fill(store, slot, columns, first, count)
            finally:
                if not (is_full and self._lane.publish(self, chunk)):
                    chunk.release()
            if not is_full:
                return

    def _fill(
        self, store: HostStore, slot: StagingSlot, columns: np.ndarray, first: int, count: int
    ) -> bool:
        for at in range(count):
            if self._lane.is_over(self):
                return False
            notes = store.recall(
                self.row,
                self.epoch,
                first + at,
                columns[first + at],
                self.candidates,
                self.wanted,
                slot.k[at],
                slot.v[at],
            )
            self.notes.add(notes)
        return True

    def drop_arrays(self) -> None:
        """Lets go of the queries."""
        self._columns = None
        self.seconds = self._lane.clock() - self._begin


class HostLane:
    """Runs jobs on a thread of its own; its methods are for one dispatching thread.

    Args:
        store: The finished blocks; from now on only the worker may use it.
        ring: Where recalled entries are staged; its slots must have room for every recall.
        sharding: Host memory for the copies of appended tokens.
        threads: Most threads of a scan; all cores but one if left out.
        before_job: Called on the worker before each job, which it may delay or fail.
        clock: Gives seconds.
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
        self._store, self._ring, self._sharding = store, ring, sharding
        self._threads = default_threads() if threads is None else threads
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
        shape, room = self._store.shape, self._ring.row_shape[1]
        expected = (shape.layers, shape.kv_heads, self._store.columns, shape.head_dim)
        if columns.shape != expected:
            raise ValueError(f"columns are {list(columns.shape)} instead of {list(expected)}")
        columns.copy_to_host_async()
        job = Recall(
            self,
            self._ring,
            row,
            epoch,
            target,
            columns,
            candidates,
            wanted,
            self._store.sinks,
            self.clock(),
        )
        if job.sinks + job.selected > room:
            raise ValueError(
                f"{job.sinks} sinks and {job.selected} entries do not fit a pool of {room}"
            )
        return self._submit(job)

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
            set_threads(self._threads)
            while (job := self._next()) is not None:
                self._finish(job, self._do(job))
                del job
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
                self._changed.wait()

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
