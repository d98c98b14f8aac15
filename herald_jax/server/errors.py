"""Errors as OpenAI's API shapes them."""

from __future__ import annotations

import re
from typing import Any

from herald_jax._checks import ConfigError
from herald_jax.engine.async_llm import EngineClosed, EngineDead
from herald_jax.engine.pages import OutOfPages
from herald_jax.engine.waiting import QueueFull
from herald_jax.outputs import GenerationError, RequestOutput

MAX_MESSAGE = 1000
"""Longest message; one may quote what the client sent."""

RETRY_SECONDS = 1
"""What `Retry-After` says where nothing better is known."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: What is wrong and what to do.
        param: The field of the body that is wrong, if one is.
        code: A name for programs.
        retry_after: Seconds after which to try again.
        outputs: What there is of the results.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        outputs: list[RequestOutput] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + "..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.outputs = outputs or []

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(round(self.retry_after), 1))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def body(self) -> dict[str, Any]:
        """The error object; `partial` holds the texts of a request that failed on its way."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        error: dict[str, Any] = {
            "message": self.message,
            "type": TYPES.get(self.status, default),
            "param": self.param,
            "code": self.code,
        }
        if self.outputs:
            samples = [sample for output in self.outputs for sample in output.outputs]
            error["partial"] = [
                {"index": at, "text": sample.text, "finish_reason": sample.finish_reason}
                for at, sample in enumerate(samples)
            ]
        return {"error": error}


def refuse(field: str, value: object, allowed: str, fix: str = "") -> ApiError:
    """The error for a field of the body."""
    shown = repr(value)
    if len(shown) > MAX_MESSAGE // 4:
        shown = shown[: MAX_MESSAGE // 4] + "..."
    hint = f" {fix}" if fix else ""
    message = f"{field}={shown} is not allowed: it must be {allowed}.{hint}"
    return ApiError(400, message, param=field, code="invalid_value")


def as_api_error(error: Exception) -> ApiError:
    """The answer to an error of the library."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        field = re.match(r"[A-Za-z_]+(?=[=\[])", str(error))
        name = field.group() if field else None
        return ApiError(400, str(error), param=name, code="invalid_value")
    if isinstance(error, OutOfPages):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_after=RETRY_SECONDS)
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), code="shutting_down", retry_after=RETRY_SECONDS)
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, GenerationError):
        return ApiError(
            500, f"generation failed: {error}", code="generation_failed", outputs=error.outputs
        )
    # What else it may be is for the log, not for the client.
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")
