"""How the pool of a row's next block gets filled: the strategies of the sparse runner.

A retrieval never owns the device's cache; it takes it and gives it back, and the runner calls it
between steps only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.cache.budget import RecallAccount
from herald_jax.cache.sparse import SparseCache
from herald_jax.engine.sparse_compiled import SparsePrograms


class Ask(NamedTuple):
    """A row that looked ahead: the pool of block `target` is to be filled."""

    row: int
    epoch: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowFailure:
    """A stay whose retrieval failed; the other rows go on."""

    row: int
    epoch: int
    error: Exception


@dataclasses.dataclass(slots=True)
class RetrievalCounts:
    """What retrievals cost so far.

    Attributes:
        recalls: Pools filled.
        bytes_scanned: Keys read on the host.
        bytes_gathered: Keys and values copied into staging buffers.
        bytes_sent: Bytes sent to the device.
        bytes_kept: Bytes of finished blocks brought to the host.
        hits: Selected entries that the row's pool before held as well.
        entries: Selected entries, sinks included.
        waits: Steps before which every row had to wait for its pool.
        wait_seconds: Time of these waits.
    """

    recalls: int = 0
    bytes_scanned: int = 0
    bytes_gathered: int = 0
    bytes_sent: int = 0
    bytes_kept: int = 0
    hits: int = 0
    entries: int = 0
    waits: int = 0
    wait_seconds: float = 0.0


class FullPool(NamedTuple):
    """A pool that is full, and what that took if host memory was read."""

    ask: Ask
    recall: RecallAccount | None


class Retrieval(Protocol):
    """Fills pools. `counts` says what it cost so far."""

    counts: RetrievalCounts

    @property
    def is_behind(self) -> bool:
        """True if what was taken should get on before more is; `wait` and `poll` until then."""
        ...

    def take_layer(self, row: int, epoch: int, at: int, k: jax.Array, v: jax.Array, n: int) -> None:
        """Takes a prompt's keys and values [1, K, S, D] of sparse layer `at`, `n` tokens."""
        ...

    def has_prompt(self, row: int) -> bool:
        """True if nothing of the prompt that was taken of a row is under way, or has failed."""
        ...

    def take_block(self, cache: SparseCache, row: int, epoch: int, index: int) -> None:
        """Takes a block that was committed and is in the row's ring still."""
        ...

    def ask(self, cache: SparseCache, queries: Sequence[Any], asks: Sequence[Ask]) -> SparseCache:
        """Begins to fill pools; slot i of every layer's queries belongs to `asks[i]`.

        A retrieval that walks through the layers takes a `WalkStart` for each instead.
        """
        ...

    def poll(self, cache: SparseCache) -> tuple[SparseCache, list[FullPool], list[RowFailure]]:
        """Puts into the pools what has come; the pools that are now full, and what failed."""
        ...

    @property
    def is_filling(self) -> bool:
        """True if pools are being filled by what `poll` takes."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Returns once `poll` has something to tell; false if not within `timeout` seconds."""
        ...

    def settle(self, row: int) -> None:
        """Returns once everything that was taken of a row's text can be fetched."""
        ...

    def fetch(self, row: int, at: int) -> tuple[jax.Array, jax.Array]:
        """A row's keys and values [1, K, S, D] of sparse layer `at`, on their way to the device."""
        ...

    def cancel(self, row: int, epoch: int) -> None:
        """Drops what a stay asked for."""
        ...

    def warmup(self, cache: SparseCache, queries: Sequence[Sequence[Any]]) -> SparseCache:
        """Compiles its programs ahead of time, for queries of these shapes."""
        ...

    def reset(self) -> None:
        """Drops everything."""
        ...

    def close(self) -> None:
        """Ends its threads and frees its memory."""
        ...


class DeviceRetrieval:
    """Selects from the store on the device, in a program of its own behind the step."""

    def __init__(self, programs: SparsePrograms, max_rows: int) -> None:
        self.counts = RetrievalCounts()
        self._programs, self._max_rows = programs, max_rows
        self._full: list[Ask] = []

    def take_layer(self, row: int, epoch: int, at: int, k: jax.Array, v: jax.Array, n: int) -> None:
        """Nothing: the prompt's keys are in the store."""

    @property
    def is_behind(self) -> bool:
        """Never: nothing is under way."""
        return False

    def has_prompt(self, row: int) -> bool:
        """Always: the prompt's keys are in the store."""
        return True

    def take_block(self, cache: SparseCache, row: int, epoch: int, index: int) -> None:
        """Nothing: the step wrote the block to the store."""

    def ask(
        self, cache: SparseCache, queries: Sequence[jax.Array], asks: Sequence[Ask]
    ) -> SparseCache:
        """Fills the pools at once."""
        self._full += asks
        self.counts.recalls += len(asks)
        return self._refill(cache, queries, asks)

    def _refill(
        self, cache: SparseCache, queries: Sequence[jax.Array], asks: Sequence[Ask]
    ) -> SparseCache:
        size = queries[0].shape[0]
        rows, targets = np.full(size, self._max_rows, np.int32), np.zeros(size, np.int32)
        for at, ask in enumerate(asks):
            rows[at], targets[at] = ask.row, ask.target
        first_mask = np.zeros(size, np.int32)
        return self._programs.refill(cache, list(queries), rows, targets, first_mask)

    def warmup(self, cache: SparseCache, queries: Sequence[Sequence[Any]]) -> SparseCache:
        """Compiles its programs, by running each with nobody to fill a pool for."""
        for shapes in queries:
            zeros = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
            cache = self._refill(cache, zeros, ())
        return cache

    def poll(self, cache: SparseCache) -> tuple[SparseCache, list[FullPool], list[RowFailure]]:
        """The pools that were asked for since the last call."""
        full, self._full = self._full, []
        return cache, [FullPool(ask, None) for ask in full], []

    @property
    def is_filling(self) -> bool:
        """Never: a later program of the device sees what an earlier one wrote."""
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """True at once."""
        return True

    def settle(self, row: int) -> None:
        """Nothing: nothing is under way."""

    def fetch(self, row: int, at: int) -> tuple[jax.Array, jax.Array]:
        """Never called: the device has it all."""
        raise RuntimeError("keys that are on the device are not fetched")

    def cancel(self, row: int, epoch: int) -> None:
        """Forgets what a stay asked for."""
        self._full = [ask for ask in self._full if (ask.row, ask.epoch) != (row, epoch)]

    def reset(self) -> None:
        """Forgets everything."""
        self._full = []

    def close(self) -> None:
        """Nothing: it has no threads."""
