"""DiffusionGemma's conversion: both spellings, two scalars a layer, fused experts, no mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import convert_checkpoint
from convert.__main__ import main
from convert.examine import examine
from convert.families import families
from convert.fields import FieldReader
from convert.report import Findings
from herald_jax.checkpoint import dotted_leaves, load_params
from herald_jax.configs import ModelConfig
from tests.canvas_model import (
    NEW_SPELLING,
    OLD_SPELLING,
    PUBLISHED,
    TEXT,
    published_shapes,
    random_tensors,
    tiny_config,
)
from tests.convert.test_families_dry_run import write_header_only
from tests.golden.families import write_folder

FULL = {
    **{"architectures": PUBLISHED["architectures"], "canvas_length": 256},
    "text_config": {
        **TEXT,
        **{"vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112},
        **{"num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2},
        **{"sliding_window": 1024, "num_experts": 128, "top_k_experts": 8},
        **{"moe_intermediate_size": 704, "layer_types": (["sliding_attention"] * 5 + ["x"]) * 5},
        "max_position_embeddings": 262144,
    },
}
FULL["text_config"]["layer_types"] = [
    kind.replace("x", "full_attention") for kind in FULL["text_config"]["layer_types"]
]


def published(**text: Any) -> dict[str, Any]:
    table = {**PUBLISHED["text_config"], **text}
    return {**PUBLISHED, "text_config": {k: v for k, v in table.items() if v is not ...}}


def faults(config: dict[str, Any], tmp_path: Path) -> list[str]:
    source = write_folder(tmp_path / "src", config, random_tensors(tiny_config(), 0))
    return [fault.where for fault in examine(source).findings.faults]


def test_every_tensor_is_bit_exact(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config(), 4)
    source = write_folder(tmp_path / "src", PUBLISHED, tensors, shards=3)
    report = convert_checkpoint(source, tmp_path / "dst", dtype="float32", progress=False)
    assert report.config == tiny_config()
    assert ModelConfig.from_json(report.config.to_json()) == report.config
    leaves = dotted_leaves(load_params(tmp_path / "dst"))
    layer = "model.decoder.layers.0."
    fused = tensors[layer + "experts.gate_up_proj"]
    wanted = {
        "experts.gate_proj": fused[:, :9].swapaxes(1, 2),
        "experts.up_proj": fused[:, 9:].swapaxes(1, 2),
        "experts.down_proj": tensors[layer + "experts.down_proj"].swapaxes(1, 2),
        "denoiser_scalar": tensors[layer + "layer_scalar"],
        "encoder_scalar": tensors["model.encoder.language_model.layers.0.layer_scalar"],
        "pre_experts_layernorm.scale": tensors[layer + "pre_feedforward_layernorm_2.weight"],
        "post_mlp_layernorm.scale": tensors[layer + "post_feedforward_layernorm_1.weight"],
        "attention.v_proj.kernel": tensors[layer + "self_attn.v_proj.weight"].T,
        "router.input_scale": tensors[layer + "router.scale"],
        "router.expert_scale": tensors[layer + "router.per_expert_scale"],
    }
    for path, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(leaves[f"layers.0.{path}"]), array, path)
    assert "layers.2.attention.v_proj.kernel" not in leaves
    text = sum(array.size for key, array in tensors.items() if "vision_tower" not in key)
    assert sum(leaf.size for leaf in leaves.values()) == text
    (remark,) = report.remarks
    assert remark.startswith("1 tensors like model.encoder.vision_tower.")


def test_bf16_keeps_routers_and_scalars_wide(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", PUBLISHED, random_tensors(tiny_config(), 5))
    convert_checkpoint(source, tmp_path / "dst", progress=False)
    leaves = dotted_leaves(load_params(tmp_path / "dst"))
    wide = {path.split(".", 2)[-1] for path, leaf in leaves.items() if leaf.dtype == np.float32}
    router = {"router.kernel", "router.input_scale", "router.expert_scale"}
    assert wide == {*router, "encoder_scalar", "denoiser_scalar"}


def test_both_spellings_say_the_same(tmp_path: Path) -> None:
    family = families()["diffusion_gemma"]
    found = []
    for spelling in (OLD_SPELLING, NEW_SPELLING):
        findings = Findings("here")
        config = {"text_config": {**TEXT, **spelling}}
        found.append(family.parse_config(FieldReader(config, findings)))
        findings.raise_if_any()
    assert found[0] == found[1] and found[0]["canvas"] == tiny_config().canvas


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_bidirectional_attention": "all"}, "text_config.use_bidirectional_attention"),
        ({"attention_bias": True}, "text_config.attention_bias"),
        ({"layer_types": ["sliding_attention"] * 3}, "text_config.layer_types"),
        ({"global_head_dim": ...}, "text_config.global_head_dim"),
        ({**NEW_SPELLING, "global_head_dim": 16}, "text_config.global_head_dim"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "text_config.per_layer_config"),
        ({"sliding_window": None}, "text_config.sliding_window"),
        ({"rope_parameters": {}}, "text_config.rope_parameters.sliding_attention"),
        ({"hidden_size": ...}, "text_config.hidden_size"),
    ],
)
def test_what_is_not_supported_is_refused(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    assert f"config.json: {field}" in faults(published(**changes), tmp_path)


def test_untied_heads_and_mask_ids_are_refused(tmp_path: Path) -> None:
    untied = faults({**PUBLISHED, "tie_word_embeddings": False}, tmp_path / "a")
    assert untied == ["config.json: tie_word_embeddings"]
    source = write_folder(tmp_path / "b", PUBLISHED, random_tensors(tiny_config(), 0))
    (fault,) = examine(source, mask_token_id=3).findings.faults
    assert fault.where == "--mask-token-id"


def test_a_lacking_encoder_scalar_is_missed(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config(), 0)
    key = "model.encoder.language_model.layers.2.layer_scalar"
    del tensors[key]
    (fault,) = examine(write_folder(tmp_path / "src", PUBLISHED, tensors)).findings.faults
    assert (fault.kind, fault.where) == ("missing", key)


def test_full_size_from_headers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = families()["diffusion_gemma"]
    findings = Findings("here")
    fields = family.parse_config(FieldReader(FULL, findings))
    findings.raise_if_any()
    config = ModelConfig(
        family=family.name,
        **fields,
        **{"attention": "canvas", "mask_token_id": -1, "block_length": 256},
        tie_word_embeddings=True,
    )
    assert config.canvas is not None and config.canvas.full_layers == (5, 11, 17, 23, 29)
    shapes = published_shapes(config)
    assert shapes["model.decoder.layers.5.self_attn.q_proj.weight"] == (8192, 2816)
    assert shapes["model.decoder.layers.0.experts.gate_up_proj"] == (128, 1408, 2816)
    total = write_header_only(tmp_path / "model.safetensors", shapes)
    (tmp_path / "config.json").write_text(json.dumps(FULL))
    assert main([str(tmp_path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "faults: none" in out and f"{total // 2:,} numbers" in out
    assert 25.0e9 < total / 2 < 25.9e9  # the makers say about 25.8 with the vision tower
    assert "experts.gate_proj [128, 2816, 704] (rows 0 to 704 of 1408, transposed); 30" in out
    assert "block_length: 256 (from config.json: canvas_length)" in out
