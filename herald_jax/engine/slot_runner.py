"""Runs step plans on the device: shapes, compiled programs and results in flight.

Ownership: this object owns the page pool and the rows' states. Each step takes both by
donation and its results replace them, so nobody else may hold them. Plans run in the order of
`dispatch`, which returns at once; `PendingStep.read` waits for that step's small results.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from herald_jax.cache.paged import PagedCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import decoding_options
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rules import RULES
from herald_jax.decoding.shifted_slots import run_shifted_slots
from herald_jax.decoding.slots import (
    DecodeSlots,
    PrefillSlots,
    RowStarts,
    RowStates,
    SlotOutput,
    run_slots,
)
from herald_jax.decoding.steps import DecodingOptions
from herald_jax.engine.kept import KeptOnDevice
from herald_jax.engine.plan import DecodeSlot, StepPlan
from herald_jax.engine.request import RowBlock
from herald_jax.engine.slot_arrays import (
    FILTERED,
    GREEDY,
    SAMPLED,
    STOP_ID_SLOTS,
    RowSampling,
    SlotArrays,
    row_bucket,
)
from herald_jax.models.decoder import Params, bind
from herald_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class CommittedBlock:
    """A block that a step committed, with the stay that it belongs to."""

    row: int
    epoch: int
    index: int
    block: RowBlock


class PendingStep:
    """A step that was dispatched; its results are on their way to the host."""

    def __init__(self, slots: Sequence[DecodeSlot], output: SlotOutput) -> None:
        """Starts the copies; a step without decode slots has nothing to copy."""
        self._slots, self._output = slots, output
        if slots:
            for leaf in jax.tree.leaves(output):
                leaf.copy_to_host_async()

    def read(self) -> list[CommittedBlock]:
        """The blocks that the step committed; waits for it."""
        if not self._slots:
            jax.block_until_ready(self._output)
            return []
        output = jax.tree.map(np.asarray, self._output)
        block = output.block
        return [
            CommittedBlock(
                row=slot.row,
                epoch=slot.epoch,
                index=int(block.index[at]),
                block=RowBlock(
                    token_ids=block.tokens[at],
                    is_generated=block.unmask_steps[at] >= 0,
                    unmask_steps=block.unmask_steps[at],
                    confidences=block.confidences[at],
                    logprobs=block.logprobs[at],
                    steps=int(block.steps[at]),
                ),
            )
            for at, slot in enumerate(self._slots)
            if output.is_committed[at]
        ]


def _step(
    params: Params,
    cache: PagedCache,
    states: RowStates,
    tables: Int[Any, "R W"],
    starts: RowStarts,
    decode: DecodeSlots,
    prefill: PrefillSlots,
    options: DecodingOptions,
    *,
    model: ModelConfig,
    spec: ProposalSpec,
) -> tuple[PagedCache, RowStates, SlotOutput]:
    decoder = bind(model, params)
    run = run_shifted_slots if model.shifts_predictions else run_slots
    return run(decoder, cache, states, tables, starts, decode, prefill, options, spec)


class SlotRunner:
    """The device side of the engine.

    Args:
        config: The model.
        params: Its parameters, on the device.
        max_rows: Rows that may decode at the same time.
        num_pages: Pages of the pool.
        page_tokens: Tokens of a page, a multiple of the block length.
        table_pages: Pages of the longest text.
        prefill_slots: Prompt blocks that one device step takes; a plan with more is run in
            several device steps.

    Attributes:
        params: Parameters of the next step; others of the same shapes may be put in their place.
        compile_seconds: Time that programs took to compile so far.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        max_rows: int,
        num_pages: int,
        page_tokens: int,
        table_pages: int,
        prefill_slots: int,
    ) -> None:
        self.config = config
        self.params = params
        self.max_rows = max_rows
        self.prefill_slots = prefill_slots
        self._pool = (num_pages, page_tokens)
        self._tables = np.zeros((max_rows, table_pages), np.int32)
        self._arrays = SlotArrays(config, max_rows)
        self._programs: dict[tuple[int, int, ProposalSpec], Callable[..., Any]] = {}
        self._kept = KeptOnDevice()
        self.compile_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        """Makes the device's state anew: an empty pool, and no row that has begun."""
        dtype = self.params["embed_tokens"]["embedding"].dtype
        self._cache: Any = None  # the old pool goes first: there may be no room for two
        self._cache = PagedCache.zeros(self.config, *self._pool, dtype)
        self._states = RowStates.empty(
            self.max_rows, self.config.block_length, has_ahead=self.config.shifts_predictions
        )
        self._device_tables = jnp.array(self._tables, copy=True)
        self._arrays.reset()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the page pool."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache))

    def stats(self) -> dict[str, float]:
        """Nothing: all of its pages are the scheduler's to count."""
        return {}

    def dispatch(self, plan: StepPlan, options: dict[int, RowSampling]) -> list[PendingStep]:
        """Sends a plan to the device without waiting for it.

        Args:
            plan: The next plan.
            options: Options of the rows that the plan starts.

        Returns:
            The device steps that the plan took, in their order; the last one decodes.
        """
        for start in plan.starts:
            self._arrays.set_row(start.row, options[start.row])
        for table in plan.tables:
            self._tables[table.row, : len(table.pages)] = table.pages
        if plan.tables:
            self._device_tables = jnp.array(self._tables, copy=True)
        prefill = list(plan.prefill)
        steps = []
        # The last device step takes the decode slots, whose rows may need what is prefilled.
        while len(prefill) > self.prefill_slots:
            steps.append(PendingStep((), self._run(None, prefill[: self.prefill_slots])))
            prefill = prefill[self.prefill_slots :]
        last = self._run(plan if plan.decode else None, prefill)
        return [*steps, PendingStep(plan.decode, last)]

    def warmup(self, specs: Sequence[ProposalSpec] = (GREEDY, SAMPLED, FILTERED)) -> None:
        """Compiles, ahead of time, all programs that steps with these facts can need."""
        sizes = {row_bucket(rows, self.max_rows) for rows in range(1, self.max_rows + 1)}
        for spec in specs:
            for decode_slots in sorted(sizes):
                for prefill_slots in (0, self.prefill_slots):
                    self._program(decode_slots, prefill_slots, spec)

    def _run(self, plan: StepPlan | None, prefill: Sequence[Any]) -> SlotOutput:
        decode: Sequence[DecodeSlot] = plan.decode if plan is not None else ()
        size = row_bucket(max(len(decode), 1), self.max_rows)
        rows = np.full(size, self.max_rows, np.int32)
        limits = np.zeros(size, np.int32)
        for at, slot in enumerate(decode):
            rows[at], limits[at] = slot.row, slot.block_limit
        options, spec, stops = self._arrays.options(decode, size)
        program = self._program(size, self.prefill_slots if prefill else 0, spec)
        starts = self._kept("no starts", self._arrays.no_starts)
        if plan is not None and plan.starts:
            starts = self._arrays.starts(plan.starts)
        slots = DecodeSlots(rows, limits, stops)  # type: ignore[arg-type]
        blocks = self._prefill(prefill)
        self._cache, self._states, output = program(
            self.params,
            self._cache,
            self._states,
            self._device_tables,
            starts,
            self._kept("decode slots", slots),
            blocks if prefill else self._kept("no prefill slots", blocks),
            self._kept("options", options),
        )
        return output

    def _prefill(self, prefill: Sequence[Any]) -> PrefillSlots:
        slots = self.prefill_slots if prefill else 0
        rows = np.full(slots, self.max_rows, np.int32)
        index = np.zeros(slots, np.int32)
        tokens = np.zeros((slots, self.config.block_length), np.int32)
        for at, slot in enumerate(prefill):
            rows[at], index[at], tokens[at] = slot.row, slot.index, slot.token_ids
        return PrefillSlots(rows, index, tokens)  # type: ignore[arg-type]

    def lower(self, decode: int, prefill: int, spec: ProposalSpec) -> jax.stages.Lowered:
        """The program of a step with so many decode and prefill slots, not compiled yet."""
        block = self.config.block_length
        sampling = [SamplingParams()] * decode

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        step = functools.partial(_step, model=self.config, spec=spec)
        return jax.jit(step, donate_argnums=(1, 2)).lower(
            self.params,
            self._cache,
            self._states,
            self._device_tables,
            self._arrays.no_starts,
            DecodeSlots(ints(decode), ints(decode), ints(decode, STOP_ID_SLOTS)),
            PrefillSlots(ints(prefill), ints(prefill), ints(prefill, block)),
            decoding_options(sampling, [0] * decode, self.config, tuple(RULES)),
        )

    def _program(self, decode: int, prefill: int, spec: ProposalSpec) -> Callable[..., Any]:
        key = (decode, prefill, spec)
        if key not in self._programs:
            begin = time.perf_counter()
            self._programs[key] = self.lower(*key).compile()
            self.compile_seconds += time.perf_counter() - begin
        return self._programs[key]
