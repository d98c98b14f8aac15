"""The files of a checkpoint folder: when it is complete, and when it may be replaced."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

INDEX_FORMAT = 1
"""Version of `params/index.json`."""

_DIGEST_BYTES = 1 << 18

INCOMPLETE, RETIRED = ".incomplete-", ".replaced-"
"""What the names of working folders beside a target have after its own name."""


class CheckpointError(ValueError):
    """Raised when a checkpoint folder cannot be written or read as asked."""


def leftovers(folder: str | Path) -> list[Path]:
    """Folders that interrupted writes of `folder` left beside it.

    An `.incomplete-` one may be deleted. A `.replaced-` one is a whole older checkpoint: the
    write was ended between the two renames of a forced replacement.
    """
    folder = Path(folder).resolve()
    if not folder.parent.is_dir():
        return []
    names = (f"{folder.name}{INCOMPLETE}", f"{folder.name}{RETIRED}")
    return sorted(path for path in folder.parent.iterdir() if path.name.startswith(names))


@contextlib.contextmanager
def naming(folder: str | Path) -> Iterator[None]:
    """Turns what the file system or hostile JSON raises into an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be used: {error}.") from error
    except RecursionError as error:
        raise CheckpointError(
            f"{folder} cannot be read: config.json or params/index.json is nested too deeply. "
            "Convert again."
        ) from error


def check_target(folder: str | Path, force: bool) -> None:
    """Raises `CheckpointError` unless a checkpoint may be written at `folder`.

    An empty folder is free. With `force` a complete checkpoint may be replaced; any other
    content is never removed, so a mistyped target cannot cost files.
    """
    with naming(folder):
        _check_content(Path(folder), force)
        parents = Path(folder).absolute().parents
        nearest = next(path for path in parents if path.exists())
    if not nearest.is_dir():
        raise CheckpointError(
            f"{folder} cannot be made: {nearest} is not a folder. Choose another target."
        )


def _check_content(folder: Path, force: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "params" / "index.json").is_file():
        raise CheckpointError(
            f"{folder} exists and is no herald_jax checkpoint, so it is not replaced, not even "
            "with force (--force). Choose another target or remove it yourself."
        )
    if not force:
        raise CheckpointError(
            f"{folder} already holds a checkpoint. Choose another target, or give force=True "
            "(--force) to replace it once the new one is complete."
        )


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a complete checkpoint folder, checked against the files beside it."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give the target of a conversion.")
    path = folder / "params" / "index.json"
    if not path.is_file():
        found = (folder / "params").is_dir()
        why = "is incomplete: its write was interrupted" if found else "is no herald_jax checkpoint"
        raise CheckpointError(
            f"{folder} {why} (no params/index.json). Convert again with "
            f"`python -m convert SRC {folder.name}`."
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        form, packs, tensors = index["format"], index["packs"], index["tensors"]
        entries = [(e["pack"], e["shape"], jnp.dtype(e["dtype"])) for e in tensors.values()]
        known = all(pack in packs for pack, _, _ in entries)
        # Folders of before there were digests have none at all.
        known &= "digests" not in index or set(index["digests"]) == set(packs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}). Convert again.") from error
    if form != INDEX_FORMAT or not known:
        raise CheckpointError(
            f"{path} has format {form!r}, this version reads {INDEX_FORMAT}. Convert again."
        )
    faults = [] if (folder / "config.json").is_file() else ["config.json is absent"]
    for pack, size in packs.items():
        found = tree_bytes(folder / "params" / pack)
        if found != size:
            faults.append(f"params/{pack} has {found} bytes instead of {size}")
    if faults:
        raise CheckpointError(
            f"{folder} is incomplete: {'; '.join(faults)}. Copy the folder or convert again."
        )
    return index


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tree_digest(folder: Path) -> str:
    """CRC-32 of all files below a folder, names included: a few seconds for 16 GB."""
    digest = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = zlib.crc32(path.relative_to(folder).as_posix().encode(), digest)
        with path.open("rb") as file:
            while block := file.read(_DIGEST_BYTES):
                digest = zlib.crc32(block, digest)
    return f"{digest:08x}"


def flush_to_disk(folder: Path, *, recurse: bool = True, files: bool = True) -> None:
    """Waits until the content of `folder` would survive a power cut, before it is renamed."""
    paths = [folder, *(folder.rglob("*") if recurse else folder.iterdir() if files else ())]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:
            pass  # some network file systems cannot sync folders; their rename is atomic still
        finally:
            os.close(descriptor)
