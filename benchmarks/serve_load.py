"""Load on a server on the loopback device: random aborts, disconnects and bad bodies.

Server and clients share this process, so that what is left in the engine can be looked at. Each
case is asked for once alone; under load, every answer that nobody cut must equal that one, and
one that was aborted must be its beginning. Refusals for want of room are asked for again.

    python -m benchmarks serve_load --requests 2000

The run ends with an error on the first kind of fault: a hang, a wrong answer or status, or
anything that is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import gc
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald_jax.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    import httpx

HANG_SECONDS = 120.0
"""A request that takes longer counts as a hang."""

RETRY_SECONDS = 0.2
"""About how long a client waits that was told to; less than the server says, to press it."""

BAD_BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[1, 2]", 400),
    (b'{"model": "load"}', 400),
    (b'{"model": "other", "prompt": "x"}', 404),
    (b'{"model": "load", "prompt": "x", "max_tokens": -1}', 400),
    (b'{"model": "load", "prompt": "x", "logit_bias": {"1": 5}}', 400),
    (b'{"model": "load", "prompt": "x", "unheard_of": 1}', 400),
    (b'{"model": "load", "prompt": "' + b"x" * 300_000 + b'"}', 413),
    (b"\xff" * 100, 400),
]
KINDS = {"whole": 45, "stream": 30, "leave_stream": 9, "leave_whole": 9, "bad_body": 7}
"""Kinds of requests and how often each is chosen of 100."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, and the texts of its choices when nobody disturbs it."""

    path: str
    body: dict[str, Any]
    texts: tuple[str, ...] = ()


