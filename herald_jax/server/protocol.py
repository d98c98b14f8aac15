"""Bodies of requests: OpenAI's fields and ours, all of them checked and none ignored.

`user` is taken and changes nothing, as with OpenAI. Fields that this server cannot honour are
accepted with the value that asks for nothing, such as `logit_bias={}` or `tools=[]`, and
refused with any other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from herald_jax.prompts import Prompt
from herald_jax.sampling import SamplingParams
from herald_jax.server.errors import ApiError, refuse
from herald_jax.server.limits import ServerLimits
from herald_jax.tokenizer import Message

SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
    "strategy", "threshold", "entropy_bound", "factor", "denoising_steps", "confidence",
)  # fmt: skip
"""Fields that `SamplingParams` has under the same name, besides `max_tokens`."""

OWN_FIELDS = ("model", "stream", "stream_options", "priority", "return_token_ids", "user")


def _is_neutral(*values: Any) -> Callable[[Any], bool]:
    """True for `null` and for these values, whose types count: `false` is not 0."""
    return lambda value: (
        value is None
        or any(type(value) is type(neutral) and value == neutral for neutral in values)
    )


UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "logit_bias": (_is_neutral({}), "null or {}"),
    "presence_penalty": (_is_neutral(0, 0.0), "0"),
    "frequency_penalty": (_is_neutral(0, 0.0), "0"),
    "logprobs": (_is_neutral(False), "null or false"),
    "top_logprobs": (_is_neutral(), "null"),
}
UNSUPPORTED_COMPLETION = {
    "echo": (_is_neutral(False), "false"),
    "suffix": (_is_neutral(), "null"),
}
UNSUPPORTED_CHAT = {
    "tools": (_is_neutral([]), "null or []"),
    "tool_choice": (_is_neutral("none"), "null or 'none'"),
    "parallel_tool_calls": (_is_neutral(), "null"),
    "functions": (_is_neutral([]), "null or []"),
    "function_call": (_is_neutral("none"), "null or 'none'"),
    "response_format": (_is_neutral({"type": "text"}), "null or {'type': 'text'}"),
    "modalities": (_is_neutral(["text"]), "null or ['text']"),
    "store": (_is_neutral(False), "null or false"),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages, and what the model's template knows them as."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A checked body.

    Attributes:
        is_chat: True for a conversation, false for prompts.
        model: The model that was asked for.
        prompts: The prompts; empty for a conversation.
        messages: The conversation.
        max_tokens: Most tokens to generate, `None` where the body does not say.
        sampling: The other options of `SamplingParams` that the body has.
        stream: True if the answer comes in pieces.
        include_usage: True if the last piece has the usage.
        priority: Lower goes first.
        return_token_ids: True if choices have the ids of their tokens.
    """

    is_chat: bool
    model: str
    prompts: list[Prompt]
    messages: list[Message]
    max_tokens: int | None
    sampling: dict[str, Any]
    stream: bool
    include_usage: bool
    priority: int
    return_token_ids: bool

    @property
    def samples(self) -> int:
        """Samples of each prompt."""
        return self.sampling.get("n", 1)


