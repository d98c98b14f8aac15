"""The command `herald`: options, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import shutil
from pathlib import Path

import pytest

from herald_jax import LLM, CacheConfig, ModelConfig, SamplingParams
from herald_jax.cli import COMMANDS, build_parser, main
from herald_jax.commands.generate import MODEL_OPTIONS, SAMPLING_OPTIONS

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "assets" / "tiny-sdar"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A converted folder: random weights, the tiny model's tokenizer."""
    import jax.numpy as jnp

    from herald_jax import checkpoint
    from herald_jax.models import random_params

    config = ModelConfig(
        family="test",
        vocab_size=2048,
        hidden_size=8,
        intermediate_size=12,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        block_length=4,
        mask_token_id=2,
        stop_token_ids=(1,),
    )
    folder = tmp_path_factory.mktemp("model") / "converted"
    checkpoint.save(folder, config, random_params(config, dtype=jnp.float32))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return str(folder)


COMMON = ["--max-model-len", "64", "--max-num-seqs", "2", "--max-tokens", "6", "--ignore-eos"]


def test_help_does_not_import_jax(run_python):
    for arguments in (["--help"], ["generate", "--help"], ["--version"]):
        run_python(
            "import sys\n"
            "from herald_jax.cli import main\n"
            f"try: main({arguments!r})\n"
            "except SystemExit as end: assert end.code == 0\n"
            "heavy = {'jax', 'flax', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)\n"
            "assert not heavy, heavy"
        )


def test_there_is_an_option_for_every_setting():
    assert set(SAMPLING_OPTIONS) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(MODEL_OPTIONS) == set(inspect.signature(LLM.__init__).parameters) - {"self", "model"}


def test_the_cache_is_described_by_its_fields(capsys):
    def parse(*fields):
        line = ["generate", "--model", "m", "--prompt", "p", "--cache", *fields]
        return build_parser().parse_args(line).cache

    assert parse() == CacheConfig()
    assert parse("placement=device", "budget=64", "lookahead=false", "dilation-weight=1") == (
        CacheConfig(placement="device", budget=64, lookahead=False, dilation_weight=1)
    )
    assert parse("budget=0.1", "selection_query=even4").budget == 0.1
    for fields, message in (
        (["budget"], "expected FIELD=VALUE with a field of placement, budget"),
        (["size=3"], "'size=3': expected"),
        (["budget=2", "budget=3"], "names budget twice"),
        (["budget=0"], "budget=0 is not allowed"),
        (["placement=disk"], "placement='disk'"),
    ):
        with pytest.raises(SystemExit):
            parse(*fields)
        assert message in capsys.readouterr().err


def test_sampling_options_reach_the_parameters():
    line = (
        "generate --model m --prompt p --max-tokens 3 --n 2 --temperature 0.5 --top-k 4 "
        "--top-p 0.9 --seed 7 --stop a --stop b --stop-token-ids 5 6 --ignore-eos "
        "--strategy entropy_bounded --entropy-bound 0.2 --denoising-steps 2 --confidence scaled"
    )
    options = vars(build_parser().parse_args(line.split()))
    given = {name: options[name] for name in SAMPLING_OPTIONS if name in options}
    assert SamplingParams(**given) == SamplingParams(
        max_tokens=3,
        n=2,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        seed=7,
        stop=["a", "b"],
        stop_token_ids=[5, 6],
        ignore_eos=True,
        strategy="entropy_bounded",
        entropy_bound=0.2,
        denoising_steps=2,
        confidence="scaled",
    )


