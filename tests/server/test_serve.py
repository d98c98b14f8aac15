"""`herald serve` as a process, with a real model and a sparse cache on the host.

Start, answers, and the end by SIGTERM; the other tests of the server have a scripted engine.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from herald_jax import LLM, CacheConfig, ModelConfig, SamplingParams
from herald_jax.cli import main
from herald_jax.server.limits import (
    ServerLimits,
    is_authorized,
    is_local_host_header,
    is_loopback,
    read_api_key,
)
from herald_jax.settings import API_KEY_VARIABLE

pytest.importorskip("fastapi", reason="needs the extra `serve`")

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "0123456789abcdef-and-more"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A converted folder: random weights, the tiny model's tokenizer."""
    import shutil

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
        shutil.copy(ROOT / "assets" / "tiny-sdar" / name, folder / name)
    return str(folder)


def test_a_process_serves_drains_and_exits_with_0(model, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    command = [
        sys.executable, "-m", "herald_jax.cli", "serve", "--model", model, "--port", "0",
        "--no-warmup", "--max-num-seqs", "1", "--max-model-len", "8192", "--drain-seconds", "1",
        "--max-prefill-tokens", "16", "--api-key-file", str(key_file), "--served-model-name", "t",
        "--cache", "placement=host", "budget=24", "dense_layers=0",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    is_up = threading.Event()

    def read():
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                is_up.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert is_up.wait(120), lines
        url = re.findall(r"http://127\.0\.0\.1:\d+", "".join(lines))[0]
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, headers=headers, timeout=120) as http:
            body = dict(model="t", prompt="Once", max_tokens=8, ignore_eos=True)
            answer = http.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 8, answer
            # Far more than a second of work, so the drain has to cut it.
            body |= dict(stream=True, max_tokens=8000)
            with http.stream("POST", "/v1/completions", json=body) as stream:
                pieces = stream.iter_lines()
                first = next(pieces)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in pieces if line]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))["choices"][0]
        assert last["finish_reason"] == "abort"
        text = "".join(
            json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            for line in [first, *rest[:-1]]
        )
        assert process.wait(30) == 0, lines
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        assert process.stderr is not None
        process.stderr.close()
    assert not any("Traceback" in line or KEY in line for line in lines), lines
    cache = CacheConfig(placement="host", budget=24, dense_layers=0)
    llm = LLM(model, max_num_seqs=1, max_model_len=8192, max_prefill_tokens=16, cache=cache)
    options = SamplingParams(max_tokens=16, ignore_eos=True)
    expected = llm.generate("Once", options)[0].outputs[0].text
    assert text and (text.startswith(expected) or expected.startswith(text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--allow-remote-without-key"),
        (["--port", "70000"], "port=70000"),
        (["--max-concurrent", "0"], "max_concurrent=0"),
        (["--drain-seconds", "-1"], "drain_seconds=-1.0"),
        (["--min-priority", "3"], "min_priority"),
        (["--api-key-file", "/nonexistent"], "api_key_file"),
        (["--max-waiting", "0"], "max_waiting=0"),
    ],
)
def test_wrong_options_end_before_anything_is_loaded(capsys, monkeypatch, arguments, message):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert main(["serve", "--model", "/nonexistent", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_extra_says_what_to_install(run_python):
    printed = run_python(
        "import sys\n"
        "sys.modules['fastapi'] = None\n"
        "from herald_jax.cli import main\n"
        "sys.stderr = sys.stdout\n"
        "assert main(['serve', '--model', 'x']) == 2"
    )
    assert "herald-jax[serve]" in printed


def test_api_keys(tmp_path, monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    assert read_api_key(None) == KEY
    path = tmp_path / "key"
    path.write_text("  another-key-in-a-file\n")
    assert read_api_key(path) == "another-key-in-a-file"
    for bad in ("", "short", "two words of a long key", "schlüssel-mit-umlaut"):
        path.write_text(bad)
        with pytest.raises(ValueError, match="16") as info:
            read_api_key(path)
        assert not bad or bad not in str(info.value)
    assert is_authorized({"authorization": f"bearer {KEY}"}, KEY)
    assert not is_authorized({"authorization": "Bearer ü"}, KEY)
    assert not is_authorized({}, KEY)


def test_names_of_this_machine():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
    assert all(map(is_local_host_header, ("localhost", "[::1]", "[::1]:80", "127.0.0.1:80")))
    assert not any(map(is_local_host_header, ("a.example", "localhost.a.example:80", "")))


def test_limits_are_checked():
    assert ServerLimits().max_priority == 100
    for field in ("max_body_bytes", "max_samples", "default_max_tokens", "max_prompt_tokens"):
        with pytest.raises(ValueError, match=field):
            ServerLimits(**{field: 0})
    for field in ("read_seconds", "write_seconds"):
        with pytest.raises(ValueError, match=field):
            ServerLimits(**{field: 0.0})
