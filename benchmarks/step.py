"""One dense step of the engine at the shapes of a real model, beside its bound and torch.

The program is the engine's own, over a page pool of random numbers; every call begins the rows'
blocks anew behind the same context, so that all calls do the same work. `bounds` says what the
bound counts. First torch runs the same step in a process of its own (`torch_baseline`). Trace
and memory analysis of the compiled program stand in each record. `--variants` compiles the step
of `--variant-case` under other compiler options as well.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from benchmarks import block, prefill, schedule, torch_baseline
from benchmarks.bounds import Ceilings, Part, bound_seconds, part_figures, step_parts
from benchmarks.dense_runner import (
    MEMORY_FRACTION,
    FilledRunner,
    add_common_arguments,
    make_runner,
    measured_ceilings,
)
from benchmarks.record import current_commit, write_record
from benchmarks.shapes import MODELS
from benchmarks.timing import seconds_per_call
from benchmarks.trace import KernelTimes, kernel_times, printed
from herald_jax.engine.slot_arrays import GREEDY
from herald_jax.models.decoder import random_params

CASES = [
    *[(1, 8192), (1, 32768), (1, 131072)],
    *[(2, 8192), (2, 32768), (2, 131072)],
    *[(8, 8192), (8, 32768)],
    *[(16, 8192), (16, 32768)],
]
"""Rows and tokens of context that fit an H200 with 8 billion weights."""

VARIANTS: dict[str, dict[str, Any]] = {
    "no_command_buffers": {"xla_gpu_enable_command_buffer": ""},
    "no_triton_gemm": {"xla_gpu_enable_triton_gemm": False},
    "no_cublaslt": {"xla_gpu_enable_cublaslt": False},
    "no_dot_merger": {"xla_gpu_dot_merger_threshold_mb": 0},
    "while_command_buffers": {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
        ),
        "xla_gpu_graph_min_graph_size": 1,
    },
}
"""Compiler options under which the step is compiled once more."""


def memory_figures(compiled: Any) -> dict[str, int]:
    """What the compiler says about the memory of a program; a hidden copy would show here."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    names = ("argument", "output", "alias", "temp")
    return {f"{name}_bytes": getattr(analysis, f"{name}_size_in_bytes") for name in names}


