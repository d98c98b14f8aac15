"""What the routes share: the engine, who may ask for what, and the counts of answers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

from herald_jax.engine.async_llm import AsyncLLM
from herald_jax.engine.stream import RequestStream
from herald_jax.outputs import StreamEvent
from herald_jax.prompts import Prompt, read_prompt
from herald_jax.sampling import SamplingParams
from herald_jax.server.errors import RETRY_SECONDS, ApiError, refuse
from herald_jax.server.limits import ServerLimits
from herald_jax.server.protocol import ApiRequest


class Service:
    """One model behind a server.

    Args:
        llm: The engine.
        model_name: The name that clients must ask for.
        limits: How much they may ask for.
        api_key: What they must send, if anything.
        is_local: True if the server is bound to the loopback device.

    Attributes:
        active: Requests that are being answered.
        answers: How many answers there were, by route and status.
        refusals: How many of them were refusals, by their code.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model_name: str,
        limits: ServerLimits | None = None,
        *,
        api_key: str | None = None,
        is_local: bool = True,
    ) -> None:
        self.llm = llm
        self.model_name = model_name
        self.limits = limits or ServerLimits()
        self.api_key = api_key
        self.is_local = is_local
        self.active = 0
        self.answers: collections.Counter[tuple[str, int]] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """A place among the requests that are answered at the same time.

        Raises:
            ApiError: If there is none, or the server takes no more requests.
        """
        state = self.llm.state
        if state in ("draining", "closed"):
            raise ApiError(
                503,
                "the server is shutting down and takes no more requests.",
                code="shutting_down",
                retry_after=self.limits.drain_seconds,
            )
        if state == "dead":
            raise ApiError(503, "the engine has failed for good.", code="engine_dead")
        if self.active >= self.limits.max_concurrent:
            raise ApiError(
                429,
                f"{self.active} requests are being answered, which is the limit. Try again later.",
                code="too_many_requests",
                retry_after=RETRY_SECONDS,
            )
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def check_model(self, name: str) -> None:
        """Checks that a request asks for this model.

        Raises:
            ApiError: If it asks for another.
        """
        if name != self.model_name:
            raise ApiError(
                404,
                f"model={name!r} is not here: this server has {self.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def submit(self, request: ApiRequest, name: str) -> list[RequestStream]:
        """The streams of a request's prompts, all of them or none.

        Raises:
            ApiError: If a prompt is too long.
            ConfigError: If a prompt or an option does not fit the model.
            QueueFull: If too many samples are waiting.
        """
        prompts = request.prompts
        if request.is_chat:
            prompts = [await asyncio.to_thread(self.llm.render_chat, request.messages)]
        streams: list[RequestStream] = []
        try:
            for at, prompt in enumerate(prompts):
                streams.append(await self._submit(request, f"{name}-{at}", prompt))
        except BaseException:
            await close_all(streams)
            raise
        return streams

    async def _submit(self, request: ApiRequest, name: str, prompt: Prompt) -> RequestStream:
        # The template of a chat writes the special tokens itself.
        _, ids = await asyncio.to_thread(
            read_prompt, prompt, self.llm.tokenizer, add_special_tokens=not request.is_chat
        )
        field = "messages" if request.is_chat else "prompt"
        longest, room = self.limits.max_prompt_tokens, self.llm.max_model_len - len(ids)
        if room < 1 or (longest is not None and len(ids) > longest):
            most = self.llm.max_model_len - 1
            most = most if longest is None else min(most, longest)
            raise ApiError(
                400,
                f"{field} has {len(ids)} tokens; at most {most} are allowed. Shorten it.",
                param=field,
                code="context_length_exceeded",
            )
        wanted = request.max_tokens
        if wanted is not None and wanted > room:
            raise refuse(
                "max_tokens", wanted, f"at most {room} after a prompt of {len(ids)} tokens"
            )
        max_tokens = min(self.limits.default_max_tokens, room) if wanted is None else wanted
        return await self.llm.submit(
            list(ids),
            SamplingParams(max_tokens=max_tokens, **request.sampling),
            request_id=name,
            priority=request.priority,
        )


async def close_all(streams: Sequence[RequestStream]) -> None:
    """Aborts what still runs."""
    for stream in streams:
        await stream.aclose()


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, StreamEvent]]:
    """Events of all streams as they come, each with the number of its stream.

    Raises:
        GenerationError: If one of them fails.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting = {asyncio.ensure_future(anext(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = waiting.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[at]))] = at
                yield at, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
