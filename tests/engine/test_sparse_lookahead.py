"""The lookahead: its groups against separate passes, and pools that come late or not at all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import CacheConfig, SamplingParams
from herald_jax.cache.dense import DenseCache
from herald_jax.engine.plan import BlockStart, DecodeSlot, PrefillSlot, RowTable, StepPlan
from herald_jax.engine.retrievals import Ask, DeviceRetrieval, FullPool, RowFailure
from herald_jax.engine.slot_arrays import RowSampling
from herald_jax.engine.sparse_runner import SparseRunner
from herald_jax.models.decoder import bind
from herald_jax.outputs import GenerationError
from tests.engine.sparse_engines import CONFIG, make_llm, params, prompts, run, sampling

BLOCK = CONFIG.block_length
WHOLE = CacheConfig(placement="device", budget=1.0)
SPARSE = CacheConfig(placement="device", budget=0.1)


class Recorder(DeviceRetrieval):
    """Keeps the queries that it is asked with."""

    asked: list[tuple[list[np.ndarray], Sequence[Ask]]]

    def ask(self, cache: Any, queries: Sequence[jax.Array], asks: Sequence[Ask]) -> Any:
        """As its base does."""
        self.asked = [*getattr(self, "asked", []), ([np.asarray(q) for q in queries], asks)]
        return super().ask(cache, queries, asks)


def make_runner(cache: CacheConfig) -> SparseRunner:
    """A runner that records, with the programs of the test's engines."""
    llm = make_llm(cache)
    made: Any = llm.engine._runner
    runner = SparseRunner(CONFIG, params(), cache, llm.engine.sizes.sparse)  # type: ignore[arg-type]
    runner.programs._programs = made.programs._programs
    runner.retrieval = Recorder(runner.programs, runner.max_rows)
    return runner


def plan(tick: int, prompt: list[int] | None, limit: int, row: int = 1) -> StepPlan:
    """A plan for one row; with a prompt, it begins."""
    tables, starts, prefill = [], [], []
    if prompt is not None:
        blocks = len(prompt) // BLOCK
        tables = [RowTable(row, 1, tuple(range(4)))]
        starts = [BlockStart(row, 1, blocks, tuple(prompt[blocks * BLOCK :]))]
        prefill = [
            PrefillSlot(row, 1, at, tuple(prompt[at * BLOCK : (at + 1) * BLOCK]))
            for at in range(blocks)
        ]
    decode = [DecodeSlot(row, 1, limit, limit)]
    return StepPlan(tick, tuple(tables), tuple(starts), tuple(decode), tuple(prefill), ())


def queries_of(text: list[int], start: int) -> list[np.ndarray]:
    """Rotated queries [B, H, D] of the block at `start` of a text, by a dense pass, by layer."""
    decoder = bind(CONFIG, params())
    cache = DenseCache.zeros(CONFIG, 1, 128, jnp.float32)
    for at in range(0, start, BLOCK):
        tokens = jnp.asarray([text[at : at + BLOCK]])
        positions = at + jnp.arange(BLOCK)[None]
        lengths = jnp.asarray([at])
        _, fresh = decoder(tokens, positions, cache.block_attend(lengths))
        cache = cache.append_blocks(fresh, lengths, jnp.asarray([True]))
    seen = []

    def attend(layer: int, q: jax.Array, fresh: Any) -> jax.Array:
        seen.append(np.asarray(q[0]))
        return cache.block_attend(jnp.asarray([start]))(layer, q, fresh)

    decoder(jnp.asarray([text[start:]]), start + jnp.arange(BLOCK)[None], attend)
    return seen


