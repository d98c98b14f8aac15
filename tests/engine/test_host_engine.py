"""Finished blocks in host memory: the same texts as on the device, whatever the lane does."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from herald_jax import LLM, CacheConfig, ConfigError, SamplingParams
from herald_jax.engine.lane_jobs import Append, Job, Recall
from herald_jax.outputs import GenerationError
from tests.engine.sparse_engines import (
    CONFIG,
    LENGTHS,
    ROWS,
    dense,
    make_llm,
    params,
    prompts,
    run,
    sampling,
)

CACHES = [
    CacheConfig(placement="host", budget=0.1),
    CacheConfig(placement="host", budget=7, recent_blocks=2, lookahead=False),
    CacheConfig(placement="host", budget=1.0, recent_blocks=3, dense_layers=0, sink_tokens=0),
]


def name(cache: CacheConfig) -> str:
    """Short name of a test's case."""
    return f"{cache.budget}-{cache.lookahead}-{cache.recent_blocks}"


def retrieval(llm: LLM) -> Any:
    """The engine's retrieval."""
    runner: Any = llm.engine._runner
    return runner.retrieval


@pytest.mark.parametrize("cache", CACHES, ids=name)
def test_offloaded_is_resident(cache: CacheConfig) -> None:
    texts = run(make_llm(cache))
    assert texts == run(make_llm(dataclasses.replace(cache, placement="device")))
    assert (texts == dense()) == (cache.budget == 1.0)
    llm = make_llm(cache)
    for at in (5, 0, 4):  # alone, in rows that others had
        assert run(llm, slice(at, at + 1)) == texts[at : at + 1]


