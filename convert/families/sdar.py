"""SDAR (dense) and TraDo: a Qwen3 body that denoises blocks in place."""

from __future__ import annotations

from typing import Any

from convert.families.base import Family, KeyRule
from convert.fields import FieldReader

_LAYER, _OURS = "model.layers.{n}.", "layers.{n}."
_ATTENTION = _LAYER + "self_attn."

KEYS = (
    KeyRule("model.embed_tokens.weight", "embed_tokens.embedding"),
    KeyRule(_LAYER + "input_layernorm.weight", _OURS + "input_layernorm.scale"),
    *(
        KeyRule(_ATTENTION + f"{name}.weight", _OURS + f"attention.{name}.kernel", "transpose")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    *(
        KeyRule(_ATTENTION + f"{name}.bias", _OURS + f"attention.{name}.bias")
        for name in ("q_proj", "k_proj", "v_proj")
    ),
    KeyRule(_ATTENTION + "q_norm.weight", _OURS + "attention.q_norm.scale"),
    KeyRule(_ATTENTION + "k_norm.weight", _OURS + "attention.k_norm.scale"),
    KeyRule(_LAYER + "post_attention_layernorm.weight", _OURS + "post_attention_layernorm.scale"),
    *(
        KeyRule(_LAYER + f"mlp.{name}.weight", _OURS + f"mlp.{name}.kernel", "transpose")
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
    KeyRule("model.norm.weight", "norm.scale"),
    KeyRule("lm_head.weight", "lm_head.kernel", "transpose"),
)


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of an SDAR `config.json`.

    The class defaults of the published code differ from the published models, so a size that
    the file lacks is a fault and never filled in.
    """
    fields.allow("hidden_act", "silu")
    fields.allow("block_causal_prompt", True, None)
    fields.allow("num_experts", 0, None)
    fields.allow("partial_rotary_factor", 1, None)
    fields.refuse_sliding_window()
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": fields.integer("num_attention_heads"),
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "head_dim": fields.integer("head_dim"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": fields.rope_theta(),
        "qkv_bias": fields.flag("attention_bias", default=False),
        "qk_norm": True,
    }


FAMILY = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    keys=KEYS,
    ignored_keys=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    parse_config=parse_config,
    mask_token_id=151669,
    mask_tokens=("<|MASK|>",),
    turn_end_tokens=("<|im_end|>",),
    stop_token_ids=(151645, 151643),
    reference="qwen3",
)
