"""Saving and loading parameters: exactness, placement, refusals."""

import asyncio
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax._checks import ConfigError
from herald_jax.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    dotted_leaves,
    leftovers,
    load_config,
    load_params,
    save,
)
from herald_jax.models import abstract_params, random_params


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (name, a), b in zip(dotted_leaves(found).items(), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype, name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_round_trip_is_bit_exact(tiny_config, tmp_path, dtype):
    config = dataclasses.replace(tiny_config, num_layers=12, qkv_bias=True)
    params = random_params(config, seed=3, dtype=dtype)
    save(tmp_path / "x", config, params)
    assert load_config(tmp_path / "x") == config
    assert_same(load_params(tmp_path / "x"), params)


def test_small_packs(tiny_config, tiny_params, tmp_path):
    """Packs of any size hold every tensor once, the largest one alone included."""
    with CheckpointWriter(tmp_path / "x", tiny_config, pack_bytes=4000) as writer:
        for name, array in dotted_leaves(tiny_params).items():
            writer.write(name, array)
    packs = [path for path in (tmp_path / "x" / "params").iterdir() if path.is_dir()]
    assert 3 < len(packs) < len(jax.tree.leaves(tiny_params))
    moved = []
    loaded = load_params(tmp_path / "x", tiny_config, progress=moved.append)
    assert_same(loaded, tiny_params)
    assert len(moved) == len(packs)


def test_tuple_paths(tiny_config, tiny_params, tmp_path):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tiny_params)
    with CheckpointWriter(tmp_path / "x", tiny_config) as writer:
        for path, array in leaves:
            writer.write(tuple(key.key for key in path), np.asarray(array))
    assert_same(load_params(tmp_path / "x"), tiny_params)


def test_load_in_another_dtype(tiny_config, tiny_params, tmp_path):
    save(tmp_path / "x", tiny_config, tiny_params)
    narrow = load_params(tmp_path / "x", dtype=jnp.bfloat16)
    assert_same(narrow, jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_params))


@pytest.mark.parametrize("dtype", ["int8", jnp.uint8, "bool", "complex64", "bf17"])
def test_load_in_a_dtype_that_cannot_hold_parameters(tiny_config, tiny_params, tmp_path, dtype):
    save(tmp_path / "x", tiny_config, tiny_params)
    with pytest.raises(ConfigError, match="^dtype=.*floating"):
        load_params(tmp_path / "x", dtype=dtype)


def test_names_sort_by_layer_number(tiny_config):
    config = dataclasses.replace(tiny_config, num_layers=11)
    names = [n for n in dotted_leaves(abstract_params(config)) if n.endswith("q_proj.kernel")]
    assert names == [f"layers.{n}.attention.q_proj.kernel" for n in range(11)]


def test_random_keys_are_refused(tiny_config, tiny_params, tmp_path):
    """Kind of fault: random-number keys in a checkpoint can be neither saved nor restored.

    A checkpoint holds parameters only: the file list of a good one names nothing else, and a
    key is refused by name, whatever its place in the tree.
    """
    with pytest.raises(CheckpointError, match="random-number key"):
        save(tmp_path / "x", tiny_config, tiny_params | {"norm": {"scale": jax.random.key(0)}})
    with pytest.raises(CheckpointError, match="rngs.*no parameter"):
        save(tmp_path / "x", tiny_config, tiny_params | {"rngs": jnp.ones(2)})
    with pytest.raises(CheckpointError, match="uint32"):
        save(tmp_path / "x", tiny_config, tiny_params | {"norm": {"scale": jnp.ones(24, "uint32")}})
    assert not list(tmp_path.iterdir())
    save(tmp_path / "x", tiny_config, tiny_params)
    index = json.loads((tmp_path / "x" / "params" / "index.json").read_text())
    assert set(index["tensors"]) == set(dotted_leaves(abstract_params(tiny_config)))


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", "device"])
def test_memory_kinds(tiny_config, tiny_params, tmp_path, kind):
    """Kind of fault: leaves in pinned host memory cannot be restored (or saved)."""
    device = jax.devices()[0]
    if kind not in {memory.kind for memory in device.addressable_memories()}:
        pytest.skip(f"no memory {kind} here")
    target = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    save(tmp_path / "x", tiny_config, jax.device_put(tiny_params, target))
    loaded = load_params(tmp_path / "x", sharding=target)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(loaded)} == {kind}
    assert_same(loaded, tiny_params)


