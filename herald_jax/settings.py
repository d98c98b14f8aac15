"""The one place that reads environment variables, and where caches on disk live.

| Variable | Meaning |
|---|---|
| `HERALD_JAX_CACHE_DIR` | Folder of all caches; `$XDG_CACHE_HOME/herald_jax` if unset |
| `HERALD_JAX_COMPILE_CACHE` | `0` switches the cache of compiled programs off |
| `HERALD_JAX_API_KEY` | Key that clients of `herald serve` must send; none if unset |
| `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` | XLA's own cap of its pinned host memory; 64 if unset |

Cached programs are executed as they are, so the folders are made private (mode 0700) and one
that somebody else could write to is not used.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from herald_jax._checks import ConfigError, require, require_one_of

CACHE_DIR_VARIABLE = "HERALD_JAX_CACHE_DIR"
COMPILE_CACHE_VARIABLE = "HERALD_JAX_COMPILE_CACHE"
API_KEY_VARIABLE = "HERALD_JAX_API_KEY"
PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The folder of all caches; it need not exist yet."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "herald_jax"


def private_folder(name: str) -> Path:
    """The folder `name` in the cache directory, made on first use, closed to other users.

    Raises:
        ConfigError: If the folder cannot be made, or others own it or may write to it.
    """
    folder = cache_dir() / name
    fix = f"Set {CACHE_DIR_VARIABLE} to a folder of your own."
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"The cache folder {folder} cannot be used: {error}. {fix}") from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"The cache folder {folder} belongs to another user or others may write to it "
            f"(mode {stat.S_IMODE(found.st_mode):04o}), so what it holds cannot be trusted. {fix}"
        )
    return folder


def compile_cache_wanted() -> bool:
    """True unless the environment switches the cache of compiled programs off."""
    value = os.environ.get(COMPILE_CACHE_VARIABLE, "1")
    require_one_of(COMPILE_CACHE_VARIABLE, value, ("0", "1"))
    return value == "1"


def server_api_key() -> str | None:
    """The key that the environment gives to the server, or `None`."""
    return os.environ.get(API_KEY_VARIABLE) or None


def pinned_limit_bytes() -> int:
    """Bytes of pinned host memory that XLA allocates at most for one GPU.

    Raises:
        ConfigError: If the variable is no number of GiB; XLA itself would go on with 0.
    """
    value = os.environ.get(PINNED_LIMIT_VARIABLE, "64")
    is_number = value.isascii() and value.isdigit()
    require(is_number, PINNED_LIMIT_VARIABLE, value, "a whole number of GiB")
    return int(value) << 30


def enable_compile_cache() -> Path | None:
    """Lets JAX keep compiled programs between runs; the folder, or `None` if there is none.

    A cache directory that JAX has been given already is left as it is. Without a usable folder
    the programs are compiled anew, and a log record says why.
    """
    import jax

    if not compile_cache_wanted():
        return None
    given = getattr(jax.config, "jax_compilation_cache_dir", None)
    if given:
        return Path(given)
    try:
        folder = private_folder("compiled")
    except ConfigError as error:
        _log.warning("Compiled programs are not kept between runs. %s", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
