"""Continuous against static batching, on the same compiled programs.

Requests differ in blocks and in denoising steps per block; a rule replays drawn steps
(`benchmarks.replay`). In the static policy a batch of `--max-rows` requests is put in together
and the next batch only when all of it has ended; rows do not wait for each other within a batch,
so this baseline is milder than batches in lockstep, whose steps are given as well. `useful_share`
is the passes of unfinished rows over all row-passes of the steps that ran; with a fixed set of
requests it is bounded by the tail in which the last long ones run alone, so the share up to the
step at which the queue was empty is given beside it. `longest_first` is continuous batching of
requests put in by falling `max_tokens`, as `LLM.generate` does.

Steps of every policy are known from the draws, by the real scheduler with no device behind it; a
measured run must take as many. A static run is cut after `--static-seconds`: what it would have
taken in all is its time a step times its steps, and is marked so.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.record import RESULTS, current_commit, write_record
from benchmarks.replay import (
    DISTRIBUTIONS,
    MOST_BLOCKS,
    Replay,
    Work,
    geometric,
    simulate,
    step_variance,
)
from benchmarks.shapes import MODELS
from herald_jax.configs import ModelConfig
from herald_jax.decoding.rules import RULES
from herald_jax.engine import slot_runner
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LiveSample, LLMEngine
from herald_jax.engine.request import Request, RowProgress
from herald_jax.engine.slot_arrays import GREEDY
from herald_jax.models.decoder import Params, random_params
from herald_jax.sampling import SamplingParams

POLICIES = ("continuous", "longest_first", "static")
PLOT = Path(__file__).parent.parent / "docs" / "images" / "batching.svg"


def blocks_of(count: int, mean: float) -> list[int]:
    """Blocks of each request; the same for every policy and distribution."""
    return geometric(np.random.default_rng(0).random(count), mean, MOST_BLOCKS).astype(int).tolist()


def requests_of(
    config: ModelConfig, blocks: Sequence[int], distribution: str, prompt_tokens: int
) -> list[Request]:
    """Requests of so many blocks each, whose steps are drawn from that distribution."""
    shape = (len(blocks), prompt_tokens)
    prompts = np.random.default_rng(1).integers(0, config.mask_token_id, shape)
    return [
        Request(
            prompt=None,
            prompt_token_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(
                max_tokens=number * config.block_length,
                ignore_eos=True,
                strategy="replay",
                entropy_bound=1.0 + list(DISTRIBUTIONS).index(distribution),
            ),
        )
        for prompt, number in zip(prompts, blocks, strict=True)
    ]


class CountedSteps:
    """Steps that an engine sends to its device."""

    def __init__(self, engine: LLMEngine) -> None:
        self.steps = 0
        runner: Any = engine.runner
        dispatch = runner.dispatch

        def counted(*args: Any) -> Any:
            pending = dispatch(*args)
            self.steps += len(pending)
            return pending

        runner.dispatch = counted


def run(
    engine: LLMEngine,
    counted: CountedSteps,
    requests: Sequence[Request],
    batch: int,
    limit_seconds: float = math.inf,
) -> dict[str, Any]:
    """Serves the requests in batches of that size and returns what it took.

    No batch begins after `limit_seconds`.
    """
    live: list[LiveSample] = []
    ends: list[float] = []
    first_step, busy_steps, busy_passes = counted.steps, 0, 0
    begin = time.perf_counter()
    for first in range(0, len(requests), batch):
        if time.perf_counter() - begin > limit_seconds:
            break
        for number, request in enumerate(requests[first : first + batch], start=first):
            progress = RowProgress(request.sampling, (), None)
            live += engine.add_request(str(number), request, [progress], [number])
        while engine.has_unfinished:
            events = engine.step()
            if engine.scheduler.waiting:
                busy_steps, busy_passes = counted.steps - first_step, _passes(live)
            now = time.perf_counter() - begin
            ends += [now for event in events if event.sample.progress.finish_reason is not None]
    seconds = time.perf_counter() - begin
    engine.scheduler.check()
    tokens = sum(len(sample.progress.token_ids) for sample in live)
    rows, steps = engine.sizes.max_rows, counted.steps - first_step
    return {
        "requests": len(live),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "generated_tokens": tokens,
        "steps": steps,
        "ms_per_step": 1e3 * seconds / steps,
        "useful_share": _passes(live) / (steps * rows),
        "useful_share_while_requests_wait": busy_passes / max(busy_steps * rows, 1),
        "latency_p50_seconds": float(np.percentile(ends, 50)),
        "latency_p99_seconds": float(np.percentile(ends, 99)),
    }


def _passes(live: Sequence[LiveSample]) -> int:
    """Denoising and commit passes of all blocks that were read."""
    blocks = [sample.progress.steps_per_block for sample in live]
    return sum(sum(steps) + len(steps) for steps in blocks)


def make_engine(config: ModelConfig, params: Params, arguments: argparse.Namespace) -> LLMEngine:
    """An engine whose longest sample is the study's longest."""
    longest = arguments.prompt_tokens + MOST_BLOCKS * config.block_length
    return LLMEngine(
        config,
        params,
        EngineConfig(
            max_model_len=math.ceil(longest / 64) * 64,
            max_num_seqs=arguments.max_rows,
            max_prefill_tokens=arguments.prefill_tokens,
            share_prefixes=False,
        ),
    )


