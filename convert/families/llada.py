"""LLaDA-8B, LLaDA-1.5 and dParallel-LLaDA: a Llama body with full attention, under OLMo's names.

No block length belongs to these models. Texts are denoised in blocks of 32 from the end of the
prompt, as their scripts and Fast-dLLM do; any other length can be asked for.
"""

from __future__ import annotations

from typing import Any

from convert.families.base import Family, KeyRule
from convert.families.llama_body import OURS
from convert.fields import FieldReader

_BLOCK = "model.transformer.blocks.{n}."

KEYS = (
    KeyRule("model.transformer.wte.weight", "embed_tokens.embedding"),
    KeyRule(_BLOCK + "attn_norm.weight", OURS + "input_layernorm.scale"),
    *(
        KeyRule(_BLOCK + f"{name}.weight", OURS + f"attention.{name}.kernel", "transpose")
        for name in ("q_proj", "k_proj", "v_proj")
    ),
    KeyRule(_BLOCK + "attn_out.weight", OURS + "attention.o_proj.kernel", "transpose"),
    KeyRule(_BLOCK + "ff_norm.weight", OURS + "post_attention_layernorm.scale"),
    KeyRule(_BLOCK + "ff_proj.weight", OURS + "mlp.gate_proj.kernel", "transpose"),
    KeyRule(_BLOCK + "up_proj.weight", OURS + "mlp.up_proj.kernel", "transpose"),
    KeyRule(_BLOCK + "ff_out.weight", OURS + "mlp.down_proj.kernel", "transpose"),
    KeyRule("model.transformer.ln_f.weight", "norm.scale"),
    # The last name of an MLP's output projection, without a layer number.
    KeyRule("model.transformer.ff_out.weight", "lm_head.kernel", "transpose"),
)


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of an LLaDA `config.json`."""
    fields.allow("block_type", "llama")
    fields.allow("activation_type", "silu")
    fields.allow("layer_norm_type", "rms")
    fields.allow("include_bias", False)
    fields.allow("include_qkv_bias", False, None)
    fields.allow("bias_for_layer_norm", False, None)
    fields.allow("attention_layer_norm", False, None)
    fields.allow("input_emb_norm", False, None)
    fields.allow("scale_logits", False, None)
    fields.allow("weight_tying", False)
    fields.allow("rope", True, None)
    fields.allow("alibi", False, None)
    fields.allow("clip_qkv", None)
    hidden, heads = fields.integer("d_model"), fields.integer("n_heads")
    # One table serves as both; rows beyond the vocabulary would need a second number.
    fields.allow("embedding_size", fields.config.get("vocab_size"), None)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("mlp_hidden_size"),
        "num_layers": fields.integer("n_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("n_kv_heads"),
        "head_dim": hidden // heads if hidden and heads else None,
        "max_position_embeddings": fields.integer("max_sequence_length"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": fields.rope_theta(),
        "qk_norm": False,
        "qkv_bias": False,
    }


FAMILY = Family(
    name="llada",
    architectures=("LLaDAModelLM",),
    model_types=("llada",),
    keys=KEYS,
    parse_config=parse_config,
    mask_token_id=126336,
    mask_tokens=("<|mdm_mask|>",),
    turn_end_tokens=("<|eot_id|>",),
    stop_token_ids=(126081, 126348),
    block_length=32,
    attention="full",
    reference="llada",
    models=("LLaDA-8B-Base and -Instruct", "LLaDA-1.5", "dParallel-LLaDA-8B-instruct"),
    checked=(
        "logits equal LlamaForCausalLM of transformers without a mask, renamed, on tiny random "
        "weights",
        "conversion is bit for bit",
        "parameter count equals that of the published sizes",
    ),
    limits=(
        "a text ends at its first stop id; the published script denoises all tokens asked for",
        "the mask id is never emitted; the published script may write it",
        "classifier-free guidance and random remasking are not there",
    ),
)