TWO_DEVICES = """
import jax, numpy as np
from herald_jax.checkpoint import dotted_leaves, load_config, load_params, save
from herald_jax.sharding import param_shardings
folder, other = {folder!r}, {other!r}
config = load_config(folder)
mesh = jax.make_mesh((2,), ("tp",))
params = load_params(folder, sharding=param_shardings(config, mesh))
up = params["layers"][1]["mlp"]["up_proj"]["kernel"]
assert len(up.sharding.device_set) == 2
assert [s.data.shape for s in up.addressable_shards] == [(24, 20), (24, 20)]
one = load_params(folder, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[1]))
for (name, a), b in zip(dotted_leaves(params).items(), jax.tree.leaves(one), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
assert one["norm"]["scale"].devices() == {{jax.devices()[1]}}
host = load_params(folder, sharding=param_shardings(config, mesh, memory_kind="pinned_host"))
assert host["norm"]["scale"].sharding.memory_kind == "pinned_host"
save(other, config, params)
"""


def test_other_device_counts(tiny_config, tiny_params, tmp_path, run_python):
    """Saved on one device, loaded and saved on two, loaded on one.

    Kind of fault: a checkpoint can only be restored on as many devices as saved it.
    """
    config = dataclasses.replace(tiny_config, vocab_size=62)
    params = random_params(config, seed=1)
    save(tmp_path / "one", config, params)
    paths = {"folder": str(tmp_path / "one"), "other": str(tmp_path / "two")}
    run_python(TWO_DEVICES.format(**paths), devices=2)
    assert_same(load_params(tmp_path / "two"), params)


def test_all_misfits_in_one_message(tiny_config, tiny_params, tmp_path):
    save(tmp_path / "x", tiny_config, tiny_params)
    other = dataclasses.replace(tiny_config, num_layers=4, hidden_size=26, tie_word_embeddings=True)
    with pytest.raises(CheckpointError) as caught:
        load_params(tmp_path / "x", other)
    text = str(caught.value)
    assert "missing layers.3.mlp.up_proj.kernel (26, 40)" in text
    assert "unexpected lm_head.kernel (24, 61)" in text
    assert "norm.scale: stored (24,), config wants (26,)" in text


def test_sharding_of_another_structure(tiny_config, tiny_params, tmp_path):
    save(tmp_path / "x", tiny_config, tiny_params)
    target = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ConfigError, match="lm_head.kernel"):
        load_params(tmp_path / "x", sharding={"norm": {"scale": target}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "not a folder"),
        (lambda folder: folder.mkdir(), "no herald_jax checkpoint"),
        (lambda folder: (folder / "params").mkdir(parents=True), "interrupted"),
    ],
)
def test_foreign_folders(tmp_path, make, message):
    make(tmp_path / "x")
    for load in (load_params, load_config):
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "x")


@pytest.mark.parametrize("index", ["{", "[]", '{"format": 1}', '{"format": 2}'])
def test_unusable_index(tiny_config, tiny_params, tmp_path, index):
    save(tmp_path / "x", tiny_config, tiny_params)
    (tmp_path / "x" / "params" / "index.json").write_text(index)
    with pytest.raises(CheckpointError, match="index.json"):
        load_params(tmp_path / "x")


def test_newer_format_is_named(tiny_config, tiny_params, tmp_path):
    save(tmp_path / "x", tiny_config, tiny_params)
    path = tmp_path / "x" / "params" / "index.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2, this version reads 1"):
        load_params(tmp_path / "x")


def test_one_flipped_bit(tiny_config, tiny_params, tmp_path):
    """Damage that keeps the size, and that the storage library reads as another number."""
    save(tmp_path / "x", tiny_config, tiny_params)
    files = (tmp_path / "x" / "params" / "0000").rglob("*")
    largest = max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(CheckpointError, match="Pack 0000 of .*x is damaged: its CRC-32"):
        load_params(tmp_path / "x")


@pytest.mark.parametrize("digests", [None, [], {}, {"0001": "00000000"}, 7])
def test_digests_that_are_none(tiny_config, tiny_params, tmp_path, digests):
    save(tmp_path / "x", tiny_config, tiny_params)
    path = tmp_path / "x" / "params" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"digests": digests}))
    with pytest.raises(CheckpointError, match="index.json"):
        load_params(tmp_path / "x")


