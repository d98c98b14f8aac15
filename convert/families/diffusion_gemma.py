"""DiffusionGemma, its text part: a Gemma 4 body that is run as an encoder and as a denoiser.

Both runs share all tensors but one scalar a layer, so the table has two lines for it: with one
set only, one of the runs would silently be wrong. Layers without a window have heads of their own
number and size, which configs spell in two ways, and no value projection.
"""

from __future__ import annotations

from typing import Any

from convert.families.base import Family, KeyRule
from convert.families.llama_body import PROJECTIONS
from convert.fields import FieldReader
from herald_jax.configs import CanvasBody, ModelConfig

_LAYER, _OURS = "model.decoder.layers.{n}.", "layers.{n}."
_CONDITION = "model.decoder.self_conditioning."
_ENCODER_LAYER = "model.encoder.language_model.layers.{n}."


def _gate_rows(config: ModelConfig) -> tuple[int, int, int]:
    return 0, config.expert_intermediate_size, 2 * config.expert_intermediate_size


def _up_rows(config: ModelConfig) -> tuple[int, int, int]:
    inner = config.expert_intermediate_size
    return inner, 2 * inner, 2 * inner


_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm_1": "post_mlp_layernorm",
    "pre_feedforward_layernorm_2": "pre_experts_layernorm",
    "post_feedforward_layernorm_2": "post_experts_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
}

