"""Stacked experts, fused projections and fp32 routers, down to the last bit."""

from __future__ import annotations

import functools
import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert import ConversionError, convert_checkpoint
from herald_jax.checkpoint import CheckpointWriter, dotted_leaves, load_params
from tests.convert.family_folders import Golden
from tests.models.passes import block_logits, whole_logits


def quiet(src: Path, dst: Path, **options: Any) -> Any:
    return convert_checkpoint(src, dst, progress=False, **options)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", ["sdar_moe", "stable_diffcoder", "llada2", "llada", "dream"])
def test_converted_models_give_the_logits_of_the_reference(
    name: str, shards: int, tmp_path: Path
) -> None:
    """Shards are cut so that the experts of one stack lie in all of them."""
    golden = Golden(name)
    report = quiet(golden.write(tmp_path / "src", shards), tmp_path / "dst", dtype="float32")
    params = load_params(tmp_path / "dst")
    tolerance = 1e-5 * np.abs(golden.logits).max()
    found = whole_logits(report.config, params, golden.tokens)
    np.testing.assert_allclose(found, golden.logits, atol=tolerance, rtol=0)
    if shards == 1 and not report.config.is_bidirectional:
        found = block_logits(report.config, params, golden.tokens)
        np.testing.assert_allclose(found, golden.logits, atol=tolerance, rtol=0)


