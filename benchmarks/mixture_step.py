"""A whole step of a mixture model against its byte bound, with the experts that it touches counted.

One denoising step of `rows` rows behind `context` tokens of keys and values on the device: every
layer, attention by the kernels of the device, head and unmasking. Half of each block is committed
to random tokens, so its tokens route apart. The same pass reports which experts each layer's router
chose; the bound reads those, every other weight once, and each row's keys and values once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.record import current_commit, write_record
from benchmarks.shapes import MODELS
from benchmarks.timing import measured_bandwidth, measured_matmul_rate, seconds_per_call
from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import kv_bytes_per_token
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import decoding_options, proposal_spec
from herald_jax.decoding.steps import BlockState, denoise_step
from herald_jax.models import moe
from herald_jax.models.decoder import Params, bind, random_params
from herald_jax.sampling import SamplingParams


@contextmanager
def seen_routings() -> Iterator[list[jax.Array]]:
    """Chosen experts [T, k] of every mixture layer that is traced inside, in order."""
    seen: list[jax.Array] = []
    plain = moe.Router.__call__

    def watched(self: moe.Router, x: Any) -> moe.Routing:
        routing = plain(self, x)
        seen.append(routing.experts)
        return routing

    moe.Router.__call__ = watched
    try:
        yield seen
    finally:
        moe.Router.__call__ = plain


def bound_costs(
    config: ModelConfig, params: Params, touched: list[int], rows: int, context: int
) -> dict[str, float]:
    """Bytes and floating-point operations that the step cannot do without."""
    itemsize = params["embed_tokens"]["embedding"].dtype.itemsize
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    weights -= params["embed_tokens"]["embedding"].size  # only a few rows are looked up
    expert = 3 * config.hidden_size * config.expert_intermediate_size
    shared = weights - len(touched) * config.num_experts * expert
    queries = rows * config.block_length
    attended = 4 * config.num_layers * config.num_heads * config.head_dim * queries
    active = shared + len(touched) * config.experts_per_token * expert
    prefix = rows * context * kv_bytes_per_token(config, itemsize)
    return {
        "bytes": (shared + sum(touched) * expert) * itemsize + prefix,
        "bytes_with_all_experts": weights * itemsize + prefix,
        "flops": 2 * active * queries + attended * (context + config.block_length),
    }


def measure(
    config: ModelConfig, params: Params, rows: int, context: int, repeats: int
) -> tuple[float, list[int]]:
    """Seconds of a step, and the experts that each mixture layer touched in it."""
    sampling = SamplingParams(strategy="low_confidence_static")
    options = decoding_options([sampling] * rows, range(rows), config)
    spec = proposal_spec([sampling])
    dtype = params["embed_tokens"]["embedding"].dtype
    fill = jax.jit(lambda key, x: jax.random.normal(key, x.shape, x.dtype), donate_argnums=1)
    cache = DenseCache.zeros(config, rows, context + config.block_length, dtype)
    leaves, tree = jax.tree.flatten(cache)
    del cache
    keys = jax.random.split(jax.random.key(1), len(leaves))
    for at, key in enumerate(keys):
        leaves[at] = fill(key, leaves[at])
    cache = jax.tree.unflatten(tree, leaves)
    index = jnp.full((rows,), context // config.block_length, jnp.int32)
    shape = (rows, config.block_length)
    tokens = jax.random.randint(jax.random.key(2), shape, 0, config.vocab_size // 2)
    is_masked = jnp.broadcast_to(jnp.arange(config.block_length) % 2 == 0, shape)
    state = BlockState.start(index, tokens, is_masked)

    @jax.jit
    def step(params: Params, cache: DenseCache, state: BlockState) -> BlockState:
        return denoise_step(bind(config, params), cache, state, options, spec)

    @jax.jit
    def touched(params: Params, cache: DenseCache, state: BlockState) -> list[jax.Array]:
        with seen_routings() as seen:
            denoise_step(bind(config, params), cache, state, options, spec)
        return [
            (jnp.bincount(chosen.reshape(-1), length=config.num_experts) > 0).sum()
            for chosen in seen
        ]

    counts = [int(count) for count in touched(params, cache, state)]
    return seconds_per_call(lambda: step(params, cache, state), repeats, samples=3), counts


def steps(arguments: argparse.Namespace) -> None:
    """Measures every number of rows and writes its record."""
    config = MODELS[arguments.model]
    if not config.num_experts:
        raise SystemExit(f"{arguments.model} has no experts; benchmarks step measures it")
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    bandwidth, rate = measured_bandwidth(arguments.copy_gigabytes), measured_matmul_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.0f} TFLOP/s")
    print(f"{'rows':>4} {'context':>8} {'experts':>8} {'ms/step':>8} {'bound':>7} {'ratio':>6}")
    for rows in arguments.rows:
        context = arguments.context
        seconds, counts = measure(config, params, rows, context, arguments.repeats)
        costs = bound_costs(config, params, counts, rows, context)
        bound = max(costs["bytes"] / bandwidth, costs["flops"] / rate)
        mean = sum(counts) / len(counts)
        print(
            f"{rows:>4} {context:>8} {mean:>8.1f} {1e3 * seconds:>8.2f} {1e3 * bound:>7.2f} "
            f"{seconds / bound:>6.2f}",
            flush=True,
        )
        write_record(
            f"mixture_step_{arguments.model}_r{rows}_s{context}",
            commit=arguments.commit or current_commit(),
            shapes={
                "model": arguments.model,
                "dtype": arguments.dtype,
                "rows": rows,
                "context_tokens": context,
                "block_length": config.block_length,
            },
            settings={"placement": "dense, on the device", "weights": "random"},
            figures={
                "ms_per_step": 1e3 * seconds,
                "bound_ms_per_step": 1e3 * bound,
                "ratio_to_bound": seconds / bound,
                "experts_touched_mean": mean,
                "experts_touched_by_layer": counts,
                **{f"{name}_per_step": value for name, value in costs.items()},
                "copy_bytes_per_second": bandwidth,
                "matmul_flops_per_second": rate,
            },
            folder=arguments.output,
        )


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of whole steps."""
    mixtures = sorted(name for name, config in MODELS.items() if config.num_experts)
    parser.add_argument("--step", action="store_true", help="time whole steps instead of a layer")
    parser.add_argument("--model", choices=mixtures, default="llada2-mini")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--copy-gigabytes", type=float, default=2.0)
