"""`AsyncLLM`: one engine for many asyncio tasks; see `engine.engine_thread` for how."""

from __future__ import annotations

import asyncio
import atexit
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from herald_jax import checkpoint
from herald_jax._checks import ConfigError
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import require_block_decoding
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.engine_thread import EngineClosed, EngineDead, EngineThread
from herald_jax.engine.intake import Intake
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.stats import EngineStats
from herald_jax.engine.stream import RequestStream
from herald_jax.model_source import find_checkpoint, resolve_dtype
from herald_jax.models import check_params, copy_params
from herald_jax.outputs import StreamEvent
from herald_jax.prompts import Prompt
from herald_jax.sampling import SamplingParams
from herald_jax.settings import enable_compile_cache
from herald_jax.tokenizer import Message, Tokenizer


class AsyncLLM:
    """A model for many asyncio tasks at once.

    Example::

        async with AsyncLLM.from_model("my-model") as llm:
            async for event in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(event.text, end="")

    Args:
        engine: The engine; from now on only this object may use it.
        tokenizer: For text; without one, prompts are lists of ids and texts are empty.

    Attributes:
        engine: The engine. Read what never changes from it, and nothing else.
        intake: Reads prompts.
        stats: Figures, for any thread.
    """

    def __init__(self, engine: LLMEngine, tokenizer: Tokenizer | None = None) -> None:
        self.engine = engine
        self.intake = Intake(engine.config, tokenizer, engine.sizes.max_model_len)
        self.stats = EngineStats()
        self._thread = EngineThread(engine, self.intake, self.stats)
        self._thread.start()
        # A daemon thread must not be inside of JAX when the interpreter goes away.
        atexit.register(self.close)

    @classmethod
    def from_model(
        cls,
        model: str | Path,
        *,
        dtype: Any = "auto",
        mask_token_id: int | None = None,
        block_length: int | None = None,
        tokenizer: str | Path | None = None,
        engine: EngineConfig | None = None,
        warmup: bool = False,
    ) -> Self:
        """An engine over a checkpoint.

        Args:
            model: As for `LLM`.
            dtype: As for `LLM`.
            mask_token_id: As for `LLM`.
            block_length: As for `LLM`.
            tokenizer: As for `LLM`.
            engine: Settings of the engine.
            warmup: True to compile all programs before the first request.

        Raises:
            ConfigError: If an argument does not fit, or a sample would not fit in memory.
        """
        name = resolve_dtype(dtype)
        enable_compile_cache()
        folder, config = find_checkpoint(
            model, dtype=name, mask_token_id=mask_token_id, block_length=block_length
        )
        require_block_decoding(config, may_shift=engine is None or engine.cache is None)
        found = Tokenizer.from_folder(folder if tokenizer is None else tokenizer)
        if found is None and tokenizer is not None:
            raise ConfigError(f"tokenizer={str(tokenizer)!r} holds no tokenizer.json.")
        params = checkpoint.load_params(folder, dtype=name)
        made = LLMEngine(config, params, engine)
        if warmup:
            made.warmup()
        return cls(made, found)

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: Mapping[str, Any],
        *,
        tokenizer: Tokenizer | None = None,
        engine: EngineConfig | None = None,
    ) -> Self:
        """An engine over parameters that are in memory already; they are copied."""
        enable_compile_cache()
        check_params(config, dict(params))
        return cls(LLMEngine(config, copy_params(dict(params)), engine), tokenizer)

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or `None`."""
        return self.intake.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its generation together."""
        return self.intake.max_model_len

    @property
    def state(self) -> str:
        """`running`, `draining` once the shutdown began, `closed` after it, or `dead`."""
        return self._thread.state

    @property
    def request_ids(self) -> list[str]:
        """Names of the requests that wait or run just now."""
        return self._thread.request_ids

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[StreamEvent]:
        """Yields an event for every finished block of every sample.

        A sample's texts join to its final text and none is ever taken back; the very last event
        carries the request's output. Closing the generator, or cancelling the task that iterates
        over it, aborts the request.

        Args:
            prompt: A text, a list of ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: Options; the defaults if left out.
            request_id: A name for `abort`, not in use; made up if left out.
            priority: Lower goes first.
            add_special_tokens: False if a text has its special tokens already.

        Raises:
            ConfigError: If the prompt or its options do not fit.
            QueueFull: If too many samples are waiting.
            EngineClosed: If the shutdown has begun.
            EngineDead: If the engine has failed for good.
            GenerationError: If the request failed; `outputs` has what there is of it.
        """
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            add_special_tokens=add_special_tokens,
        )
        async with stream:
            async for event in stream:
                yield event

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[StreamEvent]:
        """Like `generate`, for a conversation."""
        # The template writes the special tokens itself.
        events = self.generate(
            self.render_chat(messages),
            sampling_params,
            request_id=request_id,
            priority=priority,
            add_special_tokens=False,
        )
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text that a conversation becomes, the assistant's turn opened at its end.

        Raises:
            ConfigError: If there is no tokenizer or no template, or it refuses the messages.
        """
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer, and this model's folder has none.")
        return self.tokenizer.apply_chat_template(messages)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> RequestStream:
        """Like `generate`, but returns once the request is in the queue; close the stream."""
        sampling = sampling_params or SamplingParams()
        name = request_id or f"request-{secrets.token_hex(8)}"
        # Long prompts take a while; the tokenizer lets other threads run.
        request = await asyncio.to_thread(
            self.intake.request, prompt, sampling, add_special_tokens=add_special_tokens
        )
        stream = RequestStream(
            name,
            request,
            asyncio.get_running_loop(),
            abort=lambda: self._thread.drop(stream),
        )
        accepted = self._thread.call(lambda: self._thread.add(stream, priority))
        try:
            await accepted
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_id: str) -> bool:
        """Ends a request with what it has; false if there is none of that name.

        Its task gets a last event with `finish_reason="abort"` for each sample and the output.
        """
        if self.state not in ("running", "draining"):
            return False
        try:
            return await self._thread.call(lambda: self._thread.abort(request_id), is_new=False)
        except (EngineClosed, EngineDead):
            return False

    async def update_params(self, params: Mapping[str, Any]) -> None:
        """Swaps the weights in place, without compiling anything.

        Raises:
            ConfigError: If requests are running, or the new ones do not fit; nothing changes.
        """
        await self._thread.call(lambda: self.engine.update_params(dict(params)))

    async def shutdown(self, drain_seconds: float | None = None) -> None:
        """Takes no more requests, lets those that run finish, and ends the engine's thread.

        May be called again, as with a shorter time.

        Args:
            drain_seconds: After so long, what still runs is aborted with what it has; 0 aborts
                at once, `None` waits for the end.
        """
        self._thread.begin_shutdown(drain_seconds)
        await asyncio.to_thread(self._thread.join)
        atexit.unregister(self.close)

    def begin_shutdown(self, drain_seconds: float | None = None) -> None:
        """What `shutdown` does first; it does not wait, and any thread may call it."""
        self._thread.begin_shutdown(drain_seconds)

    def close(self) -> None:
        """Aborts everything and ends the engine's thread; for where no event loop runs."""
        self._thread.begin_shutdown(0.0)
        self._thread.join()
        atexit.unregister(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown(0.0)