class Load:
    """Clients of one server.

    Attributes:
        counts: How many requests ended in which way.
        faults: What went wrong, in words.
        seconds: How long each answered request took.
    """

    def __init__(self, url: str, llm: AsyncLLM, cases: Sequence[Case], *, seed: int = 0) -> None:
        self._url, self._llm, self._cases = url, llm, list(cases)
        self._chance = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.seconds: list[float] = []

    async def run(self, requests: int, concurrency: int, abort_every: float) -> None:
        """Sends so many requests, so many at a time."""
        import httpx  # here, as the other benchmarks do without it

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as http:
            self._cases = [await self._alone(http, case) for case in self._cases]
            aborter = asyncio.ensure_future(self._abort_some(abort_every))
            kinds = self._chance.choices(list(KINDS), list(KINDS.values()), k=requests)
            left = iter(kinds)

            async def client() -> None:
                for kind in left:
                    await self._guarded(http, kind)

            await asyncio.gather(*(client() for _ in range(concurrency)))
            aborter.cancel()
            await asyncio.gather(aborter, return_exceptions=True)

    async def _alone(self, http: httpx.AsyncClient, case: Case) -> Case:
        answer = await http.post(case.path, json=case.body)
        answer.raise_for_status()
        return dataclasses.replace(case, texts=tuple(map(_text, answer.json()["choices"])))

    async def _abort_some(self, every: float) -> None:
        while True:
            await asyncio.sleep(every * 2 * self._chance.random())
            names = self._llm.request_ids
            if names and await self._llm.abort(self._chance.choice(names)):
                self.counts["aborts_asked_for"] += 1

    async def _guarded(self, http: httpx.AsyncClient, kind: str) -> None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await self._one(http, kind)
        except TimeoutError:
            self.counts["hangs"] += 1
            self.faults.append(f"a request of kind {kind} hangs")
        except Exception as error:
            self.counts["wrong"] += 1
            self.faults.append(f"{kind}: {type(error).__name__}: {error}")

    async def _one(self, http: httpx.AsyncClient, kind: str) -> None:
        if kind == "bad_body":
            await self._send_bad_body(http)
            return
        case = self._chance.choice(self._cases)
        leave_after = 0.001 + self._chance.random() * 0.3
        while True:
            begin = time.perf_counter()
            if kind == "leave_whole":
                try:
                    async with asyncio.timeout(leave_after):
                        status, choices = await self._whole(http, case)
                except TimeoutError:
                    self.counts["disconnected"] += 1
                    return
            elif kind == "whole":
                status, choices = await self._whole(http, case)
            else:
                chance = 0.3 if kind == "leave_stream" else 0.0
                status, choices = await self._stream(http, case, chance)
                if choices is None:
                    self.counts["disconnected"] += 1
                    return
            if status == 429:
                self.counts["told_to_wait"] += 1
                await asyncio.sleep(RETRY_SECONDS * (0.5 + self._chance.random()))
                continue
            break
        self.seconds.append(time.perf_counter() - begin)
        self._check(case, status, choices or [])

    async def _send_bad_body(self, http: httpx.AsyncClient) -> None:
        body, expected = self._chance.choice(BAD_BODIES)
        while True:
            headers = {"content-type": "application/json"}
            answer = await http.post("/v1/completions", content=body, headers=headers)
            if answer.status_code != 429:
                break
            self.counts["told_to_wait"] += 1
            await asyncio.sleep(RETRY_SECONDS * (0.5 + self._chance.random()))
        if answer.status_code == expected and answer.json()["error"]["message"]:
            self.counts["refused"] += 1
        else:
            self.counts["wrong"] += 1
            self.faults.append(f"{body[:60]!r} was answered with {answer.status_code}")

    async def _whole(
        self, http: httpx.AsyncClient, case: Case
    ) -> tuple[int, list[tuple[str, str | None]]]:
        answer = await http.post(case.path, json=case.body)
        if answer.status_code != 200:
            assert answer.status_code != 429 or answer.headers["retry-after"]
            return answer.status_code, []
        choices = answer.json()["choices"]
        return 200, [(_text(choice), choice["finish_reason"]) for choice in choices]

    async def _stream(
        self, http: httpx.AsyncClient, case: Case, leave: float
    ) -> tuple[int, list[tuple[str, str | None]] | None]:
        """Status and choices; no choices if the client left after one of the events."""
        body = {**case.body, "stream": True}
        texts = [""] * len(case.texts)
        reasons: list[str | None] = [None] * len(case.texts)
        async with http.stream("POST", case.path, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return answer.status_code, []
            async for event in _events(answer):
                if event is None:
                    return 200, list(zip(texts, reasons, strict=True))
                if self._chance.random() < leave:
                    return 200, None
                for choice in event["choices"]:
                    texts[choice["index"]] += _text(choice)
                    reasons[choice["index"]] = choice["finish_reason"]
        raise RuntimeError("the events ended without [DONE]")

    def _check(self, case: Case, status: int, choices: list[tuple[str, str | None]]) -> None:
        if status != 200 or len(choices) != len(case.texts):
            self.counts["wrong"] += 1
            self.faults.append(f"status {status}, {len(choices)} choices for {case}")
            return
        is_cut = False
        for (text, reason), expected in zip(choices, case.texts, strict=True):
            is_cut |= reason == "abort"
            # An abort may cut a character of several tokens.
            begins = expected.startswith(text.rstrip("\ufffd"))
            right = begins if reason == "abort" else text == expected
            if not right or reason is None:
                self.counts["wrong"] += 1
                self.faults.append(f"{text!r} ({reason}) instead of {expected!r}")
                return
        self.counts["aborted" if is_cut else "ok"] += 1


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """Objects of the events; `None` for the mark at the end."""
    async for line in answer.aiter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    turn = choice.get("message") or choice.get("delta") or {}
    return turn.get("content") or ""


def what_is_left(llm: AsyncLLM) -> dict[str, int]:
    """What an idle engine still holds; everything should be 0."""
    engine = llm.engine
    end = time.monotonic() + HANG_SECONDS
    while (engine.has_unfinished or llm.request_ids) and time.monotonic() < end:
        time.sleep(0.01)
    engine.scheduler.check()
    pool = engine.scheduler._pool  # pyright: ignore[reportPrivateUsage]
    return {
        "leaked_pages": pool.num_pages - pool.available,
        "leaked_rows": len(engine.scheduler.running),
        "leaked_waiting": len(engine.scheduler.waiting),
        "leaked_samples": len(engine._samples),  # pyright: ignore[reportPrivateUsage]
        "leaked_requests": len(llm.request_ids),
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _engine() -> AsyncLLM:
    """A small random model with the bundled tokenizer; rows, pages and queue are scarce."""
    import jax.numpy as jnp

    from herald_jax.configs import ModelConfig
    from herald_jax.engine.config import EngineConfig
    from herald_jax.engine.llm_engine import LLMEngine
    from herald_jax.models.decoder import random_params
    from herald_jax.settings import enable_compile_cache
    from herald_jax.tokenizer import Tokenizer

    enable_compile_cache()
    config = ModelConfig(
        family="random",
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_length=8,
        mask_token_id=2,
        stop_token_ids=(1,),
        max_position_embeddings=512,
    )
    settings = EngineConfig(
        max_num_seqs=8,
        max_model_len=256,
        max_waiting=40,
        max_prefill_tokens=64,
        kv_cache_bytes=8 * 64 * 2 * 2 * 16 * 4,  # 8 pages of 64 tokens
    )
    engine = LLMEngine(config, random_params(config, seed=1, dtype=jnp.float32), settings)
    engine.warmup()
    folder = Path(__file__).resolve().parent.parent / "assets" / "tiny-sdar"
    return AsyncLLM(engine, Tokenizer.from_folder(folder))


def _cases() -> list[Case]:
    chance = random.Random(3)
    words = "the old man went down to the sea and looked at a ship of war".split()
    cases = []
    for at in range(40):
        text = " ".join(chance.choices(words, k=chance.randrange(1, 60)))
        body: dict[str, Any] = dict(
            model="load", max_tokens=chance.randrange(1, 90), priority=chance.randrange(3)
        )
        if at % 4 == 1:
            body |= dict(temperature=0.8, top_p=0.9, seed=at)
        if at % 4 == 2:
            body |= dict(n=2, temperature=1.0, seed=at)
        if at % 5 == 3:
            body |= dict(stop=["e"], denoising_steps=3)
        if at % 4 == 3:
            body["messages"] = [{"role": "user", "content": text}]
            cases.append(Case("/v1/chat/completions", body))
        else:
            body["prompt"] = (
                ["shared beginning of two prompts " + text, text] if at % 8 == 0 else text
            )
            cases.append(Case("/v1/completions", body))
    return cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--abort-every", type=float, default=1.0, help="seconds between aborts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="folder of the record")


def main(options: argparse.Namespace) -> None:
    """Runs the load and writes the record."""
    from benchmarks.record import RESULTS, current_commit, write_record
    from herald_jax.server.limits import ServerLimits
    from herald_jax.server.run import make_server
    from herald_jax.server.service import Service

    commit = current_commit()
    llm = _engine()
    limits = ServerLimits(max_body_bytes=200_000, max_concurrent=options.concurrency - 4)
    service = Service(llm, "load", limits)
    server = make_server(service, host="127.0.0.1", port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        warm = Load(url, llm, _cases(), seed=options.seed + 1)
        asyncio.run(warm.run(max(options.requests // 10, 1), options.concurrency, 1.0))
        what_is_left(llm)
        gc.collect()
        memory, files = _resident_bytes(), len(os.listdir("/proc/self/fd"))
        load = Load(url, llm, _cases(), seed=options.seed)
        begin = time.perf_counter()
        asyncio.run(load.run(options.requests, options.concurrency, options.abort_every))
        wall = time.perf_counter() - begin
        left = what_is_left(llm)
        gc.collect()
        end = time.monotonic() + 10  # the server closes what clients have closed
        while len(os.listdir("/proc/self/fd")) > files and time.monotonic() < end:
            time.sleep(0.05)
        growth = {
            "resident_bytes_growth": _resident_bytes() - memory,
            "open_files_growth": len(os.listdir("/proc/self/fd")) - files,
            "active_answers": service.active,
        }
        figures = llm.stats.snapshot()
    finally:
        llm.begin_shutdown(0.0)
        server.should_exit = True
        thread.join()
    ordered = sorted(load.seconds)
    result: dict[str, Any] = {
        "requests": options.requests,
        **{
            name: load.counts[name]
            for name in (
                "ok", "aborted", "disconnected", "refused", "told_to_wait", "aborts_asked_for",
                "wrong", "hangs",
            )
        },
        **left,
        **growth,
        "wall_seconds": round(wall, 2),
        "requests_per_second": round(options.requests / wall, 1),
        "answer_seconds_p50": round(ordered[len(ordered) // 2], 3),
        "answer_seconds_p99": round(ordered[int(len(ordered) * 0.99)], 3),
        "preemptions": figures["preempted"],
        "engine_thread_alive_after_shutdown": not llm.state == "closed",
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    for fault in load.faults[:20]:
        print(fault)
    if load.faults or any(left.values()) or growth["active_answers"]:
        raise SystemExit("the load has found faults")
    write_record(
        "serve_load",
        commit=commit,
        shapes={"model": dataclasses.asdict(llm.config), "cases": len(_cases())},
        settings={
            "engine": dataclasses.asdict(llm.engine.settings),
            "limits": dataclasses.asdict(limits),
            "concurrency": options.concurrency,
            "kinds_of_100": KINDS,
            "abort_every_seconds": options.abort_every,
            "seed": options.seed,
        },
        figures=result,
        folder=options.output or RESULTS,
    )
