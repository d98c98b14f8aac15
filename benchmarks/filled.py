"""Engines whose rows begin behind a prompt of random keys and values, which nobody prefills.

The engine's own scheduler, step programs, retrieval and host lane run; two things are replaced.
A row that begins finds pages, pools, ring and store full of random numbers, in place of what a
prefill would leave, and goes on as a row without lookahead does: with step 0 still to run. And
the pool in host memory is ordinary memory, of which several rows may share a part: pinning as
much as 25 rows of SDAR-8B need takes minutes. The scan reads it as it would read pinned memory
(the copies to the device leave from the staging ring, which is pinned), and a part is so large
that no cache holds it. All rows begin in the same step.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.cache.host import HostShape, PinnedPool
from herald_jax.decoding.slots import SlotOutput
from herald_jax.engine import host_retrieval, llm_engine, slot_runner, sparse_runner
from herald_jax.engine.lane import Job
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.plan import BlockStart, DecodeSlot, PrefillSlot, StepPlan
from herald_jax.engine.protocols import RunnerLike
from herald_jax.engine.scheduler import Scheduler
from herald_jax.engine.slot_arrays import GREEDY, RowSampling
from herald_jax.engine.slot_runner import PendingStep, SlotRunner
from herald_jax.engine.sparse_runner import SparseRunner
from herald_jax.engine.stays import Stay
from herald_jax.retrieval import recall
from herald_jax.retrieval.recall import HostStore, RecallNotes

SOURCE_NUMBERS = (1 << 24) + 41
"""Random numbers that are repeated; no multiple of a head's size."""


def one_bucket(rows: int, limit: int) -> int:
    """In place of `slot_arrays.row_bucket`: one size of step, so that a benchmark compiles little.

    Rows begin together and look ahead together, as long as their retrievals are in time.
    """
    return limit


def compile_together(compiles: Sequence[Callable[[], Any]]) -> None:
    """Compiles programs in threads, and those that will not be in turn."""

    def attempt(compile_one: Callable[[], Any]) -> bool:
        try:
            compile_one()
        except Exception:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(len(compiles)) as threads:
        done = list(threads.map(attempt, compiles))
    for compile_one, is_done in zip(compiles, done, strict=True):
        if not is_done:
            compile_one()


class Arena:
    """Ordinary memory with random keys and values, kept from one engine to the next."""

    def __init__(self) -> None:
        self._words = np.empty(0, np.uint16)

    def words(self, nbytes: int) -> np.ndarray:
        """So many bytes of random bfloat16 numbers."""
        count = -(-nbytes // 2)
        if self._words.size < count:
            self._words = np.empty(0, np.uint16)
            self._words = np.empty(count, np.uint16)
            self._fill()
        return self._words[:count]

    def _fill(self) -> None:
        normal = np.random.default_rng(0).normal(size=min(SOURCE_NUMBERS, self._words.size))
        source = normal.astype(np.float32).astype(jnp.bfloat16).view(np.uint16)

        def copy(start: int) -> None:
            part = self._words[start : start + source.size]
            part[:] = source[: part.size]

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(copy, range(0, self._words.size, source.size)))


