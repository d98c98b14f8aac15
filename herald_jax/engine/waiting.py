"""The queue of samples without a row, and the one order that everything follows."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

from herald_jax._checks import ConfigError, require_int
from herald_jax.engine.sample import Sample


class QueueFull(RuntimeError):
    """Raised when no more requests may wait; the caller tries again later."""


order_key = operator.attrgetter("key")
"""The place of a sample among all samples, waiting or running."""


class WaitingQueue:
    """Samples by key, the next one first.

    Args:
        max_waiting: Most samples that may wait for their first row.
        aging_ticks: Ticks of waiting that count as one level of priority.
    """

    def __init__(self, max_waiting: int, aging_ticks: int) -> None:
        require_int("max_waiting", max_waiting, 1)
        require_int("aging_ticks", aging_ticks, 1)
        self._max_waiting = max_waiting
        self._aging_ticks = aging_ticks
        self._arrivals = 0
        self._new = 0
        self._samples: list[Sample] = []

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    @property
    def head(self) -> Sample:
        """The sample that must be admitted next."""
        return self._samples[0]

    def new_key(self, tick: int, priority: int) -> tuple[int, int]:
        """The key of a sample that arrives now; the least goes first.

        All waiting samples age alike, so aging changes no order among them and the key need
        not change: an old sample is as good as a new one of better priority.
        """
        self._arrivals += 1
        return tick + priority * self._aging_ticks, self._arrivals

    def require_room(self, count: int) -> None:
        """Checks that a request of `count` samples may wait.

        Raises:
            ConfigError: If it never could.
            QueueFull: If it cannot now.
        """
        if count > self._max_waiting:
            raise ConfigError(
                f"A request of {count} samples can never wait in a queue of "
                f"max_waiting={self._max_waiting}. Lower n or raise max_waiting."
            )
        if self._new + count > self._max_waiting:
            raise QueueFull(
                f"{self._new} samples are waiting and {count} more would pass "
                f"max_waiting={self._max_waiting}. Try again later, or raise max_waiting."
            )

    def push(self, sample: Sample) -> None:
        """Puts a sample at its place."""
        bisect.insort(self._samples, sample, key=order_key)
        # Those that lost their row were let in before, and come back whatever waits.
        self._new += sample.preemptions == 0

    def remove(self, sample: Sample) -> None:
        """Takes a sample out."""
        self._samples.remove(sample)
        self._new -= sample.preemptions == 0