def measure(
    runner: FilledRunner, program: Any, rows: int, context: int, *, is_traced: bool
) -> tuple[float, KernelTimes | None]:
    """Seconds of a step, and its kernels if they can be traced here."""
    call = runner.caller(program, rows, context)
    seconds = seconds_per_call(call, 4)
    if not is_traced:
        return seconds, None
    try:
        return seconds, kernel_times(call)
    except Exception as error:  # a profiler that does not run must not end the benchmark
        print(f"  trace: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return seconds, None


def _parts_line(parts: Sequence[Part], ceilings: Ceilings) -> str:
    shares: dict[str, float] = {}
    for part in parts:
        name = part.name if part.name in ("attention", "lm_head") else "matmuls"
        shares[name] = shares.get(name, 0.0) + 1e3 * part.seconds(ceilings)
    return ", ".join(f"{name} {ms:.2f}" for name, ms in shares.items())


def main(arguments: argparse.Namespace) -> None:
    """Measures every case and writes its record as soon as it is there."""
    began = time.perf_counter()
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    config = MODELS[arguments.model]
    cases = [torch_baseline.parsed(case) for case in arguments.cases]
    theirs: dict[Any, Any] = {}
    if not arguments.no_torch:
        theirs = torch_baseline.in_child(arguments.model, cases, arguments.torch_seconds)
        print(f"torch: {len(theirs)} cases in {time.perf_counter() - began:.0f} s", flush=True)
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    ceilings = measured_ceilings(arguments)
    schedule.use()
    runner = make_runner(config, params, cases)
    programs: dict[int, Any] = {}
    header = f"{'rows':>4} {'context':>8} {'ms/step':>8} {'bound':>7} {'ratio':>6} {'torch':>8}"
    for rows, context in cases:
        if time.perf_counter() - began > arguments.seconds:
            print(f"{rows}x{context}: left out, {arguments.seconds} s are over", flush=True)
            continue
        if rows not in programs:
            lowered = runner.lower(rows, 0, GREEDY)
            begin = time.perf_counter()
            programs[rows] = lowered.compile()
            seconds = time.perf_counter() - begin
            print(f"rows {rows}: compiled in {seconds:.1f} s, {memory_figures(programs[rows])}")
            print(header, flush=True)
        is_traced = not arguments.no_trace
        step_seconds, kernels = measure(runner, programs[rows], rows, context, is_traced=is_traced)
        parts = step_parts(config, jnp.dtype(arguments.dtype).itemsize, rows, context)
        figures = part_figures(parts, ceilings)
        bound = bound_seconds(parts, ceilings)
        figures |= {
            "ms_per_step": 1e3 * step_seconds,
            "ratio_to_bound": step_seconds / bound,
            **memory_figures(programs[rows]),
        }
        other = theirs.get((rows, context))
        if other is not None:
            figures |= {
                "torch_ms_per_step": 1e3 * other["seconds"],
                "times_faster_than_torch": other["seconds"] / step_seconds,
                "torch_version": other["torch"],
            }
        torch_ms = f"{1e3 * other['seconds']:>8.2f}" if other else f"{'-':>8}"
        print(
            f"{rows:>4} {context:>8} {1e3 * step_seconds:>8.2f} {1e3 * bound:>7.2f} "
            f"{step_seconds / bound:>6.2f} {torch_ms}  bound: {_parts_line(parts, ceilings)}"
        )
        if kernels is not None:
            print(printed(kernels))
            figures |= kernels.figures()
        print(end="", flush=True)
        _write(arguments, f"step_{arguments.model}_r{rows}_s{context}", rows, context, figures)
    for rows, context in map(torch_baseline.parsed, arguments.block_cases):
        program = programs.get(rows) or runner.lower(rows, 0, GREEDY).compile()
        block.run(runner, program, rows, context, arguments)
    if arguments.prefill:
        prefill.run(config, params, ceilings, arguments, began)
    for name in arguments.variants:
        if time.perf_counter() - began > arguments.seconds:
            print(f"{name}: left out, {arguments.seconds} s are over", flush=True)
            continue
        _variant(runner, name, arguments)


def _variant(runner: FilledRunner, name: str, arguments: argparse.Namespace) -> None:
    """Prints and records the time of the step under other compiler options."""
    rows, context = torch_baseline.parsed(arguments.variant_case)
    try:
        program = runner.lower(rows, 0, GREEDY).compile(compiler_options=VARIANTS[name])
    except Exception as error:  # options come and go with versions
        print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return
    seconds, _ = measure(runner, program, rows, context, is_traced=False)
    print(f"{rows:>4} {context:>8} {1e3 * seconds:>8.2f}  {name}", flush=True)
    figures = {"ms_per_step": 1e3 * seconds, "compiler_options": VARIANTS[name]}
    name = f"variant_{arguments.model}_r{rows}_s{context}_{name}"
    _write(arguments, name, rows, context, figures)


def _write(
    arguments: argparse.Namespace, name: str, rows: int, context: int, figures: dict[str, Any]
) -> None:
    write_record(
        name,
        commit=arguments.commit or current_commit(),
        shapes={
            "model": arguments.model,
            "dtype": arguments.dtype,
            "rows": rows,
            "context_tokens": context,
            "block_length": MODELS[arguments.model].block_length,
        },
        settings={"placement": "dense, paged, on the device", "weights": "random"},
        figures=figures,
        folder=arguments.output,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--dtype", default="bfloat16")
    words = [f"{rows}x{context}" for rows, context in CASES]
    parser.add_argument("--cases", nargs="+", default=words, help="rows and context, as 8x32768")
    parser.add_argument("--variants", nargs="*", choices=sorted(VARIANTS), default=[])
    parser.add_argument("--variant-case", default="1x32768")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out")
    parser.add_argument("--no-trace", action="store_true", help="leave the profiler out")
    parser.add_argument("--torch-seconds", type=float, default=60.0, help="most seconds for torch")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after these")
    parser.add_argument("--block-cases", nargs="*", default=[], help="run whole blocks of these")
    parser.add_argument("--prefill", action="store_true", help="run the prefill as well")
    block.add_own_arguments(parser)
    prefill.add_own_arguments(parser)
    add_common_arguments(parser)
