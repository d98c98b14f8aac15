"""Converted checkpoints on disk: one writer, one loader, parameters only.

A checkpoint folder holds `config.json`, `params/` and whatever small files the converter
adds. `params/` is a row of packs, each an orbax checkpoint of a few tensors, and
`index.json`, which names every tensor with its pack, shape and dtype. Packs bound the host
memory of a save (one pack at most is pending) and save the file overhead of one orbax
checkpoint for each of some hundred tensors.

Everything is written into a folder beside the target and renamed once it is complete, so a
target exists only as a whole. `index.json` is written last and records the bytes of every
pack: a copy that was cut short is refused before anything is read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jaxtyping import Shaped

from herald_jax._checkpoint_files import (
    INCOMPLETE,
    INDEX_FORMAT,
    RETIRED,
    CheckpointError,
    flush_to_disk,
    leftovers,
    read_index,
    tree_bytes,
)
from herald_jax._checkpoint_files import check_target as _check_content
from herald_jax._checks import ConfigError, require
from herald_jax.configs import ModelConfig
from herald_jax.models import abstract_params

__all__ = [
    "CheckpointError",
    "CheckpointWriter",
    "Shardings",
    "check_target",
    "dotted_leaves",
    "leftovers",
    "load_config",
    "load_params",
    "save",
]

_PACK_BYTES = 128 * 2**20
_LOAD_THREADS = 4
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""What a rename onto anything but an empty folder fails with."""

Array = jax.Array | np.ndarray
Shardings = jax.sharding.Sharding | Mapping[Any, Any]
"""One sharding for all parameters, or a nested dict in the structure of `abstract_params`."""


def dotted_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a nested dict by dotted path, such as `layers.10.mlp.up_proj.kernel`.

    Layers come in the order of their numbers because the keys of the tree are integers.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def check_target(folder: str | Path, force: bool) -> None:
    """Raises `CheckpointError` unless a checkpoint may be written at `folder`.

    An empty folder is free. With `force` a complete checkpoint may be replaced; any other
    content is never removed, so a mistyped target cannot cost files.
    """
    with _naming(folder):
        _check_content(folder, force)
        parents = Path(folder).absolute().parents
        nearest = next(path for path in parents if path.exists())
    if not nearest.is_dir():
        raise CheckpointError(
            f"{folder} cannot be made: {nearest} is not a folder. Choose another target."
        )


