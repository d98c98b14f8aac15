"""The engine against `generate`, and what it promises about failures, memory and compilation."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from herald_jax import LLM, ConfigError, SamplingParams
from herald_jax.engine import slot_arrays, slot_runner
from herald_jax.engine.detokenizer import TextStream
from herald_jax.engine.llm_engine import EngineStepError
from herald_jax.engine.request import RowProgress
from herald_jax.engine.sample import SampleState
from herald_jax.engine.slot_runner import PendingStep, SlotRunner
from tests.engine.engines import (
    CONFIG,
    KINDS,
    LENGTHS,
    NUM_PAGES,
    PAGE_BYTES,
    PROGRAMS,
    Driver,
    make_engine,
    params,
)
from tests.oracle import count_compilations

MOST_PROGRAMS = 2 * 2 * 3
"""Row buckets 1 and 4, with and without prefill, and three kinds of step."""


def random_requests(seed: int, count: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randrange(len(KINDS)), draw.choice(LENGTHS)) for _ in range(count)]


def test_programs_are_bounded_and_none_is_compiled_after_warmup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(monkeypatch)
    engine._runner._programs = programs = {}
    with count_compilations() as compiled:
        driver = Driver(engine)
        driver.add(0, 9)
        driver.drain()
    assert len(programs) == 2, "one prompt needs few programs"
    with count_compilations() as compiled:
        for asked in random_requests(1, 50):
            driver.add(*asked)
        driver.drain()
    assert len(compiled) <= len(programs) - 2 <= MOST_PROGRAMS - 2
    before = engine.compile_seconds
    LLM.from_engine(engine).warmup()
    assert len(programs) == MOST_PROGRAMS and before < engine.compile_seconds
    PROGRAMS.update(programs)

    jax.clear_caches()  # what is not one of the programs would be compiled again
    engine = make_engine(monkeypatch)
    driver = Driver(engine)
    with count_compilations() as compiled:
        for at, asked in enumerate(random_requests(2, 50)):
            driver.add(*asked)
            if at % 3 == 0:
                driver.step()
        driver.drain()
    assert compiled == []
    assert engine.compile_seconds == 0
    assert all(live.compile_seconds == 0 for live in driver.live.values())
    driver.check()


@pytest.mark.parametrize(
    ("run_ahead", "share_prefixes"), [(1, False), (1, True), (2, False), (2, True), (4, False)]
)
def test_equals_generate(
    monkeypatch: pytest.MonkeyPatch, run_ahead: int, share_prefixes: bool
) -> None:
    """Arrivals at any time, rows of all kinds side by side, and too few pages for all of them."""
    draw = random.Random(run_ahead)
    engine = make_engine(monkeypatch, run_ahead=run_ahead, share_prefixes=share_prefixes)
    driver = Driver(engine)
    every = list(itertools.product(range(len(KINDS)), LENGTHS))
    for kind, length in draw.sample(every, 40):
        driver.add(kind, length, priority=draw.randrange(2))
        for _ in range(draw.randrange(4)):
            driver.step()
    driver.drain()
    driver.check()
    counts = engine.scheduler.counts
    assert counts.finished == 40
    assert counts.preempted > 0 or share_prefixes, "the pool was to be too small"
    assert sum(live.preemptions for live in driver.live.values()) == counts.preempted
    assert (counts.reused_tokens > 0) == share_prefixes
    assert sum(live.reused_tokens for live in driver.live.values()) == counts.reused_tokens
    for live in driver.live.values():
        assert 1 <= live.peak_pages <= engine.sizes.table_pages
        times = [live.arrived, live.admitted, live.started, live.first_block, live.ended]
        assert times == sorted(times)  # type: ignore[type-var]


@pytest.mark.parametrize("is_padded", [True, False])
def test_a_row_is_the_same_alone_and_among_others(
    monkeypatch: pytest.MonkeyPatch, is_padded: bool
) -> None:
    """To the last bit where it runs the same program; those of other sizes round otherwise."""
    if is_padded:
        monkeypatch.setattr(slot_runner, "row_bucket", lambda rows, limit: limit)
    asked = list(zip(range(len(KINDS)), (9, 5, 17, 24, 8, 3), strict=False))
    driver = Driver(make_engine(monkeypatch, share_prefixes=False))
    for one in asked:
        driver.add(*one)
    driver.drain()
    together = [live.output() for live in driver.live.values()]
    for one, expected in zip(asked, together, strict=True):
        driver = Driver(make_engine(monkeypatch, share_prefixes=False))
        name = driver.add(*one)
        driver.drain()
        alone = driver.live[name].output()
        assert alone.token_ids == expected.token_ids
        assert alone.unmask_steps == expected.unmask_steps
        rounding = 0.0 if is_padded else 1e-4
        assert alone.token_logprobs == pytest.approx(expected.token_logprobs, abs=rounding, rel=0)
        assert alone.confidences == pytest.approx(expected.confidences, abs=rounding, rel=0)


def test_the_empty_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_engine(monkeypatch))
    driver.add(1, 0)
    driver.add(0, 9)
    driver.drain()
    driver.check(but={"0"})
    output = driver.live["0"].output()
    assert len(output.token_ids) == 11 and output.finish_reason == "length"
    assert all(0 <= i < 60 for i in output.token_ids)


@pytest.mark.parametrize("run_ahead", [1, 3])
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted", "finished"])
def test_abort_in_every_state(monkeypatch: pytest.MonkeyPatch, state: str, run_ahead: int) -> None:
    engine = make_engine(monkeypatch, run_ahead=run_ahead, share_prefixes=False)
    driver = Driver(engine)
    for at in range(6):
        driver.add(at, 40 if at < 3 else 17)

    def found() -> str | None:
        scheduler = engine.scheduler
        if state == "waiting":
            return next((s.request_id for s in scheduler.waiting if not s.preemptions), None)
        if state == "preempted":
            return next((s.request_id for s in scheduler.waiting if s.preemptions), None)
        if state == "finished":
            return next((name for name, s in driver.live.items() if s.ended is not None), None)
        kind = SampleState(state)
        return next((s.request_id for s in scheduler.running if s.state is kind), None)

    while (name := found()) is None:
        assert engine.has_unfinished, f"nothing was ever {state}"
        driver.step()
    ended = engine.abort(name)
    engine.scheduler.check()
    assert [live.request_id for live in ended] == ([] if state == "finished" else [name])
    assert engine.abort(name) == engine.abort("unknown") == []
    driver.drain()
    driver.check(but={name} if state != "finished" else set())
    if state != "finished":
        driver.check_partial(name)
    driver.add(0, 5, name)  # the name is free again
    driver.drain()
    driver.check()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 3, 11])
@pytest.mark.parametrize("where", [(SlotRunner, "dispatch"), (PendingStep, "read")])
def test_a_failing_step(
    monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], at: int, error: type[BaseException]
) -> None:
    """Running requests end with what they have, waiting ones complete, the engine goes on."""
    engine = make_engine(monkeypatch)
    driver = Driver(engine)
    for one in random_requests(at, 9):
        driver.add(*one)
    calls = itertools.count()
    method = getattr(*where)

    def failing(*arguments: Any) -> Any:
        if next(calls) == at:
            raise error("out of memory")
        return method(*arguments)

    monkeypatch.setattr(*where, failing)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            driver.drain()
        assert all(live.ended is not None for live in driver.live.values())
        assert not engine.has_unfinished
        for name, live in driver.live.items():
            if live.output().finish_reason == "abort":
                driver.check_partial(name)
            else:
                driver.check(but=driver.live.keys() - {name})
    else:
        driver.drain()
        assert 1 <= len(driver.errors) <= 4
        for name, raised in driver.errors.items():
            assert isinstance(raised, EngineStepError)
            assert "ValueError: out of memory" in str(raised)
            driver.check_partial(name)
        driver.check(but=set(driver.errors))
        assert len(driver.errors) == engine.scheduler.counts.aborted
    engine.scheduler.check()
    again = Driver(engine)
    again.add(1, 17)
    again.add(0, 24)
    again.drain()
    again.check()


def test_a_tokenizer_that_fails_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch)
    driver = Driver(engine)
    decoded = itertools.count()

    def decode(ids: Any) -> str:
        if next(decoded) == 5:
            raise OverflowError("no such text")
        return "x" * len(ids)

    text = TextStream(decode, ["never"])
    progress = RowProgress(KINDS[1], CONFIG.stop_token_ids, text)
    driver.add(0, 9)
    driver.add(1, 9, progress=progress)
    driver.add(1, 24)
    driver.drain()
    assert list(driver.errors) == ["1"] and isinstance(driver.errors["1"], OverflowError)
    driver.check_partial("1")
    driver.check(but={"1"})


def test_new_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Used from the next request on, with nothing of the old ones, and without compiling."""
    engine = make_engine(monkeypatch)
    driver = Driver(engine)
    driver.add(1, 40)
    driver.step()
    with pytest.raises(ConfigError, match="update_params needs an idle engine"):
        engine.update_params(params(9))
    driver.drain()
    driver.add(1, 40, "shared")
    driver.drain()
    driver.check()
    assert driver.live["shared"].reused_tokens == 40
    with count_compilations() as compiled:
        engine.update_params(params(9))
        driver.add(1, 40, "new")
        driver.drain()
        engine.update_params(params())
        driver.add(1, 40, "old")
        driver.drain()
    assert compiled == []
    driver.check(but={"new"})
    assert driver.live["new"].output().token_ids != driver.live["old"].output().token_ids
    assert driver.live["new"].reused_tokens == driver.live["old"].reused_tokens == 0

    # A step that nobody waits for is no reason to refuse.
    driver.add(1, 9, "aborted")
    driver.step()
    driver.step()
    engine.abort("aborted")
    assert engine.has_unfinished
    engine.update_params(params())
    assert not engine.has_unfinished


