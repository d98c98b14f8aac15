"""The speed benchmark runs the engine's own parts, and its window counts what it claims."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode_run import Case, Timeline, run_case
from benchmarks.filled import Arena, SharedPool, filled_engines
from benchmarks.ladder import rungs
from benchmarks.shapes import MODELS
from benchmarks.throughput import METHODS, cache_of
from herald_jax.cache.host import HostShape
from herald_jax.cache_config import CacheConfig
from herald_jax.engine import host_retrieval, llm_engine
from herald_jax.engine.trace import DEVICE, LANE
from herald_jax.models.decoder import random_params
from herald_jax.planner import Workload, cache_bytes

CONFIG = dataclasses.replace(MODELS["toy"], num_layers=3)
CACHE = CacheConfig(placement="host", budget=0.1, dense_layers=1)


def test_a_case_decodes_its_blocks_and_writes_its_trace(tmp_path: Path) -> None:
    case = Case(
        name="herald",
        cache=CACHE,
        rows=3,
        context=512,
        steps=4,
        blocks=2,
        trace=tmp_path / "trace.json",
    )
    row_bytes = 2 * 2 * 2 * 512 * 32 * 4
    figures = run_case(CONFIG, random_params(CONFIG), case, Arena(), 2 * row_bytes)
    assert figures["blocks_measured"] >= 3
    assert figures["compile_seconds_while_measured"] == 0
    assert figures["recalls"] >= 6 and figures["hit_share"] > 0
    # Keys of two layers, of all blocks but the newest one.
    blocks = figures["mb_scanned_per_row"] * 1e6 / (2 * 2 * 16 * 32 * 4)
    assert 512 / 16 - 5 <= blocks <= 512 / 16
    work = Workload(model=CONFIG, context=512, itemsize=4)
    assert (figures["device_bytes_of_engine"], figures["host_bytes"]) == cache_bytes(work, CACHE, 3)
    _check_trace(case, figures)
    assert llm_engine.SparseRunner.__module__ == "herald_jax.engine.sparse_runner"


def _check_trace(case: Case, figures: dict[str, Any]) -> None:
    assert case.trace is not None
    events = json.loads(case.trace.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == [DEVICE, LANE, "row 0", "row 1", "row 2"]
    spans = [event for event in events if event["ph"] == "X"]
    tracks = {name: [s for s in spans if names[s["tid"]] == name] for name in names.values()}
    for name in (DEVICE, LANE):  # one thing after the other
        ends = [span["ts"] + span["dur"] for span in tracks[name]]
        begins = [span["ts"] for span in tracks[name]]
        assert all(end <= begin + 1e-3 for end, begin in zip(ends, begins[1:], strict=False))
    assert min(span["ts"] for span in spans) == 0
    assert {span["args"]["rows"] for span in tracks[DEVICE]} == {3}
    waited = sum(span["args"]["exposed_wait_ms"] for span in tracks[DEVICE]) / 1e3
    assert waited == pytest.approx(figures["wait_seconds"], abs=0.01)
    recalls = [span["args"] for span in tracks[LANE] if span["name"] == "Recall"]
    assert len(recalls) >= figures["recalls"] >= 6
    assert any(span["name"] == "Append" for span in tracks[LANE])
    for row in (0, 1, 2):
        blocks = [span["args"] for span in tracks[f"row {row}"]]
        assert len(blocks) >= 2 and all(block["steps"] == 4 for block in blocks)
        # The prompt's first block had its pool from nowhere.
        assert "bytes_sent" not in blocks[0] and blocks[1]["bytes_sent"] > 0
        assert blocks[1]["exposed_wait_ms"] >= 0 < blocks[1]["scan_seconds"]
        wanted = math.ceil(0.1 * blocks[1]["index"] * 16)
        assert blocks[1]["attended"] == 4 + wanted + 16 + 16


def test_rows_share_parts_of_the_arena() -> None:
    shape = HostShape(layers=2, rows=5, kv_heads=2, row_tokens=64, head_dim=8, dtype="float32")
    pool = SharedPool(Arena(), 2 * shape.nbytes // 5, shape, None)
    assert (pool.parts, pool.nbytes) == (2, shape.nbytes)
    views = [pool.view(layer, row) for layer in range(2) for row in range(2)]
    numbers = [part.tobytes() for view in views for part in view]
    assert len(set(numbers)) == len(numbers)
    assert pool.view(1, 4)[0].base is not None
    assert pool.view(1, 4)[0].tobytes() == pool.view(1, 0)[0].tobytes()
    k, v = pool.view(0, 1)
    pool.write(0, 3, 8, v[:, :8].copy(), k[:, :8].copy())
    assert pool.view(0, 1)[0][:, 8:16].tobytes() == v[:, :8].tobytes()


def test_what_is_replaced_comes_back() -> None:
    retrieval: Any = host_retrieval.HostRetrieval
    before = llm_engine.SlotRunner, retrieval._store_type
    with pytest.raises(RuntimeError), filled_engines(Arena(), 1):
        assert llm_engine.SlotRunner is not before[0]
        raise RuntimeError
    assert before == (llm_engine.SlotRunner, retrieval._store_type)


def test_the_window_lies_where_all_rows_run() -> None:
    timeline = Timeline(2)
    timeline.commits = [[1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5]]
    assert timeline.window(2) == (1.5, 3.0)
    # So far apart that one has ended when the other begins.
    timeline.commits = [[1.0, 2.0, 3.0], [3.5]]
    assert timeline.window(2) == (1.0, 3.0)
    # The clock ended it.
    timeline.commits = [[1.0, 2.0], [1.5, 2.5]]
    assert timeline.window(9) == (1.5, 2.5)


def test_methods_and_rungs_are_configurations() -> None:
    caches = {method: cache_of(method, CacheConfig(budget=0.07)) for method in METHODS}
    assert caches["dense"] is None
    assert all(cache.budget == 0.07 for cache in caches.values() if cache is not None)
    assert len(set(caches.values())) == len(METHODS)
    assert len(set(rungs(CacheConfig()).values())) == 6