@pytest.mark.parametrize("length", [20, 22])
def test_the_masks_of_the_next_block_see_the_draft_of_this_one(length: int) -> None:
    runner, prompt = make_runner(WHOLE), prompts()[5][:length]
    options = {1: RowSampling(SamplingParams(threshold=0.99, ignore_eos=True), 5)}
    before: list[Any] = []
    step = runner.programs.step

    def spy(spec: Any, *args: Any) -> Any:
        before.append(jax.tree.map(lambda x: np.asarray(x)[1], args[1]))
        return step(spec, *args)

    runner.programs.step = spy  # type: ignore[method-assign]
    runner.dispatch(plan(1, prompt, 8), options)
    block, draft = before[0].block, before[0].draft  # after step 0, which the prefill made
    drafted = np.where(block.is_masked, draft, block.tokens).tolist()
    assert block.is_masked.sum() in (1, 2, 3) and CONFIG.mask_token_id not in drafted
    assert drafted[: length % BLOCK] == prompt[length - length % BLOCK :]
    ((queries, asks),) = runner.retrieval.asked  # type: ignore[attr-defined]
    assert list(asks) == [Ask(1, 1, length // BLOCK + 1)]
    masks = [CONFIG.mask_token_id] * BLOCK
    text = prompt[: length // BLOCK * BLOCK] + drafted + masks
    expected = queries_of(text, len(text) - BLOCK)
    assert len(queries) == CONFIG.num_layers - WHOLE.dense_layers
    for found, wanted in zip(queries, expected[WHOLE.dense_layers :], strict=True):
        np.testing.assert_allclose(found[0], wanted, atol=2e-5)


def test_looking_ahead_changes_nothing_in_the_running_block() -> None:
    options = {1: RowSampling(SamplingParams(threshold=0.99, ignore_eos=True), 5)}
    states = []
    for end in (8, 6):  # in the last block nobody looks ahead
        runner = make_runner(SPARSE)
        runner.dispatch(plan(1, prompts()[5][:22], end), options)
        runner.dispatch(plan(2, None, end), {})
        asked = getattr(runner.retrieval, "asked", [])
        assert len(asked) == (end == 8)
        states.append((runner._states, runner._cache.recent, runner._cache.dense))
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


class Late(DeviceRetrieval):
    """Says that a pool is full only after a number of looks that chance decides.

    What it is asked with is filled only then, too: until then the pool holds what it held.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.chance = np.random.default_rng(0)
        self.late: list[list[Any]] = []
        self.failing: set[int] = set()

    def ask(self, cache: Any, queries: Sequence[jax.Array], asks: Sequence[Ask]) -> Any:
        """Keeps the queries."""
        for at, ask in enumerate(asks):
            self.late.append(
                [int(self.chance.integers(0, 9)), ask, [q[at : at + 1] for q in queries]]
            )
        return cache

    def poll(self, cache: Any) -> Any:
        """What is due by now."""
        failures = []
        for item in self.late:
            item[0] -= 1
        due = [item for item in self.late if item[0] < 0]
        self.late = [item for item in self.late if item[0] >= 0]
        full = []
        for _, ask, queries in due:
            if ask.target in self.failing:
                failures.append(RowFailure(ask.row, ask.epoch, OSError("the disk is on fire")))
                continue
            cache = self._refill(cache, queries, [ask])
            full.append(FullPool(ask, None))
        return cache, full, failures

    def cancel(self, row: int, epoch: int) -> None:
        """Drops a stay's queries."""
        self.late = [item for item in self.late if item[1][:2] != (row, epoch)]


def make_late(cache: CacheConfig, run_ahead: int) -> tuple[Any, Late]:
    """An engine whose pools come late."""
    llm = make_llm(cache, run_ahead=run_ahead)
    runner: Any = llm.engine._runner
    runner.retrieval = Late(runner.programs, runner.max_rows)
    return llm, runner.retrieval


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_a_late_pool_makes_the_row_wait_and_changes_no_text(run_ahead: int) -> None:
    llm, retrieval = make_late(SPARSE, run_ahead)
    assert run(llm) == run(make_llm(SPARSE))
    assert retrieval.counts.waits > 0 and not retrieval.late


def test_a_pool_that_fails_ends_its_row_alone() -> None:
    llm, retrieval = make_late(SPARSE, 2)
    retrieval.failing = {len(prompts()[4]) // BLOCK + 2}  # of that prompt's third block
    with pytest.raises(GenerationError, match="1 of 8 requests failed.*on fire") as caught:
        llm.generate(prompts(), sampling())
    expected = run(make_llm(SPARSE))
    for at, output in enumerate(caught.value.outputs):
        tokens = output.outputs[0].token_ids
        if at == 4:
            assert output.outputs[0].finish_reason == "abort"
            assert 0 < len(tokens) < len(expected[4][0])
            assert tokens == expected[4][0][: len(tokens)]
        else:
            assert tokens == expected[at][0]
    retrieval.failing = set()
    assert run(llm) == expected
    assert llm.engine.stats()["running"] == 0


@functools.cache
def texts_of(at: int) -> list[int]:
    """What one of the prompts gives alone."""
    return run(make_llm(SPARSE), slice(at, at + 1))[0][0]


def test_random_arrivals_and_aborts_leak_nothing() -> None:
    llm, retrieval = make_late(SPARSE, 2)
    engine, chance = llm.engine, np.random.default_rng(1)
    runner: Any = engine._runner
    live: dict[str, int] = {}
    ended = 0
    for tick in range(400):
        if chance.random() < 0.25 and len(live) < 6:
            at, request_id = int(chance.integers(8)), f"r{tick}"
            read = llm._read(prompts()[at], sampling()[at])[0]
            read.samples = engine.add_request(request_id, read.request, read.progresses, read.seeds)
            live[request_id] = at
        if live and chance.random() < 0.06:
            victim = str(chance.choice(list(live)))
            for sample in engine.abort(victim):
                expected = texts_of(live[victim])
                tokens = sample.progress.token_ids
                assert tokens == expected[: len(tokens)]
            del live[victim]
        for event in engine.step():
            sample = event.sample
            if sample.progress.finish_reason is not None and sample.request_id in live:
                assert sample.progress.token_ids == texts_of(live.pop(sample.request_id))
                ended += 1
        engine.scheduler.check()
        assert set(runner._stays) <= set(range(runner.max_rows))
    while engine.has_unfinished:
        engine.step()
    assert ended > 20
    assert not engine.scheduler.running and not runner._failures
