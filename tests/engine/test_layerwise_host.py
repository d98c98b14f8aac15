"""The paper's retrieval pass over host memory: the device's own pass, whatever the lane does."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np
import pytest

from herald_jax import LLM, CacheConfig, SamplingParams
from herald_jax.engine.lane_jobs import Append, Job
from herald_jax.engine.slot_arrays import GREEDY
from herald_jax.engine.walk_jobs import Gather, WalkLayer
from herald_jax.outputs import GenerationError
from tests.engine.sparse_engines import make_llm, prompts

HOST = CacheConfig(
    placement="host", budget=7, dense_layers=1, retrieval="layerwise", selection_query="even3"
)
"""Three masks of a block of four, so that a fourth would be seen if it were there."""


def make(cache: CacheConfig = HOST, rows: int = 2) -> LLM:
    """An engine of few rows."""
    return make_llm(cache, max_num_seqs=rows)


def run(llm: LLM, which: slice = slice(2, 6)) -> list[list[int]]:
    """Greedy texts of some prompts: one kind of step, as every program takes long to compile."""
    greedy = SamplingParams(max_tokens=21, threshold=0.5, ignore_eos=True)
    outputs = llm.generate(prompts()[which], greedy)
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def expected() -> list[list[int]]:
    """What it gives if nothing is late and nothing fails."""
    return run(make())


def retrieval(llm: LLM) -> Any:
    """The engine's retrieval."""
    runner: Any = llm.engine.runner
    return runner.retrieval


def test_offloaded_is_resident() -> None:
    resident = make(dataclasses.replace(HOST, placement="device"), rows=1)
    assert expected() == run(resident)
    llm = make()
    outputs = llm.generate(prompts()[4:5], SamplingParams(max_tokens=21, ignore_eos=True))
    token = 2 * 8 * 4  # two KV heads of 8 numbers
    accounts = outputs[0].outputs[0].stats.accounts
    for index, account in enumerate(accounts[1:], start=31):
        assert account.recall is not None
        # All three layers score their candidates; all but the last attend to keys and values.
        assert account.recall.bytes_scanned == (index - 1) * 4 * token * (3 + 2 * 2)
        assert account.recall.bytes_gathered == 2 * account.counts.pooled * token * 3
        assert account.recall.seconds > 0
    assert retrieval(llm).counts.hits > 0


def test_a_whole_budget_is_dense() -> None:
    llm = make(dataclasses.replace(HOST, budget=1.0), rows=1)
    assert run(llm, slice(4, 5)) == run(make_llm(None, max_num_seqs=1), slice(4, 5))
    # Where everything is taken no mask need walk.
    counts = retrieval(llm).counts
    assert counts.recalls > 0 and counts.bytes_scanned == 0


def test_a_slow_lane_changes_no_text() -> None:
    llm, chance = make(), np.random.default_rng(2)
    retrieval(llm)._lane._before_job = lambda job: time.sleep(float(chance.choice([0, 0.01])))
    assert run(llm) == expected()
    assert retrieval(llm).counts.waits > 0 and not retrieval(llm)._walks


@pytest.mark.parametrize("kind", [WalkLayer, Gather])
def test_a_failing_walk_ends_its_row_alone(kind: type[Job]) -> None:
    llm, count = make(), 0
    long: set[int] = set()

    def fail(job: Job) -> None:
        nonlocal count
        if isinstance(job, Append) and job.tokens == 120:  # the third prompt
            long.add(job.epoch)
        if isinstance(job, kind) and job.epoch in long:
            count += 1
            if count == 2:
                raise OSError("the disk is on fire")

    retrieval(llm)._lane._before_job = fail
    with pytest.raises(GenerationError, match="1 of 4 requests failed.*on fire") as caught:
        run(llm)
    for at, output in enumerate(caught.value.outputs):
        tokens = output.outputs[0].token_ids
        assert tokens == expected()[at][: len(tokens)]
        assert (len(tokens) < 21) == (at == 2)
    retrieval(llm)._lane._before_job = lambda job: None
    assert run(llm) == expected() and not retrieval(llm)._walks


def test_aborted_rows_leave_nothing_behind() -> None:
    llm = make()
    retrieval(llm)._lane._before_job = lambda job: time.sleep(0.005)
    for count in (1, 2, 3):
        stream = llm.stream(prompts()[5], SamplingParams(max_tokens=40, ignore_eos=True))
        for _, _event in zip(range(count), stream, strict=False):
            pass
        stream.close()
    assert run(llm) == expected()
    assert not retrieval(llm)._walks and not retrieval(llm)._recalls


def test_no_program_is_compiled_after_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    llm = make()
    llm.engine.warmup([GREEDY])
    runner: Any = llm.engine.runner
    names = set(runner.programs._programs)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        run(llm)
    assert set(runner.programs._programs) == names
    assert not [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
