"""Small engines with a sparse cache, the prompts that they get, and what those must give."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from herald_jax import LLM, CacheConfig, SamplingParams
from herald_jax.models import random_params
from tests.engine import engines
from tests.oracle import sharpen

CONFIG = dataclasses.replace(engines.CONFIG, num_layers=4, max_position_embeddings=400)
LENGTHS = (3, 4, 9, 50, 121, 200, 201, 17)
"""Shorter than a block, a block, a tail in the first block, several chunks of prefill."""

ROWS = 3
PROGRAMS: dict[Any, dict[Any, Any]] = {}


@functools.cache
def params() -> Any:
    """Weights whose greedy texts are not all the same token."""
    return sharpen(random_params(CONFIG, seed=4))


def prompts() -> list[list[int]]:
    """One prompt of each length."""
    chance = np.random.default_rng(3)
    return [chance.integers(2, 60, length).tolist() for length in LENGTHS]


def sampling() -> list[SamplingParams]:
    """Greedy and sampled rows, some of which stop."""
    return [
        SamplingParams(
            max_tokens=21,
            temperature=0.7 * (at % 2),
            seed=at,
            threshold=0.5,
            ignore_eos=at % 3 == 0,
        )
        for at in range(len(LENGTHS))
    ]


def make_llm(cache: CacheConfig | None, **settings: Any) -> LLM:
    """An engine of three rows; engines of one cache and size run the same programs."""
    options: dict[str, Any] = dict(max_model_len=256, max_num_seqs=ROWS, cache=cache) | settings
    llm = LLM.from_params(CONFIG, params(), **options)
    if cache is not None:
        runner: Any = llm.engine._runner
        key = (cache, options["max_model_len"], options["max_num_seqs"])
        runner.programs._programs = PROGRAMS.setdefault(key, {})
    return llm


def run(llm: LLM, which: Any = slice(None)) -> list[tuple[list[int], list[int]]]:
    """Tokens and steps per block of some of the prompts, decoded together."""
    outputs = llm.generate(prompts()[which], sampling()[which])
    return [
        (output.outputs[0].token_ids, output.outputs[0].stats.steps_per_block) for output in outputs
    ]


@functools.cache
def dense() -> list[tuple[list[int], list[int]]]:
    """What the engine gives that attends to everything."""
    return run(make_llm(None))


def live_bytes(tree: Any) -> int:
    """Bytes of the distinct buffers of a tree."""
    leaves = jax.tree.leaves(tree)
    return sum({leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in leaves}.values())
