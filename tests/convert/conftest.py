"""A tiny SDAR folder in which all sizes differ, and the ways to spoil it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
    "attention_bias": False,
    "eos_token_id": 57,
    "head_dim": 10,
    "hidden_act": "silu",
    "hidden_size": 24,
    "intermediate_size": 36,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "num_attention_heads": 6,
    "num_hidden_layers": 12,  # more than ten, so that names sort wrongly as strings
    "num_key_value_heads": 2,
    "rms_norm_eps": 3e-5,
    "rope_scaling": None,
    "rope_theta": 12345.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 64,
    "block_size": 4,
}
TOKENS = {f"t{i}": i for i in range(56)}
ADDED = [
    {"id": 56, "content": "<|endoftext|>"},
    {"id": 57, "content": "<|im_end|>"},
    {"id": 60, "content": "<|MASK|>"},
]
TOKENIZER: dict[str, Any] = {"model": {"type": "BPE", "vocab": TOKENS}, "added_tokens": ADDED}


def make_tensors(config: dict[str, Any], dtype: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a Qwen3 body, named as published checkpoints name them."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
        if config.get("attention_bias"):
            shapes |= {prefix + "self_attn.q_proj.bias": (q,)}
            shapes |= {prefix + f"self_attn.{name}_proj.bias": (kv,) for name in "kv"}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {
        key: ((len(shape) == 1) + rng.normal(size=shape) * 0.2).astype(dtype)
        for key, shape in shapes.items()
    }


@dataclasses.dataclass
class Source:
    """A folder under construction; `write` puts it on disk."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    tokenizer: dict[str, Any] | None
    generation_config: dict[str, Any] | None
    shards: int = 1

    def write(self) -> Path:
        """Writes all files and returns the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._json("config.json", self.config)
        if self.generation_config is not None:
            self._json("generation_config.json", self.generation_config)
        if self.tokenizer is not None:
            self._json("tokenizer.json", self.tokenizer)
            self._json("tokenizer_config.json", {"eos_token": "<|endoftext|>"})
        if self.shards == 1:
            save_file(self.tensors, self.folder / "model.safetensors")
            return self.folder
        weight_map: dict[str, str] = {}
        keys = list(self.tensors)
        for number in range(self.shards):
            name = f"model-{number + 1:05d}-of-{self.shards:05d}.safetensors"
            part = {key: self.tensors[key] for key in keys[number :: self.shards]}
            save_file(part, self.folder / name)
            weight_map |= dict.fromkeys(part, name)
        self._json("model.safetensors.index.json", {"weight_map": weight_map})
        return self.folder

    def _json(self, name: str, value: Any) -> None:
        (self.folder / name).write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def make_source(tmp_path: Path) -> Callable[..., Source]:
    """Makes a good source; keyword arguments change config fields (`...` removes one)."""

    def make(
        *, dtype: Any = ml_dtypes.bfloat16, shards: int = 1, name: str = "src", **changes: Any
    ) -> Source:
        config = {**CONFIG, "num_hidden_layers": 2, **changes}
        config = {key: value for key, value in config.items() if value is not ...}
        sizes = {**CONFIG, **config}
        return Source(
            folder=tmp_path / name,
            config=config,
            tensors=make_tensors(sizes, dtype),
            tokenizer=json.loads(json.dumps(TOKENIZER)),
            generation_config={"eos_token_id": [57, 56]},
            shards=shards,
        )

    return make