def parse_body(body: bytes, *, is_chat: bool, limits: ServerLimits) -> ApiRequest:
    """The request in a body.

    Raises:
        ApiError: If it is not JSON or a field cannot be honoured.
        ConfigError: If `SamplingParams` refuses an option.
    """
    fields = _read_json(body)
    own = {"messages", "max_completion_tokens"} if is_chat else {"prompt", "best_of"}
    unsupported = UNSUPPORTED | (UNSUPPORTED_CHAT if is_chat else UNSUPPORTED_COMPLETION)
    known = {*own, *OWN_FIELDS, *SAMPLING_FIELDS, "max_tokens"}
    for name, value in fields.items():
        if name in unsupported:
            is_neutral, allowed = unsupported[name]
            if not is_neutral(value):
                raise refuse(name, value, allowed, "This server does not support it.")
        elif name not in known:
            fix = "Fields with an effect here: " + ", ".join(sorted(known)) + "."
            raise refuse(name, value, "left out, as this server does not know it", fix)
    # `null` says what leaving a field out says.
    given = {name: value for name, value in fields.items() if value is not None}
    sampling = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    max_tokens = _max_tokens(given)
    SamplingParams(max_tokens=1 if max_tokens is None else max_tokens, **sampling)
    stream = _flag(given, "stream")
    samples = sampling.get("n", 1)
    if given.get("best_of", samples) != samples or isinstance(given.get("best_of"), bool):
        raise refuse("best_of", given["best_of"], f"left out or n={samples}")
    if "user" in given and not isinstance(given["user"], str):
        raise refuse("user", given["user"], "a string")
    prompts = [] if is_chat else _prompts(given.get("prompt"), fields)
    count = samples * max(len(prompts), 1)
    if count > limits.max_samples:
        name, value = ("n", samples) if samples > limits.max_samples else ("prompt", len(prompts))
        raise refuse(
            name, value, f"so that prompts times n is at most {limits.max_samples}",
            "Send several requests.",
        )  # fmt: skip
    return ApiRequest(
        is_chat=is_chat,
        model=_text(given, "model"),
        prompts=prompts,
        messages=_messages(given.get("messages")) if is_chat else [],
        max_tokens=max_tokens,
        sampling=sampling,
        stream=stream,
        include_usage=_include_usage(given, stream),
        priority=_priority(given.get("priority", 0), limits),
        return_token_ids=_flag(given, "return_token_ids"),
    )


def _read_json(body: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("an object has a name twice")
        return fields

    try:
        fields = json.loads(body, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object.", code="invalid_json")
    return fields


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise refuse(name, value, "a string")
    return value


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    """Under either of its names; both may be there if they agree."""
    limit, old = given.get("max_completion_tokens"), given.get("max_tokens")
    if limit is not None and old is not None and limit != old:
        raise refuse("max_tokens", old, f"left out or max_completion_tokens={limit!r}")
    return old if limit is None else limit


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise refuse("stream_options", options, "left out without stream=true")
    if not isinstance(options, dict) or not set(options) <= {"include_usage"}:
        raise refuse("stream_options", options, "{'include_usage': true or false}")
    return _flag({k: v for k, v in options.items() if v is not None}, "include_usage")


def _priority(value: Any, limits: ServerLimits) -> int:
    low, high = limits.min_priority, limits.max_priority
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise refuse("priority", value, f"an integer in {low}..{high}", "Lower goes first.")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def _prompts(value: Any, fields: Mapping[str, Any]) -> list[Prompt]:
    """A text, a list of texts, a list of ids or a list of lists of ids."""
    if isinstance(value, str) or (_is_ids(value) and value):
        return [value]
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(item, str) for item in value):
        return value
    if is_list and all(_is_ids(item) for item in value):
        return value
    raise refuse(
        "prompt", fields.get("prompt"), "a text, a list of texts, a list of ids or a list of those"
    )


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise refuse("messages", value, "a list of messages that is not empty")
    return [_message(f"messages[{at}]", message) for at, message in enumerate(value)]


def _message(field: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise refuse(field, message, "an object with role and content")
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            raise refuse(f"{field}.{name}", value, "left out; a message has role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{field}.role", role, "one of " + ", ".join(ROLES))
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{field}.content[{at}]", part) for at, part in enumerate(content))
    if not isinstance(content, str):
        raise refuse(f"{field}.content", content, "a text or a list of text parts")
    return {"role": ROLES[role], "content": content}


def _part(field: str, part: Any) -> str:
    is_text = isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text"
    if not is_text or not isinstance(part["text"], str):
        raise refuse(field, part, "{'type': 'text', 'text': ...}", "The model reads only text.")
    return part["text"]
