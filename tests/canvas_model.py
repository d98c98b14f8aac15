"""A tiny canvas model in which every size differs, and its published form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.families import families
from herald_jax.checkpoint import dotted_leaves
from herald_jax.configs import NO_MASK_TOKEN, CanvasBody, ModelConfig
from herald_jax.models import abstract_params

TEXT: dict[str, Any] = {
    **{"vocab_size": 53, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7},
    **{"num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 9},
    **{"max_position_embeddings": 512, "rms_norm_eps": 3e-3, "final_logit_softcapping": 5.0},
    **{"use_bidirectional_attention": "vision", "hidden_activation": "gelu_pytorch_tanh"},
    "layer_types": ["sliding_attention"] + ["full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1234.5},
        "full_attention": {
            **{"rope_type": "proportional", "rope_theta": 4321.0},
            "partial_rotary_factor": 0.4,
        },
    },
}
OLD_SPELLING = {"global_head_dim": 12, "num_global_key_value_heads": 3}
NEW_SPELLING = {
    "per_layer_config": {str(n): {"head_dim": 12, "num_key_value_heads": 3} for n in (1, 2)}
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": 5,
    "eos_token_id": [1, 6],
    "text_config": {**TEXT, **OLD_SPELLING},
}


def tiny_config(**changes: Any) -> ModelConfig:
    """The config that a conversion of `PUBLISHED` gives; keyword arguments change fields."""
    body = CanvasBody(
        window=7,
        full_layers=(1, 2),
        full_num_kv_heads=3,
        full_head_dim=12,
        full_rope_theta=4321.0,
        full_rotary_fraction=0.4,
        logit_cap=5.0,
    )
    fields: dict[str, Any] = {
        **{"family": "diffusion_gemma", "vocab_size": 53, "hidden_size": 20, "num_layers": 3},
        **{"intermediate_size": 28, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8},
        **{"block_length": 5, "mask_token_id": NO_MASK_TOKEN, "attention": "canvas"},
        **{"stop_token_ids": (1, 6), "rope_theta": 1234.5, "rms_norm_eps": 3e-3},
        **{"max_position_embeddings": 512, "tie_word_embeddings": True, "num_experts": 7},
        **{"experts_per_token": 3, "expert_intermediate_size": 9, "canvas": body},
    }
    return ModelConfig(**{**fields, **changes})


def published_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The published tensors, by the key table read backwards."""
    family = families()["diffusion_gemma"]
    shapes: dict[str, tuple[int, ...]] = {}
    for target, leaf in dotted_leaves(abstract_params(config)).items():
        source, rule = family.rule_for(target)
        shape = leaf.shape
        if rule.transform == "transpose":
            shape = (*shape[:-2], shape[-1], shape[-2])
        if rule.rows is not None:
            shape = (*shape[:-2], rule.rows(config)[2], shape[-1])
        shapes[source] = shape
    return shapes


def random_tensors(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Published tensors with random values, gains around one, and a tensor of a vision tower."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for key, shape in published_shapes(config).items():
        noise = rng.normal(size=shape)
        is_gain = len(shape) == 1
        values = 1 + 0.3 * noise if is_gain else 1.5 * noise * shape[-1] ** -0.5
        found[key] = values.astype(np.float32)
    found["model.encoder.vision_tower.patch_embedder.input_proj.weight"] = np.ones((3, 4), "f4")
    return found


def tiny_params(config: ModelConfig, seed: int) -> Any:
    """Random parameters with which a canvas, once it is sure, stays as it is and can end early."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.normal(size=leaf.shape)
        values = 1 + 0.2 * noise if len(leaf.shape) == 1 else noise * leaf.shape[-2] ** -0.5
        return jnp.asarray(values, jnp.float32)

    params = jax.tree.map(draw, abstract_params(config))
    params["norm"]["scale"] = params["norm"]["scale"] * 5
    for layer in params["layers"].values():  # a small say, so that ids mostly predict themselves
        for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
            layer[name]["scale"] = layer[name]["scale"] * 0.25
    return params
