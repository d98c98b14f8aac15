"""Where a model comes from: a converted folder, a Hugging Face folder or a hub id."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from herald_jax import __version__, checkpoint
from herald_jax._checks import ConfigError, require_one_of
from herald_jax.configs import ModelConfig
from herald_jax.settings import private_folder

DTYPES = ("auto", "bfloat16", "float32")

_log = logging.getLogger(__name__)


def resolve_dtype(dtype: Any) -> str:
    """The name of the dtype to compute in; `auto` is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ConfigError: If the dtype is not supported or JAX has no device.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    require_one_of("dtype", name, DTYPES)
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        raise ConfigError(
            f"JAX has no device to run on: {error}. Set JAX_PLATFORMS=cpu to run on the CPU, or "
            "install JAX with the plug-in of your accelerator."
        ) from error
    if name == "auto":
        return "float32" if platform == "cpu" else "bfloat16"
    return name


def find_checkpoint(
    model: str | Path,
    *,
    dtype: str,
    mask_token_id: int | None = None,
    block_length: int | None = None,
) -> tuple[Path, ModelConfig]:
    """A converted folder for `model`, and its config with the caller's changes.

    A Hugging Face folder is converted once into the private cache directory. The conversion is
    made again when a file of the folder or one of the options changes.

    Args:
        model: Folder, or `owner/name` on the hub.
        dtype: Dtype in which a conversion stores the weights.
        mask_token_id: Id of the mask token, where the checkpoint does not say or is wrong.
        block_length: Positions denoised together. No weight depends on it or on the mask id, so
            for a converted folder both replace what its config says.

    Raises:
        ConversionError: If there is no such folder, or it cannot be fetched or converted.
        CheckpointError: If a converted folder is incomplete.
        ConfigError: If it holds no model, or an option does not fit it.
    """
    changes = {"mask_token_id": mask_token_id, "block_length": block_length}
    given = {name: value for name, value in changes.items() if value is not None}
    from convert.reader import find_source

    folder, _ = find_source(Path(model).expanduser())
    if not _is_hugging_face(folder):
        config = checkpoint.load_config(folder)
        return folder, dataclasses.replace(config, **given) if given else config
    converted = _convert(folder, dtype=dtype, **given)
    return converted, checkpoint.load_config(converted)


def read_model_config(model: str | Path) -> ModelConfig:
    """The description of a model, without its weights; nothing is converted or written.

    Args:
        model: A folder that needs to hold no more than `config.json`, or a hub id.

    Raises:
        ConversionError: If there is no such folder, or it cannot be fetched.
        ConfigError: If its `config.json` does not tell what the model is.
    """
    from convert.examine import examine
    from convert.reader import find_source

    folder, _ = find_source(Path(model).expanduser())
    if not _is_hugging_face(folder):
        return ModelConfig.load(folder)
    description = examine(folder).description
    if description.config is None or not description.sizes_known:
        raise ConfigError(
            f"{folder / 'config.json'} does not tell what the model is; "
            f"`herald convert {model} --dry-run` says what is missing."
        )
    return description.config


def _is_hugging_face(folder: Path) -> bool:
    """True if `config.json` is one that Hugging Face models carry."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} has no config.json, so it holds no model. Give a folder that "
            "`herald convert` wrote, or a Hugging Face model folder."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is not JSON: {error}") from error
    is_ours = isinstance(config, dict) and "format" in config
    return not is_ours and not (folder / "params").is_dir()


def _convert(source: Path, **options: Any) -> Path:
    from convert.convert import convert_checkpoint

    source = source.resolve()
    files = sorted(path for path in source.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    identity = repr((__version__, str(source), stats, sorted(options.items())))
    key = hashlib.sha256(identity.encode()).hexdigest()[:24]
    target = private_folder("converted") / f"{source.name[:40]}-{key}"
    if target.is_dir():
        _log.info("Using %s, the conversion of %s", target, source)
        return target
    # A warning, as it takes time and disk space that the caller did not ask for by name.
    _log.warning(
        "%s is in Hugging Face format; it is converted once into %s. "
        "`herald convert` writes the conversion where you want it.",
        source,
        target,
    )
    try:
        convert_checkpoint(source, target, progress=False, **options)
    except Exception:
        # Another process may have published the same conversion in the meantime.
        if not target.is_dir():
            raise
    return target
