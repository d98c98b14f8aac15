"""What is planned is what is allocated, and what binds is named."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.shapes import MODELS
from herald_jax import CacheConfig, ConfigError
from herald_jax.cache.shape import SparseShape
from herald_jax.cli import main
from herald_jax.configs import ModelConfig
from herald_jax.machine import Machine
from herald_jax.models.decoder import abstract_params
from herald_jax.pass_times import expert_seconds, pass_seconds, weight_bytes
from herald_jax.planner import (
    Workload,
    block_times,
    cache_bytes,
    choose,
    most_rows,
    placements,
    plan_rows,
)
from tests.engine import sparse_engines

SDAR, LLADA = MODELS["sdar-8b"], MODELS["llada2-mini"]
GB = 10**9


@pytest.mark.parametrize("name", ["llada2-mini", "fast-dllm-1.5b"])
def test_weights_are_those_of_the_network(name: str) -> None:
    leaves = jax.tree.leaves(abstract_params(MODELS[name], jnp.bfloat16))
    matrices = sum(leaf.size for leaf in leaves if len(leaf.shape) > 1)
    assert weight_bytes(MODELS[name], 2) == 2 * matrices


@pytest.mark.parametrize(
    "cache",
    [
        None,
        CacheConfig(placement="device", lookahead=False, budget=0.3),
        CacheConfig(placement="host", budget=0.2, recent_blocks=3),
        CacheConfig(placement="host", budget=24, key_index="int8", dense_layers=1),
    ],
    ids=["dense", "mage", "herald", "index"],
)
def test_bytes_are_those_that_an_engine_holds(cache: CacheConfig | None) -> None:
    llm = sparse_engines.make_llm(cache, max_model_len=250)
    runner: Any = llm.engine.runner
    work = Workload(model=sparse_engines.CONFIG, context=250, itemsize=4)
    device, host = cache_bytes(work, cache, sparse_engines.ROWS)
    arriving = 0
    if cache is not None and cache.placement == "host":
        arriving = runner._shape.device_parts(sparse_engines.CONFIG, 4)["arriving entries"]
        assert host == runner.retrieval.host_bytes
        runner.close()
    assert device == runner.kv_bytes + arriving
    assert (device, host) == (llm.engine.sizes.kv_bytes, llm.engine.sizes.host_bytes)


def test_most_rows_fill_each_memory_and_no_more() -> None:
    work = Workload(model=SDAR, context=32768)
    cache = CacheConfig(budget=0.05)
    bounds = most_rows(work, cache, 34 * GB, 115 * GB)
    assert bounds == {"device bytes": 43, "host bytes": 24}
    assert most_rows(work, None, 34 * GB, 0) == {"device bytes": 7}
    assert most_rows(work, dataclasses.replace(cache, placement="device"), 34 * GB, 0) == {
        "device bytes": 6
    }
    # The law of algorithms.md 2.6, but for rounding, recent blocks and staging.
    gain = bounds["device bytes"] / (34 * GB / cache_bytes(work, None, 1)[0])
    assert gain == pytest.approx(1 / (2 * 0.05 * 34 / 36 + 2 / 36), rel=0.1)


def test_what_is_refused_says_a_number_that_works() -> None:
    work = Workload(model=SDAR, context=32768)
    mage, herald = CacheConfig(placement="device", lookahead=False), CacheConfig()
    for cache, rows, option in ((None, 9, "device"), (mage, 9, "device"), (herald, 25, "host")):
        limits: dict[str, Any] = {"device_bytes": 34 * GB, "host_bytes": 115 * GB}
        with pytest.raises(ConfigError, match=f"--{option}-bytes") as refused:
            plan_rows(work, cache, rows=rows, **limits)
        number = re.search(r"-bytes to (\d+), lower rows to (\d+)", str(refused.value))
        assert number is not None
        fewer = plan_rows(work, cache, rows=int(number[2]), **limits)
        assert fewer.rows == int(number[2])
        limits[f"{option}_bytes"] = int(number[1])
        more = {name: max(value, 300 * GB) for name, value in limits.items()}
        more[f"{option}_bytes"] = int(number[1])
        assert plan_rows(work, cache, rows=rows, **more).rows == rows
    with pytest.raises(ConfigError, match="shorten the context"):
        plan_rows(work, None, device_bytes=1 * GB, host_bytes=0)


def test_the_slowest_resource_sets_the_pace_and_is_named() -> None:
    work = Workload(model=SDAR, context=32768)
    host = CacheConfig(budget=0.05)

    def plan(cache: CacheConfig | None, host_bytes: int = 115 * GB, **rates: Any) -> Any:
        machine = Machine(**rates)
        return plan_rows(work, cache, device_bytes=34 * GB, host_bytes=host_bytes, machine=machine)

    fast: dict[str, Any] = {"scan_bytes_per_second": 1e13, "choose_keys_per_second": 1e13}
    assert plan(None).binding == "device bytes"
    assert plan(host).binding == "host scan"
    slow = plan(host, scan_bytes_per_second=1e10)
    assert slow.times.block == pytest.approx(slow.times.host, rel=0.5)
    # A row costs the host a time; more rows are worth nothing then.
    assert slow.rows <= 3 < plan(host, **fast).rows
    assert plan(host, 20 * GB, **fast, gather_bytes_per_second=1e13).binding == "host bytes"
    assert plan(host, **fast, link_bytes_per_second=1e9).binding == "link"
    # The host's choice that is slow gives way to one on the device.
    caches = (None, CacheConfig(placement="device", lookahead=False, budget=0.05), host)
    best = choose([plan(cache, scan_bytes_per_second=1e10) for cache in caches])
    assert best.name == "device, exact first step"
    assert choose([plan(cache, **fast) for cache in caches]).name == "host, lookahead"
    index = dataclasses.replace(host, key_index="int8")
    assert plan(index, scan_bytes_per_second=1e8).times.bytes_scanned == 0


def test_a_block_takes_its_passes() -> None:
    machine = Machine()
    work = Workload(model=SDAR, context=4096, steps=7)
    times = block_times(work, None, 3)
    assert times.block == pytest.approx(8 * times.step)
    sparse = CacheConfig(placement="device", budget=0.05)
    ahead = block_times(work, sparse, 3)
    assert 8 * ahead.step < ahead.main < 10 * ahead.step
    exact = block_times(work, dataclasses.replace(sparse, lookahead=False), 3)
    assert exact.main > 8 * exact.step
    fetch = CacheConfig(placement="host", lookahead=False, budget=0.05)
    fetched = 3 * 34 * 4096 * 4096 / machine.fetch_bytes_per_second
    assert block_times(work, fetch, 3).main > fetched + 8 * exact.step
    walk = CacheConfig(budget=0.05, retrieval="layerwise", selection_query="centre")
    lone = dataclasses.replace(walk, retrieval="single_pass")
    assert block_times(work, walk, 3).host > 2 * block_times(work, lone, 3).host


def test_buffers_that_are_few_set_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `benchmarks/results/throughput_sdar-8b_index_r17_s32768.json`: four of three layers."""
    work = Workload(model=SDAR, context=32768)
    index = CacheConfig(budget=0.05, key_index="int8")
    assert block_times(work, index, 17).binding == "device time"
    monkeypatch.setattr(SparseShape, "staging_slots", lambda *_: 4)
    monkeypatch.setattr(SparseShape, "staging_layers", lambda *_: 3)
    times = block_times(work, index, 17)
    assert times.binding == "link"
    assert 1e3 * times.block == pytest.approx(2197, rel=0.2)


