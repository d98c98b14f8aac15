"""The Python API: over a scripted runner where only the bookkeeping counts, else a tiny model."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import time

import jax
import numpy as np
import pytest
from scripted import ScriptedRunner, ScriptedStep, scripted_llm
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from herald_jax import (
    LLM,
    ConfigError,
    GenerationError,
    GenerationInterrupted,
    ModelConfig,
    SamplingParams,
)
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import EngineStepError
from herald_jax.engine.request import sample_seeds
from herald_jax.tokenizer import Tokenizer

EOS, MASK = 256, 257


def byte_tokenizer(template: str | None = None) -> Tokenizer:
    """Every byte is a token whose id is its rank in the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: at for at, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>"), AddedToken("<mask>")])
    return Tokenizer(backend, {"eos_token": "<eos>"}, template)


TOKENIZER = byte_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}<eos>")
CONFIG = ModelConfig(
    family="test",
    vocab_size=258,
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    block_length=4,
    mask_token_id=MASK,
    stop_token_ids=(EOS,),
)


def scripted(text: str = "", block_length: int = 4, **options) -> tuple[LLM, ScriptedRunner]:
    """An engine that writes `text` and the stop id for every prompt, or echoes the prompt."""

    def script(row):
        ids = TOKENIZER.encode(text) if text else list(row.prompt_token_ids)
        return itertools.chain(ids, itertools.repeat(EOS))

    config = dataclasses.replace(CONFIG, block_length=block_length)
    return scripted_llm(config, script, TOKENIZER, **options)


def test_outputs_are_in_the_order_of_the_prompts():
    llm, runner = scripted(max_num_seqs=3, max_waiting=2)
    prompts = ["a", "bcdefgh", "ij", "klm", "nopqrstuv", "w"]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == prompts
    assert [output.index for output in outputs] == list(range(6))
    assert [row.prompt_token_ids for row in runner.rows] == [
        tuple(output.prompt_token_ids) for output in outputs
    ]
    assert all(output.finished for output in outputs)


def test_the_stop_id_is_in_the_ids_and_not_in_the_text():
    llm, _ = scripted("hey")
    sample = llm.generate("x")[0].outputs[0]
    assert sample.token_ids == [*TOKENIZER.encode("hey"), EOS]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("hey", "stop", EOS)
    assert sample.cumulative_logprob == pytest.approx(-1.0)


def test_statistics():
    llm, _ = scripted("abcdefgh")
    output = llm.generate("xyz", SamplingParams(max_tokens=6, n=2))[0]
    assert output.stats.steps_per_block == [[1, 4, 4], [1, 4, 4]]
    assert output.outputs[0].stats.forwards == 12
    assert output.stats.forwards == 24
    assert output.stats.generated_tokens == 12
    assert output.stats.tokens_per_forward == 0.5
    stats, samples = output.stats, [sample.stats for sample in output.outputs]
    assert 0 < stats.queue_seconds + stats.prefill_seconds < stats.ttft_seconds
    assert stats.ttft_seconds == min(sample.ttft_seconds for sample in samples)
    ends = [s.queue_seconds + s.prefill_seconds + s.decode_seconds for s in samples]
    total = stats.queue_seconds + stats.prefill_seconds + stats.decode_seconds
    assert total == pytest.approx(max(ends))
    assert (stats.compile_seconds, stats.reused_tokens, stats.preemptions) == (0, 0, 0)
    sizes = llm.engine.sizes
    assert stats.kv_device_bytes == sizes.kv_bytes == sizes.num_pages * 64 * 2 * 4 * 4
    assert (stats.kv_host_bytes, stats.kv_request_bytes) == (0, 2 * 64 * 2 * 4 * 4)
    assert output.stats.tokens_per_second > 0
    assert output.to_dict()["stats"]["tokens_per_forward"] == 0.5