def schedules(
    arguments: argparse.Namespace, distribution: str, blocks: Sequence[int], block_length: int
) -> dict[str, Any]:
    """Steps of all policies without a device."""
    first_block = arguments.prompt_tokens // block_length
    sizes = {
        "block_length": block_length,
        "prompt_blocks": first_block,
        "prefill_slots": max(arguments.prefill_tokens // block_length, 1),
    }
    rows = arguments.max_rows
    given = Work.draw(distribution, blocks, first_block, rows)
    falling = Work.draw(distribution, sorted(blocks, reverse=True), first_block, rows)
    mean, variance = step_variance(distribution)
    return {
        "steps_mean": mean,
        "steps_variance": variance,
        "bound_useful_share": given.bound(),
        "continuous": simulate(given, len(blocks), **sizes),
        "longest_first": simulate(falling, len(blocks), **sizes),
        "static": simulate(given, rows, **sizes),
        "lockstep": {"steps": given.lockstep_steps()},
    }


def measure(
    engine: LLMEngine, counted: CountedSteps, arguments: Any, distribution: str, blocks: list[int]
) -> dict[str, Any]:
    """All policies on one engine, and what the draws say of them."""
    config = engine.config
    known = schedules(arguments, distribution, blocks, config.block_length)
    shape = (distribution, arguments.prompt_tokens)
    given = requests_of(config, blocks, *shape)
    falling = requests_of(config, sorted(blocks, reverse=True), *shape)
    run(engine, counted, given[:2], 2)
    figures: dict[str, Any] = {}
    orders = {
        "continuous": (given, len(given), math.inf),
        "longest_first": (falling, len(given), math.inf),
        "static": (given, arguments.max_rows, arguments.static_seconds),
    }
    for policy in arguments.policies:
        order = orders[policy]
        figures[policy] = row = run(engine, counted, *order)
        simulated = known[policy]
        row["steps_of_all"] = simulated["steps"]
        row["seconds_of_all"] = row["seconds"]
        if row["requests"] < len(given):  # a part was measured: its time a step holds for all
            row["seconds_of_all"] = simulated["steps"] * row["ms_per_step"] / 1e3
            ends = np.asarray(simulated["ends"]) * row["ms_per_step"] / 1e3
            row["latency_p50_seconds"], row["latency_p99_seconds"] = (
                float(np.percentile(ends, share)) for share in (50, 99)
            )
            row["is_extrapolated"] = True
        print(
            f"{distribution} {policy:>13}: {row['requests']} requests in {row['seconds']:.2f} s, "
            f"{row['steps']} steps of {row['steps_of_all']} known, {row['ms_per_step']:.2f} ms, "
            f"{row['tokens_per_second']:.1f} tok/s, useful {row['useful_share']:.3f} "
            f"({row['useful_share_while_requests_wait']:.3f} while requests wait), "
            f"p99 {row['latency_p99_seconds']:.2f} s",
            flush=True,
        )
    if "static" in figures:
        static = figures["static"]["seconds_of_all"]
        for policy in (name for name in ("continuous", "longest_first") if name in figures):
            gain = figures[f"speedup_{policy}"] = static / figures[policy]["seconds_of_all"]
            print(f"{distribution}: {policy} {gain:.2f}x static", flush=True)
    steps = {name: known[name]["steps"] for name in ("static", "lockstep")}
    figures["known_steps_over_continuous"] = {
        name: count / known["continuous"]["steps"] for name, count in steps.items()
    }
    figures["bound_useful_share"] = known["bound_useful_share"]
    figures["steps_variance"] = known["steps_variance"]
    return figures


def plot(arguments: argparse.Namespace, path: Path) -> None:
    """Draws gains over the variance of steps: known from the draws, and points of records."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "herald"
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    blocks = blocks_of(arguments.requests, arguments.mean_blocks)
    even = [round(arguments.mean_blocks)] * arguments.requests
    for label, lengths, style in (("geometric", blocks, "-"), ("all equal", even, "--")):
        known = [schedules(arguments, name, lengths, 32) for name in DISTRIBUTIONS]
        x = [line["steps_variance"] for line in known]
        for policy, color in (("static", "C0"), ("lockstep", "C1")):
            y = [line[policy]["steps"] / line["continuous"]["steps"] for line in known]
            name = f"{policy}, blocks {label}"
            axis.plot(x, y, color + style, marker=".", linewidth=1, label=name)
    for record in sorted(RESULTS.glob("continuous_*.json")):
        row = json.loads(record.read_text(encoding="utf-8"))
        if "speedup_continuous" in row["figures"] and "steps_variance" in row["figures"]:
            axis.plot(
                row["figures"]["steps_variance"],
                row["figures"]["speedup_continuous"],
                "x" if row["device"]["platform"] == "cpu" else "*",
                color="black",
                markersize=8,
                label=f"measured, {row['shapes']['model']}, {row['device']['kind']}",
            )
    axis.set(
        xlabel="variance of a block's steps (mean 8)",
        ylabel="steps, in those of continuous batching",
    )
    axis.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main(arguments: argparse.Namespace) -> None:
    """Runs the policies on one engine and writes a record a distribution."""
    if arguments.plot:
        plot(arguments, PLOT)
        return
    RULES["replay"] = Replay
    # All policies run the one program of all rows: an idle row costs what a busy one does.
    slot_runner.row_bucket = lambda rows, limit: limit
    config = MODELS[arguments.model]
    if arguments.block_length is not None:
        config = dataclasses.replace(config, block_length=arguments.block_length)
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    engine = make_engine(config, params, arguments)
    begin = time.perf_counter()
    engine.warmup([GREEDY])
    print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    counted = CountedSteps(engine)
    blocks = blocks_of(arguments.requests, arguments.mean_blocks)
    for distribution in arguments.distributions:
        figures = measure(engine, counted, arguments, distribution, blocks)
        write_record(
            f"continuous_{arguments.model}_{distribution}",
            commit=arguments.commit or current_commit(),
            shapes={
                "model": arguments.model,
                "dtype": arguments.dtype,
                "rows": arguments.max_rows,
                "block_length": config.block_length,
                "prompt_tokens": arguments.prompt_tokens,
            },
            settings={
                "placement": "paged, on the device",
                "strategy": "replay",
                "threshold": None,
                "weights": "random",
                "requests": arguments.requests,
                "mean_blocks": arguments.mean_blocks,
                "steps": distribution,
                "run_ahead": engine.settings.run_ahead,
                "prefill_tokens": arguments.prefill_tokens,
                "static_seconds": arguments.static_seconds,
            },
            figures=figures,
            folder=arguments.output,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-length", type=int, help="instead of the model's")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-rows", type=int, default=16)
    parser.add_argument("--mean-blocks", type=float, default=8.0)
    parser.add_argument(
        "--distributions",
        nargs="+",
        choices=sorted(DISTRIBUTIONS),
        default=["geometric"],
        help="of the steps of a block, all with mean 8",
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument(
        "--static-seconds", type=float, default=math.inf, help="begin no static batch after these"
    )
    parser.add_argument("--plot", action="store_true", help="only draw the plot of all records")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
