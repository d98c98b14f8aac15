"""The host's part of a layerwise retrieval, as jobs of the lane.

A job's arrays are its own. What a job has found may be read by the dispatching thread once the
job is done, and is not changed any more.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from herald_jax.cache.host import StagingRing
from herald_jax.engine.lane import HostLane
from herald_jax.engine.lane_jobs import Job, Recall
from herald_jax.retrieval.attend import AttendingStore
from herald_jax.retrieval.recall import RecallNotes


class WalkLayer(Job):
    """One layer of a walk: attention to all that the stay has written, and the choice.

    Attributes:
        index: Positions of the chosen entries [K, n].
        out: Attention output of the queries [n, H, D], fp32; `None` for the last layer.
        log_sum: Log-sum-exp of their scores [n, H], fp32; `None` for the last layer.
        notes: What it took.
    """

    def __init__(
        self,
        lane: HostLane,
        row: int,
        epoch: int,
        layer: int,
        queries: Float[jax.Array, "n H D"] | None,
        columns: Float[jax.Array, "K c D"],
        *,
        tokens: int,
        candidates: int,
        wanted: int,
    ) -> None:
        super().__init__(lane, row, epoch)
        self._layer, self._tokens = layer, tokens
        self._candidates, self._wanted = candidates, wanted
        self._arrays: Any = (queries, columns)
        for array in (queries, columns):
            if array is not None:
                array.copy_to_host_async()
        self.index: Int[np.ndarray, "K n"] | None = None
        self.out: Float[np.ndarray, "n H D"] | None = None
        self.log_sum: Float[np.ndarray, "n H"] | None = None
        self.notes = RecallNotes()

    def run(self, store: AttendingStore) -> None:
        """Attends and chooses; on the worker."""
        place = (self.row, self.epoch, self._layer)
        queries, columns = (None if a is None else np.asarray(a) for a in self._arrays)
        assert columns is not None
        self.index, self.notes = store.choose(*place, columns, self._candidates, self._wanted)
        if queries is not None and not self._lane.is_over(self):
            self.out, self.log_sum, notes = store.attend(*place, queries, self._tokens)
            self.notes.add(notes)

    def drop_arrays(self) -> None:
        """Lets go of the queries."""
        self._arrays = None


class Gather(Recall):
    """The entries of all layers, once each layer's have been chosen; the notes begin with those."""

    def __init__(
        self,
        lane: HostLane,
        ring: StagingRing,
        row: int,
        epoch: int,
        target: int,
        chosen: list[Int[np.ndarray, "K n"]],
        notes: RecallNotes,
        **numbers: Any,
    ) -> None:
        super().__init__(lane, ring, row, epoch, target, None, **numbers)
        self._chosen = chosen
        self.notes.add(notes)

    def take_layer(
        self, store: Any, layer: int, asked: None, k: np.ndarray, v: np.ndarray
    ) -> RecallNotes:
        """Copies the entries of a layer."""
        return store.gather(self.row, self.epoch, layer, self._chosen[layer], k, v)