class SharedPool(PinnedPool):
    """A host pool in an arena, of which rows share parts; `nbytes` is what all would take."""

    def __init__(
        self, arena: Arena, arena_bytes: int, shape: HostShape, sharding: Any, **_: Any
    ) -> None:
        itemsize = np.dtype(shape.dtype).itemsize
        row_bytes = shape.nbytes // shape.rows
        self.parts = min(max(arena_bytes // row_bytes, 1), shape.rows)
        self.shape = dataclasses.replace(shape, rows=self.parts)
        self._all_bytes = shape.nbytes
        words = arena.words(self.parts * row_bytes)
        # Two bfloat16 numbers in a row are a float32 number near the second.
        size = math.prod(self.shape.layer_shape) * itemsize // 2
        arrays = [
            words[at * size : (at + 1) * size].view(shape.dtype).reshape(self.shape.layer_shape)
            for at in range(2 * shape.layers)
        ]
        self._k, self._v = arrays[0::2], arrays[1::2]
        self._k_arrays = self._v_arrays = []

    @property
    def nbytes(self) -> int:
        """Bytes of a pool of all rows."""
        return self._all_bytes

    def write(self, layer: int, row: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Writes to the row's part."""
        super().write(layer, row % self.parts, start, k, v)

    def view(self, layer: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the row's part."""
        return super().view(layer, row % self.parts)


class FilledStore(HostStore):
    """A store that takes its rows as they are."""

    def adopt(self, row: int, epoch: int, tokens: int) -> None:
        """Lets a stay own the first tokens of its row."""
        layers, module = self.shape.layers, cast(Any, recall)
        self._stays[row] = module._Stay(epoch, [tokens] * layers, [None] * layers)


class Adopt(Job):
    """A stay's turn to own its row, behind what the lane still does for the one before."""

    tokens = 0

    def run(self, store: FilledStore) -> None:
        """Hands the row over."""
        store.adopt(self.row, self.epoch, self.tokens)


@functools.partial(jax.jit, donate_argnums=1)
def _noise(key: jax.Array, array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jax.random.randint(key, array.shape, -127, 128, array.dtype)
    return jax.random.normal(key, array.shape, array.dtype)


def filled(tree: Any, seed: int) -> Any:
    """A tree of arrays of the same shapes with random numbers; the old ones are donated."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    del tree
    for at, leaf in enumerate(leaves):
        if leaf.size:
            leaves[at] = _noise(keys[at], leaf)
    return jax.tree.unflatten(structure, leaves)


class FilledSlotRunner(SlotRunner):
    """The dense runner; prompt blocks are taken for written."""

    def fill(self) -> None:
        """Fills the pages."""
        self._cache = filled(self._cache, 1)

    def warm(self) -> None:
        """Compiles the one step that is run."""
        self._program(self.max_rows, 0, GREEDY)

    def dispatch(self, plan: StepPlan, options: dict[int, RowSampling]) -> list[PendingStep]:
        """Sends a plan without its prompt blocks."""
        if not plan.decode:
            raise RuntimeError("a plan has prompt blocks only: raise the step's tokens")
        return super().dispatch(dataclasses.replace(plan, prefill=()), options)


class FilledSparseRunner(SparseRunner):
    """The sparse runner; prompts are taken for written, and the first pool for selected.

    Attributes:
        is_serial: True to let every lookahead's pools be filled before the next step.
        notes: What the host's recalls took so far.
    """

    is_serial = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.notes = RecallNotes()
        retrieval: Any = self.retrieval
        if not self._shape.has_device_store:
            count = retrieval._count

            def note(job: Any) -> None:
                count(job)
                self.notes.add(job.notes)

            retrieval._count = note

    def fill(self) -> None:
        """Fills pages, pools, ring and store."""
        self._cache = filled(self._cache, 1)

    def warm(self) -> None:
        """Compiles the steps that are run."""
        size, looks = self.max_rows, self._settings.lookahead
        decode = self._decode_slots((), [], size)
        options = self._arrays.gather((), size)[0]
        state = self._arguments(self._arrays.no_starts, decode)
        widths = [0, size] if looks else [0]
        step = functools.partial(self.programs.step, GREEDY, *state)
        compiles = [
            functools.partial(step, np.full(width, size, np.int32), options) for width in widths
        ]
        if not looks and self._shape.has_device_store:
            ints = np.zeros(size, np.int32)
            compiles.append(
                functools.partial(self.programs.exact, GREEDY, *state, options, ints, ints)
            )
        compile_together(compiles)
        del step, compiles, state  # they hold the cache, which the warm-up donates
        if looks:
            self._cache = self.retrieval.warmup(self._cache, self._queries([size]))

    def _collect(self, prefill: Sequence[PrefillSlot]) -> None:
        """Nothing: the prompt is there."""

    def _begin(self, start: BlockStart, sampling: RowSampling) -> bool:
        row, epoch = start.row, start.epoch
        self._arrays.set_row(row, sampling)
        ready = start.index if self._settings.lookahead else start.index - 1
        self._stays[row] = Stay(epoch=epoch, block=start.index, ready=ready)
        if not self._shape.has_device_store:
            lane = cast(Any, self.retrieval)._lane
            job = Adopt(lane, row, epoch)
            job.tokens = start.index * self.config.block_length
            lane.submit(job)
        return False

    def _run(
        self, decode: Sequence[DecodeSlot], limits: Sequence[int], starts: Sequence[BlockStart]
    ) -> SlotOutput:
        output = super()._run(decode, limits, starts)
        while self.is_serial and any(
            stay.has_looked and stay.ready <= stay.block for stay in self._stays.values()
        ):
            self.retrieval.wait()
            self._poll()
        return output


class FilledEngine(LLMEngine):
    """An engine of these runners; make it and use it within `filled_engines`."""

    runner: Any

    def _make_scheduler(self) -> Scheduler:
        # All prompts fit one plan, so that all rows begin together.
        slots = self.sizes.max_rows * -(-self.sizes.max_model_len // self.config.block_length)
        self.sizes = dataclasses.replace(self.sizes, prefill_slots=slots)
        return super()._make_scheduler()

    def _make_runner(self) -> RunnerLike:
        runner: Any = super()._make_runner()
        runner.fill()
        runner.warm()
        return runner


@contextlib.contextmanager
def filled_engines(arena: Arena, arena_bytes: int) -> Iterator[None]:
    """Puts the parts of a filled engine in the engine's place."""
    changes: list[tuple[Any, str, Any]] = [
        (llm_engine, "SlotRunner", FilledSlotRunner),
        (llm_engine, "SparseRunner", FilledSparseRunner),
        (llm_engine, "pinnable_bytes", lambda *_, **__: 1 << 62),
        (host_retrieval, "PinnedPool", functools.partial(SharedPool, arena, arena_bytes)),
        (host_retrieval.HostRetrieval, "_store_type", FilledStore),
        (slot_runner, "row_bucket", one_bucket),
        (sparse_runner, "row_bucket", one_bucket),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
