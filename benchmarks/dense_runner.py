"""The engine's dense runner over pages of random numbers, and what its benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bounds import Ceilings
from benchmarks.record import RESULTS
from benchmarks.timing import measured_bandwidth, measured_matmul_rate
from herald_jax.configs import ModelConfig
from herald_jax.decoding.slots import DecodeSlots, RowStarts, SlotOutput
from herald_jax.engine.config import PAGE_TOKENS
from herald_jax.engine.plan import DecodeSlot, StepPlan
from herald_jax.engine.slot_arrays import GREEDY, RowSampling
from herald_jax.engine.slot_runner import SlotRunner
from herald_jax.models.decoder import Params
from herald_jax.sampling import SamplingParams

MEMORY_FRACTION = "0.92"
"""Of the device, for JAX: 512 thousand tokens of SDAR-8B are 77 GB beside 16 GB of weights."""


class FilledRunner(SlotRunner):
    """A runner whose pages hold random numbers, with tables to match any of its cases."""

    def fill(self) -> None:
        """Puts random numbers into the pages."""
        noise = jax.jit(lambda key, x: jax.random.normal(key, x.shape, x.dtype), donate_argnums=1)
        leaves, tree = jax.tree.flatten(self._cache)
        self._cache = None
        keys = jax.random.split(jax.random.key(1), len(leaves))
        for at, key in enumerate(keys):
            leaves[at] = noise(key, leaves[at])
        self._cache = jax.tree.unflatten(tree, leaves)

    def take(self, program: Any, rows: int) -> None:
        """Makes a greedy step of so many rows, compiled elsewhere, one of this runner's."""
        self._programs[rows, 0, GREEDY] = program

    def _run(self, plan: StepPlan | None, prefill: Sequence[Any]) -> SlotOutput:
        if plan is None:  # nothing but prompt blocks, which count as written
            return ()  # type: ignore[return-value]
        return super()._run(plan, ())

    def caller(self, program: Any, rows: int, context: int) -> Callable[[], Any]:
        """Runs a step in which `rows` rows begin a block behind `context` tokens."""
        block, page_tokens = self.config.block_length, self._pool[1]
        pages = -(-(context + block) // page_tokens)
        self._tables[:rows, :pages] = np.arange(rows * pages).reshape(rows, pages)
        tables = jnp.array(self._tables, copy=True)
        slots = []
        for row in range(rows):
            self._arrays.set_row(row, RowSampling(SamplingParams(), row))
            slots.append(DecodeSlot(row=row, epoch=0, block_limit=1 << 20, end_block=1 << 20))
        options, _, stops = self._arrays.options(slots, rows)
        numbers = np.arange(self.max_rows)
        shape = (self.max_rows, block)
        starts = RowStarts(
            numbers < rows,  # type: ignore[arg-type]
            np.full(self.max_rows, context // block, np.int32),  # type: ignore[arg-type]
            np.zeros(shape, np.int32),  # type: ignore[arg-type]
            np.ones(shape, bool),  # type: ignore[arg-type]
        )
        rows_of_slots = np.arange(rows, dtype=np.int32)
        limits = np.full(rows, 1 << 20, np.int32)
        decode = DecodeSlots(rows_of_slots, limits, stops)  # type: ignore[arg-type]
        fixed = jax.device_put((tables, starts, decode, self._prefill(()), options))

        def call() -> Any:
            self._cache, self._states, output = program(
                self.params, self._cache, self._states, *fixed
            )
            return output

        return call


def make_runner(
    config: ModelConfig, params: Params, cases: Sequence[tuple[int, int]]
) -> FilledRunner:
    """A runner with room for each of the cases, its pages filled."""
    page_tokens = -(-PAGE_TOKENS // config.block_length) * config.block_length
    needs = [(rows, -(-(context + config.block_length) // page_tokens)) for rows, context in cases]
    runner = FilledRunner(
        config,
        params,
        max_rows=max(rows for rows, _ in needs),
        num_pages=max(rows * pages for rows, pages in needs),
        page_tokens=page_tokens,
        table_pages=max(pages for _, pages in needs),
        prefill_slots=1,
    )
    runner.fill()
    return runner


def measured_ceilings(arguments: argparse.Namespace) -> Ceilings:
    """The device's copy and matmul rates, which are printed as well."""
    bandwidth = measured_bandwidth(arguments.copy_gigabytes)
    ceilings = Ceilings(bandwidth, measured_matmul_rate(arguments.matmul_size))
    print(
        f"copy {ceilings.bytes_per_second / 1e12:.2f} TB/s, "
        f"matmul {ceilings.flops_per_second / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return ceilings


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of all benchmarks of a dense engine."""
    parser.add_argument("--copy-gigabytes", type=float, default=2.0)
    parser.add_argument("--matmul-size", type=int, default=8192)
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
