"""What the Llama, Qwen2 and Qwen3 bodies publish under the same names: keys and sizes."""

from __future__ import annotations

from typing import Any

from convert.families.base import KeyRule
from convert.fields import FieldReader

LAYER, OURS = "model.layers.{n}.", "layers.{n}."
_ATTENTION = LAYER + "self_attn."
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

KEYS = (
    KeyRule("model.embed_tokens.weight", "embed_tokens.embedding"),
    KeyRule(LAYER + "input_layernorm.weight", OURS + "input_layernorm.scale"),
    *(
        KeyRule(_ATTENTION + f"{name}.weight", OURS + f"attention.{name}.kernel", "transpose")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    *(
        KeyRule(_ATTENTION + f"{name}.bias", OURS + f"attention.{name}.bias")
        for name in ("q_proj", "k_proj", "v_proj")
    ),
    KeyRule(_ATTENTION + "q_norm.weight", OURS + "attention.q_norm.scale"),
    KeyRule(_ATTENTION + "k_norm.weight", OURS + "attention.k_norm.scale"),
    KeyRule(LAYER + "post_attention_layernorm.weight", OURS + "post_attention_layernorm.scale"),
    *(
        KeyRule(LAYER + f"mlp.{name}.weight", OURS + f"mlp.{name}.kernel", "transpose")
        for name in PROJECTIONS
    ),
    KeyRule("model.norm.weight", "norm.scale"),
    KeyRule("lm_head.weight", "lm_head.kernel", "transpose"),
)
"""Options of the model decide which of these there are (biases, per-head norms, the head)."""

EXPERT_KEYS = tuple(
    KeyRule(LAYER + f"mlp.experts.{{e}}.{name}.weight", OURS + f"mlp.experts.{name}", "transpose")
    for name in PROJECTIONS
)
"""One tensor for each projection of each expert, stacked here."""

IGNORED_KEYS = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


def read_sizes(fields: FieldReader) -> dict[str, Any]:
    """The sizes, epsilon and rotary base, after refusing what the decoder has not.

    Class defaults of published code often differ from the published models, so a size that the
    file lacks is a fault and never filled in.
    """
    fields.allow("hidden_act", "silu")
    fields.allow("partial_rotary_factor", 1, None)
    fields.refuse_sliding_window()
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": fields.integer("num_attention_heads"),
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": fields.rope_theta(),
    }


def read_head_dim(fields: FieldReader) -> int | None:
    """The head size, which Llama and Qwen2 configs leave out where it is hidden / heads."""
    if fields.config.get("head_dim") is not None:
        return fields.integer("head_dim")
    hidden, heads = (fields.config.get(n) for n in ("hidden_size", "num_attention_heads"))
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0:
        return hidden // heads
    return fields.integer("head_dim")
