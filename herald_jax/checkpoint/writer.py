"""Writes a checkpoint into a folder beside its target, and renames it once it is complete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jaxtyping import Shaped

from herald_jax.checkpoint.files import (
    INCOMPLETE,
    INDEX_FORMAT,
    RETIRED,
    CheckpointError,
    check_target,
    flush_to_disk,
    naming,
    tree_bytes,
    tree_digest,
)
from herald_jax.checkpoint.tree import dotted_leaves
from herald_jax.configs import ModelConfig
from herald_jax.models import abstract_params

_PACK_BYTES = 128 * 2**20
_PIECE = 1 << 16
_EXPONENTS = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}
"""The bits that are all set in infinities and NaNs, and in nothing else."""
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""What a rename onto anything but an empty folder fails with."""

Array = jax.Array | np.ndarray


class CheckpointWriter:
    """Writes a checkpoint tensor by tensor and makes it appear as a whole.

    Used as a context manager. Leaving the block normally checks that every parameter of
    `config` was written and renames the folder into place; leaving it by an exception removes
    what was written and keeps an older target as it was. At most one pack of tensors and the
    tensor being written are held.

    Example:
        >>> import tempfile
        >>> from herald_jax.checkpoint import load_config
        >>> from herald_jax.models import random_params
        >>> config = ModelConfig(
        ...     family="demo", vocab_size=8, hidden_size=6, intermediate_size=5, num_layers=1,
        ...     num_heads=2, num_kv_heads=1, head_dim=4, block_length=2, mask_token_id=7,
        ... )
        >>> target = Path(tempfile.mkdtemp()) / "checkpoint"
        >>> with CheckpointWriter(target, config) as writer:
        ...     for path, array in dotted_leaves(random_params(config)).items():
        ...         writer.write(path, array)
        >>> load_config(target) == config
        True
    """

    def __init__(
        self,
        folder: str | Path,
        config: ModelConfig,
        *,
        force: bool = False,
        pack_bytes: int = _PACK_BYTES,
    ) -> None:
        """Checks that the target may be written.

        Args:
            folder: Where the checkpoint will appear.
            config: Description of the model, written as `config.json`.
            force: Replace a checkpoint that is already there. Anything else at `folder` is
                never removed.
            pack_bytes: Tensors are gathered until a pack has this size.

        Raises:
            CheckpointError: If the target exists and may not be replaced.
        """
        check_target(folder, force)
        self._force = force
        self._target = Path(folder).resolve()
        self._config = config
        self._pack_bytes = pack_bytes
        self._expected = dotted_leaves(abstract_params(config))
        self._tensors: dict[str, dict[str, Any]] = {}
        self._packs: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        self._pending: dict[str, np.ndarray] = {}
        self._work: Path | None = None
        self._is_sealed = False

    def __enter__(self) -> Self:
        """Makes the working folder beside the target.

        Raises:
            CheckpointError: If it cannot be made there.
        """
        with naming(self._target):
            self._target.parent.mkdir(parents=True, exist_ok=True)
            prefix = f"{self._target.name}{INCOMPLETE}"
            self._work = Path(tempfile.mkdtemp(prefix=prefix, dir=self._target.parent))
            (self._work / "params").mkdir()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Publishes the checkpoint, or removes all traces of it after an exception.

        Raises:
            CheckpointError: If something that may not be replaced appeared at the target.
        """
        try:
            if kind is None:
                self._publish()
        finally:
            if self._work is not None:
                shutil.rmtree(self._work, ignore_errors=True)
            self._pending.clear()

    @property
    def bytes_written(self) -> int:
        """Bytes of all tensors in sealed packs."""
        return sum(self._packs.values())

    def write(self, path: str | tuple[object, ...], array: Shaped[Array, "*shape"]) -> None:
        """Adds one parameter under its dotted path (or tuple of keys).

        Raises:
            CheckpointError: If the path is no parameter of the config, was written before, or
                the array is not a numeric array of the right shape with finite values.
                Random-number keys are refused: a checkpoint holds parameters only.
        """
        name = path if isinstance(path, str) else ".".join(str(part) for part in path)
        value = _to_host(name, array)
        if name not in self._expected:
            raise CheckpointError(f"{name} is no parameter of this config.")
        if name in self._tensors or name in self._pending:
            raise CheckpointError(f"{name} was written twice.")
        expected = self._expected[name].shape
        if value.shape != expected:
            raise CheckpointError(f"{name}: shape {value.shape}, the config wants {expected}.")
        if self._pending_bytes() + value.nbytes > self._pack_bytes:
            self._seal_pack()
        self._pending[name] = value
        if self._pending_bytes() >= self._pack_bytes:
            self._seal_pack()

    def add_file(self, name: str, content: str | Path) -> None:
        """Adds a small file to the folder: `content` is its text, or a file to copy."""
        if name in ("config.json", "params") or Path(name).name != name:
            raise CheckpointError(f"{name!r} is not a free name in a checkpoint folder.")
        if isinstance(content, Path):
            shutil.copyfile(content, self._folder / name)
        else:
            (self._folder / name).write_text(content, encoding="utf-8")

    def seal(self) -> Path:
        """Completes the working folder and returns it, loadable but not yet at its target."""
        if self._is_sealed:
            return self._folder
        self._seal_pack()
        missing = [name for name in self._expected if name not in self._tensors]
        if missing:
            raise CheckpointError("Never written: " + ", ".join(missing))
        index = {
            "format": INDEX_FORMAT,
            "packs": self._packs,
            "digests": self._digests,
            "tensors": self._tensors,
        }
        (self._folder / "config.json").write_text(self._config.to_json(), encoding="utf-8")
        flush_to_disk(self._folder)
        text = json.dumps(index, indent=1) + "\n"
        (self._folder / "params" / "index.json").write_text(text, encoding="utf-8")
        flush_to_disk(self._folder / "params", recurse=False)
        self._is_sealed = True
        return self._folder

    @property
    def _folder(self) -> Path:
        if self._work is None:
            raise CheckpointError("Use CheckpointWriter in a `with` statement.")
        return self._work

    def _pending_bytes(self) -> int:
        return sum(array.nbytes for array in self._pending.values())

    def _seal_pack(self) -> None:
        if not self._pending:
            return
        pack = f"{len(self._packs):04d}"
        folder = self._folder / "params" / pack
        context = ocp.Context()
        # bf16 weights hardly compress, and the save waits for its end, so neither a
        # compressor's nor an asynchronous save's second copy of the tensors is worth having.
        context.array.saving.use_compression = False
        context.memory.deepcopy_host_arrays = False
        with context:
            ocp.save(str(folder), dict(self._pending))
        for name, array in self._pending.items():
            shape = list(array.shape)
            self._tensors[name] = {"pack": pack, "shape": shape, "dtype": array.dtype.name}
        self._packs[pack], self._digests[pack] = tree_bytes(folder), tree_digest(folder)
        self._pending.clear()

    def _publish(self) -> None:
        work = self.seal()
        check_target(self._target, self._force)  # hours may have passed since the first time
        retired: Path | None = None
        # Without force nothing is moved away: the rename itself refuses all but an empty folder.
        if self._force and self._target.exists():
            retired = Path(
                tempfile.mkdtemp(prefix=f"{self._target.name}{RETIRED}", dir=work.parent)
            )
            os.replace(self._target, retired)
        try:
            # mkdtemp makes private folders; a checkpoint gets the usual permissions.
            umask = os.umask(0)
            os.umask(umask)
            work.chmod(0o777 & ~umask)
            os.replace(work, self._target)
        except BaseException as error:
            if retired is not None:
                os.replace(retired, self._target)
            if isinstance(error, OSError) and error.errno in _TAKEN:
                raise CheckpointError(
                    f"{self._target} appeared during the write and is not replaced: {error}."
                ) from error
            raise
        self._work = None
        flush_to_disk(self._target.parent, recurse=False, files=False)
        if retired is not None:
            shutil.rmtree(retired, ignore_errors=True)


def save(
    folder: str | Path, config: ModelConfig, params: Mapping[Any, Any], *, force: bool = False
) -> None:
    """Writes a whole parameter tree, atomically.

    Args:
        folder: Where the checkpoint will appear.
        config: Description of the model.
        params: Nested dict in the structure of `abstract_params(config)`, on any devices.
        force: Replace a checkpoint that is already there.

    Raises:
        CheckpointError: If the target may not be replaced or `params` does not fit `config`.
    """
    with CheckpointWriter(folder, config, force=force) as writer:
        for path, array in dotted_leaves(params).items():
            writer.write(path, array)


def _to_host(name: str, array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise CheckpointError(f"{name} is a random-number key; checkpoints hold parameters only.")
    if not isinstance(array, jax.Array | np.ndarray):
        raise CheckpointError(f"{name} is a {type(array).__name__}, not an array.")
    value = np.asarray(array)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise CheckpointError(f"{name} has dtype {value.dtype}; parameters are floating.")
    if bad := _count_not_finite(value):
        raise CheckpointError(
            f"{name} has {bad} of {value.size} values that are not finite. Such a model writes "
            "noise: take a sound checkpoint, or a dtype with the range of its values (bfloat16)."
        )
    return value


def _count_not_finite(value: np.ndarray) -> int:
    """NaNs and infinities, in pieces: a mask of a whole embedding would double its memory."""
    flat = value.reshape(-1)
    pieces = (flat[at : at + _PIECE] for at in range(0, flat.size, _PIECE))
    exponent = _EXPONENTS.get(value.dtype.name)
    if exponent is None:
        return sum(int(np.count_nonzero(~np.isfinite(piece))) for piece in pieces)
    # The bits say it ten times faster than NumPy's functions of 16-bit floats.
    bits = (piece.view(np.uint16) & exponent for piece in pieces)
    return sum(int(np.count_nonzero(piece == exponent)) for piece in bits)
