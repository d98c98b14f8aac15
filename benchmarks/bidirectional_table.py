"""Fast-dLLM's table on a trained model: what caches and parallel decoding cost in accuracy.

Every row is one cache and one rule on the same prompts: answers right, passes and tokens a second.
Differences are paired, prompt by prompt, with no cache under the same rule.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accuracy.paired import pack_bits, paired_share_difference
from benchmarks.accuracy.prompts import Job, made_ahead
from benchmarks.record import current_commit, write_record
from examples.train_tiny import tokenizer
from examples.train_tiny.tasks import ANSWER_ROOM, Prompt
from herald_jax.cache.layout import round_up
from herald_jax.checkpoint import load_params
from herald_jax.configs import ModelConfig
from herald_jax.decoding.bidirectional import CACHES, generate_bidirectional_program
from herald_jax.decoding.generate import pad_prompts
from herald_jax.model_source import find_checkpoint
from herald_jax.models.decoder import Params
from herald_jax.sampling import SamplingParams

RULES: dict[str, dict[str, Any]] = {
    "one": {"strategy": "low_confidence_static"},
    "threshold": {"strategy": "threshold", "threshold": 0.9},
    "factor": {"strategy": "factor", "factor": 1.0},
}
"""One token a step, and Fast-dLLM's two rules with its settings."""

ORDER = [
    *((cache, "threshold") for cache in CACHES),
    ("none", "one"),
    *((cache, "factor") for cache in CACHES),
    ("dual", "one"),
    ("prefix", "one"),
]
"""Rows as they are run: what the slowest ones are compared with comes before them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A cell's prompts, padded: the arguments of one generation."""

    cell: str
    prompts: list[Prompt]
    arguments: tuple[jax.Array, ...]


@dataclasses.dataclass(slots=True)
class Outcome:
    """What one generation of a cell gave."""

    contained: list[bool]
    exact: list[bool]
    tokens: int
    passes: float
    seconds: float


def batches(cells: list[str], length: int, rows: int, processes: int, width: int) -> list[Batch]:
    """Every cell's prompts 0 to `rows` - 1, all padded to one width."""
    jobs = [Job(cell, length, 0, rows) for cell in cells]
    found = []
    for job, prompts in made_ahead(jobs, processes):
        padded, lengths = pad_prompts([p.ids for p in prompts], multiple=width)
        seeds = jnp.arange(rows, dtype=jnp.uint32)
        arguments = (jnp.asarray(padded, jnp.int32), jnp.asarray(lengths, jnp.int32), seeds)
        found.append(Batch(job.cell, prompts, arguments))
    return found


def run_cell(program: Any, params: Params, batch: Batch, decode: Any) -> Outcome:
    """One timed generation and its judgement."""
    begin = time.perf_counter()
    out = jax.block_until_ready(program(params, *batch.arguments))
    seconds = time.perf_counter() - begin
    tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
    texts = [decode(row[:size].tolist()).strip() for row, size in zip(tokens, lengths, strict=True)]
    judged = list(zip(batch.prompts, texts, strict=True))
    return Outcome(
        [one.contained(text) for one, text in judged],
        [one.exact(text) for one, text in judged],
        int(lengths.sum()),
        float(np.asarray(out.forwards).mean()),
        seconds,
    )


def figures_of(outcomes: dict[str, Outcome], base: dict[str, Outcome] | None) -> dict[str, Any]:
    """A row's figures over all cells and for each of them."""
    seconds = sum(one.seconds for one in outcomes.values())
    tokens = sum(one.tokens for one in outcomes.values())
    ours = [flag for one in outcomes.values() for flag in one.contained]
    figures: dict[str, Any] = {
        "prompts": len(ours),
        "contained": float(np.mean(ours)),
        "exact": float(np.mean([flag for one in outcomes.values() for flag in one.exact])),
        "passes": float(np.mean([one.passes for one in outcomes.values()])),
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "cells": {},
    }
    for cell, one in outcomes.items():
        figures["cells"][cell] = {
            "n": len(one.contained),
            "contained": float(np.mean(one.contained)),
            "exact": float(np.mean(one.exact)),
            "passes": one.passes,
            "tokens_per_second": one.tokens / one.seconds,
            "contained_by_prompt": pack_bits(one.contained),
        }
        if base is not None:
            figures["cells"][cell]["difference"] = paired_share_difference(
                one.contained, base[cell].contained
            )
    if base is not None:
        theirs = [flag for one in base.values() for flag in one.contained]
        figures["difference"] = paired_share_difference(ours, theirs)
        figures["times_no_cache"] = figures["tokens_per_second"] / (
            sum(one.tokens for one in base.values()) / sum(one.seconds for one in base.values())
        )
    return figures


