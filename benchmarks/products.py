"""The matmuls of all layers without anything between them, as the step has them and otherwise.

Says what joining query, key and value weights, and gate and up weights, into one matrix each
would bring, and what the compiler's choice of matmul kernels costs. Every arrangement does the
same work: each layer's result is the next one's input.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.bounds import Part, bound_seconds, layer_matmuls
from benchmarks.dense_runner import add_common_arguments, measured_ceilings
from benchmarks.record import current_commit, write_record
from benchmarks.shapes import MODELS
from benchmarks.timing import seconds_per_call
from benchmarks.trace import kernel_times, printed

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no_triton_gemm": {"xla_gpu_enable_triton_gemm": False},
    "no_cublaslt": {"xla_gpu_enable_cublaslt": False},
    "no_dot_merger": {"xla_gpu_dot_merger_threshold_mb": 0},
}

JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}


def _layer(x: jax.Array, weights: dict[str, jax.Array], widths: list[int]) -> jax.Array:
    """One layer's matmuls on [M, E]; `widths` are those of queries, keys and values."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True))
    normed = (x * scale).astype(x.dtype)
    if "qkv_proj" in weights:
        ends = [widths[0], widths[0] + widths[1]]
        q, k, v = jnp.split(normed @ weights["qkv_proj"], ends, axis=-1)
    else:
        q, k, v = (normed @ weights[name] for name in ("q_proj", "k_proj", "v_proj"))
    x = x + (q + jnp.tile(k + v, (1, widths[0] // widths[1]))) @ weights["o_proj"]
    if "gate_up_proj" in weights:
        gate, up = jnp.split(x @ weights["gate_up_proj"], 2, axis=-1)
    else:
        gate, up = x @ weights["gate_proj"], x @ weights["up_proj"]
    return x + (jax.nn.silu(gate) * up) @ weights["down_proj"]


def main(arguments: argparse.Namespace) -> None:
    """Times every arrangement at every width and writes a record of each width."""
    began = time.perf_counter()
    config, dtype = MODELS[arguments.model], jnp.dtype(arguments.dtype)
    shapes = layer_matmuls(config)
    widths = [shapes[name][1] for name in ("q_proj", "k_proj", "v_proj")]
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    arrangements: dict[str, list[dict[str, jax.Array]]] = {"separate": [], "joined": []}
    for layer in range(config.num_layers):
        keys = jax.random.split(jax.random.key(layer), len(shapes))
        weights = {
            name: draw(key, shape, dtype) * shape[0] ** -0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        arrangements["separate"].append(weights)
        arrangements["joined"].append(
            {
                name: jnp.concatenate([weights[part] for part in parts], axis=1)
                for name, parts in JOINED.items()
            }
        )
    ceilings = measured_ceilings(arguments)
    for width in arguments.widths:
        parts = [
            Part(name, config.num_layers, a * b * dtype.itemsize, 2 * width * a * b)
            for name, (a, b) in shapes.items()
        ]
        bound = bound_seconds(parts, ceilings)
        figures: dict[str, Any] = {"bound_ms": 1e3 * bound}
        x = draw(jax.random.key(99), (width, config.hidden_size), dtype)
        for name, layers in arrangements.items():
            for option in arguments.options:
                if time.perf_counter() - began > arguments.seconds:
                    continue

                def run(x: jax.Array, layers: Any) -> jax.Array:
                    for weights in layers:
                        x = _layer(x, weights, widths)
                    return x

                try:
                    program = jax.jit(run).lower(x, layers).compile(OPTIONS[option])
                except Exception as error:  # options come and go with versions
                    print(f"{option}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    continue

                def call(program: Any = program, x: Any = x, layers: Any = layers) -> Any:
                    return program(x, layers)

                seconds = seconds_per_call(call, 5)
                figures[f"{name}_{option}_ms"] = 1e3 * seconds
                print(
                    f"{width:>5} {name:>9} {option:>15} {1e3 * seconds:>7.2f} ms  "
                    f"{seconds / bound:.2f}x bound",
                    flush=True,
                )
                times = kernel_times(call) if arguments.trace else None
                if times is not None:
                    print(printed(times), flush=True)
        write_record(
            f"products_{arguments.model}_m{width}",
            commit=arguments.commit or current_commit(),
            shapes={"model": arguments.model, "dtype": arguments.dtype, "queries": width},
            settings={"layers": config.num_layers, "weights": "random"},
            figures=figures,
            folder=arguments.output,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 256], help="queries in all")
    parser.add_argument("--options", nargs="+", choices=sorted(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--trace", action="store_true", help="print the kernels of each")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin nothing after these")
    add_common_arguments(parser)
