"""Decode speed of dense, MAGE and HERALD engines on real shapes, beside the planner's figures.

Peak throughput gives each method the same device bytes and, within them, the rows for which the
planner predicts the highest rate; `--latency` compares at the same rows. Rows begin behind
random keys and values (`benchmarks.filled`), so nothing is prefilled; random weights never pass
a confidence threshold, so every block runs `--steps` denoising passes, each of which commits its
share of the block (`low_confidence_static`), and its commit pass. The host's rates are probed
first and go into the prediction; the rest of it is `herald_jax.machine.Machine`.

    python -m benchmarks throughput --model sdar-8b --contexts 32768 65536
    python -m benchmarks throughput --model sdar-8b --latency 32768:1,2,4,8 131072:1
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode_run import WARM_BLOCKS, Case, run_case
from benchmarks.filled import Arena, FilledStore, SharedPool
from benchmarks.record import RESULTS, current_commit, write_record
from benchmarks.shapes import MODELS
from herald_jax.cache.host import HostShape
from herald_jax.cache_config import CacheConfig
from herald_jax.commands.cache_option import CacheAction
from herald_jax.engine.sparse_sizes import sparse_shape
from herald_jax.machine import Machine
from herald_jax.models.decoder import Params, random_params
from herald_jax.planner import Workload, block_times, cache_bytes, most_rows, plan_rows
from herald_jax.retrieval.queries import query_positions
from herald_jax.retrieval.scan import default_threads, set_threads
from herald_jax.retrieval.select import column_group

METHODS = ("dense", "mage", "herald", "index")
DEVICE_GB = {"sdar-8b": 34.0, "llada2-mini": 23.5}
"""Device bytes for keys and values that the paper's figures imply."""


def cache_of(method: str, given: CacheConfig) -> CacheConfig | None:
    """The cache of a method; what is given holds for all sparse ones.

    `index` is HERALD with the choice made on the device, over keys in 8 bits.
    """
    if method == "dense":
        return None
    if method == "mage":
        return dataclasses.replace(given, placement="device", lookahead=False, key_index="none")
    index = "int8" if method == "index" else "none"
    return dataclasses.replace(given, placement="host", lookahead=True, key_index=index)