def test_every_byte_is_accounted() -> None:
    llm = make_llm(CACHES[0])
    outputs = llm.generate(prompts(), sampling())
    shape, counts = llm.engine.sizes.sparse, retrieval(llm).counts
    assert shape is not None
    assert shape.host_bytes(CONFIG, 4) == retrieval(llm).host_bytes == llm.engine.sizes.host_bytes
    token = 2 * 2 * 8 * 4  # K and V, two KV heads of 8 numbers
    layers = CONFIG.num_layers - CACHES[0].dense_layers
    kept = scanned = gathered = recalls = 0
    for length, output in zip(LENGTHS, outputs, strict=True):
        assert output.stats.kv_host_bytes == llm.engine.sizes.host_bytes
        accounts = output.outputs[0].stats.accounts
        kept += (length // 4 + len(accounts)) * 4 * token * layers
        for index, account in enumerate(accounts, start=length // 4):
            if account.recall is None:  # the first block, or nothing before the recent one
                assert index == length // 4 or index <= 1
                continue
            recalls += 1
            entries = account.counts.pooled * token * layers
            assert account.recall.bytes_gathered == entries
            assert account.recall.bytes_sent >= entries
            assert 0 <= account.recall.hit_share <= 1
            candidates = (index - 1) * 4
            all_taken = account.counts.pooled == candidates
            assert account.recall.bytes_scanned == (
                0 if all_taken else candidates * token * layers // 2
            )
            scanned += account.recall.bytes_scanned
            gathered += account.recall.bytes_gathered
    assert recalls > 20 and scanned > 0
    # A row that stops has looked ahead for a block that it does not run.
    assert counts.recalls >= recalls and counts.bytes_gathered >= gathered
    assert counts.bytes_kept == kept


def test_a_slow_lane_changes_no_text() -> None:
    chance = np.random.default_rng(2)
    llm = make_llm(CACHES[0])
    retrieval(llm)._lane._before_job = lambda job: time.sleep(float(chance.choice([0, 0.02])))
    assert run(llm) == run(make_llm(CACHES[0]))
    assert retrieval(llm).counts.waits > 0


def test_a_prompt_arrives_while_recalls_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheConfig(placement="host", budget=0.1, dense_layers=0)
    # A layer to a slot, so that the four slots soon fill.
    monkeypatch.setattr("herald_jax.cache.shape.STAGING_BYTES", 1)
    llm = make_llm(cache)
    # Recalls are queued, and unread, when the next prompt's layers come.
    slow = {Recall: 0.1, Append: 0.0}
    retrieval(llm)._lane._before_job = lambda job: time.sleep(slow[type(job)])
    texts: list[Any] = []
    thread = threading.Thread(target=lambda: texts.append(run(llm, slice(5))), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the prompt and the recalls wait for each other"
    assert texts == [run(make_llm(dataclasses.replace(cache, placement="device")), slice(5))]


@pytest.mark.parametrize("kind", [Recall, Append])
@pytest.mark.parametrize("cache", CACHES[:2], ids=name)
def test_a_failing_lane_ends_its_row_alone(cache: CacheConfig, kind: type[Job]) -> None:
    if kind is Recall and not cache.lookahead:
        pytest.skip("nothing is recalled without lookahead")
    llm, expected = make_llm(cache), run(make_llm(cache))
    first = len(prompts()[4]) // 4

    def fail(job: Job) -> None:
        is_block = isinstance(job, Append) and job.start == first * 4
        if (isinstance(job, Recall) and job.target == first + 2) or (kind is Append and is_block):
            raise OSError("the disk is on fire")

    retrieval(llm)._lane._before_job = fail
    with pytest.raises(GenerationError, match="1 of 8 requests failed.*on fire") as caught:
        llm.generate(prompts(), sampling())
    for at, output in enumerate(caught.value.outputs):
        tokens = output.outputs[0].token_ids
        assert tokens == expected[at][0][: len(tokens)]
        assert (len(tokens) < len(expected[at][0])) == (at == 4)
    retrieval(llm)._lane._before_job = lambda job: None
    assert run(llm) == expected


def test_aborted_rows_leave_nothing_behind() -> None:
    llm = make_llm(CACHES[0])
    for count in (1, 2, 3):
        stream = llm.stream(prompts()[5], SamplingParams(max_tokens=40, ignore_eos=True))
        for _, _event in zip(range(count), stream, strict=False):
            pass
        stream.close()
    assert run(llm) == run(make_llm(CACHES[0]))
    deadline = time.monotonic() + 20
    while retrieval(llm)._lane.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert retrieval(llm)._lane.pending == 0


def test_the_thread_ends_with_the_engine() -> None:
    llm = make_llm(CACHES[0])
    thread = retrieval(llm)._lane._thread
    assert thread.is_alive() and thread in threading.enumerate()
    del llm
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_what_does_not_fit_the_host_is_refused_before_anything_is_allocated() -> None:
    cache = dataclasses.replace(CACHES[0], host_bytes=10_000)
    before = threading.active_count()
    with pytest.raises(ConfigError, match=rf"{ROWS} rows .* of host memory .*host_bytes"):
        LLM.from_params(CONFIG, params(), max_model_len=256, max_num_seqs=ROWS, cache=cache)
    assert threading.active_count() == before


def test_rows_that_begin_beside_a_failing_one_begin() -> None:
    """Prompts of one step, of which the first in row order fails before its first block."""
    llm, expected = make_llm(CACHES[1]), run(make_llm(CACHES[1]))
    failing: list[int] = []

    def fail(job: Job) -> None:
        if isinstance(job, Append) and job.start == 0 and job.layer == 0:
            failing.append(job.row)
            if len(failing) == 1:
                raise OSError("the disk is on fire")

    retrieval(llm)._lane._before_job = fail
    with pytest.raises(GenerationError, match="1 of 3 requests failed") as caught:
        llm.generate(prompts()[2:5], sampling()[2:5])
    assert failing[0] == 0
    texts = [output.outputs[0].token_ids for output in caught.value.outputs]
    assert texts == [[], expected[3][0], expected[4][0]]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_more_sinks_than_text(placement: str) -> None:
    cache = CacheConfig(placement=placement, budget=1, sink_tokens=500)
    assert run(make_llm(cache), slice(0, 4)) == dense()[:4]
