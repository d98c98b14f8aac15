"""Converted checkpoints on disk: one writer, one loader, parameters only.

A checkpoint folder holds `config.json`, `params/` and whatever small files the converter
adds. `params/` is a row of packs, each an orbax checkpoint of a few tensors, and
`index.json`, which names every tensor with its pack, shape and dtype. Packs bound the host
memory of a save (one pack at most is pending) and save the file overhead of one orbax
checkpoint for each of some hundred tensors.

Everything is written into a folder beside the target and renamed once it is complete, so a
target exists only as a whole. `index.json` is written last and records the bytes and a CRC of
every pack: a copy that was cut short is refused before anything is read, a damaged pack when it
is.
"""

from herald_jax.checkpoint.files import CheckpointError, check_target, leftovers
from herald_jax.checkpoint.loader import Shardings, load_config, load_params
from herald_jax.checkpoint.tree import dotted_leaves
from herald_jax.checkpoint.writer import CheckpointWriter, save

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
