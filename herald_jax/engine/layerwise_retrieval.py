"""The paper's retrieval pass over finished blocks in host memory (HERALD 2.3, steps 8-9).

A few masks of a row's next block walk through the layers: the device computes a layer's queries,
the lane's thread attends with them to all of the row's keys and values and chooses its entries,
and the device goes on with the result. When the last layer has chosen, the entries are gathered
and sent as in any recall.

Ownership: a walk's arrays are its own, and its programs read nothing that a step writes but the
pages of finished blocks, right behind the step that asked. Everything here runs on the
dispatching thread between two steps. A walk takes one layer a look, so a step is never held up;
a row with as many sparse layers as a block has steps, or more, waits for its walk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from herald_jax.cache.sparse import SparseCache
from herald_jax.decoding.layer_walk import Walk
from herald_jax.engine.host_retrieval import HostRetrieval
from herald_jax.engine.lane_jobs import Job
from herald_jax.engine.retrievals import Ask, FullPool, RowFailure
from herald_jax.engine.walk_jobs import Gather, WalkLayer
from herald_jax.models.attention import FreshKV
from herald_jax.models.decoder import Params
from herald_jax.retrieval.attend import AttendingStore
from herald_jax.retrieval.recall import RecallNotes


@dataclasses.dataclass(slots=True)
class WalkStart:
    """What a walk begins with: masks before their first sparse layer, and the row's draft."""

    walk: Walk
    drafts: list[FreshKV]
    params: Params


@dataclasses.dataclass(slots=True)
class _Walking:
    """A walk under way.

    Attributes:
        ask: The pool that it is for.
        start: Where it stands, and what it takes along.
        layer: Sparse layer that it is in.
        job: The host's part of this layer.
        begin: When it began.
        chosen: Positions that the layers so far chose.
        notes: What they took.
    """

    ask: Ask
    start: WalkStart
    layer: int
    job: WalkLayer
    begin: float
    chosen: list[np.ndarray] = dataclasses.field(default_factory=list)
    notes: RecallNotes = dataclasses.field(default_factory=RecallNotes)


class LayerwiseRetrieval(HostRetrieval):
    """Walks, scans, gathers and sends; `ask` takes a `WalkStart` for each pool."""

    _store_type = AttendingStore

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._walks: list[_Walking] = []

    def ask(self, cache: SparseCache, queries: Sequence[Any], asks: Sequence[Ask]) -> SparseCache:
        """Sends masks on their way."""
        for ask, start in zip(asks, queries, strict=True):
            counts = self._budget.counts(ask.target)
            if not counts.pooled:
                self._empty.append(ask)
                continue
            self._stays.add((ask.row, ask.epoch))
            numbers = (self._budget.candidates(ask.target), self._budget.wanted(ask.target))
            if counts.pooled == numbers[0]:  # all of them, whatever anybody asks for
                whole = jnp.zeros((len(start.drafts), *start.walk.columns.shape), jnp.float32)
                self._recalls.append((ask, self._lane.recall(*ask, whole, *numbers)))
                continue
            begin = self._lane.clock()
            self._walks.append(_Walking(ask, start, 0, self._submit(ask, start, 0), begin))
        return cache

    def _submit(self, ask: Ask, start: WalkStart, layer: int) -> WalkLayer:
        is_last = layer == len(start.drafts) - 1
        return self._lane.submit(
            WalkLayer(
                self._lane,
                ask.row,
                ask.epoch,
                layer,
                None if is_last else start.walk.queries,
                start.walk.columns,
                tokens=(ask.target - 1) * self._programs.model.block_length,
                candidates=self._budget.candidates(ask.target),
                wanted=self._budget.wanted(ask.target),
            )
        )

    def _gather(self, walking: _Walking) -> Gather:
        ask = walking.ask
        return self._lane.submit(
            Gather(
                self._lane,
                self._ring,
                *ask,
                walking.chosen,
                walking.notes,
                candidates=self._budget.candidates(ask.target),
                wanted=self._budget.wanted(ask.target),
                sinks=self._budget.sink_tokens,
                begin=walking.begin,
            )
        )

    def poll(self, cache: SparseCache) -> tuple[SparseCache, list[FullPool], list[RowFailure]]:
        """Takes every walk on by one layer, if the host is done with it; and as its base."""
        failures, walks, self._walks = [], self._walks, []
        for walking in walks:
            job = walking.job
            if job.error is not None:
                failures.append(RowFailure(job.row, job.epoch, job.error))
            elif not job.is_done:
                self._walks.append(walking)
            elif not job.is_cancelled:
                self._advance(walking)
        cache, full, others = super().poll(cache)
        return cache, full, [*failures, *others]

    def _advance(self, walking: _Walking) -> None:
        job, start, layer = walking.job, walking.start, walking.layer
        assert job.index is not None
        walking.chosen.append(job.index)
        walking.notes.add(job.notes)
        if layer == len(start.drafts) - 1:
            self._recalls.append((walking.ask, self._gather(walking)))
            return
        assert job.out is not None and job.log_sum is not None
        start.walk = self._programs.advance_walk(
            start.params,
            layer,
            start.walk,
            start.drafts[layer],
            walking.ask.target - 1,
            job.out,
            job.log_sum,
        )
        walking.layer += 1
        walking.job = self._submit(walking.ask, start, layer + 1)
        self._walks.append(walking)

    @property
    def is_filling(self) -> bool:
        """True if masks are on their way, or entries are to come."""
        return bool(self._walks) or super().is_filling

    def _jobs(self) -> list[Job]:
        return [*super()._jobs(), *(walking.job for walking in self._walks)]

    def cancel(self, row: int, epoch: int) -> None:
        """Drops what a stay asked for, and what of it is under way."""
        super().cancel(row, epoch)
        self._walks = [walking for walking in self._walks if walking.ask[:2] != (row, epoch)]

    def _warm_queries(self, cache: SparseCache, queries: Sequence[Sequence[Any]]) -> None:
        """Nothing: walks have no queries of a step."""
