"""`--cache placement=host budget=0.1 ...`: the fields of `CacheConfig` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from herald_jax._checks import ConfigError
from herald_jax.commands.fields import parse_fields

if TYPE_CHECKING:
    from herald_jax.cache_config import CacheConfig


def parse_cache(fields: Sequence[str]) -> CacheConfig:
    """The cache that some `field=value` describe; the defaults without any.

    Raises:
        ConfigError: If a field is unknown, named twice, has no value or a value that is not
            allowed.
    """
    from herald_jax.cache_config import CacheConfig  # imports JAX, which `--help` need not wait for

    return CacheConfig(**parse_fields("--cache", fields, CacheConfig))


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
