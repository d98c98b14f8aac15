"""Dense decoding at the shapes of a real model: time of a step and of a whole block.

Weights are random, so no confidence passes a threshold; a block runs a static schedule of
`--steps` denoising passes and the commit pass. The bound beside each figure is the larger of
the bytes that a pass must read (weights once, keys and values of the prefix once) over the
measured copy bandwidth and its floating-point operations over the measured matmul rate.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import RESULTS, current_commit, write_record
from benchmarks.shapes import MODELS
from benchmarks.timing import measured_bandwidth, measured_matmul_rate, seconds_per_call
from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import kv_bytes_per_token
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import decoding_options, proposal_spec
from herald_jax.decoding.steps import BlockState, decode_block, denoise_step
from herald_jax.models.decoder import Params, bind, random_params
from herald_jax.sampling import SamplingParams


def pass_costs(config: ModelConfig, params: Params, rows: int, context: int) -> dict[str, float]:
    """Bytes and floating-point operations that one pass over a block cannot do without."""
    itemsize = params["embed_tokens"]["embedding"].dtype.itemsize
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    if not config.tie_word_embeddings:
        weights -= params["embed_tokens"]["embedding"].size  # only a few rows are looked up
    queries = rows * config.block_length
    attended = 4 * config.num_layers * config.num_heads * config.head_dim * queries
    return {
        "bytes": weights * itemsize + rows * context * kv_bytes_per_token(config, itemsize),
        "flops": 2 * weights * queries + attended * (context + config.block_length),
    }


def _programs(config: ModelConfig, sampling: SamplingParams, rows: int) -> tuple[Any, Any]:
    options = decoding_options([sampling] * rows, range(rows), config)
    spec = proposal_spec([sampling])
    active = jnp.ones(rows, bool)

    @jax.jit
    def step(params: Params, cache: DenseCache, state: BlockState) -> BlockState:
        return denoise_step(bind(config, params), cache, state, options, spec)

    @functools.partial(jax.jit, donate_argnums=1)
    def block(params: Params, cache: DenseCache, state: BlockState) -> tuple:
        return decode_block(bind(config, params), cache, state, active, options, spec)

    return step, block


def measure(
    config: ModelConfig, params: Params, rows: int, context: int, steps: int, repeats: int
) -> dict[str, float]:
    """Seconds of a denoising step and of a whole block behind `context` cached tokens."""
    sampling = SamplingParams(strategy="low_confidence_static", denoising_steps=steps)
    dtype = params["embed_tokens"]["embedding"].dtype
    step, block = _programs(config, sampling, rows)
    cache = DenseCache.zeros(config, rows, context + config.block_length, dtype)
    fill = jax.jit(lambda key, x: jax.random.normal(key, x.shape, x.dtype), donate_argnums=1)
    leaves, tree = jax.tree.flatten(cache)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    cache = jax.tree.unflatten(tree, [fill(k, x) for k, x in zip(keys, leaves, strict=True)])
    del leaves
    index = jnp.full((rows,), context // config.block_length, jnp.int32)
    shape = (rows, config.block_length)
    state = BlockState.start(index, jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool))
    holder = [cache]
    del cache  # the only reference is the one that a block donates and replaces
    step_seconds = seconds_per_call(lambda: step(params, holder[0], state), repeats)

    def whole_block() -> BlockState:
        holder[0], out = block(params, holder[0], state)
        return out

    block_seconds = seconds_per_call(whole_block, 1, samples=3)
    taken = int(np.asarray(whole_block().steps)[0])
    if taken != steps:
        raise RuntimeError(f"the static schedule took {taken} steps instead of {steps}")
    return {"step_seconds": step_seconds, "block_seconds": block_seconds}


def main(arguments: argparse.Namespace) -> None:
    """Measures every (rows, context) pair and writes its record."""
    config = MODELS[arguments.model]
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    bandwidth, rate = measured_bandwidth(arguments.copy_gigabytes), measured_matmul_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.0f} TFLOP/s")
    print(f"{'rows':>4} {'context':>8} {'ms/step':>8} {'bound':>7} {'ratio':>6} {'tok/s':>8}")
    for context in arguments.contexts:
        for rows in arguments.rows:
            costs = pass_costs(config, params, rows, context)
            bound = max(costs["bytes"] / bandwidth, costs["flops"] / rate)
            times = measure(config, params, rows, context, arguments.steps, arguments.repeats)
            tokens_per_second = rows * config.block_length / times["block_seconds"]
            ratio = times["step_seconds"] / bound
            print(
                f"{rows:>4} {context:>8} {times['step_seconds'] * 1e3:>8.2f} "
                f"{bound * 1e3:>7.2f} {ratio:>6.2f} {tokens_per_second:>8.1f}",
                flush=True,
            )
            write_record(
                f"step_{arguments.model}_r{rows}_s{context}",
                commit=arguments.commit or current_commit(),
                shapes={
                    "model": arguments.model,
                    "dtype": arguments.dtype,
                    "rows": rows,
                    "context_tokens": context,
                    "block_length": config.block_length,
                },
                settings={
                    "placement": "dense, on the device",
                    "strategy": "low_confidence_static",
                    "threshold": None,
                    "denoising_steps": arguments.steps,
                    "weights": "random",
                },
                figures={
                    "ms_per_step": times["step_seconds"] * 1e3,
                    "ms_per_block": times["block_seconds"] * 1e3,
                    "tokens_per_second": tokens_per_second,
                    "bytes_per_step": costs["bytes"],
                    "flops_per_step": costs["flops"],
                    "copy_bytes_per_second": bandwidth,
                    "matmul_flops_per_second": rate,
                    "bound_ms_per_step": bound * 1e3,
                    "ratio_to_bound": ratio,
                },
                folder=arguments.output,
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--steps", type=int, default=20, help="denoising steps of a block")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--copy-gigabytes", type=float, default=2.0)
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
