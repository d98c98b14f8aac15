"""The rows of the device's state: which sample has which, and which are free."""

from __future__ import annotations

import heapq

from herald_jax.engine.pages import Handle
from herald_jax.engine.sample import Sample


class RowPool:
    """Rows 0 to `count` - 1; the lowest free one is taken first."""

    def __init__(self, count: int) -> None:
        self._samples: list[Sample | None] = [None] * count
        self._free = list(range(count))  # a heap
        self._copies: dict[int, list[Handle]] = {}
        self._epochs = 0

    @property
    def has_free(self) -> bool:
        """True if a row can be taken."""
        return bool(self._free)

    def sample(self, row: int) -> Sample | None:
        """Whoever has the row now."""
        return self._samples[row]

    def take(self, sample: Sample) -> tuple[int, int]:
        """A free row, now the sample's, and the number of this stay."""
        row = heapq.heappop(self._free)
        self._samples[row] = sample
        self._epochs += 1
        return row, self._epochs

    def release(self, row: int) -> None:
        """Takes the row from its sample; it is free once copies to or from it have ended."""
        if self._samples[row] is None:
            raise RuntimeError(f"row {row} is released but nobody has it")
        self._samples[row] = None
        if row not in self._copies:
            heapq.heappush(self._free, row)

    def hold(self, row: int, handle: Handle) -> None:
        """Keeps the row from being taken by another sample until a copy has ended."""
        self._copies.setdefault(row, []).append(handle)

    def collect(self) -> None:
        """Makes rows free whose copies have ended."""
        for row in list(self._copies):
            pending = [handle for handle in self._copies[row] if not handle.done()]
            if pending:
                self._copies[row] = pending
                continue
            del self._copies[row]
            if self._samples[row] is None:
                heapq.heappush(self._free, row)

    def check(self, running: list[Sample]) -> None:
        """Recounts the rows.

        Raises:
            RuntimeError: If the account does not add up.
        """
        taken = [row for row, sample in enumerate(self._samples) if sample is not None]
        held = [row for row in self._copies if self._samples[row] is None]
        if sorted([*taken, *held, *self._free]) != list(range(len(self._samples))):
            raise RuntimeError("a row is lost or free twice")
        owners = {sample.row for sample in running if self._samples[sample.row] is sample}
        if len(owners) != len(running) or len(taken) != len(running):
            raise RuntimeError("rows and running samples disagree")
