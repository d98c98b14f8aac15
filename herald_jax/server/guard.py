"""The door: every request passes it before any route sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from herald_jax.server.asgi import ClientGone, Receive, Reply, Scope, Send, headers_of
from herald_jax.server.errors import ApiError
from herald_jax.server.limits import is_authorized, is_local_host_header
from herald_jax.server.service import Service

OPEN_PATHS = ("/health",)
"""What may be asked for without the key."""

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Refuses requests without the key.

    A server without a key on the loopback device also refuses requests for other host names, by
    which a page of another site could reach it through a browser on this machine.
    """

    def __init__(self, app: Application, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in or answers it."""
        error = self._check(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._service.answers["guard", error.status] += 1
        try:
            reply = Reply(send, self._service.limits.write_seconds)
            await reply.json(error.status, error.body(), error.headers)
        except ClientGone:
            pass

    def _check(self, scope: Scope) -> ApiError | None:
        if scope["path"] in OPEN_PATHS:
            return None
        headers = headers_of(scope)
        key = self._service.api_key
        if key is not None:
            if is_authorized(headers, key):
                return None
            return ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )
        if self._service.is_local and not is_local_host_header(headers.get("host", "localhost")):
            return ApiError(
                403,
                "the Host header does not name this machine as localhost, and the server has no "
                "API key. Ask for http://localhost, or start the server with --api-key-file.",
                code="host_not_allowed",
            )
        return None
