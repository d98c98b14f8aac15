"""Finished blocks in host memory: device bytes against the prediction, and time of a block.

One request decodes behind a long prompt, first with the sparse cache, then with the dense one.
Weights are random, so no confidence passes a threshold; a block runs a static schedule. Device
bytes are what the allocator holds between two blocks, without the weights; a CPU has no such
count, and the arrays of the cache are summed there instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import RESULTS, current_commit, write_record
from benchmarks.shapes import MODELS
from herald_jax import CacheConfig, SamplingParams
from herald_jax.configs import ModelConfig
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.slot_arrays import GREEDY
from herald_jax.llm import LLM
from herald_jax.models.decoder import Params, random_params


def _device_bytes(engine: LLMEngine) -> int:
    runner: Any = engine.runner
    jax.block_until_ready(runner._states)
    stats = jax.devices()[0].memory_stats()
    if stats is None:
        return runner.kv_bytes
    return stats["bytes_in_use"] - sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params))


def measure(
    config: ModelConfig, params: Params, cache: CacheConfig | None, arguments: Any, context: int
) -> dict[str, Any]:
    """Bytes and times of one request of `arguments.blocks` blocks behind `context` tokens."""
    new = arguments.blocks * config.block_length
    engine = LLMEngine(
        config,
        params,
        EngineConfig(max_model_len=context + new, max_num_seqs=1, cache=cache),
    )
    engine.warmup([GREEDY])
    llm = LLM.from_engine(engine)
    sampling = SamplingParams(
        max_tokens=new,
        ignore_eos=True,
        strategy="low_confidence_static",
        denoising_steps=arguments.steps,
    )
    prompt = np.random.default_rng(context).integers(0, config.vocab_size // 2, context).tolist()
    held, ends, output = [], [time.perf_counter()], None
    for event in llm.stream(prompt, sampling):
        held.append(_device_bytes(engine))
        ends.append(time.perf_counter())
        output = event.output or output
    assert output is not None
    runner: Any = engine.runner
    blocks = np.diff(ends)[1:-1] * 1e3
    figures: dict[str, Any] = {
        "prefill_seconds": output.stats.prefill_seconds,
        "ms_per_block": float(np.median(blocks)),
        "device_bytes_held": int(np.median(held)),
        "device_bytes_predicted": engine.sizes.kv_bytes,
        "host_bytes_predicted": engine.sizes.host_bytes,
        "compile_seconds": engine.compile_seconds,
    }
    if cache is not None:
        counts = dataclasses.asdict(runner.retrieval.counts)
        recalls = [a.recall for a in output.outputs[0].stats.accounts if a.recall is not None]
        shape = engine.sizes.sparse
        assert shape is not None
        figures |= {
            "device_parts": shape.device_parts(config, engine.itemsize),
            "host_bytes_held": getattr(runner.retrieval, "host_bytes", 0),
            "attended": dataclasses.asdict(output.outputs[0].stats.accounts[-1].counts),
            "recall_ms": float(np.median([recall.seconds for recall in recalls]) * 1e3),
            "hit_share": float(np.mean([recall.hit_share for recall in recalls])),
            "counts": counts,
        }
        runner.close()
    return figures


def main(arguments: argparse.Namespace) -> None:
    """Measures every context and writes its record."""
    config = MODELS[arguments.model]
    longest = max(arguments.contexts) + arguments.blocks * config.block_length
    config = dataclasses.replace(
        config, max_position_embeddings=max(longest, config.max_position_embeddings)
    )
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    cache = CacheConfig(placement="host", budget=arguments.budget)
    heads = ("prefill s", "ms/block")
    print(f"{'context':>8} {'cache':>6} {heads[0]:>9} {heads[1]:>9} {'held':>14} {'predicted':>14}")
    for context in arguments.contexts:
        figures = {}
        for name, one in (("host", cache), ("dense", None)):
            figures[name] = found = measure(config, params, one, arguments, context)
            print(
                f"{context:>8} {name:>6} {found['prefill_seconds']:>9.2f} "
                f"{found['ms_per_block']:>9.1f} {found['device_bytes_held']:>14,} "
                f"{found['device_bytes_predicted']:>14,}",
                flush=True,
            )
            write_record(
                f"offload_{arguments.model}_s{context}",
                commit=arguments.commit or current_commit(),
                shapes={
                    "model": arguments.model,
                    "dtype": arguments.dtype,
                    "rows": 1,
                    "context_tokens": context,
                    "block_length": config.block_length,
                },
                settings={
                    "cache": dataclasses.asdict(cache),
                    "denoising_steps": arguments.steps,
                    "blocks": arguments.blocks,
                    "weights": "random",
                },
                figures=figures,
                folder=arguments.output,
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--budget", type=int, default=1638, help="tokens selected for a block")
    parser.add_argument("--blocks", type=int, default=6, help="blocks to decode")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps of a block")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
