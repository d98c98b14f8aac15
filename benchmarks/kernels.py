"""The attention kernels at the shapes of real models, beside what ships and their bound.

Each figure is the time of one call among several in one program, whose queries are the result of
the call before, so that launching and waiting do not count. The bound is the larger of the bytes
that must be read (keys and values once) over the measured copy bandwidth and the floating-point
operations (of visible pairs) over the measured matrix rate.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from benchmarks.kernel_parts import PARTS, SIZES, compile_together, measure
from benchmarks.record import RESULTS, current_commit, write_record
from benchmarks.timing import measured_bandwidth, measured_matmul_rate, seconds_per_call
from pallas_kernels import Segment, reference


class Heads(NamedTuple):
    """Attention heads of a model."""

    query: int
    kv: int
    dim: int = 128

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query // self.kv


MODELS = {"sdar-8b": Heads(32, 8), "fast-dllm-1.5b": Heads(12, 2), "llada2-mini": Heads(16, 4)}

BLOCKS = [
    # name, model, rows, tokens of each row's keys
    ("r1_s128k", "sdar-8b", 1, 131072),
    ("r2_s128k", "sdar-8b", 2, 131072),
    ("r8_s32k", "sdar-8b", 8, 32768),
    ("r32_s8k", "sdar-8b", 32, 8192),
    ("r8_pool5", "sdar-8b", 8, 6592),
    ("r8_s32k", "fast-dllm-1.5b", 8, 32768),
    ("r8_s32k", "llada2-mini", 8, 32768),
]

CHUNKS = [
    # name, tokens of the chunk, tokens of the cache before it
    ("c2k_s0", 2048, 0),
    ("c2k_s30k", 2048, 30720),
    ("c8k_s24k", 8192, 24576),
    ("c32k_s0", 32768, 0),
]

BLOCK_LENGTH = 32

KERNELS = ("block", "prefill", *PARTS)

VARIANTS = {
    "transposed": {"is_direct": False, "slack": -1},
    "listed": {"lists_units": True},
    "ordered": {"lists_units": True, "is_ordered": True},
    "tails": {"lists_units": True, "is_ordered": True, "splits_tails": True},
    "ahead": {
        "lists_units": True,
        "is_ordered": True,
        "splits_tails": True,
        "waits_ahead": True,
    },
}
"""Cuts of the block kernel that are measured beside the one in use."""

BASELINES = ("plain", "cudnn", "shipped_pieces", "torch_sdpa")


@functools.partial(jax.jit, static_argnums=(1,))
def _draw(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _loop(attend: Callable[..., jax.Array], calls: int) -> Any:
    """A program of `calls` calls, each of which takes the result of the one before."""
    return jax.jit(lambda q, *rest: lax.fori_loop(0, calls, lambda _, q: attend(q, *rest), q))


def seconds(attend: Callable[..., jax.Array], q: jax.Array, *operands: Any, calls: int) -> float:
    """Seconds of one of `calls` calls, each of which takes the result of the one before."""
    program = _loop(attend, calls)
    return seconds_per_call(lambda: program(q, *operands), 2, samples=5) / calls


def _torch_seconds(q: jax.Array, k: jax.Array, v: jax.Array, calls: int) -> float:
    """The same of torch's attention, in a CUDA graph; the group is folded into the queries."""
    import torch

    rows, block, heads, dim = q.shape
    kv_heads = k.shape[1]
    folded = torch.randn(
        rows, kv_heads, block * heads // kv_heads, dim, dtype=torch.bfloat16, device="cuda"
    )
    keys, values = (torch.from_dlpack(x) for x in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(folded, keys, values)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = attend(folded, keys, values)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    del out
    return begin.elapsed_time(end) * 1e-3 / calls


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The shipped function wants tokens before heads: given such keys, it reads them in place."""
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def _shipped_pieces(q: jax.Array, k: jax.Array, v: jax.Array, calls: int) -> float:
    """Seconds of the shipped Mosaic kernel (fp16) over key ranges laid into the batch.

    The group is folded into the queries. The partial results are not merged, so this is less
    work than the others do.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu as shipped

    rows, block, heads, dim = q.shape
    _, kv_heads, tokens, _ = k.shape
    ranges = max(128 // (rows * kv_heads), 1)
    config = shipped.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2)
    shape = (rows * ranges, block * heads // kv_heads, kv_heads, dim)
    queries = _draw(0, shape).astype(jnp.float16)
    keys = [
        _draw(i, (rows * ranges, tokens // ranges, kv_heads, dim)).astype(jnp.float16)
        for i in (1, 2)
    ]
    return seconds(lambda q, k, v: shipped.attention(q, k, v, config), queries, *keys, calls=calls)


def _baselines(
    q: jax.Array, k: jax.Array, v: jax.Array, calls: int
) -> Iterator[tuple[str, Callable[[], float]]]:
    rows, _, tokens, _ = k.shape
    index = jnp.arange(rows, dtype=jnp.int32)
    lengths = jnp.full((rows,), tokens, jnp.int32)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return reference.segment_attention(q, [Segment(k, v, index, lengths)])

    def cudnn() -> float:
        by_token = [jax.jit(lambda x: x.transpose(0, 2, 1, 3))(x) for x in (k, v)]
        return seconds(_cudnn, q, *by_token, calls=calls)

    yield "plain", lambda: seconds(plain, q, k, v, calls=2)
    yield "cudnn", cudnn
    yield "shipped_pieces", lambda: _shipped_pieces(q, k, v, calls)
    yield "torch_sdpa", lambda: _torch_seconds(q, k, v, calls)


def _attempt(name: str, measure: Callable[[], float]) -> float | None:
    """A baseline's seconds, or None where it does not run here; the reason is printed."""
    try:
        return measure()
    except Exception as error:  # a baseline that fails must not end the run
        print(f"  {name}: {type(error).__name__}: {str(error)[:120]}")
        return None


def _variant(
    changes: dict[str, Any], segment: tuple[jax.Array, jax.Array]
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The block kernel under another cut."""
    from pallas_kernels.hopper.block_attention import segment_attention, tiles_for

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rows = q.shape[1] * q.shape[2] // k.shape[1]
        programs = jax.devices()[0].core_count
        tiles = tiles_for(rows, q.shape[3], programs)._replace(**changes)
        return segment_attention(q, [Segment(k, v, *segment)], tiles)

    return attend


def block_row(
    model: str, rows: int, tokens: int, calls: int, baselines: Sequence[str]
) -> dict[str, Any]:
    """Seconds of the kernel, its variants and each baseline, and what the work must cost."""
    heads = MODELS[model]
    q = _draw(0, (rows, BLOCK_LENGTH, heads.query, heads.dim))
    k, v = (_draw(i, (rows, heads.kv, tokens, heads.dim)) for i in (1, 2))
    index = jnp.arange(rows, dtype=jnp.int32)
    lengths = jnp.full((rows,), tokens, jnp.int32)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return pallas_kernels.segment_attention(q, [Segment(k, v, index, lengths)])

    others = {name: run for name, run in _baselines(q, k, v, calls) if name in baselines}
    variants = {} if jax.default_backend() == "cpu" else VARIANTS
    kernels = {"kernel": kernel}
    kernels |= {name: _variant(changes, (index, lengths)) for name, changes in variants.items()}
    lowered = {name: _loop(run, calls).lower(q, k, v) for name, run in kernels.items()}
    for name, program in compile_together(lowered).items():
        others[name] = functools.partial(
            lambda program: seconds_per_call(lambda: program(q, k, v), 2, samples=5) / calls,
            program,
        )
    own = others.pop("kernel")()
    return {
        "seconds": own,
        "bytes": k.nbytes + v.nbytes,
        "flops": 4 * rows * BLOCK_LENGTH * heads.query * heads.dim * tokens,
        "baseline_seconds": {name: _attempt(name, measure) for name, measure in others.items()},
    }


def prefill_row(model: str, chunk: int, prefix: int, calls: int) -> dict[str, Any]:
    """Seconds of the kernel, and what the work must cost."""
    heads = MODELS[model]
    q = _draw(0, (1, chunk, heads.query, heads.dim))
    k, v = (_draw(i, (1, heads.kv, max(prefix, 1024), heads.dim)) for i in (1, 2))
    own = [_draw(i, (1, chunk, heads.kv, heads.dim)) for i in (3, 4)]

    length = jnp.asarray(prefix, jnp.int32)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, *own: jax.Array) -> jax.Array:
        return pallas_kernels.prefill_attention(q, k, v, length, own[0], own[1], BLOCK_LENGTH)

    blocks = chunk // BLOCK_LENGTH
    pairs = chunk * prefix + BLOCK_LENGTH**2 * blocks * (blocks + 1) // 2
    return {
        "seconds": seconds(kernel, q, k, v, *own, calls=calls),
        "bytes": 2 * q.nbytes + 4 * heads.kv * heads.dim * (prefix + chunk),
        "flops": 4 * heads.query * heads.dim * pairs,
        "baseline_seconds": {},
    }


def main(arguments: argparse.Namespace) -> None:
    """Measures every row, prints it and writes its record."""
    is_toy = arguments.sizes == "toy"
    bandwidth = measured_bandwidth(0.01 if is_toy else arguments.copy_gigabytes)
    rate = measured_matmul_rate(256 if is_toy else 8192)
    print(f"copy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.0f} TFLOP/s")

    def report(name: str, shapes: dict[str, Any], row: dict[str, Any]) -> None:
        bound = max(row["bytes"] / bandwidth, row["flops"] / rate)
        others = {k: s for k, s in row["baseline_seconds"].items() if s is not None}
        print(
            f"{name:>28} {row['seconds'] * 1e6:>9.1f} us  bound {bound * 1e6:>9.1f}  "
            f"{bound / row['seconds']:>6.1%}  "
            + "  ".join(f"{other} {s * 1e6:.0f}" for other, s in others.items()),
            flush=True,
        )
        write_record(
            f"kernels_{name}",
            commit=arguments.commit or current_commit(),
            shapes={"dtype": "bfloat16", "block_length": BLOCK_LENGTH, **shapes},
            settings={"calls_in_a_program": arguments.calls},
            figures={
                "us_per_call": row["seconds"] * 1e6,
                "bytes": row["bytes"],
                "flops": row["flops"],
                "copy_bytes_per_second": bandwidth,
                "matmul_flops_per_second": rate,
                "bound_us": bound * 1e6,
                "share_of_bound": bound / row["seconds"],
                "flops_per_second": row["flops"] / row["seconds"],
                "baseline_us": {other: s * 1e6 for other, s in others.items()},
            },
            folder=arguments.output,
        )

    if "block" in arguments.kernels:
        for name, model, rows, tokens in BLOCKS:
            if arguments.only and f"{model}_{name}" not in arguments.only:
                continue
            shapes = {"model": model, **MODELS[model]._asdict(), "rows": rows, "tokens": tokens}
            row = block_row(model, rows, tokens, arguments.calls, arguments.baselines)
            report(f"block_{model}_{name}", shapes, row)
    if "prefill" in arguments.kernels:
        for name, chunk, prefix in CHUNKS:
            model = "sdar-8b"
            shapes = {"model": model, **MODELS[model]._asdict(), "chunk": chunk, "prefix": prefix}
            report(f"prefill_{model}_{name}", shapes, prefill_row(model, chunk, prefix, 2))
    for part in PARTS:
        if part not in arguments.kernels:
            continue
        for row in measure(part, SIZES[arguments.sizes], arguments.seconds):
            write_record(
                f"kernels_{row.name}",
                commit=arguments.commit or current_commit(),
                shapes={"dtype": "bfloat16", "model": "sdar-8b", **row.shapes},
                settings={"sizes": arguments.sizes},
                figures={
                    **row.figures,
                    "copy_bytes_per_second_on_device": bandwidth,
                    "matmul_flops_per_second": rate,
                },
                folder=arguments.output,
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--calls", type=int, default=10, help="calls in a program")
    parser.add_argument("--baselines", nargs="*", choices=BASELINES, default=BASELINES)
    parser.add_argument("--only", nargs="+", help="block rows to measure, as sdar-8b_r32_s8k")
    parser.add_argument("--seconds", type=float, default=300.0, help="bound of each small part")
    parser.add_argument("--sizes", choices=SIZES, default="full", help="toy is for a CPU")
    parser.add_argument("--copy-gigabytes", type=float, default=2.0)
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
