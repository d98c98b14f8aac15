"""HERALD's ladder: what each of its ideas is worth, by switches of one engine.

Every rung decodes the same rows behind random keys and values, as `benchmarks.throughput` does.
The rungs between the first and the last let the device wait for every retrieval:

- `fetch`: the device fetches every layer's keys and values at a block's first step and selects.
- `all_queries`: the host scans with the queries of all masks of the block.
- `one_query`: with the middle mask's alone.
- `lookahead`: the same while the block before still runs: HERALD (2606.21633, figure 12).
- `default`: the queries of the default configuration, with the lookahead.
- `index`: keys are scored on the device, in 8 bits; the host only copies.

    python -m benchmarks ladder --model llada2-mini --contexts 8192 16384 32768
"""

from __future__ import annotations

import argparse
import dataclasses

from benchmarks.decode_run import Case
from benchmarks.shapes import MODELS
from benchmarks.throughput import Benchmark, add_common_arguments, use_small_sizes
from herald_jax.cache_config import CacheConfig

PAPER_MS = {
    8192: {"fetch": 490, "all_queries": 1103, "one_query": 372, "lookahead": 318},
    16384: {"fetch": 680, "all_queries": 2158, "one_query": 480, "lookahead": 329},
    32768: {"fetch": 1072, "all_queries": 4200, "one_query": 514, "lookahead": 344},
}
"""Milliseconds a block of LLaDA2.0-mini with 16 rows, from the paper's figure 12."""


def rungs(given: CacheConfig) -> dict[str, tuple[CacheConfig, bool]]:
    """The cache of every rung, and whether the device waits for its retrievals."""
    host = dataclasses.replace(given, placement="host", lookahead=True, key_index="none")
    lone = dataclasses.replace(host, selection_query="centre")
    return {
        "fetch": (dataclasses.replace(host, lookahead=False, selection_query="all"), False),
        "all_queries": (dataclasses.replace(host, selection_query="all"), True),
        "one_query": (lone, True),
        "lookahead": (lone, False),
        "default": (host, False),
        "index": (dataclasses.replace(host, key_index="int8"), False),
    }


def main(arguments: argparse.Namespace) -> None:
    """Runs every rung at every context, and prints its ratio to the rung before."""
    use_small_sizes(arguments)
    arguments.all_contexts = arguments.contexts
    benchmark = Benchmark(arguments, "ladder")
    for context in arguments.contexts:
        before: float | None = None
        for name, (cache, is_serial) in rungs(arguments.cache).items():
            if name not in arguments.rungs:
                continue
            case = Case(
                name=name,
                cache=cache,
                rows=arguments.rows,
                context=context,
                steps=arguments.steps,
                blocks=arguments.blocks,
                seconds=arguments.seconds,
                is_serial=is_serial,
            )
            figures = benchmark.run(case, benchmark.machine(context, cache))
            if figures is None:
                continue
            found = figures["ms_per_block"]
            paper = PAPER_MS.get(context, {}).get(name)
            text = f"  {name} at {context}: {found:.0f} ms a block"
            if before is not None:
                text += f", {before / found:.2f} times as fast as the rung before"
            print(f"{text} (paper: {paper} ms)" if paper else text, flush=True)
            before = found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    names = tuple(rungs(CacheConfig()))
    parser.add_argument("--model", choices=sorted(MODELS), default="llada2-mini")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rungs", nargs="+", choices=names, default=list(names))
    add_common_arguments(parser)
