"""What an engine has done and is doing, for people and for `/metrics`; plain Python.

The engine's thread writes and any thread reads; a lock keeps the two apart.

Definitions. A *forward* of a row is one pass over its block: its denoising steps and the commit
pass. A *row-step* is one row in one dispatched step, so row-steps minus the forwards of the
blocks that counted are bubbles: rows that ran on after their end, and blocks that were dropped
by an abort or a preemption. Blocks that are still running are in that difference, too.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

from herald_jax.engine.live import LiveSample
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.sample import SampleState

SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
STEPS_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
QUANTILES = (0.5, 0.95, 0.99)

RECENT = 2048
"""Observations that quantiles are taken from."""

RATE_SECONDS = 10.0
"""Window of tokens per second."""

PAGES_SECONDS = 0.5
"""Shortest time between two counts of the pages in use while the engine works."""


class Distribution:
    """Counts in buckets over all time, and quantiles of the most recent values.

    Example:
        >>> waits = Distribution((1.0, 2.0))
        >>> for value in (0.5, 1.5, 9.0):
        ...     waits.observe(value)
        >>> waits.cumulative()
        [1, 2, 3]
        >>> waits.quantile(0.5)
        1.5
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Takes a value."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value
        self._recent.append(value)

    def cumulative(self) -> list[int]:
        """How many values are at most each bound, and how many there are."""
        total, out = 0, []
        for count in self._counts:
            total += count
            out.append(total)
        return out

    def quantile(self, share: float) -> float | None:
        """A quantile of the recent values; `None` if there are none."""
        ordered = sorted(self._recent)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None

    def summary(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "count": self.count,
            "sum": self.sum,
            "bounds": self.bounds,
            "cumulative": self.cumulative(),
            "quantiles": {share: self.quantile(share) for share in QUANTILES},
        }


@dataclasses.dataclass(slots=True)
class _Totals:
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    blocks: int = 0
    denoising_steps: int = 0
    forwards: int = 0
    failed_requests: int = 0


class EngineStats:
    """Collects figures of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = _Totals()
        self._ended: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._queue_seconds = Distribution(SECONDS_BUCKETS)
        self._first_block_seconds = Distribution(SECONDS_BUCKETS)
        self._block_seconds = Distribution(SECONDS_BUCKETS)
        self._block_steps = Distribution(STEPS_BUCKETS)
        self._tokens: collections.deque[tuple[float, int]] = collections.deque()
        self._gauges: dict[str, Any] = {}
        self._pages_counted = 0.0

    def on_request(self, prompt_tokens: int) -> None:
        """A request was put into the queue."""
        with self._lock:
            self._totals.requests += 1
            self._totals.prompt_tokens += prompt_tokens

    def on_block(
        self,
        sample: LiveSample,
        tokens: int,
        steps: Sequence[int],
        now: float,
        since: float | None,
    ) -> None:
        """A sample got blocks.

        Args:
            sample: The sample.
            tokens: Tokens that they added.
            steps: Denoising steps of each of them; there is nearly always one.
            now: Time on the engine's clock.
            since: The same for the sample's block before, `None` for its first one.
        """
        with self._lock:
            totals = self._totals
            totals.generated_tokens += tokens
            totals.blocks += len(steps)
            totals.denoising_steps += sum(steps)
            totals.forwards += sum(steps) + len(steps)
            self._tokens.append((time.perf_counter(), tokens))
            self._drop_old_tokens(self._tokens[-1][0])
            if since is None:
                if sample.admitted is not None:
                    self._queue_seconds.observe(sample.admitted - sample.arrived)
                self._first_block_seconds.observe(now - sample.arrived)
                since = sample.started
            for count in steps:
                self._block_steps.observe(count)
                if since is not None:
                    self._block_seconds.observe((now - since) / len(steps))

    def on_end(self, reason: str) -> None:
        """A sample ended; `reason` is its finish reason or `error`."""
        with self._lock:
            self._ended[reason] = self._ended.get(reason, 0) + 1

    def on_failure(self) -> None:
        """A request failed."""
        with self._lock:
            self._totals.failed_requests += 1

    def look_at(self, engine: LLMEngine) -> None:
        """Takes the present numbers; only on the thread that runs the engine."""
        scheduler = engine.scheduler
        running = scheduler.running
        rows = collections.Counter(sample.state for sample in running)
        now = time.perf_counter()
        gauges = {
            **engine.stats(),
            "rows_prefill": rows[SampleState.PREFILL],
            "rows_decode": rows[SampleState.DECODE],
            "rows_free": engine.sizes.max_rows - len(running),
            "pages_total": engine.sizes.num_pages,
        }
        # Many pages are many numbers to look at, so not in every step.
        if not running or now - self._pages_counted > PAGES_SECONDS:
            self._pages_counted = now
            used = len({page for sample in running for page in sample.pages})
            gauges["pages_used"] = used
            gauges["kv_bytes_used"] = engine.sizes.kv_bytes * used // engine.sizes.num_pages
        with self._lock:
            self._gauges.update(gauges)

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain data."""
        now = time.perf_counter()
        with self._lock:
            self._drop_old_tokens(now)
            totals = dataclasses.asdict(self._totals)
            forwards, blocks = totals["forwards"], totals["blocks"]
            gauges = dict(self._gauges)
            return {
                **gauges,
                **totals,
                "ended": dict(self._ended),
                "tokens_per_second": sum(count for _, count in self._tokens) / RATE_SECONDS,
                "tokens_per_forward": totals["generated_tokens"] / forwards if forwards else 0.0,
                "steps_per_block": totals["denoising_steps"] / blocks if blocks else 0.0,
                "bubbles": max(gauges.get("row_steps", 0) - forwards, 0),
                "queue_seconds": self._queue_seconds.summary(),
                "first_block_seconds": self._first_block_seconds.summary(),
                "block_seconds": self._block_seconds.summary(),
                "block_steps": self._block_steps.summary(),
            }

    def _drop_old_tokens(self, now: float) -> None:
        while self._tokens and self._tokens[0][0] < now - RATE_SECONDS:
            self._tokens.popleft()
