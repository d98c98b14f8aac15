"""Parameters of the reference models under our names."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from herald_jax.configs import ModelConfig


def params_from_hf(tensors: dict[str, np.ndarray], config: ModelConfig) -> Any:
    """Nested parameters from a Qwen state dict; a projection's kernel is its weight transposed."""

    def array(name: str) -> Any:
        return jnp.asarray(tensors[name])

    def linear(name: str) -> Any:
        found = {"kernel": array(f"{name}.weight").T}
        if f"{name}.bias" in tensors and not name.endswith("o_proj"):
            found["bias"] = array(f"{name}.bias")
        return found

    def layer(index: int) -> Any:
        name = f"model.layers.{index}"
        attention = {f"{p}_proj": linear(f"{name}.self_attn.{p}_proj") for p in "qkvo"}
        if config.qk_norm:
            for p in "qk":
                attention[f"{p}_norm"] = {"scale": array(f"{name}.self_attn.{p}_norm.weight")}
        return {
            "input_layernorm": {"scale": array(f"{name}.input_layernorm.weight")},
            "attention": attention,
            "post_attention_layernorm": {"scale": array(f"{name}.post_attention_layernorm.weight")},
            "mlp": {f"{p}_proj": linear(f"{name}.mlp.{p}_proj") for p in ("gate", "up", "down")},
        }

    params = {
        "embed_tokens": {"embedding": array("model.embed_tokens.weight")},
        "layers": {index: layer(index) for index in range(config.num_layers)},
        "norm": {"scale": array("model.norm.weight")},
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = linear("lm_head")
    return params
