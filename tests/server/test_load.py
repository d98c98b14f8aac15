"""Two hundred requests with aborts, disconnects and bad bodies; the soak runs thousands."""

from __future__ import annotations

import asyncio
import random

import pytest
from serving import live_server, wait_until

from benchmarks import serve_load
from benchmarks.serve_load import Case, Load, what_is_left

pytest.importorskip("fastapi", reason="needs the extra `serve`")


def test_load(monkeypatch):
    monkeypatch.setattr(serve_load, "RETRY_SECONDS", 0.03)
    chance = random.Random(1)
    cases = []
    for at in range(20):
        text = "".join(chance.choices("abc DEF ü✓", k=chance.randrange(1, 60)))
        body = dict(model="load", max_tokens=chance.randrange(1, 50), priority=at % 3)
        if at % 3 == 0:
            messages = [{"role": "user", "content": text}]
            cases.append(Case("/v1/chat/completions", {**body, "messages": messages, "n": 2}))
        else:
            prompt = [text, "two"] if at % 3 == 1 else text
            cases.append(Case("/v1/completions", {**body, "prompt": prompt, "stop": ["F"]}))
    engine = dict(max_num_seqs=8, max_waiting=12, kv_cache_bytes=12 * 64 * 64)
    limits = dict(max_concurrent=20, max_body_bytes=200_000)
    with live_server(name="load", engine=engine, limits=limits) as (server, runner):
        runner.seconds = 0.0005
        load = Load(server.url, server.llm, cases, seed=2)
        asyncio.run(asyncio.wait_for(load.run(200, 24, abort_every=0.2), 80))
        assert load.faults == []
        counts = load.counts
        assert counts["ok"] > 80 and counts["refused"] > 3 and counts["disconnected"] > 3
        ended = ("ok", "aborted", "refused", "disconnected")
        assert sum(counts[name] for name in ended) == 200
        assert not any(what_is_left(server.llm).values())
        wait_until(lambda: server.service.active == 0)
