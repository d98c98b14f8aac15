"""Continuous against static batching, on the same compiled programs.

Requests differ in blocks and in denoising steps per block, both geometric; random weights never
pass a confidence threshold, so a rule replays those steps: it commits the whole block at the
step that was drawn for (seed, block). In the static policy a batch of `--max-rows` requests is put
in together and the next batch only when all of it has ended (rows do not wait for each other
within a batch, so this baseline is milder than lockstep decoding). `useful_share` is the passes
of unfinished rows over all row-passes of the steps that ran; with a fixed set of requests it is
bounded by the tail in which the last long ones run alone, so the share up to the step at which
the queue was empty is given beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from benchmarks.record import RESULTS, current_commit, write_record
from benchmarks.shapes import MODELS
from herald_jax.configs import ModelConfig
from herald_jax.decoding.rules import RULES, BlockView
from herald_jax.decoding.rules.base import register_rule
from herald_jax.engine import slot_runner
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LiveSample, LLMEngine
from herald_jax.engine.request import Request, RowProgress
from herald_jax.engine.slot_arrays import GREEDY
from herald_jax.models.decoder import Params, random_params
from herald_jax.sampling import SamplingParams

MOST_STEPS, MOST_BLOCKS = 32, 64


def geometric(uniform: Any, mean: Any, most: int, xp: Any = np) -> Any:
    """Numbers 1..most, geometric with that mean before the cut; a mean of 1 gives ones."""
    log_fail = xp.log1p(-1 / xp.maximum(mean, 1 + 1e-6))
    return xp.clip(xp.ceil(xp.log1p(-uniform) / log_fail), 1, most)


@register_rule
@dataclasses.dataclass(frozen=True)
class Replay:
    """Commits nothing but one position a step until the drawn last step, then all the rest."""

    mean_steps: Float[Any, " R"]
    option: ClassVar[str | None] = "entropy_bound"  # carries the mean
    option_default: ClassVar[float | None] = 8.0

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        return cls(options)

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        def draw(seed: jax.Array, block: jax.Array) -> jax.Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), block))

        uniform = jax.vmap(draw)(view.seed, view.block)
        last = geometric(uniform, self.mean_steps, MOST_STEPS, jnp).astype(jnp.int32) - 1
        leftmost = view.is_masked & (jnp.cumsum(view.is_masked, axis=-1) <= 1)
        return jnp.where((view.step >= last)[:, None], view.is_masked, leftmost)


def requests_of(
    config: ModelConfig, count: int, mean_blocks: float, mean_steps: float, prompt_tokens: int
) -> list[Request]:
    """Requests of the study; the same for every policy."""
    rng = np.random.default_rng(0)
    blocks = geometric(rng.random(count), mean_blocks, MOST_BLOCKS).astype(int)
    prompts = rng.integers(0, config.mask_token_id, (count, prompt_tokens))
    return [
        Request(
            prompt=None,
            prompt_token_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(
                max_tokens=int(number) * config.block_length,
                ignore_eos=True,
                strategy="replay",
                entropy_bound=mean_steps,
            ),
        )
        for prompt, number in zip(prompts, blocks, strict=True)
    ]


def run(engine: LLMEngine, requests: Sequence[Request], batch: int) -> dict[str, float]:
    """Serves the requests in batches of that size and returns what it took."""
    live: list[LiveSample] = []
    ends: list[float] = []
    steps, busy_steps, busy_passes = 0, 0, 0
    begin = time.perf_counter()
    for first in range(0, len(requests), batch):
        for number, request in enumerate(requests[first : first + batch], start=first):
            progress = RowProgress(request.sampling, (), None)
            live += engine.add_request(str(number), request, [progress], [number])
        while engine.has_unfinished:
            events = engine.step()
            steps += 1
            if engine.scheduler.waiting:
                busy_steps, busy_passes = steps, _passes(live)
            now = time.perf_counter() - begin
            ends += [now for event in events if event.sample.progress.finish_reason is not None]
    seconds = time.perf_counter() - begin
    engine.scheduler.check()
    tokens = sum(len(sample.progress.token_ids) for sample in live)
    rows = engine.sizes.max_rows
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "generated_tokens": tokens,
        "steps": steps,
        "useful_share": _passes(live) / (steps * rows),
        "useful_share_while_requests_wait": busy_passes / max(busy_steps * rows, 1),
        "latency_p50_seconds": float(np.percentile(ends, 50)),
        "latency_p99_seconds": float(np.percentile(ends, 99)),
    }


def _passes(live: Sequence[LiveSample]) -> int:
    """Denoising and commit passes of all blocks that were read."""
    blocks = [sample.progress.steps_per_block for sample in live]
    return sum(sum(steps) + len(steps) for steps in blocks)


def make_engine(config: ModelConfig, params: Params, arguments: argparse.Namespace) -> LLMEngine:
    """An engine whose longest sample is the study's longest."""
    longest = arguments.prompt_tokens + MOST_BLOCKS * config.block_length
    return LLMEngine(
        config,
        params,
        EngineConfig(
            max_model_len=math.ceil(longest / 64) * 64,
            max_num_seqs=arguments.max_rows,
            max_prefill_tokens=arguments.prefill_tokens,
            share_prefixes=False,
        ),
    )


def main(arguments: argparse.Namespace) -> None:
    """Runs both policies on one engine and writes the record."""
    RULES["replay"] = Replay
    # Both policies run the one program of all rows: an idle row costs what a busy one does.
    slot_runner.row_bucket = lambda rows, limit: limit
    config = MODELS[arguments.model]
    params = random_params(config, dtype=jnp.dtype(arguments.dtype))
    engine = make_engine(config, params, arguments)
    engine.warmup([GREEDY])
    shape = (config, arguments.requests, arguments.mean_blocks)
    for mean_steps in arguments.mean_steps:
        requests = requests_of(*shape, mean_steps, arguments.prompt_tokens)
        run(engine, requests[:2], 2)
        figures = {
            "continuous": run(engine, requests, len(requests)),
            "static": run(engine, requests, arguments.max_rows),
        }
        gain = figures["static"]["seconds"] / figures["continuous"]["seconds"]
        for policy, row in figures.items():
            print(
                f"mean steps {mean_steps:g} {policy:>10}: {row['seconds']:.2f} s, "
                f"{row['tokens_per_second']:.1f} tok/s, useful {row['useful_share']:.3f}, "
                f"p99 {row['latency_p99_seconds']:.2f} s",
                flush=True,
            )
        print(f"mean steps {mean_steps:g}: continuous {gain:.2f}x static")
        write_record(
            f"continuous_{arguments.model}_t{mean_steps:g}",
            commit=arguments.commit or current_commit(),
            shapes={
                "model": arguments.model,
                "dtype": arguments.dtype,
                "rows": arguments.max_rows,
                "block_length": config.block_length,
                "prompt_tokens": arguments.prompt_tokens,
            },
            settings={
                "placement": "paged, on the device",
                "strategy": "replay",
                "threshold": None,
                "weights": "random",
                "requests": arguments.requests,
                "mean_blocks": arguments.mean_blocks,
                "mean_steps": mean_steps,
                "run_ahead": engine.settings.run_ahead,
                "prefill_tokens": arguments.prefill_tokens,
            },
            figures={**figures, "speedup": gain},
            folder=arguments.output,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-rows", type=int, default=16)
    parser.add_argument("--mean-blocks", type=float, default=8.0)
    parser.add_argument("--mean-steps", type=float, nargs="+", default=[8.0])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
