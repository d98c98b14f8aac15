"""Training state as safetensors shards of at most 15 MB, with a JSON file of progress."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file, save_file

SHARD_BYTES = 15_000_000


def save(folder: Path, state: dict, progress: dict) -> None:
    """Writes `state-*.safetensors` and `progress.json`, replacing older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, size = [{}], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(state)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        size += leaf.nbytes
        if size > SHARD_BYTES:
            shards.append({})
            size = leaf.nbytes
        shards[-1][name] = leaf
    for old in folder.glob("state-*.safetensors"):
        old.unlink()
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"state-{i}.safetensors")
    (folder / "progress.json").write_text(json.dumps(progress, indent=2) + "\n")


def load(folder: Path, like: dict) -> tuple[dict, dict] | None:
    """(state, progress) with the structure of `like`, or None if the folder holds no state."""
    if not (folder / "progress.json").exists():
        return None
    arrays = {}
    for shard in sorted(folder.glob("state-*.safetensors")):
        arrays.update(load_file(shard))
    state = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(arrays[jax.tree_util.keystr(path, simple=True, separator=".")]),
        like,
    )
    return state, json.loads((folder / "progress.json").read_text())
