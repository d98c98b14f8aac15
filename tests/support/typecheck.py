"""The run-time checker of annotations that pytest installs into the packages.

It is beartype, which jaxtyping applies to functions one by one. Left out are:

- constructors, which check their own arguments: tests must see the message that a user sees;
- `typing.Self`, which beartype resolves only when it decorates the class;
- protocols that `isinstance` cannot test; these and `Self` remain with the static checker.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# An int is accepted where a float is asked for, as static checkers do.
_CHECKER = beartype(conf=BeartypeConf(is_pep484_tower=True))


def _is_static_only(hint: Any, module: str) -> bool:
    if isinstance(hint, str):
        hint = getattr(sys.modules.get(module), hint, hint)
    is_protocol = getattr(hint, "_is_protocol", False)
    is_testable = getattr(hint, "_is_runtime_protocol", False)
    return hint is typing.Self or hint == "Self" or (is_protocol and not is_testable)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its annotations checked when it is called."""
    if function.__name__ == "__init__":
        return function
    annotations = getattr(function, "__annotations__", {})
    for name, hint in list(annotations.items()):
        if _is_static_only(hint, function.__module__):
            del annotations[name]
    return _CHECKER(function)
