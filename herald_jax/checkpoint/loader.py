"""Reads a checkpoint straight to its devices, pack by pack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp

from herald_jax._checks import ConfigError, require
from herald_jax.checkpoint.files import CheckpointError, naming, read_index, tree_digest
from herald_jax.checkpoint.tree import dotted_leaves
from herald_jax.configs import ModelConfig
from herald_jax.models import abstract_params

_LOAD_THREADS = 4

Shardings = jax.sharding.Sharding | Mapping[Any, Any]
"""One sharding for all parameters, or a nested dict in the structure of `abstract_params`."""


def load_config(folder: str | Path) -> ModelConfig:
    """Reads the description of the model in a checkpoint folder.

    Raises:
        CheckpointError: If the folder holds no complete checkpoint.
        ConfigError: If `config.json` is not one that this version reads.
    """
    with naming(folder):
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
        CheckpointError: If the folder is missing, foreign, incomplete or damaged, or its tensors
            do not fit `config`; all misfits are in one message.
        ConfigError: If `dtype` is no floating dtype, or `config.json` is not one that this
            version reads.
    """
    if dtype is not None:
        require(_is_floating(dtype), "dtype", dtype, "a floating dtype, such as bfloat16")
    folder = Path(folder).absolute()
    with naming(folder):
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
        _check_digest(folder, pack, index)
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


def _check_digest(folder: Path, pack: str, index: Mapping[str, Any]) -> None:
    expected = index.get("digests", {}).get(pack)
    found = tree_digest(folder / "params" / pack) if expected else None
    if found != expected:
        raise CheckpointError(
            f"Pack {pack} of {folder} is damaged: its CRC-32 is {found} instead of {expected}. "
            "Convert or copy it again."
        )


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
