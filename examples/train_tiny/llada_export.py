"""Writes the tiny LLaDA's parameters as a checkpoint under the names of LLaDA-8B, in bfloat16."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from examples.train_tiny import model
from examples.train_tiny.export import BF16, write_folder
from examples.train_tiny.tokenizer import ASSETS as TINY_SDAR
from examples.train_tiny.tokenizer import EOS, MASK, PAD

ASSETS = TINY_SDAR.parent / "tiny-llada"

# Our stacked name: (name inside a LLaDA block, whether it is a transposed matrix).
LAYER_NAMES = {
    "q": ("q_proj", True),
    "k": ("k_proj", True),
    "v": ("v_proj", True),
    "o": ("attn_out", True),
    "gate": ("ff_proj", True),
    "up": ("up_proj", True),
    "down": ("ff_out", True),
    "norm_attention": ("attn_norm", False),
    "norm_mlp": ("ff_norm", False),
}
TOP_NAMES = {
    "embed": "model.transformer.wte.weight",
    "norm_final": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
}


def to_hf(params: dict) -> dict[str, np.ndarray]:
    """LLaDA's names and [out, in] layout, bfloat16."""
    tensors = {hf: np.asarray(params[name]) for name, hf in TOP_NAMES.items()}
    for name, (hf, transposed) in LAYER_NAMES.items():
        for index, array in enumerate(np.asarray(params[name])):
            key = f"model.transformer.blocks.{index}.{hf}.weight"
            tensors[key] = array.T if transposed else array
    return {name: np.ascontiguousarray(array.astype(BF16)) for name, array in tensors.items()}


def from_hf(path: Path, shape: model.Shape) -> dict:
    """Stacked bfloat16 parameters from a model.safetensors file."""
    tensors = load_file(path)
    params = {name: jnp.asarray(tensors[hf]) for name, hf in TOP_NAMES.items()}
    for name, (hf, transposed) in LAYER_NAMES.items():
        keys = [f"model.transformer.blocks.{i}.{hf}.weight" for i in range(shape.layers)]
        params[name] = jnp.stack(
            [jnp.asarray(tensors[key].T if transposed else tensors[key]) for key in keys]
        )
    return params


def config(shape: model.Shape) -> dict:
    """config.json of a LLaDA model."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "vocab_size": shape.vocabulary,
        "embedding_size": shape.vocabulary,
        "d_model": shape.hidden,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "n_layers": shape.layers,
        "mlp_hidden_size": shape.intermediate,
        "max_sequence_length": 4096,
        "rope": True,
        "rope_theta": shape.rope_theta,
        "rope_full_precision": True,
        "rms_norm_eps": shape.eps,
        "layer_norm_type": "rms",
        "block_type": "llama",
        "activation_type": "silu",
        "include_bias": False,
        "include_qkv_bias": False,
        "weight_tying": False,
        "scale_logits": False,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }


def write(params: dict, shape: model.Shape, folder: Path) -> None:
    """model.safetensors, configs and the tokenizer, which is that of `assets/tiny-sdar`."""
    write_folder(to_hf(params), config(shape), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY_SDAR / name, folder / name)
