"""`--cache placement=host budget=0.1 ...`: the fields of `CacheConfig` on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from herald_jax._checks import ConfigError

if TYPE_CHECKING:
    from herald_jax.cache_config import CacheConfig


def parse_cache(fields: Sequence[str]) -> CacheConfig:
    """The cache that some `field=value` describe; the defaults without any.

    Raises:
        ConfigError: If a field is unknown, named twice, has no value or a value that is not
            allowed.
    """
    from herald_jax.cache_config import CacheConfig  # imports JAX, which `--help` need not wait for

    known = [field.name for field in dataclasses.fields(CacheConfig)]
    given: dict[str, Any] = {}
    for item in fields:
        name, equals, text = item.partition("=")
        name = name.replace("-", "_")
        if name not in known or not equals:
            raise ConfigError(
                f"--cache {item!r}: expected FIELD=VALUE with a field of {', '.join(known)}"
            )
        if name in given:
            raise ConfigError(f"--cache names {name} twice")
        given[name] = _value(text)
    return CacheConfig(**given)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


class CacheAction(argparse.Action):
    """Stores a `CacheConfig`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Parses the fields; ends with a message if they are wrong."""
        try:
            setattr(namespace, self.dest, parse_cache(values))
        except ConfigError as error:
            parser.error(str(error))
