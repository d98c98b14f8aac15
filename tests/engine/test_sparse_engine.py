"""The engine with a sparse cache: what must not depend on where keys live, and what must."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from herald_jax import LLM, CacheConfig, ConfigError, SamplingParams
from herald_jax.engine.slot_arrays import SAMPLED
from herald_jax.engine.sparse_sizes import sparse_shape
from tests.engine.sparse_engines import (
    CONFIG,
    LENGTHS,
    ROWS,
    dense,
    live_bytes,
    make_llm,
    params,
    prompts,
    run,
    sampling,
)

EVERYTHING = [
    CacheConfig(placement="device", budget=1.0),
    CacheConfig(placement="device", budget=1.0, lookahead=False, selection_query="all"),
    CacheConfig(placement="device", budget=300, retrieval="layerwise", selection_query="centre"),
    CacheConfig(placement="device", budget=1.0, recent_blocks=3, dense_layers=0, sink_tokens=0),
]
SPARSE = [
    CacheConfig(placement="device", budget=0.1),
    CacheConfig(placement="device", budget=7, lookahead=False, recent_blocks=2),
]


def name(cache: CacheConfig) -> str:
    """Short name of a test's case."""
    return f"{cache.placement}-{cache.budget}-{cache.lookahead}-{cache.recent_blocks}"


@pytest.mark.parametrize("cache", EVERYTHING, ids=name)
def test_a_budget_that_covers_the_prefix_is_dense(cache: CacheConfig) -> None:
    assert run(make_llm(cache)) == dense()


@pytest.mark.parametrize("cache", SPARSE, ids=name)
def test_texts_depend_on_nothing_but_their_own_row(cache: CacheConfig) -> None:
    together = run(make_llm(cache))
    assert together != dense()
    assert run(make_llm(cache, run_ahead=1)) == together
    llm = make_llm(cache)
    for at in (7, 0, 5, 4):
        assert run(llm, slice(at, at + 1)) == together[at : at + 1]
    assert run(llm, slice(None, None, -1)) == together[::-1]


def test_a_short_prefix_is_attended_whole() -> None:
    cache = CacheConfig(placement="device", budget=11, sink_tokens=5, recent_blocks=2)
    texts = run(make_llm(cache))
    # Of 3, 4 and 9 prompt tokens and 21 more no block has a prefix that pool and ring exceed.
    short = [at for at, length in enumerate(LENGTHS) if length + 21 - 4 <= 11 + 5 + 8]
    assert len(short) == 2
    assert [texts[at] for at in short] == [dense()[at] for at in short]
    assert texts != dense()


@pytest.mark.parametrize("lookahead", [True, False])
def test_the_first_step_of_the_first_block_sees_the_whole_prompt(lookahead: bool) -> None:
    cache = CacheConfig(placement="device", budget=1, sink_tokens=0, lookahead=lookahead)
    # One step commits a whole block; of the first block no other step can have a say.
    once = SamplingParams(
        max_tokens=3,
        strategy="low_confidence_static",
        denoising_steps=1,
        temperature=0.8,
        seed=5,
        ignore_eos=True,
    )
    twice = dataclasses.replace(once, max_tokens=7)
    sparse, whole = make_llm(cache), make_llm(None)
    long = [prompts()[at] for at in (4, 5, 6)]

    def texts(llm: LLM, sampling: SamplingParams) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(long, sampling)]

    assert texts(sparse, once) == texts(whole, once)
    # Without lookahead the first step of every block sees everything.
    assert (texts(sparse, twice) == texts(whole, twice)) == (not lookahead)


def test_a_row_has_no_more_recent_blocks_than_its_text() -> None:
    many = CacheConfig(recent_blocks=1000)
    assert sparse_shape(many, CONFIG, rows=2, longest=37).recent_blocks == 10
    assert sparse_shape(CacheConfig(recent_blocks=3), CONFIG, 2, longest=37).recent_blocks == 3


