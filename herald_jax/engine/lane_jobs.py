"""What the host lane does, job by job.

A job's arrays belong to the job. Their copies to the host are started when it is submitted, by
the dispatching thread, and depend on the programs that make them; the worker waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float, Int

from herald_jax.cache.budget import RecallAccount
from herald_jax.cache.host import StagingRing, StagingSlot, finish_copy
from herald_jax.retrieval.recall import HostStore, RecallNotes

if TYPE_CHECKING:
    from herald_jax.engine.lane import HostLane


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
    """The pool of a block that is being filled from host memory, by a scan of all candidates.

    Attributes:
        target: Index of the block.
        candidates: First tokens that may be chosen.
        wanted: Entries to choose besides the sinks.
        sinks: Sinks that are taken.
        selected: Further entries, per KV head and layer.
        notes: What the layers so far took.
        bytes_sent: Bytes of the chunks that were sent.
        seconds: Time from submission until it was done.
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
        asked: jax.Array | None,
        candidates: int,
        wanted: int,
        sinks: int,
        begin: float,
    ) -> None:
        super().__init__(lane, row, epoch)
        self.ring, self.target, self.candidates, self.wanted = ring, target, candidates, wanted
        self.sinks = min(sinks, candidates)
        self.selected = min(wanted, candidates - self.sinks)
        room = ring.row_shape[1]
        if self.sinks + self.selected > room:
            raise ValueError(
                f"{self.sinks} sinks and {self.selected} entries do not fit a pool of {room}"
            )
        self.notes = RecallNotes()
        self.bytes_sent, self.seconds = 0, 0.0
        self._asked = asked
        if asked is not None:
            asked.copy_to_host_async()
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
            scan_seconds=self.notes.scan_seconds,
            gather_seconds=self.notes.gather_seconds,
        )

    def ready_chunks(self) -> list[RecallChunk]:
        """The chunks that have come since the last call, in the order of their layers.

        Each must be sent or released.
        """
        return self._lane.take_chunks(self)

    def run(self, store: HostStore) -> None:
        """Fills chunk after chunk; on the worker."""
        asked = None if self._asked is None else np.asarray(self._asked)
        layers = store.shape.layers
        for first in range(0, layers, self.ring.layers):
            slot = self.ring.acquire(lambda: self._lane.is_over(self))
            if slot is None:
                return
            count = min(self.ring.layers, layers - first)
            chunk = RecallChunk(self, slot, first, count)
            is_full = False
            try:
                is_full = self._fill(store, slot, asked, first, count)
            finally:
                if not (is_full and self._lane.publish(self, chunk)):
                    chunk.release()
            if not is_full:
                return

    def _fill(
        self, store: HostStore, slot: StagingSlot, asked: Any, first: int, count: int
    ) -> bool:
        for at in range(count):
            if self._lane.is_over(self):
                return False
            layer = first + at
            own = None if asked is None else asked[layer]
            self.notes.add(self.take_layer(store, layer, own, slot.k[at], slot.v[at]))
        return True

    def take_layer(
        self, store: HostStore, layer: int, asked: Any, k: np.ndarray, v: np.ndarray
    ) -> RecallNotes:
        """Fills keys and values [K, C, D] of a layer; what it took. On the worker.

        Args:
            store: Where from.
            layer: The layer.
            asked: The layer's part of what the job was asked for: columns [K, c, D].
            k: Room for keys.
            v: Room for values.
        """
        numbers = (self.candidates, self.wanted)
        return store.recall(self.row, self.epoch, layer, asked, *numbers, k, v)

    def drop_arrays(self) -> None:
        """Lets go of what it was asked for."""
        self._asked = None
        self.seconds = self._lane.clock() - self._begin


class PositionRecall(Recall):
    """A pool whose entries were chosen on the device: the host only copies them.

    It is asked for positions [L, K, C], ascending, of which as many count as are to be taken.
    """

    def take_layer(
        self,
        store: HostStore,
        layer: int,
        asked: Int[np.ndarray, "K n"],
        k: Float[np.ndarray, "K C D"],
        v: Float[np.ndarray, "K C D"],
    ) -> RecallNotes:
        """Copies the entries of a layer."""
        index = asked[:, : self.sinks + self.selected]
        return store.recall_at(self.row, self.epoch, layer, index, self.candidates, k, v)
