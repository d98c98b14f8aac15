"""Writes a run's parameters as a Hugging Face checkpoint: bfloat16 safetensors and configs.

`python -m examples.train_tiny.export --run examples/train_tiny/runs/a [--to assets/tiny-sdar]`
"""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from examples.train_tiny import checkpoint, model, train
from examples.train_tiny.tokenizer import ASSETS, EOS, MASK, PAD

BF16 = jnp.bfloat16.dtype

# Our stacked name: (name inside a Hugging Face layer, whether it is a transposed matrix).
LAYER_NAMES = {
    "q": ("self_attn.q_proj", True),
    "k": ("self_attn.k_proj", True),
    "v": ("self_attn.v_proj", True),
    "o": ("self_attn.o_proj", True),
    "gate": ("mlp.gate_proj", True),
    "up": ("mlp.up_proj", True),
    "down": ("mlp.down_proj", True),
    "norm_attention": ("input_layernorm", False),
    "norm_mlp": ("post_attention_layernorm", False),
    "norm_q": ("self_attn.q_norm", False),
    "norm_k": ("self_attn.k_norm", False),
}
TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm_final": "model.norm.weight"}


def to_hf(params: dict) -> dict[str, np.ndarray]:
    """Hugging Face names and [out, in] layout, bfloat16."""
    tensors = {hf: np.asarray(params[name]) for name, hf in TOP_NAMES.items()}
    for name, (hf, transposed) in LAYER_NAMES.items():
        for index, array in enumerate(np.asarray(params[name])):
            tensors[f"model.layers.{index}.{hf}.weight"] = array.T if transposed else array
    return {name: np.ascontiguousarray(array.astype(BF16)) for name, array in tensors.items()}


def from_hf(path: Path, shape: model.Shape) -> dict:
    """Stacked bfloat16 parameters from a model.safetensors file."""
    tensors = load_file(path)
    params = {name: jnp.asarray(tensors[hf]) for name, hf in TOP_NAMES.items()}
    for name, (hf, transposed) in LAYER_NAMES.items():
        stack = [tensors[f"model.layers.{i}.{hf}.weight"] for i in range(shape.layers)]
        params[name] = jnp.stack([jnp.asarray(a.T if transposed else a) for a in stack])
    return params


def config(shape: model.Shape) -> dict:
    """config.json of an SDAR model."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": 16384,
        "max_window_layers": shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "block_size": 32,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }


def write(params: dict, shape: model.Shape, folder: Path) -> None:
    """model.safetensors, config.json and generation_config.json."""
    write_folder(to_hf(params), config(shape), folder)


def write_folder(tensors: dict, description: dict, folder: Path) -> None:
    """The same files, from tensors and a config that are in their final form."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"eos_token_id": [EOS], "pad_token_id": PAD, "mask_token_id": MASK}
    for name, content in (("config", description), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes a run as a Hugging Face checkpoint.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--to", type=Path, default=ASSETS)
    arguments = parser.parse_args()
    stored = checkpoint.load(arguments.run, train.initial_state())
    if stored is None:
        raise SystemExit(f"{arguments.run} holds no checkpoint; train a stage first")
    write(stored[0]["params"], train.SHAPE, arguments.to)
