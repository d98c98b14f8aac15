"""The application: which path leads where."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from herald_jax._checks import ConfigError
from herald_jax.server.errors import ApiError
from herald_jax.server.generate import GenerateRoute
from herald_jax.server.guard import Guard
from herald_jax.server.service import Service

if TYPE_CHECKING:
    import fastapi


def require_extra() -> None:
    """Checks that the packages of the extra `serve` are there.

    Raises:
        ConfigError: If one is missing.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the server needs the package {error.name!r}: pip install 'herald-jax[serve]'"
        ) from error


def create_app(service: Service) -> fastapi.FastAPI:
    """The ASGI application of a service.

    Raises:
        ConfigError: If a package of the extra `serve` is missing.
    """
    require_extra()
    import fastapi
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    from herald_jax.server.metrics import MetricsRoute

    app = fastapi.FastAPI(title="herald", openapi_url=None, docs_url=None, redoc_url=None)
    metrics = MetricsRoute(service)
    since = int(time.time())
    model = {
        "id": service.model_name,
        "object": "model",
        "created": since,
        "owned_by": "herald",
        "max_model_len": service.llm.max_model_len,
    }

    async def health(_: Any) -> Response:
        state = service.llm.state
        is_well = state == "running"
        body = {"status": "ok" if is_well else state}
        return JSONResponse(body, status_code=200 if is_well else 503)

    async def read_metrics(_: Any) -> Response:
        text, kind = metrics.text()
        return Response(text, media_type=kind)

    async def list_models(_: Any) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def get_model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(model)

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        api = ApiError(error.status_code, str(error.detail))
        return JSONResponse(api.body(), status_code=api.status, headers=dict(error.headers or {}))

    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", read_metrics, methods=["GET"])
    app.add_route("/v1/models", list_models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", get_model, methods=["GET"])
    for path, is_chat in (("/v1/completions", False), ("/v1/chat/completions", True)):
        route: Any = GenerateRoute(service, is_chat=is_chat)
        app.add_route(path, route, methods=["POST"])
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_middleware(Guard, service=service)
    return app
