"""`FIELD=VALUE ...` on the command line, for the fields of a dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from herald_jax._checks import ConfigError


def parse_fields(option: str, fields: Sequence[str], kind: type[Any]) -> dict[str, Any]:
    """The values that some `field=value` give to fields of a dataclass.

    Raises:
        ConfigError: If a field is unknown, named twice or has no value.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    given: dict[str, Any] = {}
    for item in fields:
        name, equals, text = item.partition("=")
        name = name.replace("-", "_")
        if name not in known or not equals:
            raise ConfigError(
                f"{option} {item!r}: expected FIELD=VALUE with a field of {', '.join(known)}"
            )
        if name in given:
            raise ConfigError(f"{option} names {name} twice")
        given[name] = _value(text)
    return given


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
