"""What a server lets in: limits, the API key, and names of hosts."""

from __future__ import annotations

import dataclasses
import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from herald_jax._checks import ConfigError, require, require_float, require_int
from herald_jax.settings import API_KEY_VARIABLE, server_api_key

MIN_KEY_LENGTH = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """How much clients may ask for.

    Attributes:
        max_body_bytes: Largest body.
        max_concurrent: Requests that are answered at the same time; further ones get a 429.
        max_samples: Most samples of one request, over all its prompts.
        max_prompt_tokens: Longest prompt; `None` leaves it to `max_model_len`.
        default_max_tokens: Tokens to generate where a request does not say, as far as the
            context has room.
        min_priority: Best priority that a client may ask for; lower goes first.
        max_priority: Worst one.
        read_seconds: Time in which a body must have come.
        write_seconds: Time in which a client must take a piece of its answer.
        drain_seconds: Time that running requests get when the server is told to stop.
    """

    max_body_bytes: int = 1 << 20
    max_concurrent: int = 256
    max_samples: int = 64
    max_prompt_tokens: int | None = None
    default_max_tokens: int = 256
    min_priority: int = 0
    max_priority: int = 100
    read_seconds: float = 30.0
    write_seconds: float = 60.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Checks every field."""
        for field in ("max_body_bytes", "max_concurrent", "max_samples", "default_max_tokens"):
            require_int(field, getattr(self, field), 1)
        if self.max_prompt_tokens is not None:
            require_int("max_prompt_tokens", self.max_prompt_tokens, 1)
        for field in ("read_seconds", "write_seconds"):
            require_float(field, getattr(self, field), 1e-3, 1e6, "seconds, more than 0")
        require_float("drain_seconds", self.drain_seconds, 0.0, 1e6, "seconds, at least 0")
        for field in ("min_priority", "max_priority"):
            require_int(field, getattr(self, field), -1_000_000)
        require(
            self.min_priority <= 0 <= self.max_priority,
            "min_priority, max_priority",
            (self.min_priority, self.max_priority),
            "at most 0 and at least 0, as 0 is what requests get that ask for nothing",
        )


def read_api_key(path: str | Path | None) -> str | None:
    """The key in a file, else the one of the environment, else `None`; it is never logged.

    Raises:
        ConfigError: If the file cannot be read, or the key is too short or not plain ASCII.
    """
    if path is None:
        key, source = server_api_key(), API_KEY_VARIABLE
        if key is None:
            return None
    else:
        source = f"api_key_file={str(path)!r}"
        try:
            key = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}") from error
    key = key.strip()
    is_plain = key.isascii() and key.isprintable() and " " not in key
    if len(key) < MIN_KEY_LENGTH or not is_plain:
        raise ConfigError(
            f"the key in {source} is not allowed: it must be one word of at least "
            f"{MIN_KEY_LENGTH} ASCII characters. `openssl rand -hex 32` makes one."
        )
    return key


def is_authorized(headers: Mapping[str, str], key: str) -> bool:
    """True if a request carries the key; takes the same time whatever it carries."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    is_same = hmac.compare_digest(given.strip().encode(), key.encode())
    return is_same and scheme.lower() == "bearer"


def is_loopback(host: str) -> bool:
    """True for an address or name that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_host_header(value: str) -> bool:
    """True if a `Host` header names this machine as such.

    A page of another site that had its own name resolve to 127.0.0.1 would send that name.
    """
    name = value.rsplit(":", 1)[0] if value.rsplit(":", 1)[-1].isdigit() else value
    return is_loopback(name.strip("[]").lower())
