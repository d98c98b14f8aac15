"""Traffic over keys in host memory: two thousand random ticks, the asyncio front, new weights."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import LLM, CacheConfig, SamplingParams
from herald_jax.engine.async_llm import AsyncLLM
from herald_jax.models import random_params
from tests.engine.sparse_engines import CONFIG, live_bytes
from tests.oracle import sharpen

TICKS = 2000
ROWS = 2
SMALL = dataclasses.replace(CONFIG, num_layers=2, max_position_embeddings=96)
CACHE = CacheConfig(placement="host", budget=5, dense_layers=1)
LENGTHS = (3, 4, 30, 61)


@functools.cache
def weights(seed: int = 6) -> Any:
    """Parameters of `SMALL`."""
    return sharpen(random_params(SMALL, seed=seed))


PROGRAMS: dict[Any, Any] = {}


def make(seed: int = 6) -> LLM:
    """An engine; all of them share their programs, which are what takes time."""
    settings: dict[str, Any] = dict(max_model_len=96, max_num_seqs=ROWS, cache=CACHE)
    llm = LLM.from_params(SMALL, weights(seed), **settings)
    runner: Any = llm.engine.runner
    runner.programs._programs = PROGRAMS
    return llm


def prompt(at: int) -> list[int]:
    """One of the prompts."""
    return np.random.default_rng(at).integers(2, 60, LENGTHS[at]).tolist()


def sampling(at: int) -> SamplingParams:
    """How it goes on; all in one kind of step, and some stop."""
    return SamplingParams(max_tokens=9 + 5 * at, threshold=0.5, ignore_eos=at % 2 == 0)


@functools.cache
def texts(seed: int = 6) -> list[list[int]]:
    """What each prompt gives alone."""
    llm = make(seed)
    outputs = [llm.generate([prompt(at)], sampling(at))[0] for at in range(len(LENGTHS))]
    return [output.outputs[0].token_ids for output in outputs]


def test_random_arrivals_and_aborts_leak_nothing() -> None:
    llm, chance = make(), np.random.default_rng(1)
    engine = llm.engine
    runner: Any = engine.runner
    front: Any = llm
    retrieval = runner.retrieval
    expected = texts()
    held, ended, aborted = live_bytes(runner._cache), 0, 0
    arrays = len(jax.live_arrays())
    retrieval._lane._before_job = lambda job: time.sleep(0.002 * (chance.random() < 0.1))
    live: dict[str, int] = {}
    for tick in range(TICKS):
        if chance.random() < 0.3 and len(live) < 5:
            at, name = int(chance.integers(len(LENGTHS))), f"r{tick}"
            read = front._read([prompt(at)], [sampling(at)])[0]
            read.samples = engine.add_request(name, read.request, read.progresses, read.seeds)
            live[name] = at
        if live and chance.random() < 0.05:
            victim = str(chance.choice(list(live)))
            for sample in engine.abort(victim):
                tokens = sample.progress.token_ids
                assert tokens == expected[live[victim]][: len(tokens)]
            del live[victim]
            aborted += 1
        for event in engine.step():
            sample = event.sample
            if sample.progress.finish_reason is not None and sample.request_id in live:
                assert sample.progress.token_ids == expected[live.pop(sample.request_id)]
                ended += 1
        engine.scheduler.check()
        assert len(runner._stays) <= ROWS and len(retrieval._stays) <= ROWS
    while engine.has_unfinished:
        engine.step()
    assert ended > 100 and aborted > 50
    retrieval.reset()
    while retrieval._lane.pending:
        time.sleep(0.001)
    retrieval._lane.collect()
    assert not (retrieval._recalls or retrieval._appends or retrieval._stays or runner._failures)
    ring = retrieval._ring
    assert len(ring._free) == len(ring._slots) and not ring._held
    assert live_bytes(runner._cache) == held
    assert len(jax.live_arrays()) <= arrays + 20  # and not one a tick


def test_the_asyncio_front_and_new_weights() -> None:
    llm = AsyncLLM(make().engine)

    async def text(at: int) -> list[int]:
        events = [event async for event in llm.generate(prompt(at), sampling(at))]
        return [token for event in events for token in event.token_ids]

    async def main() -> None:
        async with llm:
            for seed in (6, 7):
                found = await asyncio.gather(*map(text, range(len(LENGTHS))))
                assert found == texts(seed)
                await llm.update_params(weights(7))

    asyncio.run(main())
    assert texts(6) != texts(7)


def test_wide_blocks_in_bfloat16() -> None:
    """Kind of fault: a dtype or a block length that only small tests have."""
    wide = dataclasses.replace(SMALL, block_length=32, max_position_embeddings=512)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights())
    options = SamplingParams(
        max_tokens=100, temperature=0.7, seed=3, denoising_steps=8, ignore_eos=True
    )
    found = []
    for placement in ("host", "device"):
        cache = CacheConfig(placement=placement, budget=24, dense_layers=1)
        llm = LLM.from_params(wide, half, max_model_len=512, max_num_seqs=1, cache=cache)
        found.append(llm.generate([prompt(3) * 5], options)[0].outputs[0].token_ids)
    assert found[0] == found[1] and len(set(found[0])) > 5
