"""Files of prompts: faults reported together, restarts that lose and repeat nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedRunner, scripted_llm

from herald_jax import LLM, ConfigError, GenerationError, ModelConfig, SamplingParams, checkpoint
from herald_jax.batch_file import ResultFile, model_identity, read_items, run_file
from herald_jax.model_source import resolve_dtype
from herald_jax.models import random_params
from herald_jax.prompts import read_prompt
from herald_jax.tokenizer import Tokenizer

CONFIG = ModelConfig(
    family="test",
    vocab_size=64,
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    block_length=4,
    mask_token_id=63,
    stop_token_ids=(1,),
)
PARAMS = SamplingParams(max_tokens=6)
OPTIONS = {"model": "scripted"}
TOKENIZER = Path(__file__).resolve().parent.parent / "assets" / "tiny-sdar"


def engine(**options: Any) -> tuple[LLM, ScriptedRunner]:
    """Repeats the first id of the prompt for ever."""
    return scripted_llm(
        CONFIG, lambda row: itertools.repeat(row.prompt_token_ids[0]), max_num_seqs=3, **options
    )


def write_input(path: Path, prompts: int) -> Path:
    lines = [{"id": f"q{at}", "prompt_token_ids": [at + 2] * (1 + at % 5)} for at in range(prompts)]
    lines[1]["sampling_params"] = {"max_tokens": 2}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(
    source: Path,
    target: Path,
    llm: LLM,
    *,
    params: SamplingParams = PARAMS,
    options: dict[str, Any] = OPTIONS,
    restart: bool = False,
) -> list[dict[str, Any]]:
    with ResultFile(target, restart=restart) as results:
        return list(run_file(llm, read_items(source, params), results, options))


def read(target: Path) -> list[dict[str, Any]]:
    """The results without what depends on the clock and on the batch."""
    records = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    for record in records:
        record["stats"] = {name: record["stats"][name] for name in ("forwards", "steps_per_block")}
        for output in record["outputs"]:
            del output["stats"], output["seed"]
    return records


def test_results(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 8), tmp_path / "new" / "out.jsonl"
    llm, _ = engine()
    returned = run(source, target, llm)
    records = read(target)
    assert len(returned) == len(records) == 8
    assert [record["index"] for record in records] == list(range(8))
    assert [record["id"] for record in records] == [f"q{at}" for at in range(8)]
    assert [record["outputs"][0]["token_ids"] for record in records] == [
        [at + 2] * (2 if at == 1 else 6) for at in range(8)
    ]
    assert records[3]["prompt_token_ids"] == [5, 5, 5, 5]
    assert records[3]["stats"]["forwards"] == 10


def test_a_finished_file_is_left_alone(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 4), tmp_path / "out.jsonl"
    run(source, target, engine()[0])
    before = target.read_bytes()
    llm, runner = engine()
    assert run(source, target, llm) == []
    assert runner.dispatched == 0
    assert target.read_bytes() == before


def test_more_prompts_may_be_added_at_the_end(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    run(source, target, engine()[0])
    write_input(source, 5)
    assert [record["id"] for record in run(source, target, engine()[0])] == ["q3", "q4"]


def test_a_restart_after_any_cut_gives_the_same_file(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    run(source, target, engine()[0])
    whole, expected = target.read_bytes(), read(target)
    for size in sorted({*range(0, len(whole), 37), len(whole) - 1, whole.index(b"\n") + 1}):
        target.write_bytes(whole[:size])
        done = whole[:size].count(b"\n")
        assert len(run(source, target, engine()[0])) == 5 - done
        assert read(target) == expected
        assert target.read_bytes().startswith(whole[: whole[:size].rfind(b"\n") + 1])


def test_a_last_line_of_zeros_after_a_power_cut_is_dropped(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    run(source, target, engine()[0])
    first = target.read_bytes().split(b"\n")[0] + b"\n"
    target.write_bytes(first + b"\0" * 50 + b"\n")
    assert len(run(source, target, engine()[0])) == 2
    assert len(read(target)) == 3


@pytest.mark.parametrize("step", [4, 12, 14, 20])
@pytest.mark.parametrize("where", ["fail_at", "read_fails_at"])
def test_an_error_keeps_what_was_finished(tmp_path, where, step):
    source, target = write_input(tmp_path / "in.jsonl", 8), tmp_path / "out.jsonl"
    llm, runner = engine(**{where: step})
    with pytest.raises(GenerationError, match=r"line \d of the input failed: .*on fire") as caught:
        run(source, target, llm)
    kept = len(read(target))
    assert kept < 8 and (kept > 0 or step < 14)
    assert f"line {kept + 1} of the input" in str(caught.value)
    assert all(record["outputs"][0]["finish_reason"] == "length" for record in read(target))
    assert llm.engine.scheduler.is_idle, "what could not be written is not decoded"
    assert len(run(source, target, engine()[0])) == 8 - kept
    assert [record["index"] for record in read(target)] == list(range(8))


def test_an_interrupt_keeps_what_was_finished(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 8), tmp_path / "out.jsonl"
    llm, _ = engine(fail_at=20, failure=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(source, target, llm)
    kept = len(read(target))
    assert 0 < kept < 8
    assert len(run(source, target, engine()[0])) == 8 - kept
    assert [record["index"] for record in read(target)] == list(range(8))


def test_options_of_different_programs_still_come_in_input_order(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for at in range(7):
            options = {"strategy": "sequential"} if at % 2 else {}
            print(json.dumps({"prompt_token_ids": [at + 2], "sampling_params": options}), file=file)
    run(source, target, engine()[0])
    assert [record["prompt_token_ids"] for record in read(target)] == [[at + 2] for at in range(7)]


@pytest.mark.parametrize("change", ["line", "params", "options", "shorter"])
def test_other_input_or_options_are_refused(tmp_path, change):
    source, target = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    run(source, target, engine()[0])
    before = target.read_bytes()
    params, options = PARAMS, OPTIONS
    if change == "line":
        source.write_text(source.read_text().replace("[2]", "[9]"))
    elif change == "shorter":
        write_input(source, 2)
    elif change == "params":
        params = SamplingParams(max_tokens=7)
    else:
        options = {"model": "another"}
    llm, runner = engine()
    with pytest.raises(ConfigError, match="--restart"):
        run(source, target, llm, params=params, options=options)
    assert target.read_bytes() == before
    assert runner.dispatched == 0
    assert len(run(source, target, llm, params=params, options=options, restart=True)) > 1


def test_a_foreign_file_is_not_overwritten(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 2), tmp_path / "notes.txt"
    target.write_text("my notes\n")
    with pytest.raises(ConfigError, match="line 1, was not written by a batch run"):
        run(source, target, engine()[0])
    assert target.read_text() == "my notes\n"


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize(
    "content", ["my notes\n", "my notes", '["index"]\n', '{"a": 1}', "\ufffe\n"]
)
def test_a_restart_does_not_overwrite_a_foreign_file(tmp_path, content, restart):
    source, target = write_input(tmp_path / "in.jsonl", 2), tmp_path / "notes.txt"
    target.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1,? was not .*Choose another output file"):
        run(source, target, engine()[0], restart=restart)
    assert target.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("content", [b"", b'{"ind', b'{"index": 0, "id": "q', b"\0\0\0", b'{"in\0'])
@pytest.mark.parametrize("restart", [True, False])
def test_what_a_crash_left_of_the_first_record_is_replaced(tmp_path, content, restart):
    source, target = write_input(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    target.write_bytes(content)
    assert len(run(source, target, engine()[0], restart=restart)) == len(read(target)) == 2


@pytest.mark.parametrize("torn", [b"", b'{"index": 3'])
def test_a_restart_that_fails_before_its_first_result_keeps_the_old_ones(tmp_path, torn):
    source, target = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    run(source, target, engine()[0])
    target.write_bytes(target.read_bytes() + torn)
    before = target.read_bytes()
    with pytest.raises(RuntimeError, match="no model"), ResultFile(target, restart=True):
        raise RuntimeError("no model")
    assert target.read_bytes() == before
    with pytest.raises(GenerationError):
        run(source, target, engine(fail_at=0)[0], restart=True)
    assert target.read_bytes() == before
    assert len(run(source, target, engine()[0], restart=True)) == len(read(target)) == 3


def test_a_restart_with_an_empty_input_leaves_no_results(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    run(source, target, engine()[0])
    source.write_text("\n")
    assert run(source, target, engine()[0], restart=True) == []
    assert target.read_bytes() == b""


def save_model(folder: Path, seed: int, *, record: str | None = None) -> Path:
    params = random_params(CONFIG, seed, dtype=np.float32)
    checkpoint.save(folder, CONFIG, params, force=True)
    if record is not None:
        (folder / "conversion.json").write_text(record)
    return folder


@pytest.mark.parametrize("records", [(None, None), ("{}", "{ }")])
def test_replaced_weights_are_another_model(tmp_path, records):
    folder = save_model(tmp_path / "m", 0, record=records[0])
    before = model_identity(folder)
    assert model_identity(folder) == before
    save_model(folder, 1, record=records[1])
    after = model_identity(folder)
    assert after["weights"] != before["weights"]
    assert {**after, "weights": None} == {**before, "weights": None}


def test_a_path_spelled_otherwise_is_the_same_model(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "m", 0)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    expected = model_identity(folder, tokenizer=folder)
    for name in ("m", "./m", "m/", "../" + tmp_path.name + "/m", "link", Path("m")):
        assert model_identity(name, tokenizer=name) == expected


def test_the_dtype_is_that_which_is_computed_in(tmp_path):
    folder = save_model(tmp_path / "m", 0)
    resolved = resolve_dtype("auto")
    assert model_identity(folder) == model_identity(folder, dtype=resolved)
    for other in {"float32", "bfloat16"} - {resolved}:
        assert model_identity(folder) != model_identity(folder, dtype=other)
    assert model_identity(folder) != model_identity(folder, block_length=2)


def test_two_runs_cannot_write_to_one_file(tmp_path):
    with ResultFile(tmp_path / "out.jsonl"):
        with (
            pytest.raises(ConfigError, match="Another process"),
            ResultFile(tmp_path / "out.jsonl"),
        ):
            pass


def test_all_faulty_lines_are_reported_together(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        textwrap.dedent("""\
        {"prompt": "fine"}
        not json

        {"prompt": "a", "prompt_token_ids": [1]}
        {"prompt": "a", "temprature": 1}
        {"prompt": "a", "sampling_params": {"temperature": -1}}
        {"prompt": "a", "sampling_params": {"heat": 1}}
        {"prompt_token_ids": "a"}
        [1]
        {"prompt": "a", "id": [1]}
        {"prompt": "a", "sampling_params": {"max_tokens": true}}
        """)
    )
    with pytest.raises(ConfigError) as caught:
        read_items(source, PARAMS)
    message = str(caught.value)
    assert "9 faulty lines" in message
    for number in (2, 4, 5, 6, 7, 8, 9, 10, 11):
        assert f"line {number}:" in message
    assert "line 1:" not in message


def test_lone_surrogates_are_reported_with_their_lines(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        textwrap.dedent(r"""
        {"prompt": "x\ud800"}
        {"prompt": "x", "id": "\udfff"}
        {"prompt": "x", "sampling_params": {"stop": ["\ud83d"]}}
        {"prompt": "\ud83d\ude00", "id": "\ud83d\ude00"}
        """)
    )
    with pytest.raises(ConfigError, match="3 faulty lines") as caught:
        read_items(source, PARAMS)
    message = str(caught.value)
    assert (
        r"line 2: prompt is not valid Unicode: character 1 is the lone surrogate '\ud800'"
        in message
    )
    assert "line 3: id is not valid Unicode" in message
    assert "line 4: sampling_params is not valid Unicode" in message
    message.encode()


@pytest.mark.parametrize("prompt", ["x\ud800", {"prompt": "\udfff"}])
def test_a_prompt_with_a_lone_surrogate_is_refused(prompt):
    tokenizer = Tokenizer.from_folder(TOKENIZER)
    with pytest.raises(ConfigError, match="prompt is not valid Unicode"):
        read_prompt(prompt, tokenizer, add_special_tokens=True)
    assert read_prompt("\U0001f600", tokenizer, add_special_tokens=True)[1]


def test_prompts_that_do_not_fit_the_model_are_reported_before_anything_runs(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"prompt_token_ids": [2]}\n\n{"prompt_token_ids": [64]}\n{"prompt": "text"}\n'
    )
    llm, runner = engine()
    with pytest.raises(ConfigError, match=r"2 faulty lines:\s+line 3: .*=64(.|\n)*line 4: "):
        run(source, tmp_path / "out.jsonl", llm)
    assert runner.dispatched == 0


PROGRAM = """
import itertools, sys, time
from pathlib import Path
sys.path.insert(0, "tests/support")
from scripted import ScriptedRunner, scripted_llm
from herald_jax import LLM, ModelConfig, SamplingParams
from herald_jax.batch_file import ResultFile, read_items, run_file

