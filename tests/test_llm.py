"""The Python API: over a scripted runner where only the bookkeeping counts, else a tiny model."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from scripted import ScriptedRunner
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


def scripted(text: str | bytes = "", **options) -> tuple[LLM, ScriptedRunner]:
    """An engine that writes `text` and the stop id for every prompt, or echoes the prompt."""

    def script(row):
        ids = TOKENIZER.encode(text) if text else list(row.prompt_token_ids)
        return itertools.chain(ids, itertools.repeat(EOS))

    runner = ScriptedRunner(script, **options)
    return LLM.from_runner(CONFIG, runner, TOKENIZER), runner


def test_outputs_are_in_the_order_of_the_prompts():
    llm, runner = scripted(max_num_seqs=3)
    prompts = ["a", "bcdefgh", "ij", "klm", "nopqrstuv", "w"]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == prompts
    assert [output.index for output in outputs] == list(range(6))
    assert [len(batch.rows) for batch in runner.batches] == [3, 3]
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
    assert output.stats.prefill_seconds == 0.25
    assert (output.stats.kv_device_bytes, output.stats.kv_host_bytes) == (200, 7)
    assert output.stats.tokens_per_second > 0
    assert output.to_dict()["stats"]["tokens_per_forward"] == 0.5


def test_samples_of_one_request_may_spread_over_batches():
    llm, runner = scripted("ab", max_num_seqs=2)
    (output,) = llm.generate("x", SamplingParams(n=5, seed=3))
    assert [sample.index for sample in output.outputs] == list(range(5))
    assert [len(batch.rows) for batch in runner.batches] == [2, 2, 1]
    assert output.stats.prefill_seconds == 0.75
    seeds = [sample.seed for sample in output.outputs]
    assert seeds == sample_seeds(SamplingParams(n=5, seed=3))
    assert seeds == [row.seed for batch in runner.batches for row in batch.rows]


def test_rows_are_grouped_by_what_is_compiled():
    llm, runner = scripted()
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
    assert [len(batch.rows) for batch in runner.batches] == [2, 2, 1]


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
    assert runner.batches[0].rows[0].prompt_token_ids == (5, MASK, 7, 9, 2)


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
    assert not runner.batches


def test_prompt_and_output_may_fill_the_context_exactly():
    llm, _ = scripted("abc", max_model_len=16)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len(llm.generate("p" * 13, params)[0].outputs[0].token_ids) == 3
    with pytest.raises(ConfigError, match="max_model_len=16"):
        llm.generate("p" * 13, SamplingParams(max_tokens=4))


def test_without_a_tokenizer():
    runner = ScriptedRunner(lambda row: itertools.repeat(5))
    llm = LLM.from_runner(CONFIG, runner)
    (output,) = llm.generate([1, 2], SamplingParams(max_tokens=3))
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([5, 5, 5], "")
    with pytest.raises(ConfigError, match="prompt 0: .*no tokenizer"):
        llm.generate("text")
    with pytest.raises(ConfigError, match="stop_token_ids"):
        llm.generate([1], SamplingParams(stop="x"))
    with pytest.raises(ConfigError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_chat_renders_the_template_once_with_its_special_tokens():
    llm, runner = scripted("ok")
    turn = {"role": "user", "content": "hi"}
    (output,) = llm.chat([turn])
    assert output.prompt == "[user]hi<eos>"
    assert output.prompt_token_ids == [*TOKENIZER.encode("[user]hi"), EOS]
    assert len(llm.chat([[turn], [turn, turn]])) == 2
    assert llm.chat([turn], chat_template="{{ messages[0].content }}")[0].prompt == "hi"
    with pytest.raises(ConfigError, match="refuses the messages: no system"):
        llm.chat([turn], chat_template="{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match="chat_template"):
        LLM.from_runner(CONFIG, runner, byte_tokenizer()).chat([turn])


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


def test_closing_a_stream_stops_its_batch_and_frees_the_engine():
    llm, runner = scripted("a" * 40)
    stream = llm.stream("x")
    next(stream)
    with pytest.raises(RuntimeError, match="busy"):
        llm.generate("y")
    with pytest.raises(RuntimeError, match="busy"):
        llm.update_params({})
    stream.close()
    assert not runner.batches[0].is_active.any()
    assert runner.blocks == 1
    assert llm.generate("y")[0].finished


def test_a_stream_is_checked_before_it_starts():
    llm, _ = scripted("a")
    with pytest.raises(ConfigError, match="max_tokens"):
        llm.stream("x", SamplingParams(max_tokens=512))


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(KeyboardInterrupt(), GenerationInterrupted), (ValueError("no"), GenerationError)],
)
def test_results_survive_an_interrupt(failure, raised):
    llm, runner = scripted(max_num_seqs=2, fail_at=5, failure=failure)
    # Batch 0: "a" takes one block, "bcdefghijk" four; batch 1 fails at its second block.
    with pytest.raises(raised) as caught:
        llm.generate(["a", "bcdefghijk", "mnopqrst", "mnopqrst", "z"])
    outputs = caught.value.outputs
    texts = [output.outputs[0].text for output in outputs]
    assert texts == ["a", "bcdefghijk", "mnop", "mnop", ""]
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["stop", "stop", "abort", "abort", "abort"]
    assert [output.finished for output in outputs] == [True, True, False, False, False]
    assert caught.value.__cause__ is failure
    assert not any(batch.is_active.any() for batch in runner.batches)
    runner.fail_at = None
    assert llm.generate("again")[0].outputs[0].text == "again"


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
    return LLM.from_params(tiny_config, tiny_params, max_model_len=24, max_num_seqs=4)


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
