"""The little of ASGI that the routes need: bodies in, JSON or events out, and who has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any

from herald_jax.server.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DISCARDED_BODIES = 8
"""A body that is too large is read on to this many times the limit, so that a client that sends
first and listens then hears why it was refused."""


class ClientGone(Exception):
    """Raised where the client has closed the connection, or does not take its answer."""


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request, names in lower case; of several the last counts."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(scope: Scope, receive: Receive, *, limit: int, seconds: float) -> bytes:
    """The body of a request.

    Raises:
        ApiError: If it is too large, too slow or not JSON by its type.
        ClientGone: If it ends within.
    """
    headers = headers_of(scope)
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    # A page of another site could send other types to this machine without asking first.
    if kind != "application/json":
        raise ApiError(415, f"Content-Type={kind!r} is not allowed: it must be application/json.")
    size = headers.get("content-length", "")
    announced = int(size) if size.isdigit() else 0
    body, total = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            while announced <= DISCARDED_BODIES * limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                total += len(piece)
                if total <= limit:
                    body += piece
                elif total > DISCARDED_BODIES * limit:
                    break
                if not message.get("more_body", False):
                    break
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {seconds:g} seconds.") from error
    if max(total, announced) > limit:
        raise ApiError(
            413,
            f"the body has {max(total, announced)} bytes or more; at most {limit} are allowed.",
            code="body_too_large",
        )
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, but cancels it when the client goes; the body must have been read.

    Raises:
        ClientGone: If the client went first; the work has ended then.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = task.done()
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not is_done:
        raise ClientGone
    task.result()


class Reply:
    """Sends one answer and remembers how far it is.

    Args:
        send: Where to.
        seconds: Time in which the client must take each piece.

    Attributes:
        status: The status that was sent, `None` before.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self.status: int | None = None

    async def body(
        self,
        status: int,
        body: bytes,
        content_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends an answer as a whole."""
        await self._start(
            status, {"content-length": str(len(body)), **(headers or {})}, content_type
        )
        await self._piece({"type": "http.response.body", "body": body})

    async def json(
        self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends an object."""
        await self.body(status, _dump(body).encode(), "application/json", headers)

    async def event(self, body: Mapping[str, Any]) -> None:
        """Sends an object as the next server-sent event."""
        await self._event(_dump(body))

    async def end_events(self) -> None:
        """Sends the mark at the end of all events."""
        await self._event("[DONE]")
        await self._piece({"type": "http.response.body", "body": b"", "more_body": False})

    async def _event(self, data: str) -> None:
        if self.status is None:
            await self._start(200, {"cache-control": "no-cache"}, "text/event-stream")
        body = f"data: {data}\n\n".encode()
        await self._piece({"type": "http.response.body", "body": body, "more_body": True})

    async def _start(self, status: int, headers: Mapping[str, str], content_type: str) -> None:
        self.status = status
        pairs = [(b"content-type", content_type.encode())]
        pairs += [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._piece({"type": "http.response.start", "status": status, "headers": pairs})

    async def _piece(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


def _dump(body: Mapping[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
