"""What the configs of the families say, leave out, and may not say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from convert.examine import examine
from convert.facts import block_length
from convert.families import Family, detect, families
from convert.fields import FieldReader
from convert.report import Findings
from herald_jax.checkpoint import dotted_leaves
from herald_jax.configs import ModelConfig
from herald_jax.models import abstract_params
from tests.convert.family_folders import Golden
from tests.golden.families import PUBLISHED

QWEN = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
FULL_SIZE: dict[str, tuple[str, dict[str, Any], int]] = {
    "SDAR-30B-A3B": (
        "sdar_moe",
        {
            **QWEN,
            "hidden_act": "silu",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        30_532_122_624,
    ),
    "Stable-DiffCoder-8B": (
        "stable_diffcoder",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e5,
            "max_position_embeddings": 8192,
            "hidden_act": "silu",
            "vocab_size": 155136,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
        8_250_462_208,
    ),
    "Qwen3-0.6B-BD3LM": (
        "a2d_qwen3",
        {
            **QWEN,
            "hidden_act": "silu",
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
}
_LLADA2 = {
    **{"vocab_size": 157184, "rms_norm_eps": 1e-6, "rope_theta": 600000},
    **{"head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1},
    **{"n_group": 8, "topk_group": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    **{"routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "norm_topk_prob": True},
    **{"moe_router_enable_expert_bias": True, "score_function": "sigmoid"},
    **{"max_position_embeddings": 32768, "tie_word_embeddings": False, "hidden_act": "silu"},
}
FULL_SIZE["LLaDA2-mini"] = (
    "llada2",
    {
        **_LLADA2,
        "num_hidden_layers": 20,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "moe_intermediate_size": 512,
    },
    16_255_643_392,
)
FULL_SIZE["LLaDA2-flash"] = (
    "llada2",
    {
        **_LLADA2,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "num_attention_heads": 32,
        "moe_intermediate_size": 1024,
    },
    102_889_705_216,
)
FULL_SIZE["LLaDA-8B"] = (
    "llada",
    {
        **{"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32},
        **{"mlp_hidden_size": 12288, "vocab_size": 126464, "embedding_size": 126464},
        **{"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_sequence_length": 4096},
        **{"block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms"},
        **{"include_bias": False, "weight_tying": False},
    },
    8_015_581_184,
)
FULL_SIZE["Fast_dLLM_v2_7B"] = (
    "fast_dllm_v2",
    {
        **QWEN,
        "hidden_act": "silu",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    7_615_616_512,
)
FULL_SIZE["Dream-7B"] = (
    "dream",
    {
        **QWEN,
        "hidden_act": "silu",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    7_615_616_512,
)


def config_of(family: Family, published: dict[str, Any]) -> ModelConfig:
    findings = Findings("here")
    fields = family.parse_config(FieldReader(published, findings))
    findings.raise_if_any()
    facts = {"mask_token_id": 7, "block_length": 32}
    facts |= {"tie_word_embeddings": published.get("tie_word_embeddings", False)}
    return ModelConfig(family=family.name, **fields, **facts)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_parameters_of_the_published_models(name: str) -> None:
    """The tables and the decoder together give the published counts to the last parameter."""
    family_name, published, count = FULL_SIZE[name]
    family = families()[family_name]
    leaves = dotted_leaves(abstract_params(config_of(family, published)))
    assert sum(leaf.size for leaf in leaves.values()) == count
    assert all(family.rules_for(target) for target in leaves)


def test_who_is_who() -> None:
    for name, published in PUBLISHED.items():
        found = detect(published["architectures"], published["model_type"])
        assert found is families()[name]
    assert detect([], "llama") is None and detect(["LlamaForCausalLM"], "llama") is None
    assert detect([], "llada21_moe") is families()["llada2"]
    named = {name for family in families().values() for name in family.architectures}
    assert len(named) == sum(len(family.architectures) for family in families().values())


def test_every_family_says_how_it_was_checked() -> None:
    from convert.references import BUILDERS

    for family in families().values():
        assert family.reference in BUILDERS, family.name
        assert any("logits" in line for line in family.checked), family.name
        assert any("bit for bit" in line for line in family.checked), family.name


def faults(name: str, tmp_path: Path, **changes: Any) -> list[str]:
    findings = examine(Golden(name).write(tmp_path / "src", **changes)).findings
    return [fault.where for fault in findings.faults]


def test_facts_that_llada2_leaves_out(tmp_path: Path) -> None:
    """Without a block size in the file the family's is taken, and its mask id if it fits."""
    changes = {"mask_token_id": ..., "block_size": ..., "vocab_size": 157184}
    found = examine(Golden("llada2").write(tmp_path / "src", **changes)).description.facts
    assert str(found["block_length"]) == "32 (from family table: llada2)"
    assert str(found["mask_token_id"]) == "156895 (from family table: llada2)"
    assert found["stop_token_ids"].value == (156892,)


