"""Prompts with equal beginnings, over a sparse cache: keys are taken over, texts do not change."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import jax
import numpy as np
import pytest

from herald_jax import LLM, CacheConfig, SamplingParams
from herald_jax.cache.shape import SparseShape
from herald_jax.engine import sparse_compiled
from herald_jax.engine.kept_prompts import KeptPrompts, KnownPrefix
from herald_jax.engine.lane_jobs import Recall
from tests.engine.sparse_engines import make_llm, params

CHUNK = 64
FIRST = np.random.default_rng(5).integers(2, 60, 200).tolist()
SECOND = FIRST[:150] + FIRST[:50]
PROMPTS = [FIRST, SECOND, [*FIRST, 7, 9]]
SHARED = 128 + 200
"""Two whole chunks of the second prompt, and all blocks of the third, which are the first's."""

CACHES = [
    CacheConfig(placement="host", budget=0.1),
    CacheConfig(placement="host", budget=7, recent_blocks=2, lookahead=False),
    CacheConfig(placement="device", budget=0.1),
]
"""Those of other tests, whose programs they share."""


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse_compiled, "CHUNK_TOKENS", CHUNK)


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    sampling = [
        SamplingParams(max_tokens=17, temperature=0.6 * (at % 2), seed=at, ignore_eos=True)
        for at in range(len(prompts))
    ]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]


def taken_over(llm: LLM) -> int:
    return llm.engine.stats()["kept_prompt_tokens"]


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: f"{cache.placement}-{cache.lookahead}")
def test_equal_beginnings_are_taken_over_and_texts_stay(cache: CacheConfig) -> None:
    apart = make_llm(cache, share_prefixes=False)
    wanted = texts(apart, PROMPTS)
    assert taken_over(apart) == 0
    shared = make_llm(cache)
    assert texts(shared, PROMPTS) == wanted
    assert taken_over(shared) == SHARED
    # From rows that have ended, the row itself among them.
    assert texts(shared, PROMPTS) == wanted
    assert taken_over(shared) == SHARED + 3 * 200
    shared.update_params(jax.tree.map(lambda leaf: leaf * 1.01, params()))
    apart.update_params(jax.tree.map(lambda leaf: leaf * 1.01, params()))
    assert texts(shared, PROMPTS[2:]) == texts(apart, PROMPTS[2:])
    assert taken_over(shared) == SHARED + 3 * 200


def test_a_prompt_that_did_not_reach_the_host_is_not_taken_over() -> None:
    """Kind of fault: another request gets the zeros, or the old keys, of an aborted prompt."""
    llm = make_llm(CACHES[0])
    runner: Any = llm.engine.runner
    write = runner.retrieval._pool.write

    def failing(layer: int, *args: Any) -> None:
        if layer == 1:  # the last of the sparse ones
            raise OSError("no more memory")
        write(layer, *args)

    runner.retrieval._pool.write = failing
    with pytest.raises(Exception, match="no more memory"):
        texts(llm, PROMPTS[:1])
    runner.retrieval._pool.write = write
    assert texts(llm, PROMPTS[2:]) == texts(make_llm(CACHES[0]), PROMPTS[2:])
    assert taken_over(llm) == 0


def test_a_prompt_on_its_way_is_waited_for_while_recalls_need_room(monkeypatch: Any) -> None:
    """Kind of fault: a thread waits for work that is stuck behind what only it can take."""
    monkeypatch.setattr(SparseShape, "staging_slots", lambda *_: 1)
    llm = make_llm(CACHES[0])
    lane = cast(Any, llm.engine.runner).retrieval._lane
    lane._before_job = lambda job: time.sleep(0.05) if isinstance(job, Recall) else None
    sampling = [
        SamplingParams(max_tokens=48 if at == 0 else 12 + at % 5 * 4, seed=at, ignore_eos=True)
        for at in range(14)
    ]
    done = threading.Thread(target=lambda: llm.generate([FIRST] * 14, sampling), daemon=True)
    done.start()
    done.join(120)
    assert not done.is_alive()
    assert taken_over(llm) > 0


def test_the_longest_run_of_equal_whole_chunks_counts() -> None:
    kept = KeptPrompts(4)
    first = np.arange(10)
    assert kept.match(first) is None
    kept.put(3, 1, first)
    kept.put(5, 2, first[:7])
    assert kept.match(first) == KnownPrefix(3, 10)
    assert kept.match(np.arange(12)) == KnownPrefix(3, 8)
    assert kept.match(first[:7]) == KnownPrefix(5, 7)
    assert kept.match(np.where(first == 5, 0, first)) == KnownPrefix(3, 4)
    assert kept.match(np.where(first == 3, 0, first)) is None
    kept.drop(3, epoch=9)  # of a stay that is long over
    assert kept.match(first) == KnownPrefix(3, 10)
    kept.drop(3, epoch=1)
    assert kept.match(first) == KnownPrefix(5, 4)