@pytest.mark.parametrize("tokens, measured", [(32, 5.05), (128, 5.6), (256, 6.6)])
def test_a_pass_takes_what_was_measured(tokens: int, measured: float) -> None:
    """SDAR-8B without attention, as the hardware notes have it."""
    machine = Machine(attention_seconds=1e-9)
    seconds = pass_seconds(SDAR, machine, 2, blocks=tokens // 32, attended_bytes=0)
    assert 1e3 * seconds == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "tokens, measured", [(32, 0.425), (256, 0.763), (1024, 1.901), (4096, 2.686)]
)
def test_experts_take_what_was_measured(tokens: int, measured: float) -> None:
    """As `benchmarks/results/mixture.json` has it."""
    assert 1e3 * expert_seconds(LLADA, Machine(), 2, tokens) == pytest.approx(measured, rel=0.1)


def test_every_placement_can_be_planned_for_a_mixture() -> None:
    work = Workload(model=LLADA, context=65536)
    plans = [
        plan_rows(work, cache, device_bytes=int(23.5 * GB), host_bytes=115 * GB)
        for cache in placements()
    ]
    assert len({plan.name for plan in plans}) == len(plans)
    assert plans[0].rows == 8
    assert all(plan.device_bytes <= 23.5 * GB for plan in plans)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a description and no weights."""
    config: ModelConfig = dataclasses.replace(SDAR, max_position_embeddings=65536)
    (tmp_path / "config.json").write_text(config.to_json(), encoding="utf-8")
    (tmp_path / "params").mkdir()
    return tmp_path


def test_command(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", str(model_folder), "--context", "32768"]
    limits = ["--device-bytes", "34GB", "--host-bytes", "107GiB"]
    assert main([*command, *limits]) == 0
    out = capsys.readouterr().out
    assert "dense: 7 rows" in out and "host, lookahead, int8 index" in out
    assert out.splitlines()[-1].startswith("fastest: ")
    assert main([*command, *limits, "--json", "--cache", "placement=host", "budget=0.05"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["most_rows"] == {"device bytes": 43, "host bytes": 24}
    assert facts["binds"] == "host scan" and facts["cache"]["budget"] == 0.05
    assert main([*command, *limits, "--rows", "27", "--cache", "budget=0.05"]) == 2
    assert "--host-bytes to" in capsys.readouterr().err
    assert main([*command, *limits, "--machine", "scan=1"]) == 2
    with pytest.raises(SystemExit):
        main([*command, "--device-bytes", "lots"])


def test_command_reads_a_published_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "block_size": 32,
        "mask_token_id": 151669,
        "eos_token_id": 151643,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(published), encoding="utf-8")
    command = ["plan", "--model", str(tmp_path), "--context", "32768", "--json"]
    assert main([*command, "--device-bytes", "34GB", "--host-bytes", "115GB"]) == 0
    dense = json.loads(capsys.readouterr().out.splitlines()[0])
    assert dense["device_bytes"] == 7 * 32768 * 147456
