"""Full-attention decoding at LLaDA-8B's shapes: no cache, prefix cache and dual cache in one run.

Weights are random, so no confidence passes a threshold: every block takes `--steps` steps with
each cache, and the figures compare what a step costs, not how many are needed. Each generation is
one jitted call, timed after two that are not. With `--table` a trained model is judged instead:
see `bidirectional_table.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bidirectional_table import add_table_arguments, table
from benchmarks.record import RESULTS, current_commit, write_record
from benchmarks.shapes import BIDIRECTIONAL
from herald_jax.configs import ModelConfig
from herald_jax.decoding.bidirectional import CACHES, generate_bidirectional_program
from herald_jax.models.decoder import Params, random_params
from herald_jax.sampling import SamplingParams


def measure(
    config: ModelConfig,
    params: Params,
    *,
    rows: int,
    prompt_tokens: int,
    sampling: SamplingParams,
    cache: str,
    samples: int,
) -> dict[str, Any]:
    """Seconds of a whole generation and what follows from them."""
    prompts = np.random.default_rng(0).integers(0, config.vocab_size // 2, (rows, prompt_tokens))
    arguments = (
        jnp.asarray(prompts, jnp.int32),
        jnp.full((rows,), prompt_tokens, jnp.int32),
        jnp.arange(rows, dtype=jnp.uint32),
    )
    begin = time.perf_counter()
    lowered = generate_bidirectional_program.lower(
        params, *arguments, model=config, sampling=sampling, cache=cache
    )
    run = lowered.compile()
    compile_seconds = time.perf_counter() - begin
    seconds = []
    for _ in range(2 + samples):  # command buffers record on the second run
        begin = time.perf_counter()
        out = jax.block_until_ready(run(params, *arguments))
        seconds.append(time.perf_counter() - begin)
    forwards = np.asarray(out.forwards)
    blocks = -(-sampling.max_tokens // config.block_length)
    expected = blocks * (sampling.denoising_steps or config.block_length)
    if (forwards != expected).any():
        raise RuntimeError(f"rows took {forwards.tolist()} passes instead of {expected}")
    median = statistics.median(seconds[2:])
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": median,
        "tokens_per_second": rows * sampling.max_tokens / median,
        "ms_per_pass": 1e3 * median / expected,
        "passes": expected,
        "whole_text_passes": expected if cache == "none" else blocks,
        "compile_seconds": compile_seconds,
        "peak_device_bytes_so_far": stats.get("peak_bytes_in_use"),
    }


def main(arguments: argparse.Namespace) -> None:
    """Measures every cache and writes its record, or the table on a trained model."""
    if arguments.max_tokens is None:
        arguments.max_tokens = 64 if arguments.table else 256
    if arguments.table:
        table(arguments)
        return
    config = BIDIRECTIONAL[arguments.model]
    if arguments.block_length is not None:
        config = dataclasses.replace(config, block_length=arguments.block_length)
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    sampling = SamplingParams(
        max_tokens=arguments.max_tokens,
        strategy="low_confidence_static",
        denoising_steps=arguments.steps,
        ignore_eos=True,
    )
    print(f"{'cache':>7} {'rows':>4} {'ms/pass':>8} {'tok/s':>8} {'times none':>10}")
    for rows in arguments.rows:
        base = None
        for cache in arguments.caches:
            figures = measure(
                config,
                params,
                rows=rows,
                prompt_tokens=arguments.prompt_tokens,
                sampling=sampling,
                cache=cache,
                samples=arguments.samples,
            )
            base = base or figures["tokens_per_second"]
            figures["times_no_cache"] = figures["tokens_per_second"] / base
            print(
                f"{cache:>7} {rows:>4} {figures['ms_per_pass']:>8.2f} "
                f"{figures['tokens_per_second']:>8.1f} {figures['times_no_cache']:>10.2f}",
                flush=True,
            )
            write_record(
                f"bidirectional_{arguments.model}_{cache}_r{rows}",
                commit=arguments.commit or current_commit(),
                shapes={
                    "model": arguments.model,
                    "dtype": arguments.dtype,
                    "rows": rows,
                    "prompt_tokens": arguments.prompt_tokens,
                    "max_tokens": arguments.max_tokens,
                    "block_length": config.block_length,
                },
                settings={
                    "cache": cache,
                    "strategy": "low_confidence_static",
                    "threshold": None,
                    "denoising_steps": arguments.steps or config.block_length,
                    "weights": "random",
                },
                figures=figures,
                folder=arguments.output,
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(BIDIRECTIONAL), default="llada-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, help="256, or 64 in the table, if left out")
    parser.add_argument("--block-length", type=int, help="instead of the model's")
    parser.add_argument("--steps", type=int, help="steps of a block; one token a step if left out")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
    add_table_arguments(parser)
