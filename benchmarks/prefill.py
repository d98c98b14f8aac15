"""Prefill of a long prompt by both of the repository's paths, as a share of the matmul rate.

`engine` sends prompt blocks through the paged engine's step program, a chunk at a time; `layers`
runs the whole prompt through one layer before the next, as the sparse cache does. Only the
operations that the prompt's keys and values need count: pairs of tokens that are masked and the
LM head do not.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bounds import Ceilings, prefill_flops
from benchmarks.dense_runner import MEMORY_FRACTION, add_common_arguments, measured_ceilings
from benchmarks.record import current_commit, write_record
from benchmarks.shapes import MODELS
from benchmarks.trace import kernel_times, printed
from herald_jax.configs import ModelConfig
from herald_jax.decoding.layer_prefill import LayerPrefill
from herald_jax.engine.config import PAGE_TOKENS
from herald_jax.engine.plan import PrefillSlot, RowTable, StepPlan
from herald_jax.engine.slot_runner import SlotRunner
from herald_jax.models.decoder import Params, random_params


def _engine_path(
    config: ModelConfig, params: Params, tokens: int, chunk: int
) -> Callable[[int], Any]:
    """Prefills so many tokens with the engine's runner, and waits."""
    block = config.block_length
    page_tokens = -(-PAGE_TOKENS // block) * block
    pages = -(-tokens // page_tokens)
    runner = SlotRunner(
        config,
        params,
        max_rows=1,
        num_pages=pages,
        page_tokens=page_tokens,
        table_pages=pages,
        prefill_slots=chunk // block,
    )
    ids = tuple((np.arange(block) % config.mask_token_id).tolist())
    table = RowTable(row=0, epoch=0, pages=tuple(range(pages)))

    def run(length: int) -> Any:
        slots = [
            PrefillSlot(row=0, epoch=0, index=index, token_ids=ids)
            for index in range(length // block)
        ]
        plan = StepPlan(
            tick=0, tables=(table,), starts=(), decode=(), prefill=tuple(slots), preempted=()
        )
        return [step.read() for step in runner.dispatch(plan, {})]

    return run


def _layer_path(
    config: ModelConfig, params: Params, tokens: int, chunk: int
) -> Callable[[int], Any]:
    """Prefills so many tokens layer by layer, and waits; layers are dropped as they come."""
    prefill = LayerPrefill(config, capacity=tokens, chunk_tokens=chunk)
    ids = np.arange(tokens) % config.mask_token_id

    def run(length: int) -> Any:
        last: Any = None
        for output in prefill.layers(params, ids[:length]):
            last = output.k
        return jax.block_until_ready(last)

    return run


PATHS = {"engine": _engine_path, "layers": _layer_path}


def main(arguments: argparse.Namespace) -> None:
    """Measures both paths and writes their records."""
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    config = MODELS[arguments.model]
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    run(config, params, measured_ceilings(arguments), arguments, time.perf_counter())


def run(
    config: ModelConfig,
    params: Params,
    ceilings: Ceilings,
    arguments: argparse.Namespace,
    began: float,
) -> None:
    """Measures both paths, unless too long has passed since `began`."""
    tokens = arguments.tokens
    flops = prefill_flops(config, tokens)
    cases = [("layers", chunk) for chunk in arguments.layer_chunks]
    cases += [("engine", chunk) for chunk in arguments.engine_chunks]
    for path, chunk in cases:
        begin = time.perf_counter()
        if begin - began > arguments.seconds:
            print(f"{path}, {chunk}: left out, {arguments.seconds} s are over", flush=True)
            continue
        call = PATHS[path](config, params, tokens, chunk)
        for _ in range(2):  # compiles, and records what is replayed later
            call(2 * chunk)
        warm = time.perf_counter() - begin
        times = []
        for _ in range(arguments.repeats):
            begin = time.perf_counter()
            call(tokens)
            times.append(time.perf_counter() - begin)
        seconds = float(np.median(times))
        share = flops / seconds / ceilings.flops_per_second
        print(
            f"{path:>6}, {chunk} at a time: {seconds:.3f} s for {tokens} tokens, "
            f"{100 * share:.1f} % of the matmul rate (ready after {warm:.0f} s)",
            flush=True,
        )
        figures: dict[str, Any] = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "flops": flops,
            "matmul_flops_per_second": ceilings.flops_per_second,
            "share_of_matmul_rate": share,
        }
        if not arguments.no_trace:
            figures |= _kernels(lambda call=call: call(tokens))
        write_record(
            f"prefill_{arguments.model}_{path}_c{chunk}_s{tokens}",
            commit=arguments.commit or current_commit(),
            shapes={
                "model": arguments.model,
                "dtype": arguments.dtype,
                "tokens": tokens,
                "chunk_tokens": chunk,
                "block_length": config.block_length,
            },
            settings={"path": path, "weights": "random"},
            figures=figures,
            folder=arguments.output,
        )


def _kernels(run: Callable[[], Any]) -> dict[str, Any]:
    try:
        times = kernel_times(run, calls=1)
    except Exception as error:  # a profiler that does not run must not end the benchmark
        print(f"  trace: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return {}
    if times is None:
        return {}
    print(printed(times), flush=True)
    return times.figures()


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run` that the benchmark of a step lacks."""
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--layer-chunks", type=int, nargs="*", default=[2048])
    parser.add_argument("--engine-chunks", type=int, nargs="*", default=[2048])
    parser.add_argument("--repeats", type=int, default=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-trace", action="store_true", help="leave the profiler out")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after these")
    add_own_arguments(parser)
    add_common_arguments(parser)