config = ModelConfig(family="test", vocab_size=64, hidden_size=8, intermediate_size=12,
    num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, block_length=4, mask_token_id=63,
    stop_token_ids=(1,))
llm, _ = scripted_llm(
    config, lambda row: itertools.repeat(row.prompt_token_ids[0]), max_num_seqs=3)
items = read_items(sys.argv[1], SamplingParams(max_tokens=6))
with ResultFile(sys.argv[2]) as results:
    for record in run_file(llm, items, results, {"model": "scripted"}):
        print(record["index"], flush=True)
        time.sleep(float(sys.argv[3]))
"""


def test_killed_and_started_again(tmp_path):
    source, target = write_input(tmp_path / "in.jsonl", 12), tmp_path / "out.jsonl"
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", PROGRAM, str(source), str(target)]
    with subprocess.Popen([*command, "0.2"], cwd=root, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        seen = [int(process.stdout.readline()) for _ in range(4)]
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert seen == [0, 1, 2, 3]
    kept = [record["index"] for record in read(target)]
    assert kept[:4] == seen, "what was reported is in the file"
    done = subprocess.run([*command, "0"], cwd=root, capture_output=True, text=True, check=True)
    assert [int(line) for line in done.stdout.split()] == list(range(len(kept), 12))
    assert [record["id"] for record in read(target)] == [f"q{at}" for at in range(12)]