class CheckpointWriter:
    """Writes a checkpoint tensor by tensor and makes it appear as a whole.

    Used as a context manager. Leaving the block normally checks that every parameter of
    `config` was written and renames the folder into place; leaving it by an exception removes
    what was written and keeps an older target as it was. At most one pack of tensors and the
    tensor being written are held.

    Example:
        >>> import tempfile
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
        self._pending: dict[str, np.ndarray] = {}
        self._work: Path | None = None
        self._is_sealed = False

    def __enter__(self) -> Self:
        """Makes the working folder beside the target.

        Raises:
            CheckpointError: If it cannot be made there.
        """
        with _naming(self._target):
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
                the array is not a numeric array of the right shape. Random-number keys are
                refused: a checkpoint holds parameters only.
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
        index = {"format": INDEX_FORMAT, "packs": self._packs, "tensors": self._tensors}
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
        self._packs[pack] = tree_bytes(folder)
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


def load_config(folder: str | Path) -> ModelConfig:
    """Reads the description of the model in a checkpoint folder.

    Raises:
        CheckpointError: If the folder holds no complete checkpoint.
        ConfigError: If `config.json` is not one that this version reads.
    """
    with _naming(folder):
        read_index(Path(folder))
        return ModelConfig.load(folder)


def load_params(
    folder: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: Any = None,
    sharding: Shardings | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Reads the parameters straight to their devices.

    Args:
        folder: A checkpoint folder.
        config: What the caller expects; the folder's own `config.json` if left out.
        dtype: Floating dtype of the result; the stored one if left out. Parameters that
            `abstract_params` keeps in fp32 (routers) come back in fp32 in any case.
        sharding: Where the parameters go: one sharding for all, or a nested dict of them in
            the structure of `abstract_params(config)`; the default device if left out. The
            devices need not be those that the checkpoint was saved from.
        progress: Called with the bytes of every pack that has arrived.

    Returns:
        A nested dict in the structure of `abstract_params(config)`.

    Raises:
        CheckpointError: If the folder is missing, foreign or incomplete, or its tensors do not
            fit `config`; all misfits are in one message.
        ConfigError: If `dtype` is no floating dtype, or `config.json` is not one that this
            version reads.
    """
    if dtype is not None:
        require(_is_floating(dtype), "dtype", dtype, "a floating dtype, such as bfloat16")
    folder = Path(folder).absolute()
    with _naming(folder):
        index = read_index(folder)
        config = ModelConfig.load(folder) if config is None else config
    tree = abstract_params(config)
    expected = dotted_leaves(tree)
    _compare(folder, index["tensors"], expected)
    shardings = _spread(tree, sharding)

    def load_pack(pack: str) -> dict[str, jax.Array]:
        targets: dict[str, jax.ShapeDtypeStruct] = {}
        for name, entry in index["tensors"].items():
            if entry["pack"] == pack:
                chosen = jnp.dtype(entry["dtype"] if dtype is None else dtype)
                if expected[name].dtype == jnp.float32:  # of a bf16 tree: fp32 whatever is asked
                    chosen = jnp.dtype(jnp.float32)
                targets[name] = jax.ShapeDtypeStruct(
                    tuple(entry["shape"]), chosen, sharding=_to_default_memory(shardings[name])
                )
        try:
            arrays: dict[str, jax.Array] = ocp.load(str(folder / "params" / pack), targets)
        except Exception as error:
            message = f"Pack {pack} of {folder} cannot be read: {error}. Convert or copy it again."
            raise CheckpointError(message) from error
        moved = {n: jax.device_put(a, shardings[n]) for n, a in arrays.items()}
        if progress is not None:
            progress(index["packs"][pack])
        return moved

    # Threads overlap the disk with the transfers; their number bounds the packs in flight.
    with ThreadPoolExecutor(_LOAD_THREADS) as pool:
        parts = list(pool.map(load_pack, index["packs"]))
    arrays = {name: array for part in parts for name, array in part.items()}
    leaves = [arrays[name] for name in dotted_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


@contextlib.contextmanager
def _naming(folder: str | Path) -> Iterator[None]:
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


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:  # no dtype at all
        return False


def _compare(folder: Path, stored: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    faults = [
        f"missing {name} {leaf.shape}" for name, leaf in expected.items() if name not in stored
    ]
    for name, entry in stored.items():
        shape = tuple(entry["shape"])
        if name not in expected:
            faults.append(f"unexpected {name} {shape}")
        elif shape != expected[name].shape:
            faults.append(f"{name}: stored {shape}, config wants {expected[name].shape}")
    if faults:
        raise CheckpointError(
            f"{folder} does not fit the config given. Use the config of that folder "
            "(load_config) or the right folder.\n  " + "\n  ".join(faults)
        )


def _spread(tree: Any, sharding: Shardings | None) -> dict[str, jax.sharding.Sharding]:
    """One sharding for every dotted path."""
    names = list(dotted_leaves(tree))
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)  # the default device
    if isinstance(sharding, jax.sharding.Sharding):
        return dict.fromkeys(names, sharding)
    given = dotted_leaves(sharding)
    if set(given) != set(names):
        wrong = sorted(set(given) ^ set(names))
        raise ConfigError(f"sharding has not the structure of the parameters; differing: {wrong}")
    return given


def _to_default_memory(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Restores go to device memory; host memory kinds are reached by a move afterwards."""
    kind = min(sharding.device_set, key=lambda device: device.id).default_memory().kind
    return sharding if sharding.memory_kind in (None, kind) else sharding.with_memory_kind(kind)


def _to_host(name: str, array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise CheckpointError(f"{name} is a random-number key; checkpoints hold parameters only.")
    if not isinstance(array, jax.Array | np.ndarray):
        raise CheckpointError(f"{name} is a {type(array).__name__}, not an array.")
    value = np.asarray(array)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise CheckpointError(f"{name} has dtype {value.dtype}; parameters are floating.")
    return value
