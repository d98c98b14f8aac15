"""Finished blocks in host memory: device bytes against the prediction, and time of a block.

One request decodes behind a long prompt over the sparse cache and, if asked for, over the dense
one. A block runs a static schedule, as random weights pass no threshold. Device bytes are those
of the allocator, beyond what it held before the engine was made, in the decode phase: `held`
between two blocks, `most` right behind any dispatch, when entries from the host may be arriving.
The allocator counts whole pieces of memory, which may be larger than the array in them, so what
JAX's arrays hold is recorded besides. A CPU has no such count; there that is all.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import RESULTS, current_commit, write_record
from benchmarks.shapes import MODELS
from herald_jax import CacheConfig, SamplingParams, checkpoint
from herald_jax.configs import ModelConfig
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.slot_arrays import GREEDY
from herald_jax.llm import LLM
from herald_jax.model_source import find_checkpoint
from herald_jax.models.decoder import Params, random_params


def bytes_in_use() -> int:
    """Device bytes by the allocator's count."""
    stats = jax.devices()[0].memory_stats()
    return bytes_in_arrays() if stats is None else stats["bytes_in_use"]


def bytes_in_arrays() -> int:
    """Device bytes of all JAX arrays."""
    kind = jax.devices()[0].default_memory().kind
    alive = [array for array in jax.live_arrays() if not array.is_deleted()]
    return sum(array.nbytes for array in alive if array.sharding.memory_kind == kind)


class DeviceBytes:
    """Device bytes since it was made, now and behind every dispatch of an engine."""

    def __init__(self) -> None:
        gc.collect()  # of an engine before this one
        self._in_use, self._in_arrays = bytes_in_use(), bytes_in_arrays()
        self.samples: list[int] = []

    def watch(self, engine: LLMEngine) -> None:
        """Notes from now on what is held behind each dispatch."""
        runner: Any = engine.runner
        self._runner = runner
        dispatch = runner.dispatch

        def watched(*args: Any) -> Any:
            pending = dispatch(*args)
            if pending:  # else a prompt may be on its way
                self.samples.append(self.now())
            return pending

        runner.dispatch = watched

    def now(self) -> int:
        """What is held at this moment."""
        return bytes_in_use() - self._in_use

    def arrays(self) -> int:
        """What JAX's arrays hold of it."""
        return bytes_in_arrays() - self._in_arrays

    def settled(self) -> int:
        """What is held once the steps have run that were dispatched, and entries have arrived."""
        jax.block_until_ready(self._runner._states)
        lane = getattr(getattr(self._runner, "retrieval", None), "_lane", None)
        if lane is not None:
            lane.collect()
        return self.now()


