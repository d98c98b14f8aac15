"""Times the host's part of a recall: scan, choice and gather, beside plain reading of memory.

Every figure is taken over all layers in turn, so that no cache holds the keys:

    python -m benchmarks host_lane
    python -m benchmarks host_lane --small --output /tmp/records
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np

from benchmarks.record import RESULTS, current_commit, write_record
from herald_jax.cache.host import HostShape, PinnedPool, StagingRing, host_sharding
from herald_jax.cache.shape import STAGING_SLOTS, staged_layers
from herald_jax.engine.lane import HostLane
from herald_jax.engine.lane_jobs import Recall
from herald_jax.retrieval import SelectionConfig, scan
from herald_jax.retrieval.recall import HostStore

SINKS = 4
READ_BYTES = 1 << 18


@numba.njit(parallel=True, nogil=True)
def _read(words, sums):  # noqa: ANN001, ANN202
    size = READ_BYTES // 8
    for part in numba.prange(sums.shape[0]):
        total = np.uint64(0)
        for i in range(part * size, min((part + 1) * size, words.shape[0])):
            total += words[i]
        sums[part] = total


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One machine load: a row's keys and values, and how many entries are chosen."""

    shape: HostShape
    pool: PinnedPool
    sharding: Any
    entries: int

    @property
    def key_bytes(self) -> int:
        """Bytes of all layers' keys."""
        return self.shape.nbytes // 2


def make_case(layers: int, kv_heads: int, context: int, head_dim: int, budget: float) -> Case:
    """A pool of one row, full of random keys and values."""
    sharding = host_sharding(jax.devices()[0])
    shape = HostShape(
        layers=layers,
        rows=1,
        kv_heads=kv_heads,
        row_tokens=context,
        head_dim=head_dim,
        dtype=jnp.bfloat16,
    )
    pool = PinnedPool(shape, sharding)
    numbers = np.random.default_rng(0).normal(size=(kv_heads, context, head_dim))
    random = numbers.astype(np.float32).astype(np.dtype(jnp.bfloat16))
    for layer in range(layers):
        random = np.roll(random, 1, axis=1)
        pool.write(layer, 0, 0, random, random)
    return Case(shape, pool, sharding, math.ceil(budget * context))