def expected_mixture(own: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Our tensors of one mixture layer, written out by hand."""
    found = {"router.kernel": own["mlp.gate.weight"].T}
    for name in ("gate_proj", "up_proj", "down_proj"):
        parts = [own[f"mlp.experts.{e}.{name}.weight"].T for e in range(count)]
        found[f"experts.{name}"] = np.stack(parts)
        if f"mlp.shared_experts.{name}.weight" in own:
            shared = own[f"mlp.shared_experts.{name}.weight"].T
            found[f"shared_expert.{name}.kernel"] = shared
    if "mlp.gate.expert_bias" in own:
        found["router.selection_bias"] = own["mlp.gate.expert_bias"]
    return found


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.float32, "bfloat16"),
        (np.float32, "float32"),
        (ml_dtypes.bfloat16, "float32"),
    ],
)
@pytest.mark.parametrize("name", ["sdar_moe", "llada2"])
def test_experts_are_bit_exact_and_routers_stay_fp32(
    name: str, stored: Any, asked: str, tmp_path: Path
) -> None:
    golden = Golden(name)
    is_bias = lambda key: key.endswith("expert_bias")  # noqa: E731
    golden.tensors = {k: v if is_bias(k) else v.astype(stored) for k, v in golden.tensors.items()}
    source = golden.write(tmp_path / "src", shards=3)
    report = quiet(source, tmp_path / "dst", dtype=asked)
    leaves = dotted_leaves(load_params(tmp_path / "dst"))
    layer = golden.config["num_hidden_layers"] - 1
    prefix = f"model.layers.{layer}."
    own = {k.removeprefix(prefix): v for k, v in golden.tensors.items() if k.startswith(prefix)}
    for path, wanted in expected_mixture(own, golden.config["num_experts"]).items():
        leaf = np.asarray(leaves[f"layers.{layer}.mlp.{path}"])
        dtype = jnp.float32 if path.startswith("router") else jnp.dtype(asked)
        assert leaf.dtype == dtype, path
        assert leaf.tobytes() == np.ascontiguousarray(wanted.astype(dtype)).tobytes(), path
    record = json.loads((tmp_path / "dst" / "conversion.json").read_text())
    for path in source.glob("*.safetensors"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert record["source"]["files"][path.name]["sha256"] == digest
    assert report.tensors == len(leaves)


def test_fused_rows_are_queries_keys_values(tmp_path: Path) -> None:
    golden = Golden("llada2")
    fused = golden.tensors["model.layers.1.attention.query_key_value.weight"]
    quiet(golden.write(tmp_path / "src"), tmp_path / "dst", dtype="float32")
    attention = load_params(tmp_path / "dst")["layers"][1]["attention"]
    assert fused.shape == ((6 + 2 + 2) * 8, 20)
    np.testing.assert_array_equal(attention["q_proj"]["kernel"], fused[:48].T)
    np.testing.assert_array_equal(attention["k_proj"]["kernel"], fused[48:64].T)
    np.testing.assert_array_equal(attention["v_proj"]["kernel"], fused[64:].T)


def test_experts_of_a_trainer_are_one_tensor(tmp_path: Path) -> None:
    """The merged form gives the same parameters as the form with one tensor for each expert."""
    golden = Golden("llada2")
    quiet(golden.write(tmp_path / "src"), tmp_path / "dst")
    for layer in (1, 2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts."
            parts = [golden.tensors.pop(f"{prefix}{e}.{name}.weight") for e in range(12)]
            golden.tensors[prefix + name] = np.stack(parts)
    changes = {"model_type": "llada2_moe_veomni", "architectures": ...}
    quiet(golden.write(tmp_path / "merged", **changes), tmp_path / "other")
    found, wanted = (dotted_leaves(load_params(tmp_path / name)) for name in ("other", "dst"))
    assert list(found) == list(wanted)
    assert all(np.array_equal(found[path], wanted[path]) for path in wanted)


def faults_of(golden: Golden, tmp_path: Path, **changes: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConversionError) as caught:
        quiet(golden.write(tmp_path / "src", **changes), tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    return [(fault.kind, fault.where.split(" in ")[0]) for fault in caught.value.faults]


def test_every_fault_of_experts_is_reported_once(tmp_path: Path) -> None:
    """A lacking, a transposed and a surplus expert, and a fused tensor of another size."""
    golden = Golden("llada2")
    one = "model.layers.1.mlp.experts."
    del golden.tensors[one + "3.up_proj.weight"]
    golden.tensors[one + "4.up_proj.weight"] = golden.tensors[one + "4.up_proj.weight"].T
    golden.tensors[one + "12.up_proj.weight"] = golden.tensors[one + "5.up_proj.weight"]
    fused = "model.layers.2.attention.query_key_value.weight"
    golden.tensors[fused] = golden.tensors[fused][:-1]
    assert sorted(faults_of(golden, tmp_path)) == [
        ("missing", one + "3.up_proj.weight"),
        ("shape", one + "4.up_proj.weight"),
        ("shape", fused),
        ("unexpected", one + "12.up_proj.weight"),
    ]


def test_without_sizes_names_are_checked_still(tmp_path: Path) -> None:
    golden = Golden("llada2")
    del golden.tensors["model.layers.2.mlp.experts.7.down_proj.weight"]
    found = faults_of(golden, tmp_path, hidden_size=...)
    assert found == [
        ("config", "config.json: hidden_size"),
        ("missing", "model.layers.2.mlp.experts.7.down_proj.weight"),
    ]


def test_one_stack_at_a_time_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every shard has a part of every stack, so that all could be open at once."""
    small_packs = functools.partial(CheckpointWriter, pack_bytes=2**16)
    monkeypatch.setattr("convert.convert.CheckpointWriter", small_packs)
    golden = Golden("sdar_moe")
    golden.config |= {"num_hidden_layers": 8, "moe_intermediate_size": 512, "hidden_size": 128}
    rng = np.random.default_rng(0)
    first = {k: v for k, v in golden.tensors.items() if "layers.0." in k}
    grown = {k: v for k, v in golden.tensors.items() if ".layers." not in k}
    for layer in range(8):
        grown |= {k.replace("layers.0.", f"layers.{layer}."): v for k, v in first.items()}
    sizes = {20: 128, 9: 512}
    golden.tensors = {
        k: rng.normal(size=[sizes.get(n, n) for n in v.shape]).astype(np.float32)
        for k, v in grown.items()
    }
    source = golden.write(tmp_path / "src", shards=5)
    stack = 7 * 512 * 128 * 4
    total = sum(array.nbytes for array in golden.tensors.values())
    assert total > 20 * stack
    del grown, golden
    quiet(source, tmp_path / "warm", dtype="float32")  # imports and caches
    tracemalloc.start()
    quiet(source, tmp_path / "dst", dtype="float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * stack, f"{peak / stack:.1f} stacks"
