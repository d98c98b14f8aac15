"""Fills pools from finished blocks in pinned host memory: HERALD's retrieval.

Ownership: the lane's thread owns the pinned pool. Everything here runs on the thread that
dispatches, between two steps: it hands tokens and queries to the lane, and puts what comes back
into the device's pools. A row's keys are read here only where nothing of that row is under way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from herald_jax.cache.budget import Budget
from herald_jax.cache.host import HostShape, PinnedPool, StagingRing, host_sharding
from herald_jax.cache.host_link import measure_link
from herald_jax.cache.sparse import SparseCache
from herald_jax.cache_config import CacheConfig
from herald_jax.engine.lane import HostLane
from herald_jax.engine.lane_jobs import Append, Job, Recall
from herald_jax.engine.retrievals import Ask, FullPool, RetrievalCounts, RowFailure
from herald_jax.engine.sparse_compiled import SparsePrograms
from herald_jax.engine.trace import Trace
from herald_jax.retrieval.queries import query_positions
from herald_jax.retrieval.recall import HostStore
from herald_jax.retrieval.select import column_group

PROMPT_STEP = 1024
"""A prompt travels to the host in arrays of this many tokens times a power of two."""

LINK_PROBE_BYTES = 1 << 26
"""Size of the copies by which a slow link is found when the engine starts."""

LAYERS_UNDER_WAY = 2
"""Layers of a prompt on their way to the host; each keeps its buffers on the device."""


class HostRetrieval:
    """Scans, gathers and sends on a thread of its own.

    Args:
        programs: The programs of the engine.
        cache: What is selected, from where, and when.
        dtype: Of keys and values.
        device: The device.

    Attributes:
        counts: What it cost so far.

    Raises:
        ConfigError: If there is no room in host memory, before anything is allocated.
    """

    _store_type: ClassVar[type[HostStore]] = HostStore

    def __init__(
        self,
        programs: SparsePrograms,
        cache: CacheConfig,
        dtype: Any,
        device: Any,
    ) -> None:
        self.counts = RetrievalCounts()
        self._programs = programs
        model, shape = programs.model, programs.shape
        self._budget: Budget = cache.budget_of(model.block_length)
        itemsize = jnp.dtype(dtype).itemsize
        sharding = host_sharding(device)
        host = HostShape(
            layers=model.num_layers - shape.dense_layers,
            rows=shape.rows,
            kv_heads=model.num_kv_heads,
            row_tokens=shape.row_tokens,
            head_dim=model.head_dim,
            dtype=dtype,
        )
        staged = (model.num_kv_heads, shape.pool_tokens, model.head_dim)
        layers = shape.staging_layers(model, itemsize)
        slots = shape.staging_slots(model, itemsize)
        more = StagingRing.predicted_bytes(slots, layers, staged, dtype)
        self._pool = PinnedPool(host, sharding, host_bytes=cache.host_bytes, more_bytes=more)
        self._ring = StagingRing(slots, layers, staged, dtype, sharding)
        if device.platform == "gpu":
            measure_link(sharding, LINK_PROBE_BYTES)  # warns of a slow one
        group = column_group(cache.selection, model.num_heads, model.num_kv_heads)
        positions = query_positions(cache.selection_query, model.block_length)
        store = self._store_type(
            self._pool,
            cache.selection,
            columns=len(positions) * group,
            group=group,
            sinks=cache.sink_tokens,
        )
        self._lane = HostLane(store, self._ring, sharding)
        self._layers = layers
        self._recalls: list[tuple[Ask, Recall]] = []
        self._empty: list[Ask] = []  # nothing to fetch: a prefix that is all recent
        self._appends: list[Append] = []
        self._stays: set[tuple[int, int]] = set()

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned memory."""
        return self._pool.nbytes + self._ring.nbytes

    def set_trace(self, trace: Trace | None) -> None:
        """Tells a trace what the lane does."""
        self._lane.trace = trace

    def take_layer(self, row: int, epoch: int, at: int, k: jax.Array, v: jax.Array, n: int) -> None:
        """Sends a prompt's layer to the host."""
        size = _prompt_size(n, k.shape[2])
        cut = functools.partial(_cut, size=size)
        self._append(row, epoch, at, 0, cut(k), cut(v), n)

    @property
    def is_behind(self) -> bool:
        """True if more than two layers, or blocks, are under way to the host."""
        return sum(not job.is_done for job in self._appends) > LAYERS_UNDER_WAY

    def has_prompt(self, row: int) -> bool:
        """True if nothing of the prompt that was taken of a row is under way, or has failed."""
        own = [job for job in self._appends if job.row == row and job.start == 0]
        return all(job.is_done and job.error is None for job in own)

    def take_block(self, cache: SparseCache, row: int, epoch: int, index: int) -> None:
        """Sends a committed block to the host."""
        block = self._programs.read_block(cache, row, index)
        tokens = block.k.shape[2]
        self._append(row, epoch, 0, index * tokens, block.k, block.v, tokens)

    def _append(
        self, row: int, epoch: int, layer: int, start: int, k: jax.Array, v: jax.Array, n: int
    ) -> None:
        self._stays.add((row, epoch))
        self._appends.append(self._lane.append(row, epoch, layer, start, k, v, tokens=n))
        self.counts.bytes_kept += (k.nbytes + v.nbytes) * n // k.shape[2]

    def ask(
        self, cache: SparseCache, queries: Sequence[jax.Array], asks: Sequence[Ask]
    ) -> SparseCache:
        """Hands the queries to the lane, or what the device chooses with them."""
        columns = () if cache.index else self._programs.columns(queries)
        for slot, ask in enumerate(asks):
            numbers = (self._budget.candidates(ask.target), self._budget.wanted(ask.target))
            if not self._budget.counts(ask.target).pooled:
                self._empty.append(ask)
                continue
            self._stays.add((ask.row, ask.epoch))
            if cache.index:
                chosen = self._programs.choose(cache, queries, slot, ask.row, ask.target)
                job = self._lane.recall_positions(*ask, chosen, *numbers)
            else:
                job = self._lane.recall(*ask, columns[slot], *numbers)
            self._recalls.append((ask, job))
        return cache

    def poll(self, cache: SparseCache) -> tuple[SparseCache, list[FullPool], list[RowFailure]]:
        """Sends what has come to the device; the pools that are full, and what failed."""
        full, self._empty = [FullPool(ask, None) for ask in self._empty], []
        failures, left = [], []
        rows = self._programs.shape.rows
        for ask, job in self._recalls:
            for chunk in job.ready_chunks():
                k, v = chunk.send()
                pool_row = ask.target % 2 * rows + ask.row
                cache = self._programs.install(
                    cache, chunk.first_layer, chunk.count, pool_row, k, v
                )
            if job.error is not None:
                failures.append(RowFailure(ask.row, ask.epoch, job.error))
            elif job.is_taken:
                full.append(FullPool(ask, job.account))
                self._count(job)
            elif not job.is_cancelled:
                left.append((ask, job))
        self._recalls = left
        failed = [job for job in self._appends if job.error is not None]
        self._appends = [job for job in self._appends if not job.is_done]
        failures += [RowFailure(job.row, job.epoch, job.error) for job in failed if job.error]
        return cache, full, failures

    def _count(self, job: Recall) -> None:
        counts, notes = self.counts, job.notes
        counts.recalls += 1
        counts.bytes_scanned += notes.bytes_scanned
        counts.bytes_gathered += notes.bytes_gathered
        counts.bytes_sent += job.bytes_sent
        counts.entries += notes.entries
        counts.hits += notes.hits

    @property
    def is_filling(self) -> bool:
        """True if entries are to come."""
        return bool(self._recalls)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the lane."""
        if self._empty:
            return True
        jobs = self._jobs()
        if not jobs:
            raise RuntimeError("a row waits for a pool that nobody asked for")
        return self._lane.wait(jobs, timeout)

    def _jobs(self) -> list[Job]:
        return [*(job for _, job in self._recalls), *self._appends]

    def settle(self, row: int) -> None:
        """Waits until everything of a row is on the host.

        Raises:
            LaneError: If something of it has failed.
        """
        for job in [job for job in self._appends if job.row == row]:
            job.wait()
            if job.error is not None:
                raise job.error

    def fetch(self, row: int, at: int) -> tuple[jax.Array, jax.Array]:
        """A layer of a row that has settled, on its way to the device."""
        k, v = self._pool.view(at, row)
        # Copies: on a CPU the array would else be the pool's own memory.
        return jnp.array(k[None], copy=True), jnp.array(v[None], copy=True)

    def cancel(self, row: int, epoch: int) -> None:
        """Drops what a stay asked for, and what of it is under way."""
        self._lane.cancel(row, epoch)
        self._stays.discard((row, epoch))
        gone = (row, epoch)
        self._recalls = [one for one in self._recalls if (one[0].row, one[0].epoch) != gone]
        self._appends = [job for job in self._appends if (job.row, job.epoch) != gone]
        self._empty = [ask for ask in self._empty if (ask.row, ask.epoch) != gone]

    def warmup(self, cache: SparseCache, queries: Sequence[Sequence[Any]]) -> SparseCache:
        """Compiles what recalls and appends need."""
        self._warm_queries(cache, queries)
        example = cache.selected[0].k
        total = len(cache.selected)
        for count in {min(self._layers, total), total % self._layers or self._layers}:
            zeros = jnp.zeros((self._layers, *example.shape[1:]), example.dtype)
            cache = self._programs.install(cache, 0, count, 0, zeros, zeros)
        self._programs.read_block(cache, 0, 0)
        capacity = self._programs.shape.row_tokens
        prompt = jnp.zeros((1, example.shape[1], capacity, example.shape[3]), example.dtype)
        for tokens in range(1, capacity + 1, PROMPT_STEP):
            _cut(prompt, _prompt_size(tokens, capacity))
        return cache

    def _warm_queries(self, cache: SparseCache, queries: Sequence[Sequence[Any]]) -> None:
        for shapes in queries:
            zeros = [jnp.zeros(one.shape, one.dtype) for one in shapes]
            if cache.index:
                self._programs.choose(cache, zeros, 0, 0, 0)
            else:
                self._programs.columns(zeros)

    def reset(self) -> None:
        """Drops everything."""
        for row, epoch in list(self._stays):
            self.cancel(row, epoch)

    def close(self) -> None:
        """Ends the lane's thread."""
        self._lane.close()


@functools.partial(jax.jit, static_argnames="size")
def _cut(array: jax.Array, size: int) -> jax.Array:
    return array[:, :, :size]


def _prompt_size(tokens: int, capacity: int) -> int:
    size = PROMPT_STEP
    while size < tokens:
        size *= 2
    return min(size, capacity)
