"""What an asyncio task holds of a running request: its events, as they come."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from typing import Self

from herald_jax.engine.request import Request
from herald_jax.outputs import RequestOutput, StreamEvent

MAX_BUFFERED = 64
"""Events that wait for a slow reader; further ones are joined to the last of their sample."""


class RequestStream:
    """The events of one request, for one task of the event loop that submitted it.

    Iterate over it, and close it (`async with`, or `aclose`) if you stop before its end; that
    aborts the request. What a slow reader leaves unread is joined, so a stream never holds much
    more than the request's final text and ids.

    Args:
        request_id: The request's name.
        request: What was asked for.
        loop: The loop whose task reads.
        abort: Called to end the request.

    Attributes:
        output: The result, once the request has ended.
    """

    def __init__(
        self,
        request_id: str,
        request: Request,
        loop: asyncio.AbstractEventLoop,
        abort: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.loop = loop
        self.output: RequestOutput | None = None
        self._abort = abort
        self._events: collections.deque[StreamEvent] = collections.deque()
        self._error: Exception | None = None
        self._ended = False
        self._wake = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """True if nothing of the request runs any more; events may still be unread."""
        return self._ended

    def put(self, event: StreamEvent) -> None:
        """Takes the next event; only on the loop's thread."""
        if self._ended:
            return
        if event.output is not None:
            self.output, self._ended = event.output, True
        if len(self._events) < MAX_BUFFERED or not self._join(event):
            self._events.append(event)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, behind the events that it has."""
        if not self._ended:
            self._error, self._ended = error, True
            self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._events:
            if self._ended:
                error, self._error = self._error, None
                raise error or StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    async def aclose(self) -> None:
        """Aborts the request if it has not ended; nothing happens the second time."""
        self._events.clear()
        if not self._ended:
            self._ended = True
            self._wake.set()
            self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _join(self, event: StreamEvent) -> bool:
        """Adds an event to the last unread one of its sample, if there is one."""
        for at in range(len(self._events) - 1, -1, -1):
            last = self._events[at]
            if last.index == event.index:
                # The result stays the stream's very last word.
                if event.output is not None and at != len(self._events) - 1:
                    return False
                self._events[at] = dataclasses.replace(
                    event,
                    text=last.text + event.text,
                    token_ids=last.token_ids + event.token_ids,
                    steps=last.steps + event.steps,
                )
                return True
        return False