def best_seconds(call: Callable[[], Any], samples: int) -> float:
    """Fewest seconds of a call, the first of all left out."""
    call()
    found = []
    for _ in range(samples):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def measured_read_bandwidth(case: Case, samples: int) -> float:
    """Bytes per second of reading every layer's keys and doing next to nothing with them."""
    rows = [case.pool.view(layer, 0)[0] for layer in range(case.shape.layers)]
    words = [row.reshape(-1).view(np.uint64) for row in rows]
    sums = np.zeros(-(-words[0].nbytes // READ_BYTES), np.uint64)
    return case.key_bytes / best_seconds(lambda: [_read(part, sums) for part in words], samples)


def measure_stages(case: Case, columns: int, stage: Any, samples: int) -> dict[str, float]:
    """Rates of the parts of a scan, apart."""
    shape, spec = case.shape, SelectionConfig()
    scan.compile_scan(np.dtype(shape.dtype), shape.head_dim)
    scratch = scan.ScanScratch(shape.kv_heads, shape.row_tokens, columns)
    cols = np.random.default_rng(1).normal(size=(shape.kv_heads, columns, shape.head_dim))
    cols = (cols * 0.3).astype(np.float32).astype(np.dtype(shape.dtype))
    plan = scan.plan_scan(
        scratch,
        columns,
        1,
        spec,
        candidates=shape.row_tokens,
        sinks=SINKS,
        number=case.entries,
    )
    rows = [case.pool.view(layer, 0) for layer in range(shape.layers)]
    number = SINKS + case.entries
    index = np.zeros((shape.kv_heads, number), np.int32)
    out_k = np.zeros((shape.kv_heads, number, shape.head_dim), np.dtype(shape.dtype))
    out_v = np.zeros_like(out_k)

    def score() -> None:
        nonlocal plan
        for k, _ in rows:
            plan = stage(plan, scratch, k, cols)

    def choose() -> None:
        for _ in rows:
            scan.choose_scored(plan, scratch, index)

    def gather() -> None:
        for k, v in rows:
            scan.gather_layer(k, v, index, out_k, out_v)

    def whole() -> None:
        for k, _ in rows:
            scan.scan_layer(
                k,
                cols,
                shape.row_tokens,
                SINKS,
                case.entries,
                spec,
                scratch,
                stage=stage,
            )

    seconds = {
        name: best_seconds(call, samples)
        for name, call in (
            ("score", score),
            ("choose", choose),
            ("gather", gather),
            ("whole", whole),
        )
    }
    gathered = 2 * 2 * out_k.nbytes * shape.layers  # read and written, keys and values
    return {
        "score_gb_per_second": case.key_bytes / seconds["score"] / 1e9,
        "scan_gb_per_second": case.key_bytes / seconds["whole"] / 1e9,
        "choose_ms_per_layer": 1e3 * seconds["choose"] / shape.layers,
        "gather_gb_per_second": gathered / 2 / seconds["gather"] / 1e9,
        "scan_ms_per_row": 1e3 * seconds["whole"],
        "gather_ms_per_row": 1e3 * seconds["gather"],
    }


def measure_lane(
    case: Case, columns: int, stage: Any, threads: int, samples: int, step: Callable[[], Any]
) -> dict[str, float]:
    """Milliseconds from asking for a row's pool until all of it is on the device.

    `lane` waits for the lane alone, `beside` runs a step, and waits for it, between two looks.
    """
    shape = case.shape
    store = HostStore(
        case.pool, SelectionConfig(), columns=columns, group=1, sinks=SINKS, stage=stage
    )
    row_shape = (shape.kv_heads, -(-(SINKS + case.entries) // 64) * 64, shape.head_dim)
    layer_bytes = math.prod(row_shape) * np.dtype(shape.dtype).itemsize
    layers = staged_layers(layer_bytes, shape.layers)
    ring = StagingRing(STAGING_SLOTS, layers, row_shape, shape.dtype, case.sharding)
    size = (shape.layers, shape.kv_heads, columns, shape.head_dim)
    cols = jax.random.normal(jax.random.key(0), size, shape.dtype)
    done: list[Recall] = []

    with HostLane(store, ring, case.sharding, threads=threads) as lane:
        size = (1, shape.kv_heads, shape.row_tokens, shape.head_dim)
        rows = jax.random.normal(jax.random.key(1), size, shape.dtype)
        begin = time.perf_counter()
        jobs = [lane.append(0, 0, layer, 0, rows, rows) for layer in range(shape.layers)]
        while not jobs[-1].wait(60):
            pass
        append_seconds = time.perf_counter() - begin

        def recall(between: Callable[[], Any] | None) -> None:
            job = lane.recall(0, 0, 1, cols, shape.row_tokens, case.entries)
            arrays = []
            while not job.is_taken:
                if between is None:
                    job.wait(60)
                else:
                    between()
                    steps.append(time.perf_counter())
                if job.error:
                    raise job.error
                arrays += [chunk.send() for chunk in job.ready_chunks()]
            jax.block_until_ready(arrays)
            done.append(job)

        steps: list[float] = []
        seconds = best_seconds(lambda: recall(None), samples)
        alone = best_seconds(step, 8)
        beside = best_seconds(lambda: recall(step), samples)
        pace = np.diff(steps)
    account = done[-1].account
    return {
        "lane_ms_per_row": 1e3 * seconds,
        "beside_ms_per_row": 1e3 * beside,
        "scan_ms_beside": 1e3 * done[-1].notes.scan_seconds,
        "gather_ms_beside": 1e3 * done[-1].notes.gather_seconds,
        "step_ms": 1e3 * alone,
        "step_ms_beside": 1e3 * float(np.median(pace)) if len(pace) else 0.0,
        "append_gb_per_second": shape.nbytes / append_seconds / 1e9,
        "bytes_scanned": account.bytes_scanned,
        "bytes_gathered": account.bytes_gathered,
        "bytes_sent": account.bytes_sent,
        "staging_layers": layers,
    }


def make_step(width: int, times: int) -> Callable[[], Any]:
    """A program of about 4 ms on a GPU, whose small result is waited for, as a step's tokens."""
    weights = jnp.zeros((width, width), jnp.bfloat16)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        for _ in range(times):
            x = x @ weights
        return x[0, :8]

    x = jnp.ones((width, width), jnp.bfloat16)
    return lambda: np.asarray(run(x))


def main(arguments: argparse.Namespace) -> None:
    """Measures every case and writes its record."""
    begin = time.perf_counter()
    if arguments.small:
        arguments.layers, arguments.kv_heads = 3, [2]
        arguments.context, arguments.head_dim, arguments.samples = 4096, 32, 2
    step = make_step(*((64, 2) if arguments.small else (8192, 3)))
    print(
        "GB/s of keys; ms of all layers; `beside` a thread that dispatches steps and waits", end=""
    )
    print(" for each\n K  stage  columns threads   read  score   scan choose gather", end="")
    print("   lane beside  (scan gather)  step beside")
    for kv_heads in arguments.kv_heads:
        case = make_case(
            arguments.layers, kv_heads, arguments.context, arguments.head_dim, arguments.budget
        )
        asked = [
            (threads, name, columns)
            for threads in arguments.threads or [scan.default_threads()]
            for name in arguments.stages
            for columns in arguments.columns
        ]
        for threads, name, columns in asked:
            if time.perf_counter() - begin > arguments.seconds:
                print(f"--seconds {arguments.seconds} are over", flush=True)
                return
            threads = scan.set_threads(threads)
            read = measured_read_bandwidth(case, arguments.samples)
            stage = scan.SCORE_STAGES[name]()
            figures = measure_stages(case, columns, stage, arguments.samples)
            figures |= measure_lane(case, columns, stage, threads, arguments.samples, step)
            figures["read_gb_per_second"] = read / 1e9
            figures["scan_share_of_read"] = figures["scan_gb_per_second"] / read * 1e9
            print(
                f"{kv_heads:>2} {name:>6} {columns:>8} {threads:>7} {read / 1e9:>6.1f} "
                f"{figures['score_gb_per_second']:>6.1f} "
                f"{figures['scan_gb_per_second']:>6.1f} "
                f"{figures['choose_ms_per_layer'] * case.shape.layers:>6.1f} "
                f"{figures['gather_ms_per_row']:>6.1f} "
                f"{figures['lane_ms_per_row']:>6.1f} {figures['beside_ms_per_row']:>6.1f} "
                f" ({figures['scan_ms_beside']:.1f} {figures['gather_ms_beside']:.1f}) "
                f"{figures['step_ms']:>6.2f} {figures['step_ms_beside']:>6.2f}",
                flush=True,
            )
            write_record(
                f"host_lane_{name}_c{columns}_k{kv_heads}_s{arguments.context}_t{threads}",
                commit=arguments.commit or current_commit(),
                shapes={
                    "layers": case.shape.layers,
                    "kv_heads": kv_heads,
                    "head_dim": case.shape.head_dim,
                    "context_tokens": case.shape.row_tokens,
                    "columns": columns,
                    "entries": SINKS + case.entries,
                    "dtype": "bfloat16",
                },
                settings={
                    "stage": name,
                    "threads": threads,
                    "numba_threading_layer": numba.threading_layer(),  # pyright: ignore[reportPrivateImportUsage]
                    "memory_kind": case.sharding.memory_kind,
                    "samples": f"best of {arguments.samples}",
                },
                figures=figures,
                folder=arguments.output,
            )
        del case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--columns", type=int, nargs="+", default=[16])
    parser.add_argument(
        "--stages", nargs="+", choices=sorted(scan.SCORE_STAGES), default=["matrix"]
    )
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--threads", type=int, nargs="+", help="all cores but one if left out")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="begin no case after these")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for any machine")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