def compiled(
    model: ModelConfig, params: Params, rows: int, width: int, sampling: SamplingParams, cache: str
) -> Any:
    """The program of one row of the table."""
    spec = jax.ShapeDtypeStruct
    arguments = spec((rows, width), jnp.int32), spec((rows,), jnp.int32), spec((rows,), jnp.uint32)
    lowered = generate_bidirectional_program.lower(
        params, *arguments, model=model, sampling=sampling, cache=cache
    )
    return lowered.compile()


def table(arguments: argparse.Namespace) -> None:
    """Measures every row that the time allows and writes its record as soon as it is there."""
    began = time.perf_counter()
    folder, model = find_checkpoint(arguments.folder, dtype=arguments.dtype)
    params = load_params(folder, model, dtype=jnp.dtype(arguments.dtype))
    decode = tokenizer.load().decode
    rows = arguments.rows[0]
    width = round_up(arguments.length - ANSWER_ROOM, 64)
    found: dict[tuple[str, str], dict[str, Outcome]] = {}
    with ThreadPoolExecutor(arguments.compile_threads) as pool:
        programs = {}
        for cache, rule in ORDER:
            sampling = SamplingParams(max_tokens=arguments.max_tokens, **RULES[rule])
            programs[cache, rule] = pool.submit(
                compiled, model, params, rows, width, sampling, cache
            )
        made = batches(arguments.cells, arguments.length, rows, arguments.processes, width)
        seconds = time.perf_counter() - began
        print(f"{len(made)} x {rows} prompts, {width} wide, {seconds:.0f} s", flush=True)
        print(f"{'cache':>7} {'rule':>9} {'right':>6} {'exact':>6} {'passes':>7} {'tok/s':>9}")
        for cache, rule in ORDER:
            if time.perf_counter() - began > arguments.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                print("time is used up")
                break
            program = programs[cache, rule].result()
            run_cell(program, params, made[0], decode)  # command buffers record on later runs
            outcomes = {one.cell: run_cell(program, params, one, decode) for one in made}
            found[cache, rule] = outcomes
            figures = figures_of(outcomes, found.get(("none", rule)) if cache != "none" else None)
            write_record(
                f"bidirectional_table_{arguments.name}_{cache}_{rule}",
                commit=arguments.commit or current_commit(),
                shapes={
                    "model": arguments.name,
                    "dtype": arguments.dtype,
                    "rows": rows,
                    "length_tokens": arguments.length,
                    "padded_prompt_tokens": width,
                    "max_tokens": arguments.max_tokens,
                    "block_length": model.block_length,
                },
                settings={"cache": cache, "cells": arguments.cells, **RULES[rule]},
                figures=figures,
                folder=arguments.output,
            )
            line = (
                f"{cache:>7} {rule:>9} {figures['contained']:>6.3f} {figures['exact']:>6.3f} "
                f"{figures['passes']:>7.1f} {figures['tokens_per_second']:>9.0f}"
            )
            if "difference" in figures:
                middle, low, high = (100 * x for x in figures["difference"])
                line += f"  {middle:+.1f} [{low:+.1f}, {high:+.1f}] points to no cache, "
                line += f"{figures['times_no_cache']:.1f} x as fast"
            cells = figures["cells"].items()
            line += "".join(f"  {name} {one['contained']:.3f}" for name, one in cells)
            print(line + f"  ({time.perf_counter() - began:.0f} s)", flush=True)


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the table's options."""
    parser.add_argument("--table", action="store_true", help="accuracy and speed, trained model")
    parser.add_argument("--folder", type=Path, default=Path("assets/tiny-llada"))
    parser.add_argument("--name", default="tiny-llada", help="the model in the records' names")
    parser.add_argument("--cells", nargs="+", default=["niah8", "kv", "list3"])
    parser.add_argument("--length", type=int, default=1024, help="prompt and answer together")
    parser.add_argument("--seconds", type=float, default=100.0, help="no row starts after that")
    parser.add_argument("--processes", type=int, default=3, help="that make prompts")
    parser.add_argument("--compile-threads", type=int, default=6)
