"""Runs the server until a signal stops it.

The first SIGTERM or SIGINT begins the drain: new requests get a 503, those that run have
`drain_seconds` to finish and are then aborted with the text that they have. A second signal
aborts at once, and a third one does not even wait for the answers to be taken.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from types import FrameType
from typing import Any

from herald_jax.server.app import create_app
from herald_jax.server.service import Service

ANSWER_SECONDS = 10
"""Time that clients have to take their answers once the engine has stopped."""

_log = logging.getLogger(__name__)


def make_server(service: Service, *, host: str, port: int, access_log: bool = False) -> Any:
    """A `uvicorn.Server` that drains; its `signals` holds the signals that it got.

    Raises:
        ConfigError: If a package of the extra `serve` is missing.
    """
    app = create_app(service)
    import uvicorn

    class Server(uvicorn.Server):
        """A server that answers while it drains, and returns where uvicorn raises signals."""

        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            self.signals: list[int] = []
            self._loop: asyncio.AbstractEventLoop | None = None
            self._draining: asyncio.Task[None] | None = None

        async def serve(self, sockets: Any = None) -> None:
            self._loop = asyncio.get_running_loop()
            try:
                await super().serve(sockets)
            finally:
                await service.llm.shutdown(0.0)

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                name, number = self.servers[0].sockets[0].getsockname()[:2]
                shown = f"[{name}]" if ":" in name else name
                print(
                    f"herald serve: {service.model_name} at http://{shown}:{number}/v1",
                    file=sys.stderr,
                    flush=True,
                )

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.signals.append(sig)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.begin_drain)

        def begin_drain(self) -> None:
            """What a signal does; once more aborts, and a third time ends the server."""
            if self._draining is None:
                self._draining = asyncio.ensure_future(self._drain())
            elif len(self.signals) < 3:
                service.llm.begin_shutdown(0.0)
            else:
                self.should_exit = self.force_exit = True

        async def _drain(self) -> None:
            _log.warning("draining for up to %g seconds", service.limits.drain_seconds)
            try:
                await service.llm.shutdown(service.limits.drain_seconds)
            finally:
                self.should_exit = True

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=access_log,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=ANSWER_SECONDS,
    )
    return Server(config)


def serve(service: Service, *, host: str, port: int, access_log: bool = False) -> int:
    """Serves until a signal; the exit code: 0 after SIGTERM, 130 after SIGINT."""
    server = make_server(service, host=host, port=port, access_log=access_log)
    server.run()
    if not server.started:
        return 1
    return 130 if server.signals[:1] == [signal.SIGINT] else 0