def probe(work: Workload, cache: CacheConfig, arena: Arena, arena_bytes: int) -> dict[str, float]:
    """What one row's recall takes on this host, with nothing beside it: seconds and rates."""
    model, dtype = work.model, jnp.dtype(f"{'bfloat16' if work.itemsize == 2 else 'float32'}")
    shape = sparse_shape(cache, model, 1, work.context)
    host = HostShape(
        layers=model.num_layers - cache.dense_layers,
        rows=1,
        kv_heads=model.num_kv_heads,
        row_tokens=shape.row_tokens,
        head_dim=model.head_dim,
        dtype=dtype,
    )
    set_threads(default_threads())
    group = column_group(cache.selection, model.num_heads, model.num_kv_heads)
    columns = len(query_positions(cache.selection_query, model.block_length)) * group
    store = FilledStore(
        SharedPool(arena, arena_bytes, host, None),
        cache.selection,
        columns=columns,
        group=group,
        sinks=cache.sink_tokens,
    )
    counts = cache.budget_of(model.block_length).counts(work.context // model.block_length - 1)
    store.adopt(0, 0, work.context)
    size = (model.num_kv_heads, columns, model.head_dim)
    cols = np.random.default_rng(1).normal(size=size).astype(np.float32).astype(dtype)
    out = [np.zeros((model.num_kv_heads, shape.pool_tokens, model.head_dim), dtype) for _ in "kv"]
    best: dict[str, float] = {}
    for _ in range(3):
        notes = [
            store.recall(0, 0, layer, cols, work.context, counts.selected, *out)
            for layer in range(host.layers)
        ]
        scan = sum(note.scan_seconds for note in notes)
        gather = sum(note.gather_seconds for note in notes)
        if not best or scan + gather < best["scan"] + best["gather"]:
            best = {"scan": scan, "gather": gather}
        scanned = sum(note.bytes_scanned for note in notes)
        gathered = sum(note.bytes_gathered for note in notes)
    best["scan_bytes_per_second"] = scanned / best["scan"]
    best["gather_bytes_per_second"] = gathered / best["gather"]
    return best


def probed_machine(rates: dict[str, float]) -> Machine:
    """The default machine with the host's rates as probed; the choice is part of the scan's."""
    return Machine(
        scan_bytes_per_second=rates["scan_bytes_per_second"],
        scan_columns=1 << 20,
        choose_keys_per_second=1e15,
        gather_bytes_per_second=rates["gather_bytes_per_second"],
    )


def predicted(work: Workload, case: Case, machine: Machine) -> dict[str, Any]:
    """The planner's figures of a case."""
    cache, rows = case.cache, case.rows
    times = block_times(work, cache, rows, machine)
    device, host = cache_bytes(work, cache, rows)
    block = times.main + times.host if case.is_serial else times.block
    return {
        "tokens_per_second": rows * work.model.block_length / block,
        "ms_per_block": 1e3 * block,
        "ms_per_pass": 1e3 * times.step,
        "main_ms": 1e3 * times.main,
        "host_ms": 1e3 * times.host,
        "link_ms": 1e3 * times.link,
        "alone_ms": 1e3 * times.alone,
        "binding": times.binding,
        "device_bytes": device,
        "host_bytes": host,
    }


class Benchmark:
    """Runs cases one after the other, each with its record.

    Args:
        arguments: The command's options.
        name: Beginning of the records' names.
    """

    def __init__(self, arguments: argparse.Namespace, name: str) -> None:
        self.arguments, self._name = arguments, name
        self._begin = time.perf_counter()
        self._arena = Arena()
        self._arena_bytes = int(arguments.arena_gb * 1e9)
        config = MODELS[arguments.model]
        longest = max(arguments.all_contexts)
        self.config = dataclasses.replace(
            config, max_position_embeddings=max(longest, config.max_position_embeddings)
        )
        self._params: Params | None = None
        self._machines: dict[Any, Machine] = {}

    @property
    def params(self) -> Params:
        """The weights, made on first use."""
        params = self._params
        if params is None:
            dtype = jnp.dtype(self.arguments.dtype)
            self._params = params = jax.block_until_ready(random_params(self.config, dtype=dtype))
        return params

    def work(self, context: int) -> Workload:
        """What is decoded at a context."""
        itemsize = jnp.dtype(self.arguments.dtype).itemsize
        return Workload(
            model=self.config, context=context, steps=self.arguments.steps, itemsize=itemsize
        )

    def machine(self, context: int, cache: CacheConfig) -> Machine:
        """The machine with the host's rates as probed for a context."""
        key = (context, cache)
        if key not in self._machines:
            work = self.work(context)
            rates = probe(work, cache, self._arena, self._arena_bytes)
            self._machines[key] = probed_machine(rates)
            print(
                f"host, one row of {context}: scan {1e3 * rates['scan']:.1f} ms "
                f"({rates['scan_bytes_per_second'] / 1e9:.1f} GB/s), gather "
                f"{1e3 * rates['gather']:.1f} ms",
                flush=True,
            )
        return self._machines[key]

    def run(self, case: Case, machine: Machine) -> dict[str, Any] | None:
        """Runs a case and writes its record; `None` if there was no time or it failed."""
        used = time.perf_counter() - self._begin
        if used > self.arguments.limit:
            print(f"{case.name} is left out: {used:.0f} s are over", flush=True)
            return None
        work, begin = self.work(case.context), time.perf_counter()
        names = (self._name, self.arguments.model, case.name)
        name = f"{'_'.join(names)}_r{case.rows}_s{case.context}"
        if self.arguments.trace:
            trace = self.arguments.output / f"{name}.trace.json"
            case = dataclasses.replace(case, trace=trace)
        before = predicted(work, case, machine)
        try:
            figures = run_case(self.config, self.params, case, self._arena, self._arena_bytes)
        except Exception:
            traceback.print_exc()
            print(f"{case.name} R{case.rows} S{case.context} FAILED", flush=True)
            return None
        figures |= {"predicted": before, "wall_seconds": time.perf_counter() - begin}
        self._print(case, figures)
        write_record(
            name,
            commit=self.arguments.commit or current_commit(),
            shapes={
                "model": self.arguments.model,
                "dtype": self.arguments.dtype,
                "rows": case.rows,
                "context_tokens": case.context,
                "block_length": self.config.block_length,
            },
            settings={
                "cache": None if case.cache is None else dataclasses.asdict(case.cache),
                "denoising_steps": case.steps,
                "warm_blocks": WARM_BLOCKS,
                "blocks": case.blocks,
                "is_serial": case.is_serial,
                "weights": "random",
                "prompts": "random keys and values, not prefilled",
                "host_pool": f"ordinary memory, rows share parts of {self._arena_bytes / 1e9:g} GB",
                "machine": dataclasses.asdict(machine),
            },
            figures=figures,
            folder=self.arguments.output,
        )
        return figures

    def _print(self, case: Case, figures: dict[str, Any]) -> None:
        before = figures["predicted"]
        lane = figures.get("lane_ms_per_row")
        text = (
            f"{case.name:<16} R{case.rows:<3} S{case.context:<7}"
            f"{figures['tokens_per_second']:>7.0f} tok/s (predicted "
            f"{before['tokens_per_second']:.0f}), block {figures['ms_per_block']:.0f} ms "
            f"({before['ms_per_block']:.0f}), pass {figures['ms_per_pass']:.2f}, alone "
            f"{figures['ms_per_pass_alone']:.2f} ({before['ms_per_pass']:.2f})"
        )
        if case.cache is not None:
            text += f", exposed {figures['exposed_ms_per_block']:.0f} ms"
        if lane is not None:
            text += (
                f", lane {lane:.1f} ms/row, hits {figures['hit_share']:.2f}, sent "
                f"{figures['mb_sent_per_row']:.0f} MB/row"
            )
        text += f" [{figures['wall_seconds']:.0f} s, {figures['setup_seconds']:.0f} of them setup]"
        print(text, flush=True)


def peak_cases(benchmark: Benchmark) -> Iterator[tuple[Case, Machine]]:
    """Each method at each context with its own best rows."""
    arguments = benchmark.arguments
    given = dict(item.split("=") for item in arguments.rows or ())
    device = int(arguments.device_gb * 1e9)
    host = int(arguments.host_gb * 1e9)
    for context in arguments.contexts:
        work = benchmark.work(context)
        machine = benchmark.machine(context, cache_of("herald", arguments.cache))  # type: ignore[arg-type]
        for method in arguments.methods:
            cache = cache_of(method, arguments.cache)
            if method in given:
                numbers = [int(number) for number in given[method].split(",")]
            else:
                plan = plan_rows(work, cache, device_bytes=device, host_bytes=host, machine=machine)
                numbers = [plan.rows]
            print(
                f"{method} at {context}: rows {numbers}, room for "
                f"{most_rows(work, cache, device, host)}",
                flush=True,
            )
            for rows in numbers:
                yield make_case(arguments, method, cache, rows, context), machine


def latency_cases(benchmark: Benchmark) -> Iterator[tuple[Case, Machine]]:
    """Each method at the same rows."""
    arguments = benchmark.arguments
    for item in arguments.latency:
        context, _, numbers = item.partition(":")
        machine = benchmark.machine(int(context), cache_of("herald", arguments.cache))  # type: ignore[arg-type]
        for rows in map(int, numbers.split(",")):
            for method in arguments.methods:
                cache = cache_of(method, arguments.cache)
                yield make_case(arguments, method, cache, rows, int(context)), machine


def make_case(
    arguments: argparse.Namespace, name: str, cache: CacheConfig | None, rows: int, context: int
) -> Case:
    """A case with the command's numbers."""
    return Case(
        name=name,
        cache=cache,
        rows=rows,
        context=context,
        steps=arguments.steps,
        blocks=arguments.blocks,
        seconds=arguments.seconds,
    )


def use_small_sizes(arguments: argparse.Namespace) -> None:
    """With `--small`: a model of two layers and short texts."""
    if not arguments.small:
        return
    arguments.model, arguments.contexts, arguments.steps = "toy", [1024], 3
    arguments.dtype, arguments.arena_gb, arguments.blocks = "float32", 0.01, 2
    if arguments.cache.dense_layers > 1:
        arguments.cache = dataclasses.replace(arguments.cache, dense_layers=1)


def main(arguments: argparse.Namespace) -> None:
    """Runs all cases; a ratio to dense is printed where there is one."""
    if arguments.small:
        arguments.latency = ["1024:1,2"] if arguments.latency else None
        arguments.device_gb, arguments.host_gb = 3e-3, 8e-3
    use_small_sizes(arguments)
    if arguments.device_gb is None:
        arguments.device_gb = DEVICE_GB.get(arguments.model, 34.0)
    latency = arguments.latency or ()
    arguments.all_contexts = (
        [int(item.partition(":")[0]) for item in latency] if latency else arguments.contexts
    )
    benchmark = Benchmark(arguments, "latency" if latency else "throughput")
    found: dict[tuple[str, int, int], float] = {}
    cases = latency_cases(benchmark) if latency else peak_cases(benchmark)
    for case, machine in cases:
        figures = benchmark.run(case, machine)
        if figures is None:
            continue
        rows = case.rows if latency else 0
        found[case.name, rows, case.context] = rate = figures["tokens_per_second"]
        base = found.get(("dense", rows, case.context))
        if base and case.name != "dense":
            print(f"{case.name} is {rate / base:.2f} times dense at {case.context}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--latency", nargs="+", metavar="CONTEXT:ROWS,ROWS", help="same rows")
    parser.add_argument("--rows", nargs="+", metavar="METHOD=ROWS,ROWS", help="instead of the best")
    parser.add_argument("--device-gb", type=float, help="device bytes of keys and values")
    parser.add_argument("--host-gb", type=float, default=115.0, help="host bytes of the same")
    add_common_arguments(parser)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that the ladder has as well."""
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=20, help="denoising passes of a block")
    parser.add_argument("--blocks", type=int, default=3, help="blocks measured of every row")
    parser.add_argument("--seconds", type=float, default=40.0, help="most decoding of a case")
    parser.add_argument("--limit", type=float, default=540.0, help="no case begins after this")
    parser.add_argument("--arena-gb", type=float, default=19.0, help="memory that rows share")
    parser.add_argument(
        "--cache", nargs="+", action=CacheAction, default=CacheConfig(), metavar="FIELD=VALUE"
    )
    parser.add_argument("--trace", action="store_true", help="a Chrome trace beside each record")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for any machine")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
