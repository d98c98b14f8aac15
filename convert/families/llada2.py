"""LLaDA2.0 and 2.1, mini and flash: sigmoid-routed experts in groups, fused projections.

The published config leaves out the mask id, the stop ids, the block length and `use_qk_norm`;
all published members agree on them. LLaDA2.1's editing of committed tokens is a matter of
decoding; its network and its keys are those of 2.0.
"""

from __future__ import annotations

from typing import Any

from convert.families import llama_body
from convert.families.base import Family, KeyRule
from convert.fields import FieldReader
from herald_jax.configs import ModelConfig

_LAYER, _OURS = llama_body.LAYER, llama_body.OURS
_FUSED = _LAYER + "attention.query_key_value.weight"


def _spans(config: ModelConfig) -> tuple[int, int, int]:
    """Row after the queries, after the keys, and of the whole: all heads of one kind together."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return q, q + kv, q + 2 * kv


def _query_rows(config: ModelConfig) -> tuple[int, int, int]:
    queries, _, total = _spans(config)
    return 0, queries, total


def _key_rows(config: ModelConfig) -> tuple[int, int, int]:
    queries, keys, total = _spans(config)
    return queries, keys, total


def _value_rows(config: ModelConfig) -> tuple[int, int, int]:
    _, keys, total = _spans(config)
    return keys, total, total


_ROWS = {"q_proj": _query_rows, "k_proj": _key_rows, "v_proj": _value_rows}

KEYS = (
    KeyRule("model.word_embeddings.weight", "embed_tokens.embedding"),
    KeyRule(_LAYER + "input_layernorm.weight", _OURS + "input_layernorm.scale"),
    *(
        KeyRule(_FUSED, _OURS + f"attention.{name}.kernel", "transpose", rows)
        for name, rows in _ROWS.items()
    ),
    KeyRule(_LAYER + "attention.dense.weight", _OURS + "attention.o_proj.kernel", "transpose"),
    KeyRule(_LAYER + "attention.query_layernorm.weight", _OURS + "attention.q_norm.scale"),
    KeyRule(_LAYER + "attention.key_layernorm.weight", _OURS + "attention.k_norm.scale"),
    KeyRule(_LAYER + "post_attention_layernorm.weight", _OURS + "post_attention_layernorm.scale"),
    *(
        KeyRule(_LAYER + f"mlp.{name}.weight", _OURS + f"mlp.{name}.kernel", "transpose")
        for name in llama_body.PROJECTIONS
    ),
    KeyRule(_LAYER + "mlp.gate.weight", _OURS + "mlp.router.kernel", "transpose"),
    KeyRule(_LAYER + "mlp.gate.expert_bias", _OURS + "mlp.router.selection_bias"),
    *llama_body.EXPERT_KEYS,
    # Trainers write the experts of a layer as one tensor, without the suffix.
    *(
        KeyRule(_LAYER + f"mlp.experts.{name}", _OURS + f"mlp.experts.{name}", "transpose")
        for name in llama_body.PROJECTIONS
    ),
    *(
        KeyRule(
            _LAYER + f"mlp.shared_experts.{name}.weight",
            _OURS + f"mlp.shared_expert.{name}.kernel",
            "transpose",
        )
        for name in llama_body.PROJECTIONS
    ),
    KeyRule("model.norm.weight", "norm.scale"),
    KeyRule("lm_head.weight", "lm_head.kernel", "transpose"),
)


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of an LLaDA2 `config.json`."""
    fields.allow("hidden_act", "silu", None)
    fields.allow("use_qkv_bias", False, None)
    fields.allow("use_bias", False, None)
    fields.allow("use_qk_norm", True, None)
    fields.allow("norm_head", False, None)
    fields.allow("score_function", "sigmoid", None)
    fields.allow("router_dtype", "fp32", "float32", None)
    fields.allow("expert_capacity", None)  # LLaDA2.2 routes whole blocks
    fields.refuse_sliding_window()
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", minimum=0)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads == 0 else kv_heads,  # 0 means as many as heads
        "head_dim": fields.integer("head_dim"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": fields.rope_theta(is_partial=True),
        "rotary_fraction": fields.rotary_fraction(),
        "qk_norm": True,
        "qkv_bias": False,
        "num_experts": fields.integer("num_experts"),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "expert_intermediate_size": fields.integer("moe_intermediate_size"),
        "num_shared_experts": fields.integer("num_shared_experts", minimum=0),
        "first_dense_layers": fields.integer("first_k_dense_replace", minimum=0),
        "router_score": "sigmoid",
        "router_bias": fields.flag("moe_router_enable_expert_bias"),
        "router_groups": fields.integer("n_group"),
        "router_top_groups": fields.integer("topk_group"),
        "normalise_expert_weights": fields.flag("norm_topk_prob"),
        "routed_scale": fields.number("routed_scaling_factor"),
    }


FAMILY = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    model_types=("llada2_moe", "llada2_moe_veomni", "llada21_moe"),
    keys=KEYS,
    ignored_keys=(r"model\.(layers\.\d+\.attention\.)?rotary_emb\.inv_freq",),
    parse_config=parse_config,
    mask_token_id=156895,
    mask_tokens=("<|mask|>",),
    turn_end_tokens=("<|role_end|>",),
    stop_token_ids=(156892,),
    block_length=32,
    reference="glm4_moe",
    models=("LLaDA2.0-mini and -flash (also -preview and -CAP)", "LLaDA2.1-mini and -flash"),
    checked=(
        "logits equal Glm4MoeForCausalLM of transformers, renamed, on tiny random weights",
        "conversion is bit for bit",
        "parameter counts equal those of the published sizes",
        "editing steps equal those of BlockRefinementScheduler of diffusers on random logits",
    ),
    limits=(
        "LLaDA2.1's editing of committed tokens is in herald_jax.generate(editing=...); LLM and "
        "the server decode 2.1 as 2.0",
    ),
)