def test_stable_diffcoder_has_one_block_length_and_sdar_many(tmp_path: Path) -> None:
    assert faults("stable_diffcoder", tmp_path / "a", block_size=...) == []
    assert faults("sdar_moe", tmp_path / "b", block_size=...) == ["block_length"]
    assert families()["stable_diffcoder"].block_length == 4
    assert families()["a2d_qwen3"].block_length is None


@pytest.mark.parametrize(("name", "is_shifted"), [("llada", False), ("dream", True)])
def test_bidirectional_families(name: str, is_shifted: bool, tmp_path: Path) -> None:
    """Without a block size in the file, texts are denoised in blocks of 32."""
    config = examine(Golden(name).write(tmp_path / "src", block_size=...)).description.config
    assert config is not None and config.is_bidirectional and config.block_length == 32
    assert config.shifts_predictions is is_shifted
    assert ModelConfig.from_json(config.to_json()) == config


def test_full_attention_belongs_to_these_families_alone(tmp_path: Path) -> None:
    full = {name for name, family in families().items() if family.attention == "full"}
    assert full == {"llada", "dream"}
    config = examine(Golden("llada2").write(tmp_path / "src")).description.config
    assert config is not None and not config.is_bidirectional and not config.shifts_predictions


def test_fast_dllm_v2_has_another_name_for_its_block() -> None:
    published = {**PUBLISHED["fast_dllm_v2"], "bd_size": 32}
    del published["block_size"]
    assert families()["fast_dllm_v2"].shifts_predictions
    for changes, expected in ({}, [32]), ({"block_size": 16}, []), ({"bd_size": 8}, [8]):
        findings = Findings("here")
        hf = SimpleNamespace(config={**published, **changes})
        found = block_length(families()["fast_dllm_v2"], hf, None, findings)  # type: ignore
        assert [found.value for found in [found] if found] == expected
        assert bool(findings.faults) is not bool(expected)


def test_layers_without_tensors_are_named_as_llada_names_them(tmp_path: Path) -> None:
    assert "config.json: n_layers" in faults("llada", tmp_path, n_layers=3)


def test_as_many_kv_heads_as_heads_is_spelled_zero() -> None:
    published = {**PUBLISHED["llada2"], "num_key_value_heads": 0}
    assert config_of(families()["llada2"], published).num_kv_heads == 6


def test_rotary_facts_in_one_table() -> None:
    published = {k: v for k, v in PUBLISHED["llada2"].items() if "rot" not in k and "rope" not in k}
    table = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.25}
    config = config_of(families()["llada2"], {**published, "rope_parameters": table})
    assert (config.rope_theta, config.rotary_fraction, config.rotary_dim) == (99.0, 0.25, 2)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("sdar_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("sdar_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("sdar_moe", {"norm_topk_prob": ...}, "norm_topk_prob"),
        ("sdar_moe", {"num_experts": ...}, "num_experts"),
        ("llada2", {"norm_head": True}, "norm_head"),
        ("llada2", {"use_qkv_bias": True}, "use_qkv_bias"),
        ("llada2", {"use_qk_norm": False}, "use_qk_norm"),
        ("llada2", {"score_function": "softmax"}, "score_function"),
        ("llada2", {"expert_capacity": 64}, "expert_capacity"),
        ("llada2", {"partial_rotary_factor": ...}, "partial_rotary_factor"),
        (
            "llada2",
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor",
        ),
        ("stable_diffcoder", {"attention_bias": True}, "attention_bias"),
        ("llada", {"weight_tying": True}, "weight_tying"),
        ("llada", {"block_type": "sequential"}, "block_type"),
        ("llada", {"embedding_size": 64}, "embedding_size"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias"),
        ("llada", {"mlp_hidden_size": ...}, "mlp_hidden_size"),
        ("llada", {"d_model": ...}, "d_model"),
        ("dream", {"use_mrope": True}, "use_mrope"),
        ("dream", {"attention_bias": False}, "attention_bias"),
        ("stable_diffcoder", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
    ],
)
def test_what_is_not_supported_is_refused(
    name: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    assert f"config.json: {field}" in faults(name, tmp_path, **changes)


def test_groups_that_cannot_be(tmp_path: Path) -> None:
    findings = examine(Golden("llada2").write(tmp_path / "src", n_group=5)).findings
    assert "router_groups=5" in str(findings.faults[0])
