"""The two routes that generate, as ASGI applications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from herald_jax.engine.stream import RequestStream
from herald_jax.outputs import GenerationError, RequestOutput
from herald_jax.server.asgi import (
    ClientGone,
    Receive,
    Reply,
    Scope,
    Send,
    read_body,
    while_connected,
)
from herald_jax.server.errors import as_api_error
from herald_jax.server.protocol import ApiRequest, parse_body
from herald_jax.server.responses import Answer
from herald_jax.server.service import Service, close_all, merged

CLIENT_GONE = 499
"""Status under which answers that nobody waited for are counted."""

_log = logging.getLogger(__name__)


class GenerateRoute:
    """`/v1/completions` or `/v1/chat/completions`.

    Args:
        service: What all routes share.
        is_chat: True for conversations.
    """

    def __init__(self, service: Service, *, is_chat: bool) -> None:
        self._service = service
        self._is_chat = is_chat
        self._name = "chat" if is_chat else "completions"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        service = self._service
        reply = Reply(send, service.limits.write_seconds)
        status = CLIENT_GONE
        try:
            with service.slot():
                body = await read_body(
                    scope,
                    receive,
                    limit=service.limits.max_body_bytes,
                    seconds=service.limits.read_seconds,
                )
                request = parse_body(body, is_chat=self._is_chat, limits=service.limits)
                service.check_model(request.model)
                await while_connected(receive, self._answer(request, reply))
            status = reply.status or CLIENT_GONE
        except ClientGone:
            pass
        except Exception as error:
            status = await self._refuse(error, reply)
        finally:
            service.answers[self._name, status] += 1

    async def _answer(self, request: ApiRequest, reply: Reply) -> None:
        answer = Answer.begin(request)
        streams = await self._service.submit(request, answer.name)
        try:
            if request.stream:
                await _send_events(answer, streams, reply)
            else:
                await reply.json(200, answer.whole(await _outputs(streams)))
        finally:
            await close_all(streams)

    async def _refuse(self, error: Exception, reply: Reply) -> int:
        """Sends an error, as an event if the answer has begun; the status that it counts as."""
        api = as_api_error(error)
        if api.status >= 500 and api.code not in ("shutting_down", "engine_dead"):
            _log.error("a request failed", exc_info=error)
        self._service.refusals[api.code or str(api.status)] += 1
        try:
            if reply.status is None:
                await reply.json(api.status, api.body(), api.headers)
            else:
                await reply.event(api.body())
                await reply.end_events()
        except ClientGone:
            return CLIENT_GONE
        return api.status


async def _outputs(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The results of all streams.

    Raises:
        GenerationError: If one failed; it has the results of all.
    """
    ends = await asyncio.gather(*map(_output, streams))
    errors = [end for end in ends if isinstance(end, GenerationError)]
    if errors:
        outputs = [
            output
            for end in ends
            for output in (end.outputs if isinstance(end, GenerationError) else [end])
        ]
        raise GenerationError(str(errors[0]), outputs) from errors[0]
    return [end for end in ends if isinstance(end, RequestOutput)]


async def _output(stream: RequestStream) -> RequestOutput | GenerationError:
    try:
        async for event in stream:
            if event.output is not None:
                return event.output
    except GenerationError as error:
        return error
    raise RuntimeError("a request ended without its output")


async def _send_events(answer: Answer, streams: Sequence[RequestStream], reply: Reply) -> None:
    for piece in answer.opening(len(streams)):
        await reply.event(piece)
    outputs: dict[int, RequestOutput] = {}
    async for at, event in merged(streams):
        piece = answer.piece(at, event)
        if piece is not None:
            await reply.event(piece)
        if event.output is not None:
            outputs[at] = event.output
    for piece in answer.closing([outputs[at] for at in sorted(outputs)]):
        await reply.event(piece)
    await reply.end_events()