def test_compilation_is_in_no_other_time():
    llm, runner = scripted("abcdefgh")
    dispatch = runner.dispatch

    def compiling(plan, options):
        runner.compile_seconds += 100.0
        return dispatch(plan, options)

    runner.dispatch = compiling
    (output,) = llm.generate("xyz")
    stats = output.stats
    # Time that is said to be spent on compiling and was not makes the others negative.
    assert stats.compile_seconds == 100.0 * runner.dispatched
    assert stats.queue_seconds + stats.prefill_seconds + stats.decode_seconds < -900
    assert llm.generate("xyz")[0].stats.compile_seconds < stats.compile_seconds + 1


def test_the_prefill_counts_as_such_though_nobody_waits_for_it(monkeypatch):
    llm, _ = scripted("abcdefgh", max_num_seqs=2, max_prefill_tokens=16, run_ahead=3)
    read = ScriptedStep.read

    def slow(step):
        if not step.decodes:
            time.sleep(0.05)
        return read(step)

    monkeypatch.setattr(ScriptedStep, "read", slow)
    stats = llm.generate("x" * 121)[0].stats  # 30 blocks, 6 in a step
    assert stats.prefill_seconds > 4 * 0.05 > stats.decode_seconds


def test_samples_of_one_request_may_run_at_different_times():
    llm, runner = scripted("ab", max_num_seqs=2)
    (output,) = llm.generate("x", SamplingParams(n=5, seed=3))
    assert [sample.index for sample in output.outputs] == list(range(5))
    seeds = [sample.seed for sample in output.outputs]
    assert seeds == sample_seeds(SamplingParams(n=5, seed=3))
    assert seeds == [row.seed for row in runner.rows]
    queued = [sample.stats.queue_seconds for sample in output.outputs]
    assert queued == sorted(queued) and queued[0] == output.stats.queue_seconds < queued[-1]


def test_rows_of_all_kinds_run_together():
    llm, runner = scripted(max_num_seqs=5)
    kinds = [
        SamplingParams(),
        SamplingParams(strategy="sequential"),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, confidence="scaled"),
        SamplingParams(strategy="sequential", max_tokens=9),
    ]
    prompts = ["aa", "bb", "cc", "dd", "ee"]
    outputs = llm.generate(prompts, kinds)
    assert [output.outputs[0].text for output in outputs] == prompts
    # Blocks of two tokens and of four, their commit passes, and a step that was sent ahead.
    assert runner.dispatched == 3 + 5 + 1
    assert [row.sampling for row in runner.rows] == kinds


def test_a_row_is_taken_over_when_its_sample_ends():
    llm, runner = scripted(max_num_seqs=2, run_ahead=1)
    llm.generate(["a" * 40, *"bcdefghi"])
    # "b" to "i" need 3 + 1 passes each, and "a" ten blocks of five and a stop behind them.
    assert runner.dispatched == 11 * 5


def test_generate_begins_with_what_may_run_longest():
    """Kind of fault: the last long requests run alone, beside empty rows."""
    llm, runner = scripted(max_num_seqs=1)
    prompts = ["aaaa", "bbbb", "cccc", "dddd"]
    sampling = [SamplingParams(max_tokens=most) for most in (4, 12, 8, 12)]
    outputs = llm.generate(prompts, sampling)
    assert [output.prompt for output in outputs] == prompts
    assert [bytes(row.prompt_token_ids[:1]) for row in runner.rows] == [
        bytes(outputs[at].prompt_token_ids[:1]) for at in (1, 3, 2, 0)
    ]


def test_requests_wait_outside_a_full_queue():
    llm, _ = scripted(max_num_seqs=1, max_waiting=2)
    prompts = [chr(97 + at) for at in range(20)]
    finished = []
    for output in llm.iter_generate(prompts):
        assert len(llm.engine.scheduler.waiting) <= 2
        finished.append(output.outputs[0].text)
    assert finished == prompts
    with pytest.raises(ConfigError, match="prompt 0: n=3 .*max_waiting=2"):
        llm.generate("x", SamplingParams(n=3))


