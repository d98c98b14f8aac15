"""Runs step plans over a sparse cache: prefill by layers, steps, lookahead, pools.

Ownership: this object owns the device's cache and the rows' states. Every program that writes
takes them by donation, in the order of its dispatch, and its results replace them. A retrieval
may fill a pool only between steps and only of the parity that the row's running block does not
read, and the row may run a block only once its pool is full: a retrieval that is late makes
the row wait, and one that fails ends it.

A row's prompt is collected from the plans and goes through the layers when the row begins. The
steps of other rows stand still meanwhile, for as long as that one prompt takes. Its sparse layers
take over the leading chunks that another row's prompt has left in the store (`kept_prompts`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.cache.budget import BlockAccount
from herald_jax.cache.shape import SparseShape
from herald_jax.cache.sparse import SparseCache
from herald_jax.cache_config import CacheConfig
from herald_jax.configs import ModelConfig
from herald_jax.decoding.layer_prefill import KnownKeys
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rows import DecodeSlots, RowStarts, RowStates, SlotOutput
from herald_jax.engine.host_retrieval import HostRetrieval
from herald_jax.engine.kept import KeptOnDevice
from herald_jax.engine.kept_prompts import KeptPrompts
from herald_jax.engine.lane import LaneError
from herald_jax.engine.layerwise_retrieval import LayerwiseRetrieval, WalkStart
from herald_jax.engine.plan import BlockStart, DecodeSlot, PrefillSlot, StepPlan
from herald_jax.engine.retrievals import Ask, DeviceRetrieval, Retrieval, RowFailure
from herald_jax.engine.slot_arrays import (
    FILTERED,
    GREEDY,
    SAMPLED,
    RowSampling,
    SlotArrays,
    row_bucket,
)
from herald_jax.engine.slot_runner import CommittedBlock, PendingStep
from herald_jax.engine.sparse_compiled import SparsePrograms
from herald_jax.engine.stays import Stay
from herald_jax.engine.streamed_step import streamed_step
from herald_jax.models.attention import FreshKV
from herald_jax.models.decoder import Params

SERVE_SECONDS = 0.0005
"""Between two looks at a step that still runs, while entries are to come."""


class SparsePendingStep:
    """A step that was dispatched; reading it tells the runner what was committed.

    Until the step has ended, what comes for the pools is sent on. A copy is issued as soon as it
    can be, and not once a step: many rows' entries would wait in the staging buffers for it.
    """

    def __init__(
        self,
        slots: Sequence[DecodeSlot],
        output: SlotOutput,
        serve: Callable[[], bool],
        on_read: Callable[[list[CommittedBlock]], list[CommittedBlock | RowFailure]],
    ) -> None:
        self._step = PendingStep(slots, output)
        self._output, self._serve, self._on_read = output, serve, on_read

    def read(self) -> list[CommittedBlock | RowFailure]:
        """The blocks that the step committed, and the rows that have failed; waits for it."""
        outputs = jax.tree.leaves(self._output)
        while not all(output.is_ready() for output in outputs) and self._serve():
            pass
        return self._on_read(self._step.read())


class SparseRunner:
    """The device side of the engine with a sparse cache.

    Args:
        config: The model.
        params: Its parameters, on the device.
        cache: What is selected, from where, and when.
        shape: Sizes of the device's cache.
        share_prefixes: True if a prompt may take over keys and values of an equal beginning.

    Attributes:
        programs: The compiled programs.
        retrieval: What fills the pools.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        cache: CacheConfig,
        shape: SparseShape,
        share_prefixes: bool = False,
    ) -> None:
        self.config, self._params = config, params
        self._settings, self._shape = cache, shape
        self.max_rows = shape.rows
        self._budget = cache.budget_of(config.block_length)
        self.programs = SparsePrograms(config, cache, shape)
        self._arrays = SlotArrays(config, shape.rows)
        self._shares = share_prefixes
        self._kept = KeptPrompts(self.programs.prefill.chunk_tokens)
        self._small = KeptOnDevice()
        self._reused_tokens = 0
        self.retrieval: Retrieval
        if shape.has_device_store:
            self.retrieval = DeviceRetrieval(self.programs, shape.rows)
        else:
            embedding = params["embed_tokens"]["embedding"]
            device = next(iter(embedding.devices()))
            is_layerwise = self.programs.lookahead.is_on_host
            kind = LayerwiseRetrieval if is_layerwise else HostRetrieval
            self.retrieval = kind(self.programs, cache, embedding.dtype, device)
            # Its thread would keep it, and the pinned memory, as long as the process lives.
            weakref.finalize(self, self.retrieval.close)
        self._tables = np.zeros((shape.rows, shape.row_tokens // shape.page_tokens), np.int32)
        self.reset()

    @property
    def params(self) -> Params:
        """Parameters of the next step; others of the same shapes may be put in their place."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        self._params = params
        self._kept.clear()  # keys of other parameters

    def reset(self) -> None:
        """Makes the device's state anew: an empty cache, and no row that has begun."""
        self.retrieval.reset()
        self._kept.clear()
        dtype = self.params["embed_tokens"]["embedding"].dtype
        self._cache: Any = None  # the old one goes first: there may be no room for two
        self._cache = SparseCache.zeros(self.config, self._shape, dtype)
        self._states = RowStates.empty(self.max_rows, self.config.block_length, has_draft=True)
        self._device_tables = jnp.array(self._tables, copy=True)
        self._arrays.reset()
        self._stays: dict[int, Stay] = {}
        self._prompts: dict[int, tuple[int, list[int]]] = {}
        self._failures: list[RowFailure] = []
        self._number = 0

    def close(self) -> None:
        """Ends the retrieval's threads."""
        self.retrieval.close()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the device's cache."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache))

    def stats(self) -> dict[str, float]:
        """What retrievals cost so far, and what prompts took over."""
        counts = dataclasses.asdict(self.retrieval.counts)
        own: dict[str, float] = {f"retrieval_{name}": value for name, value in counts.items()}
        return own | {"kept_prompt_tokens": self._reused_tokens}

    def dispatch(
        self, plan: StepPlan, options: dict[int, RowSampling]
    ) -> Sequence[SparsePendingStep]:
        """Sends a plan to the device; it waits only where no row has its pool.

        Args:
            plan: The next plan.
            options: Options of the rows that the plan starts.

        Returns:
            The step that decodes; none if the plan only prefills.
        """
        self._number += 1
        for table in plan.tables:
            self._tables[table.row, : len(table.pages)] = table.pages
        if plan.tables:
            self._device_tables = jnp.array(self._tables, copy=True)
        self._drop_stays(plan)
        self._collect(plan.prefill)
        starts = [start for start in plan.starts if not self._begin(start, options[start.row])]
        if not plan.decode:
            return []
        self._poll()
        if self._settings.lookahead:
            self._wait_for_a_pool(plan.decode)
        else:
            self._run_exact(plan.decode, starts)
            starts = []
        limits = [self._limit(slot) for slot in plan.decode]
        output = self._run(plan.decode, limits, starts)
        read = functools.partial(self._on_read, self._number)
        return [SparsePendingStep(plan.decode, output, self._serve, read)]

    @property
    def compile_seconds(self) -> float:
        """Time that programs took to compile so far."""
        return self.programs.compile_seconds

    def warmup(self, specs: Sequence[ProposalSpec] = (GREEDY, SAMPLED, FILTERED)) -> None:
        """Compiles, ahead of time, all programs that steps with these facts can need."""
        self.programs.warm_prompts(self.params, self._cache, self._tables[0])
        sizes = sorted({row_bucket(n, self.max_rows) for n in range(1, self.max_rows + 1)})
        looks = self._settings.lookahead
        for spec in specs:
            for size in sizes:
                decode = self._decode_slots((), [], size)
                options = self._arrays.gather((), size)[0]
                state = self._arguments(self._arrays.no_starts, decode)
                for width in [0, *(n for n in sizes if n <= size)] if looks else [0]:
                    ahead = np.full(width, self.max_rows, np.int32)
                    self.programs.step(spec, *state, ahead, options)
                if not looks and self._shape.has_device_store:
                    ints = np.zeros(size, np.int32)
                    self.programs.exact(spec, *state, options, ints, ints)
            alone = self._arrays.gather((), 1)[0]
            self.programs.warm_first_step(
                spec, self._states, self.params, self._arrays.no_starts, alone
            )
        if self.programs.lookahead.is_on_host:
            self.programs.warm_walks(self._cache, self.params, self._tables[0], sizes)
        if looks or not self._shape.has_device_store:
            self._cache = self.retrieval.warmup(self._cache, self._queries(sizes))

    def _drop_stays(self, plan: StepPlan) -> None:
        here = {slot.row: slot.epoch for slot in plan.decode}
        for row, stay in list(self._stays.items()):
            if here.get(row) != stay.epoch:
                if not self.retrieval.has_prompt(row):
                    self._kept.drop(row, stay.epoch)
                self.retrieval.cancel(row, stay.epoch)
                del self._stays[row]

    def _collect(self, prefill: Sequence[PrefillSlot]) -> None:
        for slot in prefill:
            epoch, tokens = self._prompts.get(slot.row, (slot.epoch, []))
            if epoch != slot.epoch:
                tokens = []
            if len(tokens) != slot.index * self.config.block_length:
                raise RuntimeError(f"row {slot.row} lacks the blocks before block {slot.index}")
            self._prompts[slot.row] = (slot.epoch, [*tokens, *slot.token_ids])

    def _begin(self, start: BlockStart, sampling: RowSampling) -> bool:
        """Prefills a row's prompt and fills its first pool; True if step 0 is done as well.

        The first block walks through the layers with the prompt and sees all of it, which is
        its step 0 (HERALD 2.3). Without lookahead, or without a prompt, that step is still due.
        """
        row, epoch = start.row, start.epoch
        self._arrays.set_row(row, sampling)
        known, tokens = self._prompts.pop(row, (epoch, []))
        if known != epoch or len(tokens) != start.index * self.config.block_length:
            raise RuntimeError(f"row {row} begins block {start.index} without its prompt")
        looks = self._settings.lookahead
        tail = np.asarray(start.tail, np.int32) if looks else None
        prompt, dense = np.asarray(tokens, np.int32), self._shape.dense_layers
        hidden, shared = None, self._known_keys(prompt)
        self._kept.drop(row)
        for layer, k, v, q, last in self.programs.prompt_layers(self.params, prompt, tail, shared):
            hidden = last
            if layer < dense:
                self._cache = self.programs.place_pages(
                    self._cache, layer, self._tables[row], len(tokens), k, v
                )
            else:
                at = layer - dense
                self._cache = self.programs.place_prompt(
                    self._cache, at, row, start.index, len(start.tail), q, k, v
                )
                self.retrieval.take_layer(row, epoch, at, k, v, len(tokens))
            del k, v, q
            # Other rows' entries are taken meanwhile: the lane may need the room they hold.
            while self.retrieval.is_behind:
                self.retrieval.wait()
                self._poll()
        has_failed = any((one.row, one.epoch) == (row, epoch) for one in self._failures)
        if self._shares and not has_failed:
            self._kept.put(row, epoch, prompt)
        # Without lookahead nothing is ready before the row's exact step.
        ready = start.index if looks else start.index - 1
        stay = Stay(epoch=epoch, block=start.index, ready=ready, tail=start.tail)
        self._stays[row] = stay
        if hidden is None:
            return False
        options, spec, _ = self._arrays.gather([start], 1)
        begins = self._arrays.starts([start])
        self._states = self.programs.first_step(
            spec, self._states, self.params, begins, row, hidden, options
        )
        stay.began = self._number - 1  # this step is the block's second
        return True

    def _known_keys(self, prompt: np.ndarray) -> KnownKeys | None:
        """The beginning of a prompt that some row still holds in its sparse layers.

        The dense layers run whole: their pages may be others' by now, and they are few.
        """
        while (found := self._kept.match(prompt)) is not None:
            if self.retrieval.has_prompt(found.row):
                break
            # Other rows' entries are taken meanwhile: the lane may need the room they hold.
            self.retrieval.wait()
            self._poll()
        if found is None:
            return None
        self._reused_tokens += found.tokens
        dense = self._shape.dense_layers

        def fetch(layer: int) -> tuple[jax.Array, jax.Array]:
            if self._shape.has_device_store:
                return self.programs.read_store(self._cache, layer - dense, found.row)
            return self.retrieval.fetch(found.row, layer - dense)

        return KnownKeys(found.tokens, dense, fetch)

    def _poll(self) -> None:
        self._cache, full, failures = self.retrieval.poll(self._cache)
        for (row, epoch, target), recall in full:
            stay = self._stays.get(row)
            if stay is not None and stay.epoch == epoch:
                stay.fill(target, recall)
        self._failures += failures
        for failure in failures:
            self._kept.drop(failure.row, failure.epoch)

    def _serve(self) -> bool:
        """Takes what comes for the pools, if anything is to; for a moment at most."""
        if not self.retrieval.is_filling:
            return False
        if self.retrieval.wait(SERVE_SECONDS):
            self._poll()
        return True

    def _wait_for_a_pool(self, decode: Sequence[DecodeSlot]) -> None:
        """Waits where no row could do anything in this step."""
        while not self._failures and not any(self._can_run(slot.row) for slot in decode):
            begin = time.perf_counter()
            self.retrieval.wait()
            self._poll()
            self.retrieval.counts.waits += 1
            self.retrieval.counts.wait_seconds += time.perf_counter() - begin

    def _can_run(self, row: int) -> bool:
        stay = self._stays[row]
        # A block that has begun may not be done yet, as far as the host can tell.
        return stay.ready >= stay.block

    def _limit(self, slot: DecodeSlot) -> int:
        return min(slot.block_limit, self._stays[slot.row].allow(self._number))

    def _run(
        self, decode: Sequence[DecodeSlot], limits: Sequence[int], starts: Sequence[BlockStart]
    ) -> SlotOutput:
        size = row_bucket(len(decode), self.max_rows)
        options, spec, _ = self._arrays.options(decode, size)
        asks = [ask for slot in decode if (ask := self._ask(slot)) is not None]
        width = min(row_bucket(len(asks), self.max_rows), size) if asks else 0
        ahead = np.full(width, self.max_rows, np.int32)
        ahead[: len(asks)] = [ask.row for ask in asks]
        on_device = self._small
        slots = on_device("decode slots", self._decode_slots(decode, limits, size))
        begins = on_device("no starts", self._arrays.no_starts)
        if starts:
            begins = self._arrays.starts(starts)
        args = (*self._arguments(begins, slots), ahead, on_device("options", options))
        self._cache, self._states, output, queries = self.programs.step(spec, *args)(*args)
        if asks:
            if self.programs.lookahead.is_on_host:
                queries = [self._walk(queries, at, ask) for at, ask in enumerate(asks)]
            self._cache = self.retrieval.ask(self._cache, queries, asks)
        return output

    def _walk(self, drafts: Sequence[FreshKV], slot: int, ask: Ask) -> WalkStart:
        """Masks on their way to the host's layers, behind the step that made the drafts."""
        table, blocks = self._tables[ask.row].copy(), ask.target - 1
        begin = (self._cache, self.params, table, blocks, drafts, slot)
        return WalkStart(*self.programs.begin_walk(*begin), self.params)

    def _ask(self, slot: DecodeSlot) -> Ask | None:
        """The row's lookahead, if this step is to have it."""
        stay = self._stays[slot.row]
        is_last = stay.block + 1 >= slot.end_block
        looks = self._settings.lookahead and stay.looks_ahead(self._number)
        if is_last or not looks:
            return None
        stay.has_looked = True
        return Ask(slot.row, slot.epoch, stay.block + 1)

    def _run_exact(self, slots: Sequence[DecodeSlot], starts: Sequence[BlockStart]) -> None:
        """Step 0 of the rows that begin a block, over their whole prefix."""
        failed = {(failure.row, failure.epoch) for failure in self._failures}
        decode = [
            slot
            for slot in slots
            if self._stays[slot.row].ready < self._stays[slot.row].block
            and (slot.row, slot.epoch) not in failed
        ]
        if decode and self._shape.has_device_store:
            self._run_exact_rows(decode, self._arrays.starts(starts))
            return
        for slot in decode:
            own = [start for start in starts if start.row == slot.row]
            self._run_exact_row(slot, self._arrays.starts(own))

    def _run_exact_rows(self, decode: Sequence[DecodeSlot], begins: RowStarts) -> None:
        """All of them in one program, over the store on the device."""
        size = row_bucket(len(decode), self.max_rows)
        options, spec, _ = self._arrays.gather(decode, size)
        targets, first = np.zeros(size, np.int32), np.zeros(size, np.int32)
        for at, slot in enumerate(decode):
            stay = self._stays[slot.row]
            targets[at], first[at] = stay.block, len(stay.tail)
            stay.ready = stay.block
        slots = self._decode_slots(decode, [slot.block_limit for slot in decode], size)
        args = (*self._arguments(begins, slots), options, targets, first)
        self._cache, self._states = self.programs.exact(spec, *args)(*args)

    def _run_exact_row(self, slot: DecodeSlot, begins: RowStarts) -> None:
        """One of them, over a store that comes from the host layer by layer."""
        stay = self._stays[slot.row]
        options, spec, _ = self._arrays.gather([slot], 1)
        try:
            self.retrieval.settle(slot.row)
        except LaneError as error:
            self._failures.append(RowFailure(slot.row, slot.epoch, error))
            return
        self._cache, self._states = streamed_step(
            self.programs,
            self._cache,
            self._states,
            self.params,
            row=slot.row,
            index=stay.block,
            tail=stay.tail,
            table=self._tables[slot.row],
            starts=begins,
            fetch=functools.partial(self.retrieval.fetch, slot.row),
            options=options,
            spec=spec,
        )
        stay.ready = stay.block

    def _arguments(self, starts: RowStarts, decode: DecodeSlots) -> tuple[Any, ...]:
        """What every step takes first."""
        states = (self._cache, self._states, self.params, self._device_tables)
        return (*states, starts, decode)

    def _queries(self, sizes: Sequence[int]) -> list[list[jax.ShapeDtypeStruct]]:
        """Shapes of the lookahead's queries, one list of layers for each size."""
        model = self.config
        block = (model.block_length, model.num_heads, model.head_dim)
        dtype = self._cache.selected[0].k.dtype
        layers = len(self._cache.selected)
        return [[jax.ShapeDtypeStruct((size, *block), dtype)] * layers for size in sizes]

    def _decode_slots(
        self, decode: Sequence[DecodeSlot], limits: Sequence[int], size: int
    ) -> DecodeSlots:
        rows, block_limits = np.full(size, self.max_rows, np.int32), np.zeros(size, np.int32)
        rows[: len(decode)] = [slot.row for slot in decode]
        block_limits[: len(decode)] = limits
        stops = self._arrays.stop_ids(decode, size)
        return DecodeSlots(rows, block_limits, stops)  # type: ignore[arg-type]

    def _on_read(
        self, number: int, blocks: list[CommittedBlock]
    ) -> list[CommittedBlock | RowFailure]:
        """The failures since the last read, and the blocks with their accounts.

        A failure comes first, so that no block of its row is taken after it.
        """
        results: list[CommittedBlock | RowFailure] = []
        for block in blocks:
            stay = self._stays.get(block.row)
            if stay is not None and stay.epoch == block.epoch:
                recall = stay.on_commit(block.index, number)
                account = BlockAccount(self._budget.counts(block.index), recall)
                new = block.block._replace(account=account)
                results.append(dataclasses.replace(block, block=new))
                self.retrieval.take_block(self._cache, block.row, block.epoch, block.index)
        failures, self._failures = self._failures, []
        return [*failures, *results]