KEYS = (
    KeyRule("model.decoder.embed_tokens.weight", "embed_tokens.embedding"),
    *(
        KeyRule(_LAYER + f"{theirs}.weight", _OURS + f"{ours}.scale")
        for theirs, ours in _NORMS.items()
    ),
    *(
        KeyRule(
            _LAYER + f"self_attn.{name}.weight", _OURS + f"attention.{name}.kernel", "transpose"
        )
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    KeyRule(_LAYER + "self_attn.q_norm.weight", _OURS + "attention.q_norm.scale"),
    KeyRule(_LAYER + "self_attn.k_norm.weight", _OURS + "attention.k_norm.scale"),
    *(
        KeyRule(_LAYER + f"mlp.{name}.weight", _OURS + f"mlp.{name}.kernel", "transpose")
        for name in PROJECTIONS
    ),
    KeyRule(_LAYER + "router.proj.weight", _OURS + "router.kernel", "transpose"),
    KeyRule(_LAYER + "router.scale", _OURS + "router.input_scale"),
    KeyRule(_LAYER + "router.per_expert_scale", _OURS + "router.expert_scale"),
    KeyRule(_LAYER + "experts.gate_up_proj", _OURS + "experts.gate_proj", "transpose", _gate_rows),
    KeyRule(_LAYER + "experts.gate_up_proj", _OURS + "experts.up_proj", "transpose", _up_rows),
    KeyRule(_LAYER + "experts.down_proj", _OURS + "experts.down_proj", "transpose"),
    KeyRule(_LAYER + "layer_scalar", _OURS + "denoiser_scalar"),
    KeyRule(_ENCODER_LAYER + "layer_scalar", _OURS + "encoder_scalar"),
    KeyRule("model.decoder.norm.weight", "norm.scale"),
    KeyRule(_CONDITION + "pre_norm.weight", "self_conditioning.pre_norm.scale"),
    *(
        KeyRule(_CONDITION + f"{name}.weight", f"self_conditioning.mlp.{name}.kernel", "transpose")
        for name in PROJECTIONS
    ),
    KeyRule("lm_head.weight", "lm_head.kernel", "transpose"),
)


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of a DiffusionGemma `config.json`, which has them in `text_config`."""
    text = fields.section("text_config")
    text.allow("hidden_activation", "gelu_pytorch_tanh", None)
    text.allow("attention_bias", False, None)
    text.allow("use_bidirectional_attention", "vision", None)
    rope = text.section("rope_parameters")
    near, far = rope.section("sliding_attention"), rope.section("full_attention")
    near.allow("rope_type", "default")
    near.allow("partial_rotary_factor", 1, None)
    far.allow("rope_type", "proportional")
    far.allow("factor", 1, None)
    layers = text.integer("num_hidden_layers")
    kinds = text.config.get("layer_types")
    known = ("sliding_attention", "full_attention")
    # A config class of transformers turns the last layer into a full one, whatever the file says.
    is_usable = isinstance(kinds, list) and len(kinds) == layers and kinds[-1:] == [known[1]]
    if not is_usable or any(kind not in known for kind in kinds or ()):
        wanted = f"{known[0]} or {known[1]} for each layer, and {known[1]} for the last"
        text.misfit("layer_types", kinds, wanted)
        full = None
    else:
        full = tuple(n for n, kind in enumerate(kinds or ()) if kind == known[1])
    kv_heads = text.integer("num_key_value_heads")
    full_dim, full_kv_heads = _full_heads(text, full, kv_heads)
    body = {
        "window": text.integer("sliding_window", minimum=2),
        "full_layers": full,
        "full_num_kv_heads": full_kv_heads,
        "full_head_dim": full_dim,
        "full_rope_theta": far.number("rope_theta"),
        "full_rotary_fraction": far.number("partial_rotary_factor"),
        "logit_cap": text.number("final_logit_softcapping"),
    }
    return {
        "vocab_size": text.integer("vocab_size"),
        "hidden_size": text.integer("hidden_size"),
        "intermediate_size": text.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": text.integer("num_attention_heads"),
        "num_kv_heads": kv_heads,
        "head_dim": text.integer("head_dim"),
        "max_position_embeddings": text.integer("max_position_embeddings"),
        "rms_norm_eps": text.number("rms_norm_eps"),
        "rope_theta": near.number("rope_theta"),
        "num_experts": text.integer("num_experts"),
        "experts_per_token": text.integer("top_k_experts"),
        "expert_intermediate_size": text.integer("moe_intermediate_size"),
        "canvas": None if None in body.values() else CanvasBody(**body),
    }


def _full_heads(
    text: FieldReader, full: tuple[int, ...] | None, kv_heads: int | None
) -> tuple[int | None, int | None]:
    """Head size and key/value heads of the layers without a window, in either spelling.

    Older files have one field for each; newer ones a table from layer to its differences.
    """
    table = text.config.get("per_layer_config")
    if table is None:
        dim = text.integer("global_head_dim")
        if text.config.get("num_global_key_value_heads") is None:
            return dim, kv_heads
        return dim, text.integer("num_global_key_value_heads")
    per_layer = text.section("per_layer_config")
    if full is None:
        return None, None
    entries = [per_layer.config.get(str(layer)) for layer in full]
    names = {str(layer) for layer in full}
    if set(per_layer.config) != names or any(entry != entries[0] for entry in entries):
        wanted = f"equal entries for the full layers {sorted(names, key=int)} and no others"
        text.misfit("per_layer_config", table, wanted)
        return None, None
    one = per_layer.section(str(full[0]))
    for name, other in (("head_dim", "global_head_dim"),):
        if text.config.get(other) not in (None, one.config.get(name)):
            text.misfit(other, text.config[other], f"absent, or {name} of per_layer_config")
    if one.config.get("num_key_value_heads") is None:
        return one.integer("head_dim"), kv_heads
    return one.integer("head_dim"), one.integer("num_key_value_heads")


FAMILY = Family(
    name="diffusion_gemma",
    architectures=("DiffusionGemmaForBlockDiffusion",),
    model_types=("diffusion_gemma",),
    keys=KEYS,
    left_out={
        r"model\.encoder\.(vision_tower|embed_vision)\..*": "images are not supported",
    },
    parse_config=parse_config,
    turn_end_tokens=("<turn|>", "<end_of_turn>"),
    stop_token_ids=(1, 50, 106),
    block_length=256,
    attention="canvas",
    always_tied=True,
    reference="diffusion_gemma",
    models=("DiffusionGemma-26B-A4B-it, text only",),
    checked=(
        "logits of encoder and denoiser equal DiffusionGemmaForBlockDiffusion of transformers on "
        "tiny random weights",
        "conversion is bit for bit",
        "tokens equal those of a plain loop in NumPy with the same random numbers",
    ),
    limits=(
        "decoded by herald_jax.generate_canvas only; LLM and the server refuse it",
        "random numbers are our own; drawn tokens are not those of the published loop",
    ),
)