def test_prompt_forms():
    llm, _ = scripted("ok")
    ids = TOKENIZER.encode("abc")
    for prompt in ("abc", ids, np.array(ids), {"prompt": "abc"}, {"prompt_token_ids": ids}):
        (output,) = llm.generate(prompt)
        assert output.prompt_token_ids == ids
    assert len(llm.generate(["abc", ids, np.array(ids)])) == 3
    assert len(llm.generate(np.array([ids, ids]))) == 2
    assert llm.generate([]) == []


def test_an_empty_prompt_is_allowed():
    llm, _ = scripted("ok")
    first, second = llm.generate(["", {"prompt_token_ids": []}])
    assert first.prompt_token_ids == second.prompt_token_ids == []
    assert first.outputs[0].text == "ok"


def test_the_mask_id_in_a_prompt_is_kept():
    llm, runner = scripted("ok")
    (output,) = llm.generate([5, MASK, 7, 9, 2])
    assert output.prompt_token_ids == [5, MASK, 7, 9, 2]
    assert runner.rows[0].prompt_token_ids == (5, MASK, 7, 9, 2)


SHORT = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", [3, 258]], SHORT, r"prompt 1: prompt_token_ids\[1\]=258 .*\[0, vocab_size=258\)"),
        ([[0], [-1]], SHORT, r"prompt 1: prompt_token_ids\[0\]=-1"),
        ([[0], [1, True]], SHORT, r"prompt 1: prompt_token_ids\[1\]=True"),
        ([{"text": "a"}], SHORT, "prompt 0: prompt="),
        ([{"prompt": [1]}], SHORT, "prompt 0: prompt="),
        (["a", "b"], [SamplingParams()], r"len\(sampling_params\)=1 .*must be 2"),
        (["a", "b" * 60], SamplingParams(max_tokens=5), "prompt 1: .*60 tokens.*=5.*=64.*most 4"),
        (["b" * 64], SamplingParams(max_tokens=1), "shorten the prompt"),
        (["a"], SamplingParams(denoising_steps=5), "prompt 0: denoising_steps=5"),
        (["a"], SamplingParams(stop_token_ids=[258]), "prompt 0: stop_token_ids=258"),
    ],
)
def test_everything_is_checked_before_anything_runs(prompts, params, message):
    llm, runner = scripted("x", max_model_len=64)
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompts, params)
    assert runner.dispatched == 0


def test_prompt_and_output_may_fill_the_context_exactly():
    llm, _ = scripted("abc", max_model_len=16)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len(llm.generate("p" * 13, params)[0].outputs[0].token_ids) == 3
    with pytest.raises(ConfigError, match="max_model_len=16"):
        llm.generate("p" * 13, SamplingParams(max_tokens=4))