def measure(
    config: ModelConfig, params: Params, cache: CacheConfig | None, arguments: Any, context: int
) -> dict[str, Any]:
    """Bytes and times of one request of `arguments.blocks` blocks behind `context` tokens."""
    new = arguments.blocks * config.block_length
    jax.block_until_ready(params)
    device_bytes = DeviceBytes()
    engine = LLMEngine(
        config,
        params,
        EngineConfig(max_model_len=context + new, max_num_seqs=1, cache=cache),
    )
    if not arguments.no_warmup:
        engine.warmup([GREEDY])
    llm = LLM.from_engine(engine)
    sampling = SamplingParams(
        max_tokens=new,
        ignore_eos=True,
        strategy="low_confidence_static",
        denoising_steps=arguments.steps,
    )
    prompt = np.random.default_rng(context).integers(0, config.vocab_size // 2, context).tolist()
    device_bytes.watch(engine)
    held, arrays, ends, output = [], [], [time.perf_counter()], None
    for event in llm.stream(prompt, sampling):
        held.append(device_bytes.settled())
        arrays.append(device_bytes.arrays())
        ends.append(time.perf_counter())
        output = event.output or output
    assert output is not None
    runner: Any = engine.runner
    blocks = np.diff(ends)[1:-1] * 1e3
    figures: dict[str, Any] = {
        "prefill_seconds": output.stats.prefill_seconds,
        "ms_per_block": float(np.median(blocks)),
        "device_bytes_held": int(np.median(held)),
        "device_bytes_in_arrays": int(np.median(arrays)),
        "device_bytes_most": max(device_bytes.samples),
        "device_bytes_predicted": engine.sizes.kv_bytes,
        "device_bytes_predicted_most": engine.sizes.kv_bytes,
        "host_bytes_predicted": engine.sizes.host_bytes,
        "compile_seconds": engine.compile_seconds,
    }
    if cache is not None:
        counts = dataclasses.asdict(runner.retrieval.counts)
        recalls = [a.recall for a in output.outputs[0].stats.accounts if a.recall is not None]
        shape = engine.sizes.sparse
        assert shape is not None
        parts = shape.device_parts(config, engine.itemsize)
        figures |= {
            "device_parts": parts,
            "device_bytes_predicted": engine.sizes.kv_bytes - parts["arriving entries"],
            "device_bytes_held_beside_dense_layers": figures["device_bytes_held"]
            - parts["dense layers"],
            "host_bytes_held": getattr(runner.retrieval, "host_bytes", 0),
            "attended": dataclasses.asdict(output.outputs[0].stats.accounts[-1].counts),
            "recall_ms": float(np.median([recall.seconds for recall in recalls]) * 1e3),
            "hit_share": float(np.mean([recall.hit_share for recall in recalls])),
            "counts": counts,
        }
        runner.close()
    return figures


def load(arguments: argparse.Namespace) -> tuple[ModelConfig, Params]:
    """The model of that name with random weights, or of that folder with its own.

    Contexts may be longer than the model was made for.
    """
    dtype = jnp.dtype(arguments.dtype)
    if arguments.model in MODELS:
        config = MODELS[arguments.model]
        params = random_params(config, dtype=dtype)
    else:
        folder, config = find_checkpoint(arguments.model, dtype=dtype.name)
        params = checkpoint.load_params(folder, config, dtype=dtype)
    longest = max(arguments.contexts) + arguments.blocks * config.block_length
    room = max(longest, config.max_position_embeddings)
    return dataclasses.replace(config, max_position_embeddings=room), params


def main(arguments: argparse.Namespace) -> None:
    """Measures every context and writes its record."""
    begin = time.perf_counter()
    config, params = load(arguments)
    name = Path(arguments.model).name
    cache = CacheConfig(placement="host", budget=arguments.budget)
    settings = {"host": cache} | ({"dense": None} if arguments.dense else {})
    heads = ("prefill s", "ms/block")
    print(f"{'context':>8} {'cache':>6} {heads[0]:>9} {heads[1]:>9} {'held':>14} {'predicted':>14}")
    for context in arguments.contexts:
        if time.perf_counter() - begin > arguments.seconds:
            print(f"{context:>8} left out: --seconds {arguments.seconds} are over", flush=True)
            continue
        figures = {}
        for which, one in settings.items():
            figures[which] = found = measure(config, params, one, arguments, context)
            print(
                f"{context:>8} {which:>6} {found['prefill_seconds']:>9.2f} "
                f"{found['ms_per_block']:>9.1f} {found['device_bytes_held']:>14,} "
                f"{found['device_bytes_predicted']:>14,}",
                f"most {found['device_bytes_most']:,}; compiled in "
                f"{found['compile_seconds']:.0f} s; {time.perf_counter() - begin:.0f} s so far",
                flush=True,
            )
            write_record(
                f"offload_{name}_s{context}",
                commit=arguments.commit or current_commit(),
                shapes={
                    "model": name,
                    "dtype": arguments.dtype,
                    "rows": 1,
                    "context_tokens": context,
                    "block_length": config.block_length,
                },
                settings={
                    "cache": dataclasses.asdict(cache),
                    "denoising_steps": arguments.steps,
                    "blocks": arguments.blocks,
                    "weights": "random" if arguments.model in MODELS else "trained",
                },
                figures=figures,
                folder=arguments.output,
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--model", default="sdar-8b", help="a name of benchmarks.shapes, or a folder"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--budget", type=int, default=1638, help="tokens selected for a block")
    parser.add_argument("--blocks", type=int, default=6, help="blocks to decode")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps of a block")
    parser.add_argument("--no-warmup", action="store_true", help="compile what is needed, in time")
    parser.add_argument("--dense", action="store_true", help="measure the dense engine as well")
    parser.add_argument("--seconds", type=float, default=600, help="begin no context after these")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
