"""Where numba keeps compiled functions between runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import numba

from herald_jax._checks import ConfigError
from herald_jax.settings import compile_cache_wanted, private_folder

_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """A private folder for compiled functions, or `None` if they are not to be kept.

    numba's own choice is the folder of the source, which may be read-only, or shared with
    others who could then put code there.
    """
    if not compile_cache_wanted():
        return None
    try:
        return private_folder("numba")
    except ConfigError as error:
        _log.warning("Compiled functions are not kept between runs. %s", error)
        return None


@contextlib.contextmanager
def in_folder(folder: Path | None) -> Iterator[None]:
    """Functions that are decorated meanwhile are kept there; others keep numba's setting."""
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(folder or before)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