def test_pack_that_the_storage_library_cannot_read(tiny_config, tiny_params, tmp_path, run_python):
    """An error that names the pack, also for a checkpoint without digests.

    Read in a process of its own: after a failed read the storage library ends other reads
    late, with complaints that pytest would blame on whichever test runs then.
    """
    save(tmp_path / "x", tiny_config, tiny_params)
    for path in (tmp_path / "x" / "params" / "0000").rglob("*.ocdbt"):
        path.write_bytes(bytes(path.stat().st_size))
    index = tmp_path / "x" / "params" / "index.json"
    old = {key: value for key, value in json.loads(index.read_text()).items() if key != "digests"}
    index.write_text(json.dumps(old))
    code = f"""
from herald_jax.checkpoint import CheckpointError, load_params
try:
    load_params({str(tmp_path / "x")!r})
except CheckpointError as error:
    assert "Pack 0000" in str(error) and "cannot be read" in str(error)
    print("refused")
"""
    assert run_python(code) == "refused\n"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tiny_config, tiny_params, tmp_path, dtype, bad):
    leaves = dotted_leaves(tiny_params)
    name = next(name for name, leaf in leaves.items() if leaf.ndim == 2)
    array = np.asarray(leaves[name]).astype(jnp.dtype(dtype))
    array[1, 2] = bad
    array[0, 0] = np.finfo(jnp.dtype(dtype)).max if dtype != "bfloat16" else 3e38
    with CheckpointWriter(tmp_path / "x", tiny_config) as writer:
        with pytest.raises(CheckpointError, match=f"{name} has 1 of {array.size} values that are"):
            writer.write(name, array)
        array[1, 2] = 0
        writer.write(name, array)
        for other, leaf in leaves.items():
            if other != name:
                writer.write(other, leaf)


def test_incomplete_writes_are_refused(tiny_config, tiny_params, tmp_path):
    missing = {key: value for key, value in tiny_params.items() if key != "lm_head"}
    with pytest.raises(CheckpointError, match="lm_head.kernel"):
        save(tmp_path / "x", tiny_config, missing)
    with CheckpointWriter(tmp_path / "y", tiny_config) as writer:
        leaves = dotted_leaves(tiny_params)
        name, array = leaves.popitem()
        writer.write(name, array)
        with pytest.raises(CheckpointError, match="twice"):
            writer.write(name, array)
        with pytest.raises(CheckpointError, match="shape"):
            writer.write("lm_head.kernel", jnp.ones((61, 24)))
        for other, value in leaves.items():
            writer.write(other, value)
    assert [path.name for path in tmp_path.iterdir()] == ["y"]
    assert leftovers(tmp_path / "y") == []


def test_save_needs_force(tiny_config, tiny_params, tmp_path):
    save(tmp_path / "x", tiny_config, tiny_params)
    with pytest.raises(CheckpointError, match="force=True"):
        save(tmp_path / "x", tiny_config, tiny_params)
    changed = jax.tree.map(lambda x: x + 1, tiny_params)
    save(tmp_path / "x", tiny_config, changed, force=True)
    assert_same(load_params(tmp_path / "x"), changed)


def test_target_below_a_file(tiny_config, tiny_params, tmp_path):
    (tmp_path / "file").write_text("years")
    with pytest.raises(CheckpointError, match="file/x cannot be made: .*file is not a folder"):
        save(tmp_path / "file" / "x", tiny_config, tiny_params)
    writer = CheckpointWriter(tmp_path / "later" / "x", tiny_config)
    (tmp_path / "later").write_text("years")
    with pytest.raises(CheckpointError, match="later/x cannot be used"):
        writer.__enter__()


@pytest.mark.parametrize("name", ["config.json", "params/index.json"])
def test_endless_nesting(tiny_config, tiny_params, tmp_path, name):
    save(tmp_path / "x", tiny_config, tiny_params)
    (tmp_path / "x" / name).write_text("[" * 200_000)
    for load in (load_params, load_config):
        with pytest.raises((CheckpointError, ConfigError), match="config.json|index.json"):
            load(tmp_path / "x")


def test_reserved_names(tiny_config, tmp_path):
    with pytest.raises(CheckpointError, match="not a free name"):
        with CheckpointWriter(tmp_path / "x", tiny_config) as writer:
            writer.add_file("../x", "text")
    assert not list(tmp_path.iterdir())


def test_inside_a_running_event_loop(tiny_config, tiny_params, tmp_path):
    """Servers and notebooks call from coroutines."""

    async def both():
        save(tmp_path / "x", tiny_config, tiny_params)
        return load_params(tmp_path / "x")

    assert_same(asyncio.run(both()), tiny_params)
