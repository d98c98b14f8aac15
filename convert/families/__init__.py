"""The supported families, one file each.

A module of this package that defines `FAMILY` is a family; adding one touches no other file.
"""

from __future__ import annotations

import importlib
import pkgutil

from convert.families.base import Family, KeyRule

__all__ = ["Family", "KeyRule", "detect", "families"]


def families() -> dict[str, Family]:
    """All families by name."""
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{info.name}"), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return found


def detect(architectures: list[str], model_type: str | None) -> Family | None:
    """The family of a config: by architecture, and by model type only if that names none.

    A bare `llama` or `qwen3` type says nothing about how a model decodes, so no family
    lists those.
    """
    for family in families().values():
        if any(name in family.architectures for name in architectures):
            return family
    if architectures:
        return None
    known = (family for family in families().values() if model_type in family.model_types)
    return next(known, None)