def test_defaults_are_those_of_the_library():
    options = vars(build_parser().parse_args(["generate", "--model", "m", "--prompt", "p"]))
    assert not set(options) & {*MODEL_OPTIONS, *SAMPLING_OPTIONS}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "x"], "--input needs --output"),
        (["--prompt", "x", "--output", "y"], "--output needs --input"),
        (["--prompt", "x", "--restart"], "--restart needs"),
        (["--prompt", "x", "--progress"], "--progress needs --input"),
        (["--prompt", "x", "--system", "y"], "--system needs --chat"),
        (["--input", "x", "--output", "y", "--chat"], "--chat does not go with --input"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "x", "--strategy", "best"], "low_confidence_dynamic, low_confidence_static"),
        (["--prompt-file", "/none/such"], "--prompt-file /none/such"),
        (["--input", "/none/such", "--output", "y"], "cannot be read"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    assert main(["generate", "--model", "/none/such", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_missing_model(capsys):
    assert main(["generate", "--model", "/none/such", "--prompt", "x"]) in (1, 2)
    assert "/none/such" in capsys.readouterr().err


def test_unknown_commands_and_options_end_with_a_usage_error(capsys):
    assert set(COMMANDS) == {"generate", "serve", "convert", "models", "plan"}
    for arguments in (["serve"], [], ["generate", "--model", "m"], ["generate", "--heat", "1"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_convert_reads_the_converters_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["convert", "--help"])
    assert ended.value.code == 0
    assert "--mask-token-id" in capsys.readouterr().out


def test_text_goes_to_stdout_and_statistics_to_stderr(model, capsys):
    assert main(["generate", "--model", model, "--prompt", "Hello there", *COMMON]) == 0
    streamed = capsys.readouterr()
    assert "tokens/s" in streamed.err and "6 tokens" in streamed.err
    assert main(["generate", "--model", model, "--prompt", "Hello there", "--json", *COMMON]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompt"] == "Hello there"
    assert len(record["outputs"][0]["token_ids"]) == 6
    assert streamed.out == record["outputs"][0]["text"] + "\n"


def test_several_samples(model, capsys):
    arguments = ["--prompt", "Hello", "--n", "2", "--temperature", "1", *COMMON]
    assert main(["generate", "--model", model, *arguments]) == 0
    captured = capsys.readouterr()
    assert "--- sample 0" in captured.out and "--- sample 1" in captured.out
    assert "12 tokens" in captured.err


def test_chat_and_prompts_from_stdin(model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    arguments = ["--prompt-file", "-", "--chat", "--system", "Text.", "--json", *COMMON]
    assert main(["generate", "--model", model, *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompt"] == "Text.<|user|> hi<|assistant|>"


def test_a_file_of_prompts(model, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "One"}\n{"prompt": "Two"}\n{"prompt_token_ids": [5]}\n')
    arguments = ["--input", str(source), "--output", str(target), *COMMON]
    assert main(["generate", "--model", model, "--json", "--progress", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out == target.read_text()
    assert "3/3" in captured.err and "3 prompts done, 0 were there" in captured.err
    assert main(["generate", "--model", model, *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "0 prompts done, 3 were there" in captured.err
    assert main(["generate", "--model", model, *arguments, "--seed", "1"]) == 2
    assert "--restart" in capsys.readouterr().err
    assert main(["generate", "--model", model, *arguments, "--seed", "1", "--restart"]) == 0
    assert (
        main(["generate", "--model", model, "--input", str(source), "--output", str(source)]) == 2
    )


def test_a_restart_without_a_model_keeps_the_results(model, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "One"}\n')
    arguments = ["--input", str(source), "--output", str(target), *COMMON]
    assert main(["generate", "--model", model, *arguments]) == 0
    before = target.read_bytes()
    assert before
    assert main(["generate", "--model", "/none/such", *arguments, "--restart"]) in (1, 2)
    assert "/none/such" in capsys.readouterr().err
    assert target.read_bytes() == before
    thesis = tmp_path / "thesis.md"
    thesis.write_text("# Thesis\n")
    arguments = ["--input", str(source), "--output", str(thesis), *COMMON, "--restart"]
    assert main(["generate", "--model", model, *arguments]) == 2
    assert "thesis.md is not replaced" in capsys.readouterr().err
    assert thesis.read_text() == "# Thesis\n"


def test_a_batch_goes_on_with_the_same_model_only(model, tmp_path, capsys, monkeypatch):
    import jax.numpy as jnp

    from herald_jax import checkpoint
    from herald_jax.models import random_params

    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "One"}\n')
    arguments = ["--input", "in.jsonl", "--output", "out.jsonl", *COMMON]
    assert main(["generate", "--model", "m", *arguments]) == 0
    assert main(["generate", "--model", "./m", *arguments, "--dtype", "float32"]) == 0
    assert "0 prompts done, 1 were there" in capsys.readouterr().err
    config = ModelConfig.load(folder)
    checkpoint.save(folder, config, random_params(config, 1, dtype=jnp.float32), force=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    assert main(["generate", "--model", "m", *arguments]) == 2
    assert "another model" in capsys.readouterr().err


def test_a_prompt_that_is_no_unicode_is_a_usage_error(model, capsys):
    assert main(["generate", "--model", model, "--prompt", "x\udcff", *COMMON]) == 2
    assert "not valid Unicode" in capsys.readouterr().err
