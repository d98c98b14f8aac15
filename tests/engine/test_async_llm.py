"""The asyncio front over a scripted engine: streams, aborts in every state, failures, the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading

import pytest
from serving import EOS, TOKENIZER, assert_nothing_left, reply, run, scripted_async, wait_until

from herald_jax import ConfigError, GenerationError, SamplingParams
from herald_jax.engine import stream as stream_module
from herald_jax.engine.async_llm import AsyncLLM, EngineClosed, EngineDead
from herald_jax.engine.sample import SampleState
from herald_jax.engine.waiting import QueueFull
from herald_jax.tokenizer import Tokenizer

LONG = SamplingParams(max_tokens=300, ignore_eos=True)


async def collect(events) -> list:
    return [event async for event in events]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def text_of(llm: AsyncLLM, prompt: str, **options) -> str:
    events = await collect(llm.generate(prompt, SamplingParams(max_tokens=200, **options)))
    return "".join(event.text for event in events)


def test_events_join_to_the_output():
    llm, _ = scripted_async()

    async def main():
        async with llm:
            events = await collect(llm.generate("Grüße, wörld ✓", SamplingParams(max_tokens=90)))
            output = events[-1].output
            sample = output.outputs[0]
            assert "".join(event.text for event in events) == sample.text == reply("Grüße, wörld ✓")
            assert [i for event in events for i in event.token_ids] == sample.token_ids
            assert sum(event.steps for event in events) == sum(sample.stats.steps_per_block)
            assert [event.output for event in events[:-1]] == [None] * (len(events) - 1)
            assert (sample.finish_reason, sample.stop_reason) == ("stop", EOS)
            assert output.error is None and output.finished

    run(main())
    assert_nothing_left(llm)


def test_chat():
    llm, _ = scripted_async()
    without, _ = scripted_async(tokenizer=None)

    async def main():
        async with llm, without:
            turns = [{"role": "user", "content": "hi"}]
            events = await collect(llm.chat(turns, SamplingParams(max_tokens=60)))
            assert events[-1].output.outputs[0].text == reply("[user]hi[assistant]")
            with pytest.raises(ConfigError, match="chat needs a tokenizer"):
                await collect(without.chat(turns))
            with pytest.raises(ConfigError, match="no tokenizer"):
                await collect(without.generate("text"))
            events = await collect(without.generate([1, 2], SamplingParams(max_tokens=5)))
            assert len(events[-1].output.outputs[0].token_ids) == 5

    run(main())


def test_many_tasks_and_samples_at_once():
    llm, _ = scripted_async()

    async def main():
        async with llm:
            prompts = [f"prompt {at}" * (at % 5 + 1) for at in range(30)]
            texts = await asyncio.gather(*(text_of(llm, prompt) for prompt in prompts))
            assert texts == [reply(prompt) for prompt in prompts]
            events = await collect(llm.generate("twins", SamplingParams(max_tokens=30, n=3)))
            for index in range(3):
                own = [event for event in events if event.index == index]
                assert "".join(event.text for event in own) == reply("twins")
                assert [event.finish_reason for event in own][-1] == "stop"
            assert events[-1].output.stats.generated_tokens == 3 * (len(reply("twins")) + 1)

    run(main())
    assert_nothing_left(llm)


def test_prompts_that_do_not_fit_are_refused_and_names_are_used_once():
    llm, runner = scripted_async()

    async def main():
        async with llm:
            with pytest.raises(ConfigError, match="max_model_len=512"):
                await text_of(llm, "x" * 400)
            runner.seconds = 0.01
            first = await llm.submit("x", LONG, request_id="name")
            with pytest.raises(ConfigError, match="request_id='name'"):
                await llm.submit("y", LONG, request_id="name")
            await anext(first)  # still there
            await first.aclose()
            await first.aclose()

    run(main())
    assert_nothing_left(llm)


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "finished"])
@pytest.mark.parametrize("how", ["abort", "close"])
def test_abort_in_every_state(state, how):
    """The runner is stopped before the first dispatch in which the request is in that state."""
    llm, runner = scripted_async(engine=dict(max_num_seqs=1, max_prefill_tokens=4))

    def state_now():
        scheduler = llm.engine.scheduler
        samples = [*scheduler.waiting, *scheduler.running]
        return {sample.request_id: sample.state for sample in samples}.get("mine")

    async def main():
        async with llm:
            others = []
            if state == "waiting":
                runner.seconds = 0.01
                others.append(await llm.submit("first", LONG, request_id="other"))
            else:
                runner.stop_at = {"prefill": 3, "decode": 60}.get(state)
            length = 4 if state == "finished" else 200
            options = SamplingParams(max_tokens=length, ignore_eos=True)
            mine = await llm.submit("p" * 83, options, request_id="mine")
            if state == "finished":
                await collect(mine)
            else:
                if state == "waiting":
                    runner.seconds = 0.0
                    runner.may_go.clear()
                await asyncio.to_thread(runner.is_stopped.wait, 10)
                assert state_now() is SampleState(state)
            if how == "abort":
                ended = asyncio.ensure_future(llm.abort("mine"))
                await asyncio.sleep(0)  # the command is in the queue now
            else:
                await mine.aclose()
            runner.stop_at = None
            runner.may_go.set()
            if how == "abort":
                assert await ended is (state != "finished")
                assert await llm.abort("mine") is False
                events = await collect(mine)
                if state != "finished":
                    sample = events[-1].output.outputs[0]
                    assert sample.finish_reason == events[-1].finish_reason == "abort"
                    assert "".join(event.text for event in events) == sample.text
                    assert (sample.text != "") == (state == "decode")
            else:
                assert await collect(mine) == []
            for other in others:
                assert len((await collect(other))[-1].output.outputs[0].token_ids) == 300

    run(main())
    assert_nothing_left(llm)


def test_a_generator_that_is_closed_or_cancelled_aborts():
    llm, runner = scripted_async()
    runner.seconds = 0.002

    async def main():
        async with llm:
            events = llm.generate("x", LONG)
            await anext(events)
            await events.aclose()
            await asyncio.to_thread(assert_nothing_left, llm)
            task = asyncio.ensure_future(text_of(llm, "x" * 100, ignore_eos=True))
            await until(lambda: llm.engine.has_unfinished)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(assert_nothing_left, llm)
            # While it waits to be taken into the queue, too.
            task = asyncio.ensure_future(llm.submit("x", LONG))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(assert_nothing_left, llm)
            # A generator that nobody keeps is closed by asyncio.
            await anext(llm.generate("x", LONG))
            gc.collect()
            await asyncio.to_thread(assert_nothing_left, llm)

    run(main())


def test_a_request_is_accepted_before_the_step_that_runs_it():
    llm, runner = scripted_async()

    async def main():
        async with llm:
            runner.may_go.clear()
            stream = await asyncio.wait_for(llm.submit("x"), 20)
            assert llm.request_ids == [stream.request_id]
            runner.may_go.set()
            assert (await collect(stream))[-1].output.outputs[0].text == reply("x")

    run(main())


def test_what_a_slow_reader_leaves_is_joined(monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_BUFFERED", 3)
    llm, _ = scripted_async()

    async def main():
        async with llm:
            options = SamplingParams(max_tokens=120, n=2, ignore_eos=True)
            stream = await llm.submit("slow reader " * 8, options)
            while not stream.has_ended:
                await asyncio.sleep(0.01)
            assert len(stream._events) <= 3 + 2
            events = await collect(stream)
            assert events[-1].output is stream.output
            for sample in stream.output.outputs:
                own = [event for event in events if event.index == sample.index]
                assert "".join(event.text for event in own) == sample.text
                assert [i for event in own for i in event.token_ids] == sample.token_ids

    run(main())


def test_a_full_queue_refuses_and_priorities_order_it():
    llm, runner = scripted_async(engine=dict(max_num_seqs=1, max_waiting=2, aging_ticks=10))

    async def main():
        async with llm:
            runner.stop_at = 3
            first = await llm.submit("first", LONG)
            await asyncio.to_thread(runner.is_stopped.wait, 10)
            late = asyncio.ensure_future(llm.submit("late", LONG, priority=9))
            await until(lambda: len(llm._thread._commands) == 1)
            soon = asyncio.ensure_future(llm.submit("soon", LONG, priority=0))
            await until(lambda: len(llm._thread._commands) == 2)
            more = asyncio.ensure_future(llm.submit("more", LONG))
            await until(lambda: len(llm._thread._commands) == 3)
            runner.may_go.set()
            with pytest.raises(QueueFull, match="max_waiting=2"):
                await more
            await first.aclose()
            for stream in await asyncio.gather(late, soon):
                await collect(stream)
            prompts = [TOKENIZER.decode(row.prompt_token_ids) for row in runner.rows]
            assert prompts == ["first", "soon", "late"]

    run(main())
    assert_nothing_left(llm)


@pytest.mark.parametrize("where", ["fail_at", "read_fails_at"])
def test_a_failed_step_ends_those_on_the_device(where):
    llm, _ = scripted_async(engine=dict(max_num_seqs=1), **{where: 14})

    async def main():
        async with llm:
            bad, good = await asyncio.gather(
                llm.submit("aaaaaaaaaaaaaaaa", LONG), llm.submit("good", SamplingParams())
            )
            events = []
            with pytest.raises(GenerationError, match="EngineStepError.*device is on fire") as info:
                async for event in bad:
                    events.append(event)
            (output,) = info.value.outputs
            text = output.outputs[0].text
            assert text and reply("aaaaaaaaaaaaaaaa").startswith(text)
            assert "".join(event.text for event in events) == text
            assert output.outputs[0].finish_reason == "abort" and "on fire" in output.error
            assert await collect(bad) == []
            assert (await collect(good))[-1].output.outputs[0].text == reply("good")
            assert await text_of(llm, "next") == reply("next")

    run(main())
    figures = llm.stats.snapshot()
    assert figures["failed_requests"] == 1 and figures["ended"]["error"] == 1
    assert_nothing_left(llm)


class FragileTokenizer(Tokenizer):
    """Fails on texts with an exclamation mark."""

    def decode(self, token_ids):
        text = super().decode(token_ids)
        if "!" in text:
            raise ValueError("cannot decode")
        return text


@pytest.mark.parametrize("options", [{}, {"stop": ["never"]}], ids=["late", "in_accept"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_fails_on_the_host_ends_alone(options, n):
    tokenizer = FragileTokenizer(TOKENIZER._backend, TOKENIZER._config)
    llm, _ = scripted_async(tokenizer=tokenizer)

    async def main():
        async with llm:
            good = asyncio.ensure_future(text_of(llm, "good" * 10))
            with pytest.raises(GenerationError, match="ValueError: cannot decode") as info:
                await text_of(llm, "abcdefgh!", n=n, **options)
            assert info.value.outputs[0].outputs[0].text in reply("abcdefgh!")
            assert await good == reply("good" * 10)

    run(main())
    assert_nothing_left(llm)


def test_a_fault_of_the_engine_fails_all_and_three_in_a_row_end_it(monkeypatch):
    llm, _ = scripted_async()
    step, faults = llm.engine.step, [1]

    def faulty():
        if faults[0] > 0:
            faults[0] -= 1
            raise ZeroDivisionError("a bug")
        return step()

    monkeypatch.setattr(llm.engine, "step", faulty)

    async def main():
        with pytest.raises(GenerationError, match="ZeroDivisionError: a bug"):
            await text_of(llm, "x")
        assert llm.state == "running"
        assert await text_of(llm, "x") == reply("x")
        faults[0] = 100
        streams = [await llm.submit("x") for _ in range(3) if llm.state == "running"]
        for stream in streams:
            with contextlib.suppress(GenerationError, EngineDead):
                await collect(stream)
        while llm.state == "running":
            with pytest.raises((GenerationError, EngineDead)):
                await text_of(llm, "x")
        assert llm.state == "dead"
        with pytest.raises(EngineDead, match="a bug"):
            await llm.submit("x")
        assert await llm.abort("x") is False
        await llm.shutdown()

    run(main())


def test_shutdown_drains_aborts_and_may_be_repeated():
    async def main():
        llm, runner = scripted_async()
        runner.seconds = 0.001
        streams = [await llm.submit(f"stream {at}") for at in range(6)]
        await llm.shutdown()
        for at, stream in enumerate(streams):
            output = (await collect(stream))[-1].output
            assert output.outputs[0].text == reply(f"stream {at}")
        with pytest.raises(EngineClosed):
            await llm.submit("late")
        assert llm.state == "closed"
        await asyncio.gather(llm.shutdown(), llm.shutdown(0.0))
        llm.close()
        assert_nothing_left(llm)

        llm, runner = scripted_async()
        runner.seconds = 0.002
        stream = await llm.submit("a" * 150, LONG)
        await anext(stream)
        slow = asyncio.ensure_future(llm.shutdown(30.0))
        await asyncio.sleep(0.01)
        assert llm.state == "draining" and not slow.done()
        with pytest.raises(EngineClosed):
            await llm.submit("late")
        await llm.shutdown(0.0)
        await slow
        output = (await collect(stream))[-1].output
        assert output.outputs[0].finish_reason == "abort" and output.outputs[0].text
        assert_nothing_left(llm)

    run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "herald-engine"]


def test_an_idle_engine_does_nothing_and_weights_are_swapped_only_then(monkeypatch):
    llm, runner = scripted_async()
    runner.seconds = 0.002
    steps = []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: steps.append(1) or step())

    async def main():
        async with llm:
            stream = await llm.submit("x", LONG)
            await anext(stream)
            with pytest.raises(ConfigError, match="idle engine"):
                await llm.update_params(llm.engine.params)
            await stream.aclose()
            await asyncio.to_thread(assert_nothing_left, llm)
            await llm.update_params(llm.engine.params)
            before = len(steps)
            await asyncio.sleep(0.1)
            assert len(steps) == before

    run(main())


def test_a_loop_that_has_gone_leaves_nothing_behind():
    llm, runner = scripted_async()
    runner.seconds = 0.002

    async def leave():
        await llm.submit("x", LONG)

    asyncio.run(leave())
    assert_nothing_left(llm)
    assert run(text_of(llm, "still here")) == reply("still here")
    llm.close()


def test_random_use_leaks_nothing():
    llm, _ = scripted_async(engine=dict(max_waiting=100, kv_cache_bytes=64 * 12 * 64))
    chance = random.Random(5)

    async def one(at: int):
        prompt = "p" * chance.randrange(1, 90)
        how, after = chance.choice(["read", "close", "cancel", "abort"]), chance.random() * 0.03
        options = SamplingParams(max_tokens=chance.randrange(1, 120), n=chance.choice([1, 1, 3]))

        async def read():
            events = llm.generate(prompt, options, request_id=str(at), priority=at % 3)
            async with contextlib.aclosing(events):
                output = None
                async for event in events:
                    output = event.output
                    if how == "close" and chance.random() < 0.2:
                        return
                assert output is not None
                for sample in output.outputs:
                    assert reply(prompt).startswith(sample.text)
                    if sample.finish_reason == "stop":
                        assert sample.text == reply(prompt)

        await asyncio.sleep(chance.random() * 0.3)
        task = asyncio.ensure_future(read())
        if how == "cancel":
            await asyncio.sleep(after)
            task.cancel()
        elif how == "abort":
            await asyncio.sleep(after)
            await llm.abort(str(at))
        with contextlib.suppress(asyncio.CancelledError, QueueFull):
            await task

    async def main():
        async with llm:
            await asyncio.gather(*map(one, range(200)))
            await asyncio.to_thread(assert_nothing_left, llm)
            assert llm.stats.snapshot()["ended"]["stop"] > 20

    run(main())
    wait_until(lambda: not llm._thread._thread.is_alive())