def test_without_a_tokenizer():
    llm, _ = scripted_llm(CONFIG, lambda row: itertools.repeat(5))
    (output,) = llm.generate([1, 2], SamplingParams(max_tokens=3))
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([5, 5, 5], "")
    with pytest.raises(ConfigError, match="prompt 0: .*no tokenizer"):
        llm.generate("text")
    with pytest.raises(ConfigError, match="stop_token_ids"):
        llm.generate([1], SamplingParams(stop="x"))
    with pytest.raises(ConfigError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_chat_renders_the_template_once_with_its_special_tokens():
    llm, _ = scripted("ok")
    turn = {"role": "user", "content": "hi"}
    (output,) = llm.chat([turn])
    assert output.prompt == "[user]hi<eos>"
    assert output.prompt_token_ids == [*TOKENIZER.encode("[user]hi"), EOS]
    assert len(llm.chat([[turn], [turn, turn]])) == 2
    assert llm.chat([turn], chat_template="{{ messages[0].content }}")[0].prompt == "hi"
    with pytest.raises(ConfigError, match="refuses the messages: no system"):
        llm.chat([turn], chat_template="{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match="chat_template"):
        LLM.from_engine(llm.engine, byte_tokenizer()).chat([turn])


@pytest.mark.parametrize("stop", [None, "🦜", "c中", ("zzz", "本!")])
@pytest.mark.parametrize("block_length", [1, 3, 4, 7])
def test_streamed_text_joins_to_the_final_text(stop, block_length):
    text = "abc中日本!🦜 end zz"
    llm, _ = scripted(text, block_length=block_length)
    params = SamplingParams(stop=stop)
    events = list(llm.stream("xy", params))
    (output,) = llm.generate("xy", params)
    sample = output.outputs[0]
    assert "".join(event.text for event in events) == sample.text
    assert sum((event.token_ids for event in events), []) == sample.token_ids
    assert [event.steps for event in events] == sample.stats.steps_per_block
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == "stop"
    assert events[-1].output is not None
    assert events[-1].output.outputs[0].text == sample.text
    if stop is None:
        assert sample.text == text


def test_streamed_samples_are_told_apart():
    llm, _ = scripted("abcdefghij", max_num_seqs=2)
    texts = {0: "", 1: "", 2: ""}
    events = list(llm.stream("x", SamplingParams(n=3)))
    for event in events:
        texts[event.index] += event.text
    assert set(texts.values()) == {"abcdefghij"}
    assert [event.output is not None for event in events].index(True) == len(events) - 1


def test_closing_a_stream_aborts_its_request_and_frees_the_engine():
    llm, runner = scripted("a" * 40)
    stream = llm.stream("x")
    next(stream)
    with pytest.raises(RuntimeError, match="busy"):
        llm.generate("y")
    with pytest.raises(RuntimeError, match="busy"):
        llm.update_params({})
    stream.close()
    assert llm.engine.scheduler.is_idle
    assert runner.dispatched == 6, "one block and a step ahead"
    llm.engine.scheduler.check()
    llm.update_params(llm.engine.params)
    assert not llm.engine.has_unfinished
    assert llm.generate("y")[0].finished


def test_a_stream_is_checked_before_it_starts():
    llm, _ = scripted("a")
    with pytest.raises(ConfigError, match="max_tokens"):
        llm.stream("x", SamplingParams(max_tokens=512))


PROMPTS = ["a", "bcdefghijk", "mnopqrst", "mnopqrst", "z"]


def check_partial(llm: LLM, runner: ScriptedRunner, outputs) -> None:
    """Every text is a beginning, and the engine works as before."""
    assert [output.index for output in outputs] == list(range(5))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sample = output.outputs[0]
        assert sample.text == prompt if output.finished else prompt.startswith(sample.text)
        assert output.finished == (sample.finish_reason == "stop")
        assert len(sample.token_logprobs) == len(sample.token_ids)
    assert llm.engine.scheduler.is_idle
    llm.engine.scheduler.check()
    runner.fail_at = runner.read_fails_at = None
    assert [output.outputs[0].text for output in llm.generate(PROMPTS)] == PROMPTS


@pytest.mark.parametrize("where", ["fail_at", "read_fails_at"])
@pytest.mark.parametrize("step", [0, 1, 7, 13])
def test_results_survive_an_interrupt(where, step):
    failure = KeyboardInterrupt()
    llm, runner = scripted(max_num_seqs=2, failure=failure, **{where: step})
    with pytest.raises(GenerationInterrupted) as caught:
        llm.generate(PROMPTS)
    outputs = caught.value.outputs
    assert caught.value.__cause__ is failure
    if (where, step) == ("fail_at", 7):
        # "a" took 3 + 1 passes, its text comes out one step later.
        texts = [output.outputs[0].text for output in outputs]
        assert texts == ["a", "bc", "", "", ""]
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["stop", "abort", "abort", "abort", "abort"]
    assert not outputs[4].finished and outputs[4].error is None
    check_partial(llm, runner, outputs)


@pytest.mark.parametrize("where", ["fail_at", "read_fails_at"])
@pytest.mark.parametrize("step", [0, 1, 7, 13])
def test_a_failing_step_ends_the_requests_that_were_running(where, step):
    failure = ValueError("no")
    llm, runner = scripted(max_num_seqs=2, failure=failure, **{where: step})
    with pytest.raises(GenerationError, match="2 of 5 requests failed.*ValueError: no") as caught:
        llm.generate(PROMPTS)
    outputs = caught.value.outputs
    assert isinstance(caught.value.__cause__, EngineStepError)
    assert caught.value.__cause__.__cause__ is failure
    assert [output.error is not None for output in outputs].count(True) == 2
    for output in outputs:
        assert output.finished == (output.error is None)
        assert output.finished or "EngineStepError: a step failed" in output.to_dict()["error"]
    assert outputs[4].finished, "it was waiting and went on"
    assert runner.resets == 2
    check_partial(llm, runner, outputs)


def test_a_failing_tokenizer_ends_one_request():
    llm, runner = scripted(max_num_seqs=3)
    tokenizer = byte_tokenizer()
    decode = tokenizer.decode

    def failing(ids):
        if tuple(TOKENIZER.encode("h")) in [(i,) for i in ids]:
            raise OverflowError("no such text")
        return decode(ids)

    tokenizer.decode = failing
    llm = LLM.from_engine(llm.engine, tokenizer)
    for stop in (None, "zz"):
        with pytest.raises(GenerationError, match="1 of 5 .*OverflowError: no such") as caught:
            llm.generate(PROMPTS, SamplingParams(stop=stop))
        outputs = caught.value.outputs
        assert [output.finished for output in outputs] == [True, False, True, True, True]
        texts = [output.outputs[0].text for output in outputs]
        assert texts == ["a", "bcdefg" if stop else "", *PROMPTS[2:]]
        assert [output.error is None for output in outputs] == [True, False, True, True, True]
    with pytest.raises(GenerationError, match="1 of 1 .*OverflowError: no such") as caught:
        list(llm.stream(PROMPTS[1]))
    assert caught.value.outputs[0].outputs[0].finish_reason == "abort"
    assert llm.engine.scheduler.is_idle
    llm.engine.scheduler.check()
    assert llm.generate("b")[0].outputs[0].text == "b"


def test_a_failing_stream_raises_with_what_there_is():
    llm, runner = scripted("abcdefgh", fail_at=8)
    texts = ""
    with pytest.raises(GenerationError, match="ValueError: device is on fire") as caught:
        for event in llm.stream("x"):
            texts += event.text
    (output,) = caught.value.outputs
    assert output.outputs[0].text == texts == "abc"
    assert output.outputs[0].finish_reason == "abort"
    assert "".join(event.text for event in llm.stream("x")) == "abcdefgh"


def test_iter_generate_yields_failed_requests_and_raises_at_the_end():
    llm, _ = scripted(max_num_seqs=2, fail_at=7)
    outputs = []
    with pytest.raises(GenerationError) as caught:
        for output in llm.iter_generate(PROMPTS):
            outputs.append(output)
    assert sorted(output.index for output in outputs) == list(range(5))
    failed = [output.index for output in outputs if output.error is not None]
    assert failed == [output.index for output in caught.value.outputs if output.error is not None]
    assert len(failed) == 2


def test_iter_generate_yields_requests_as_they_finish():
    llm, _ = scripted(max_num_seqs=4)
    prompts = ["abcdefghi", "b", "cdefg"]
    assert [output.index for output in llm.iter_generate(prompts)] == [1, 2, 0]


def test_progress_bar_goes_to_stderr_and_only_on_request(capsys):
    llm, _ = scripted("a")
    llm.generate(["x", "y"])
    assert capsys.readouterr().err == ""
    llm.generate(["x", "y"], use_tqdm=True)
    captured = capsys.readouterr()
    assert "2/2" in captured.err and "tokens/s" in captured.err
    assert captured.out == ""


@pytest.fixture(scope="module")
def tiny_llm(tiny_config, tiny_params):
    return LLM.from_params(
        tiny_config, tiny_params, max_model_len=24, max_num_seqs=4, max_prefill_tokens=16
    )


SAMPLED = SamplingParams(max_tokens=6, temperature=1.0, seed=11, ignore_eos=True)


def test_a_seed_repeats_whatever_the_neighbours_are(tiny_llm):
    prompts = [[5, 60, 7], [9, 8, 7, 6, 5], []]
    together = tiny_llm.generate(prompts, SAMPLED)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = (
            tiny_llm.generate(prompt, SAMPLED) if prompt else tiny_llm.generate([[]], SAMPLED)
        )
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 6
        assert output.prompt_token_ids == prompt
    (output,) = tiny_llm.generate([5, 6], SamplingParams(max_tokens=6, temperature=1.0, n=4))
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    assert len({sample.seed for sample in output.outputs}) == 4


def test_weights_are_swapped_in_place(tiny_llm, tiny_params):
    (before,) = tiny_llm.generate([5, 6, 7], SAMPLED)
    tiny_llm.update_params(jax.tree.map(lambda leaf: -leaf, tiny_params))
    (swapped,) = tiny_llm.generate([5, 6, 7], SAMPLED)
    tiny_llm.update_params(tiny_params)
    (after,) = tiny_llm.generate([5, 6, 7], SAMPLED)
    assert swapped.outputs[0].token_ids != before.outputs[0].token_ids
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.outputs[0].cumulative_logprob == before.outputs[0].cumulative_logprob
    assert after.stats.compile_seconds < 0.2
    with pytest.raises(ConfigError, match="params do not fit"):
        tiny_llm.update_params({"embed_tokens": tiny_params["embed_tokens"]})


def test_the_settings_and_their_defaults_are_those_of_the_engine():
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    arguments = inspect.signature(LLM.__init__).parameters
    shared = {name for name in arguments if name in fields}
    assert shared == set(fields) - {"max_waiting", "aging_ticks"}
    assert {name: arguments[name].default for name in shared} == {
        name: fields[name] for name in shared
    }


def test_warmup_compiles_ahead_and_waits_for_its_turn():
    llm, runner = scripted("abc")
    stream = llm.stream("x")
    next(stream)
    with pytest.raises(RuntimeError, match="busy"):
        llm.warmup()
    stream.close()
    llm.warmup()
    assert runner.compile_seconds == 1.0


def test_weights_are_copied_and_checked(tiny_config, tiny_params):
    """A trainer may overwrite or donate its parameters, and may not pass wrong ones unnoticed."""
    own = jax.tree.map(lambda leaf: np.array(leaf, copy=True), tiny_params)
    llm = LLM.from_params(tiny_config, own, max_model_len=64, max_num_seqs=1)
    params = SamplingParams(max_tokens=8)
    before = llm.generate([[5, 7, 9]], params)[0].outputs[0].token_ids
    llm.update_params(own)
    for leaf in jax.tree.leaves(own):
        leaf *= 0
    assert llm.generate([[5, 7, 9]], params)[0].outputs[0].token_ids == before
    wrong = {**tiny_params, "norm": {"scale": tiny_params["norm"]["scale"][:1]}}
    with pytest.raises(ConfigError, match=r"\['norm'\]\['scale'\]: expected"):
        LLM.from_params(tiny_config, wrong, max_model_len=64)
    with pytest.raises(ConfigError, match=r"\['norm'\]\['scale'\]: expected"):
        llm.update_params({name: leaf for name, leaf in tiny_params.items() if name != "norm"})
