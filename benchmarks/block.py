"""Whole dense blocks through the engine, with a recorded commit schedule, against its steps.

Every row replays another row of `schedule.json`, so rows commit and begin blocks at different
steps, as in service. Prompts are taken for written: pages are full of random numbers, and only
decoding is timed. The wall time of a step is that between two reads of the engine, from the
first block that a row commits until the first row has all of its blocks; it is compared with the
time that the same compiled program takes back to back, which no host can be faster than.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import schedule
from benchmarks.dense_runner import (
    MEMORY_FRACTION,
    FilledRunner,
    add_common_arguments,
    make_runner,
)
from benchmarks.record import current_commit, write_record
from benchmarks.shapes import MODELS
from benchmarks.timing import seconds_per_call
from benchmarks.torch_baseline import parsed
from herald_jax.configs import ModelConfig
from herald_jax.engine import slot_runner
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.request import Request, RowProgress
from herald_jax.engine.scheduler import Scheduler
from herald_jax.engine.slot_arrays import GREEDY
from herald_jax.models.decoder import random_params
from herald_jax.sampling import SamplingParams


class PromptlessEngine(LLMEngine):
    """An engine whose runner takes prompts for written, so that all rows begin together."""

    runner: Any

    def _make_scheduler(self) -> Scheduler:
        slots = self.sizes.max_rows * -(-self.sizes.max_model_len // self.config.block_length)
        self.sizes = dataclasses.replace(self.sizes, prefill_slots=slots)
        return super()._make_scheduler()


def _requests(config: ModelConfig, context: int, blocks: int) -> Request:
    return Request(
        prompt=None,
        prompt_token_ids=(config.vocab_size // 3,) * context,
        sampling=SamplingParams(
            max_tokens=blocks * config.block_length, ignore_eos=True, strategy="recorded"
        ),
    )


def _serve(engine: PromptlessEngine, request: Request, rows: int, blocks: int) -> dict[str, Any]:
    """Steps, seconds and blocks of the window, and what the rows took."""
    progresses = []
    for row in range(rows):
        progress = RowProgress(request.sampling, (), None)
        engine.add_request(str(row), request, [progress], [row])
        progresses.append(progress)
    ends: list[float] = []
    committed: list[int] = []
    while max(len(progress.steps_per_block) for progress in progresses) < blocks:
        events = engine.step()
        if events or committed:
            ends.append(time.perf_counter())
            committed.append(len(events))
    taken = [list(progress.steps_per_block) for progress in progresses]
    for row in range(rows):
        engine.abort(str(row))
    while engine.has_unfinished:
        engine.step()
    return {
        "steps": len(ends) - 1,
        "seconds": ends[-1] - ends[0],
        "blocks": sum(committed[1:]),
        "steps_per_block": float(np.mean([steps for row in taken for steps in row])),
        "slowest_step_ms": 1e3 * float(np.max(np.diff(ends))),
    }


def measure(
    runner: FilledRunner, program: Any, rows: int, context: int, blocks: int
) -> dict[str, Any]:
    """Figures of `rows` rows that begin behind `context` tokens, by the runner's program."""
    length = runner.config.block_length
    longest = context + (blocks + 1) * length
    # The shapes of a model are measured at lengths that it was not trained for as well.
    positions = max(longest, runner.config.max_position_embeddings)
    config = dataclasses.replace(runner.config, max_position_embeddings=positions)
    settings = EngineConfig(
        max_model_len=longest,
        max_num_seqs=rows,
        share_prefixes=False,
        device_memory_fraction=1.0,
        kv_cache_bytes=runner.kv_bytes,
    )
    runner.take(program, rows)
    engine = PromptlessEngine(config, runner.params, settings, runner)
    _serve(engine, _requests(config, context, 2), rows, 2)
    served = _serve(engine, _requests(config, context, blocks), rows, blocks)
    middle = context + blocks * length // 2 // length * length
    step_seconds = seconds_per_call(runner.caller(program, rows, middle), 4)
    wall = served["seconds"] / served["steps"]
    return {
        "ms_per_step_in_engine": 1e3 * wall,
        "ms_per_step": 1e3 * step_seconds,
        "wall_over_steps": wall / step_seconds,
        "ms_per_block": 1e3 * served["seconds"] * rows / served["blocks"],
        "tokens_per_second": served["blocks"] * length / served["seconds"],
        "denoising_steps_per_block": served["steps_per_block"],
        "steps": served["steps"],
        "slowest_step_ms": served["slowest_step_ms"],
    }


def run(
    runner: FilledRunner, program: Any, rows: int, context: int, arguments: argparse.Namespace
) -> None:
    """Measures one case, prints it and writes its record."""
    # One program for each case: that of all of its rows.
    slot_runner.row_bucket = lambda rows, limit: limit
    figures = measure(runner, program, rows, context, arguments.blocks)
    print(
        f"{rows}x{context}: {figures['ms_per_block']:.1f} ms a block of "
        f"{figures['denoising_steps_per_block']:.1f} steps and a commit, "
        f"{figures['ms_per_step_in_engine']:.2f} ms a step in the engine, "
        f"{figures['ms_per_step']:.2f} back to back: {figures['wall_over_steps']:.3f}x, "
        f"slowest {figures['slowest_step_ms']:.2f}, {figures['steps']} steps",
        flush=True,
    )
    write_record(
        f"block_{arguments.model}_r{rows}_s{context}",
        commit=arguments.commit or current_commit(),
        shapes={
            "model": arguments.model,
            "dtype": arguments.dtype,
            "rows": rows,
            "context_tokens": context,
            "block_length": runner.config.block_length,
        },
        settings={
            "placement": "dense, paged, on the device",
            "strategy": "a schedule recorded from tiny-sdar",
            "weights": "random",
            "blocks": arguments.blocks,
        },
        figures=figures,
        folder=arguments.output,
    )


def main(arguments: argparse.Namespace) -> None:
    """Measures every case and writes its record."""
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    schedule.use()
    config = MODELS[arguments.model]
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    for rows, context in map(parsed, arguments.cases):
        longest = context + (arguments.blocks + 1) * config.block_length
        runner = make_runner(config, params, [(rows, longest)])
        run(runner, runner.lower(rows, 0, GREEDY).compile(), rows, context, arguments)
        del runner
        gc.collect()


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("--blocks", type=int, default=8, help="blocks of every row")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", nargs="+", default=["1x8192", "8x32768"])
    add_own_arguments(parser)
    add_common_arguments(parser)
