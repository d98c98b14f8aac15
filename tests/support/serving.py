"""A scripted engine behind `AsyncLLM` and a server on the loopback device, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
from scripted import ScriptedRow, ScriptedRunner
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from herald_jax import ModelConfig
from herald_jax.engine.async_llm import AsyncLLM
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.models import random_params
from herald_jax.server.limits import ServerLimits
from herald_jax.server.run import make_server
from herald_jax.server.service import Service
from herald_jax.tokenizer import Tokenizer

EOS, MASK = 256, 257
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
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


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: at for at, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>"), AddedToken("<mask>")])
    return Tokenizer(backend, {"eos_token": "<eos>"}, TEMPLATE)


TOKENIZER = byte_tokenizer()


def reply(prompt: str) -> str:
    """What the scripted model says to a prompt."""
    return f"<{prompt.swapcase()}>"


def script(row: ScriptedRow) -> Iterator[int]:
    text = TOKENIZER.decode(row.prompt_token_ids)
    return itertools.chain(TOKENIZER.encode(reply(text)), itertools.repeat(EOS))


class PausingRunner(ScriptedRunner):
    """A scripted runner that takes its time, and that a test can stop before a dispatch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(script, block_length=CONFIG.block_length, **options)
        self.seconds = 0.0
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_stopped = threading.Event()
        self.stop_at: int | None = None

    def dispatch(self, plan: Any, options: Any) -> Any:
        if self.dispatched == self.stop_at:
            self.may_go.clear()
        if not self.may_go.is_set():
            self.is_stopped.set()
            assert self.may_go.wait(30), "the test has forgotten the runner"
            self.is_stopped.clear()
        if self.seconds:
            time.sleep(self.seconds)
        del self.rows[:-8]
        return super().dispatch(plan, options)


def scripted_async(
    *, tokenizer: Tokenizer | None = TOKENIZER, engine: Any = None, **options: Any
) -> tuple[AsyncLLM, PausingRunner]:
    """`engine` are settings of the engine, `options` those of the runner."""
    runner = PausingRunner(**options)
    settings: dict[str, Any] = dict(
        max_num_seqs=4, max_model_len=512, max_waiting=64, max_prefill_tokens=64
    )
    settings |= {"share_prefixes": False, **(engine or {})}  # a script sees what is prefilled
    made = LLMEngine(CONFIG, random_params(CONFIG), EngineConfig(**settings), runner)
    return AsyncLLM(made, tokenizer), runner


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def assert_nothing_left(llm: AsyncLLM) -> None:
    """No request, row or page is held; for an engine without work."""
    engine = llm.engine
    wait_until(lambda: not engine.has_unfinished and not llm.request_ids)
    engine.scheduler.check()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert not engine._samples and not engine._options
    pool = engine.scheduler._pool
    assert pool.available == pool.num_pages and pool.held == 0


class LiveServer:
    """A server on a thread."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.llm = service.llm
        self.server = make_server(service, host="127.0.0.1", port=0)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        wait_until(lambda: self.server.started or not self._thread.is_alive())
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def begin_drain(self) -> None:
        self.server._loop.call_soon_threadsafe(self.server.begin_drain)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.llm.begin_shutdown(0.0)
            with contextlib.suppress(RuntimeError):
                self.begin_drain()
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def live_server(
    *, limits: Any = None, api_key: str | None = None, name: str = "tiny", **options: Any
) -> Iterator[tuple[LiveServer, PausingRunner]]:
    """A server over a scripted engine; `limits` are those of the server."""
    llm, runner = scripted_async(**options)
    service = Service(llm, name, ServerLimits(**(limits or {})), api_key=api_key)
    server = LiveServer(service)
    try:
        yield server, runner
        if llm.state == "running":
            assert_nothing_left(llm)
    finally:
        runner.stop_at = None
        runner.may_go.set()
        server.stop()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))
