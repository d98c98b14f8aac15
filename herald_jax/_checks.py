"""Argument checks whose messages name the field, the value, what is allowed and what to do."""

from __future__ import annotations

import math
from collections.abc import Collection


class ConfigError(ValueError):
    """Raised when an argument, option or config value cannot be used."""


def require(condition: bool, field: str, value: object, allowed: str, fix: str = "") -> None:
    """Raises `ConfigError` unless `condition` holds; `fix` says what the caller can do."""
    if not condition:
        hint = f" {fix}" if fix else ""
        raise ConfigError(f"{field}={value!r} is not allowed: it must be {allowed}.{hint}")


def require_int(field: str, value: object, minimum: int, fix: str = "") -> None:
    """Checks for an integer (bools refused) of at least `minimum`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int and value >= minimum, field, value, f"an integer >= {minimum}", fix)  # type: ignore[operator]


def require_float(field: str, value: object, low: float, high: float, allowed: str) -> None:
    """Checks for a finite real number in [low, high] (bools refused)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    in_range = is_number and math.isfinite(value) and low <= value <= high  # type: ignore[operator]
    require(bool(in_range), field, value, allowed)


def require_one_of(field: str, value: object, choices: Collection[str]) -> None:
    """Checks for one of a few names."""
    require(value in choices, field, value, "one of " + ", ".join(sorted(choices)))
