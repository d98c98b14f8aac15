"""SDAR with experts (30B-A3B): a Qwen3-MoE body that denoises blocks in place."""

from __future__ import annotations

from typing import Any

from convert.families import llama_body
from convert.families.base import Family, KeyRule
from convert.fields import FieldReader

_GATE = KeyRule(
    llama_body.LAYER + "mlp.gate.weight", llama_body.OURS + "mlp.router.kernel", "transpose"
)


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields; all layers are mixtures, so `intermediate_size` has no tensor."""
    fields.allow("block_causal_prompt", True, None)
    fields.allow("decoder_sparse_step", 1, None)
    fields.allow("mlp_only_layers", [], None)
    fields.allow("shared_expert_intermediate_size", 0, None)
    return llama_body.read_sizes(fields) | {
        "head_dim": fields.integer("head_dim"),
        "qkv_bias": fields.flag("attention_bias", default=False),
        "qk_norm": True,
        "num_experts": fields.integer("num_experts"),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "expert_intermediate_size": fields.integer("moe_intermediate_size"),
        "normalise_expert_weights": fields.flag("norm_topk_prob"),
        "router_score": "softmax",
    }


FAMILY = Family(
    name="sdar_moe",
    architectures=("SDARMoeForCausalLM",),
    model_types=("sdar_moe",),
    keys=(*llama_body.KEYS, _GATE, *llama_body.EXPERT_KEYS),
    ignored_keys=llama_body.IGNORED_KEYS,
    parse_config=parse_config,
    mask_token_id=151669,
    mask_tokens=("<|MASK|>",),
    turn_end_tokens=("<|im_end|>",),
    stop_token_ids=(151645, 151643),
    reference="qwen3_moe",
    models=("SDAR-30B-A3B-Chat", "SDAR-30B-A3B-Sci"),
    checked=(
        "logits equal Qwen3MoeForCausalLM of transformers on tiny random weights",
        "conversion is bit for bit",
        "parameter count equals that of the published sizes",
    ),
)
