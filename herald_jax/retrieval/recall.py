"""The host's store of finished blocks: appends, selection, and copies for the device.

Ownership: one thread, the host lane's worker, makes every call. It notes how far each stay has
written each layer. Tokens are appended in order and once, and a selection may only look at
tokens that its own stay has written: neither a late append nor what another request left in
the row can get into a pool.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from herald_jax.cache.host import HostShape, PinnedPool
from herald_jax.retrieval.scan import (
    BEST_SCORES,
    ScanScratch,
    ScoreStage,
    compile_scan,
    count_common,
    default_threads,
    fewest_threads,
    gather_layer,
    plan_scan,
    scan_layer,
    set_threads,
    thread_counts,
)
from herald_jax.retrieval.settings import SelectionConfig

PROBE_BYTES = 1 << 28
"""Keys that are read to choose the number of threads; more than caches hold."""

_chosen_threads: dict[HostShape, int] = {}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class RecallNotes:
    """What recalls of some layers did.

    Attributes:
        entries: Entries chosen, sinks included, all KV heads together.
        hits: Those that the row's recall before had chosen as well.
        bytes_scanned: Keys read for their scores.
        bytes_gathered: Keys and values copied.
        scan_seconds: Time of the choice.
        gather_seconds: Time of the copies.
    """

    entries: int = 0
    hits: int = 0
    bytes_scanned: int = 0
    bytes_gathered: int = 0
    scan_seconds: float = 0.0
    gather_seconds: float = 0.0

    @property
    def hit_share(self) -> float:
        """Share of the entries that the recall before had chosen as well."""
        return self.hits / self.entries if self.entries else 0.0

    def add(self, other: RecallNotes) -> None:
        """Adds the notes of another layer."""
        for field in dataclasses.fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclasses.dataclass(slots=True)
class _Stay:
    """By layer: tokens written, and the positions that the last recall chose."""

    epoch: int
    written: list[int]
    chosen: list[np.ndarray | None]


class HostStore:
    """Finished blocks of all rows in host memory.

    Args:
        pool: The memory.
        spec: How keys are scored.
        columns: Score columns of a recall, c.
        group: Columns of one position, as `select.column_group` gives it.
        sinks: First candidates that are always taken.
        stage: What computes the logits.
        clock: Gives seconds.
    """

    def __init__(
        self,
        pool: PinnedPool,
        spec: SelectionConfig,
        *,
        columns: int,
        group: int,
        sinks: int,
        stage: ScoreStage = BEST_SCORES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        shape = pool.shape
        dtype = np.dtype(shape.dtype)
        compile_scan(dtype, shape.head_dim)
        self._token_bytes = shape.kv_heads * shape.head_dim * dtype.itemsize  # keys of a layer
        self.shape, self.columns, self.sinks = shape, columns, sinks
        self._pool, self._spec, self._group, self._stage = pool, spec, group, stage
        self._clock = clock
        self._scratch = ScanScratch(shape.kv_heads, shape.row_tokens, columns)
        self._stays: dict[int, _Stay] = {}

    def calibrate_threads(self) -> int:
        """Sets how many threads scans of the calling thread use; once measured, kept.

        A small pool, which caches hold, is no measure: it gets all cores but one. The keys are
        read whatever they are, so this belongs before the first append.
        """
        shape = self.shape
        layer_bytes = self._token_bytes * shape.row_tokens
        layers = min(shape.layers, -(-PROBE_BYTES // layer_bytes))
        counts = thread_counts(default_threads() + 1)
        if layers * layer_bytes < PROBE_BYTES or len(counts) == 1:
            return set_threads(default_threads())
        cols = np.ones((shape.kv_heads, self.columns, shape.head_dim), np.float32)
        numbers = dict(candidates=shape.row_tokens, sinks=self.sinks, number=1)
        plan = plan_scan(self._scratch, self.columns, self._group, self._spec, **numbers)

        def score() -> None:
            for layer in range(layers):
                self._stage(plan, self._scratch, self._pool.view(layer, 0)[0], cols)

        if shape not in _chosen_threads:
            _chosen_threads[shape] = fewest_threads(score, counts)
            _log.info("Scans of host memory use %d threads.", _chosen_threads[shape])
        return set_threads(_chosen_threads[shape])

    def append(
        self,
        row: int,
        epoch: int,
        layer: int,
        start: int,
        k: Float[np.ndarray, "K T D"],
        v: Float[np.ndarray, "K T D"],
    ) -> None:
        """Writes the next tokens of a stay's layer.

        Raises:
            RuntimeError: If `start` is not where the stay's last tokens ended.
        """
        stay = self._stays.get(row)
        if stay is None or stay.epoch != epoch:
            # The row has passed to another stay; what the last one wrote counts no more.
            layers = self.shape.layers
            stay = _Stay(epoch, [0] * layers, [None] * layers)
        if start != stay.written[layer]:
            raise RuntimeError(
                f"layer {layer} of row {row} has {stay.written[layer]} tokens of stay {epoch}, "
                f"so tokens cannot be appended at {start}"
            )
        self._pool.write(layer, row, start, k, v)
        stay.written[layer] = start + k.shape[1]
        self._stays[row] = stay

    def recall(
        self,
        row: int,
        epoch: int,
        layer: int,
        cols: Float[np.ndarray, "K c D"],
        candidates: int,
        wanted: int,
        out_k: Float[np.ndarray, "K C D"],
        out_v: Float[np.ndarray, "K C D"],
    ) -> RecallNotes:
        """Copies the best keys and values of a layer, in the order of the text; what it took.

        Args:
            row: The row.
            epoch: The stay that asks.
            layer: The layer.
            cols: What `select.columns` gave.
            candidates: First tokens that may be chosen.
            wanted: Entries to choose besides the sinks.
            out_k: Room for the entries; the rest of it is left as it is.
            out_v: The same.

        Raises:
            RuntimeError: If the stay has not written all candidates.
        """
        index, notes = self.choose(row, epoch, layer, cols, candidates, wanted)
        notes.add(self.gather(row, epoch, layer, index, out_k, out_v))
        return notes

    def recall_at(
        self,
        row: int,
        epoch: int,
        layer: int,
        index: Int[np.ndarray, "K n"],
        candidates: int,
        out_k: Float[np.ndarray, "K C D"],
        out_v: Float[np.ndarray, "K C D"],
    ) -> RecallNotes:
        """As `recall`, of entries that were chosen elsewhere.

        Raises:
            RuntimeError: If the stay has not written all candidates.
            IndexError: If a position is none of them.
        """
        stay = self._checked(row, epoch, layer, candidates)
        if index.size and int(index[:, -1].max()) >= candidates:
            raise IndexError(f"positions must be in 0 to {candidates - 1}")
        own = np.array(index, np.int32, order="C")  # what loops are compiled to take
        notes = self._chosen(stay, layer, own)
        notes.add(self.gather(row, epoch, layer, own, out_k, out_v))
        return notes

    def choose(
        self,
        row: int,
        epoch: int,
        layer: int,
        cols: Float[np.ndarray, "K c D"],
        candidates: int,
        wanted: int,
    ) -> tuple[Int[np.ndarray, "K n"], RecallNotes]:
        """Positions of the entries that `recall` would copy; the arguments are the same.

        Raises:
            RuntimeError: If the stay has not written all candidates.
        """
        stay = self._checked(row, epoch, layer, candidates)
        begin = self._clock()
        k, _ = self._pool.view(layer, row)
        index = scan_layer(
            k,
            cols,
            candidates,
            self.sinks,
            wanted,
            self._spec,
            self._scratch,
            group=self._group,
            stage=self._stage,
        )
        notes = self._chosen(stay, layer, index)
        if index.shape[1] not in (candidates, min(self.sinks, candidates)):
            notes.bytes_scanned = candidates * self._token_bytes
        notes.scan_seconds = self._clock() - begin
        return index, notes

    def gather(
        self,
        row: int,
        epoch: int,
        layer: int,
        index: Int[np.ndarray, "K n"],
        out_k: Float[np.ndarray, "K C D"],
        out_v: Float[np.ndarray, "K C D"],
    ) -> RecallNotes:
        """Copies the keys and values at `index`, ascending, all of which the stay has written."""
        self._checked(row, epoch, layer, int(index[:, -1:].max(initial=-1)) + 1)
        begin = self._clock()
        k, v = self._pool.view(layer, row)
        gather_layer(k, v, index, out_k, out_v)
        return RecallNotes(
            bytes_gathered=2 * index.shape[1] * self._token_bytes,
            gather_seconds=self._clock() - begin,
        )

    def _chosen(self, stay: _Stay, layer: int, index: np.ndarray) -> RecallNotes:
        """Remembers what was chosen; how much of it was chosen the time before."""
        before, stay.chosen[layer] = stay.chosen[layer], index
        hits = 0 if before is None else count_common(before, index)
        return RecallNotes(entries=index.size, hits=hits)

    def _checked(self, row: int, epoch: int, layer: int, tokens: int) -> _Stay:
        """The stay, which has written so many tokens of the layer."""
        stay = self._stays.get(row)
        written = stay.written[layer] if stay is not None and stay.epoch == epoch else 0
        if stay is None or written < tokens:
            raise RuntimeError(
                f"stay {epoch} has written {written} tokens of layer {layer} of row {row}, and "
                f"{tokens} are to be read"
            )
        return stay

    def forget(self, row: int, epoch: int) -> None:
        """Ends a stay: what it wrote can no longer be selected."""
        stay = self._stays.get(row)
        if stay is not None and stay.epoch == epoch:
            del self._stays[row]