def test_what_is_attended_adds_up() -> None:
    cache = CacheConfig(placement="device", budget=0.1)
    outputs = make_llm(cache).generate(prompts(), sampling())
    for length, output in zip(LENGTHS, outputs, strict=True):
        stats = output.outputs[0].stats
        assert len(stats.accounts) == len(stats.steps_per_block)
        for block, account in enumerate(stats.accounts, start=length // 4):
            counts = account.counts
            assert counts.block == 4
            assert counts.recent == 4 * min(block, 1)
            left = 4 * block - counts.recent
            assert counts.sinks == min(4, left)
            assert counts.selected == min(-(-block * 4 // 10), left - counts.sinks)
            assert counts.attended == counts.pooled + counts.recent + counts.block
            assert account.recall is None


@pytest.mark.parametrize("cache", [EVERYTHING[3], SPARSE[1]], ids=name)
def test_bytes_on_the_device_are_those_predicted(cache: CacheConfig) -> None:
    llm = make_llm(cache)
    runner: Any = llm.engine._runner
    shape = llm.engine.sizes.sparse
    assert shape is not None
    assert shape.device_bytes(CONFIG, 4) == llm.engine.sizes.kv_bytes
    assert live_bytes(runner._cache) == llm.engine.sizes.kv_bytes
    run(llm, slice(3, 6))
    assert live_bytes(runner._cache) == llm.engine.sizes.kv_bytes
    # Nothing is left of the prompts that went by.
    held = live_bytes((runner._cache, runner._states, params(), llm.engine.params))
    ours = [a for a in jax.live_arrays() if a.shape[:2] == (1, 2) and a.ndim == 4]
    assert not ours and held > 0


def test_no_program_is_compiled_after_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    cache = CacheConfig(placement="device", budget=9)
    llm = make_llm(cache, max_num_seqs=1)
    llm.engine.warmup([SAMPLED])
    runner: Any = llm.engine._runner
    before, names = llm.engine.compile_seconds, set(runner.programs._programs)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        run(llm, slice(1, 6, 2))
    assert set(runner.programs._programs) == names
    assert llm.engine.compile_seconds == before
    assert not [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


def test_the_cache_is_written_in_place() -> None:
    cache = CacheConfig(placement="device", budget=0.1)
    llm = make_llm(cache)
    run(llm, slice(3, 6))
    runner: Any = llm.engine._runner
    steps = [program for key, program in runner.programs._programs.items() if key[0] == "step"]
    assert steps
    for program in steps:
        assert program.memory_analysis().alias_size_in_bytes >= llm.engine.sizes.kv_bytes


def test_aborted_rows_leave_nothing_behind() -> None:
    cache = CacheConfig(placement="device", budget=0.1)
    expected = run(make_llm(cache))
    llm = make_llm(cache)
    stream = llm.stream(prompts()[5], SamplingParams(max_tokens=40, ignore_eos=True))
    next(iter(stream))
    stream.close()
    assert run(llm) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(budget=0), "budget=0 is not allowed"),
        (dict(budget=1.5), "budget=1.5 is not allowed"),
        (dict(budget=True), "budget=True is not allowed"),
        (dict(budget=float("nan")), "budget=nan"),
        (dict(placement="disk"), "placement='disk'"),
        (dict(recent_blocks=0), "recent_blocks=0"),
        (dict(dense_layers=-1), "dense_layers=-1"),
        (dict(selection_query="middle"), "selection_query='middle'"),
        (dict(selection_heads="all"), "selection_heads='all'"),
        (dict(selection_pooling="sum"), "selection_pooling='sum'"),
        (dict(retrieval="layerwise", lookahead=False), "Take lookahead=True"),
        (dict(dilation_weight=2.0), "dilation_weight=2.0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**options)


def test_settings_that_do_not_fit_the_model_or_the_memory_are_refused() -> None:
    def start(cache: CacheConfig, **settings: Any) -> None:
        LLM.from_params(CONFIG, params(), max_model_len=256, cache=cache, **settings)

    device = CacheConfig(placement="device", budget=0.1)
    with pytest.raises(ConfigError, match="dense_layers=4 .*less than the model's 4 layers"):
        start(dataclasses.replace(device, dense_layers=4))
    with pytest.raises(ConfigError, match="run_ahead=3"):
        start(device, run_ahead=3)
    with pytest.raises(ConfigError, match=f"{ROWS} rows of max_model_len=256 need .*kv_cache_byt"):
        start(device, max_num_seqs=ROWS, kv_cache_bytes=1000)
    with pytest.raises(ConfigError, match="cache="):
        start({"placement": "device"})  # type: ignore[arg-type]