def test_parameters_that_do_not_fit_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch)
    wrong = {**params(), "norm": {"scale": jnp.zeros(3)}}
    del wrong["lm_head"]
    with pytest.raises(ConfigError, match=r"(?s)lm_head.*got nothing.*norm.*\(24,\).*\(3,\)"):
        engine.update_params(wrong)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params())
    with pytest.raises(ConfigError, match="bfloat16"):
        engine.update_params(half)
    assert engine.params is params()


def test_donated_buffers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A donated pool that is copied all the same doubles the peak."""
    engine = make_engine(monkeypatch)
    driver = Driver(engine)
    driver.add(0, 9)
    driver.drain()
    assert engine.sizes.kv_bytes == engine._runner.kv_bytes == NUM_PAGES * PAGE_BYTES
    assert {prefill for _, prefill, _ in PROGRAMS} == {0, 4}
    for program in PROGRAMS.values():
        assert program.memory_analysis().alias_size_in_bytes >= engine.sizes.kv_bytes


def test_no_step_calls_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks fail with sharded inputs and stall a GPU."""
    runner = make_engine(monkeypatch)._runner
    for spec in (slot_arrays.GREEDY, slot_arrays.SAMPLED, slot_arrays.FILTERED):
        step = functools.partial(slot_runner._step, model=CONFIG, spec=spec)
        options, _, stops = runner._arrays.gather((), 4)
        decode = slot_runner.DecodeSlots(
            jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), jnp.asarray(stops)
        )
        prefill = slot_runner.PrefillSlots(
            jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), jnp.zeros((4, 4), jnp.int32)
        )
        text = str(
            jax.make_jaxpr(step)(
                runner.params,
                runner._cache,
                runner._states,
                runner._device_tables,
                runner._arrays.no_starts,
                decode,
                prefill,
                jax.tree.map(jnp.asarray, options),
            )
        )
        assert "scatter" in text and "callback" not in text


def test_a_request_that_cannot_be_added_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch)
    driver = Driver(engine)
    driver.add(0, 9, "a")
    with pytest.raises(ConfigError, match="request_id='a'"):
        driver.add(0, 9, "a")
    with pytest.raises(ConfigError, match="max_model_len=52"):
        driver.add(0, 42, "b")
    assert engine.abort("b") == []
    driver.drain()
    driver.check()


def test_stops_beyond_those_that_the_device_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than 16 stop ids the host ends the sample; the text is the same."""
    engine = LLM.from_engine(make_engine(monkeypatch))
    few = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[59])
    (free,) = engine.generate([[5, 6, 7]], few)
    last = free.outputs[0].token_ids[9]
    assert last != 59
    many = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[*range(20), last])
    (cut,) = engine.generate([[5, 6, 7]], many)
    ids = free.outputs[0].token_ids
    stop = next(at for at, i in enumerate(ids) if i in set(many.stop_token_ids or ()))
    assert cut.outputs[0].token_ids == ids[: stop + 1]
