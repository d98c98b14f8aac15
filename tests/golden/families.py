"""Tiny published folders of the families, and the logits of their references.

Run at the repository root with the extra `parity` installed, after a change to the configs here:

    PYTHONPATH=. python -m tests.golden.families [NAME ...]

It writes `family_*.npz`: the published config (JSON), tensors under their published names
(`tensor:NAME`), tokens [2, n] whose length is no multiple of the block, and fp32 logits. All
sizes differ and nothing is at its default; gains and biases are random, expert biases mostly
negative. The tensors come from what `save_pretrained` of transformers writes, so the names and
the order of experts are not ours.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).parent
BLOCK = 5

_SIZES: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 20,
    "intermediate_size": 28,
    "max_position_embeddings": 64,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 3e-3,
    "rope_theta": 1234.5,
    "tie_word_embeddings": False,
    "vocab_size": 53,
    "mask_token_id": 52,
    "block_size": BLOCK,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "sdar_moe": {
        **_SIZES,
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "sdar_moe",
        "head_dim": 8,
        "attention_bias": False,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 9,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "stable_diffcoder": {
        **_SIZES,
        "architectures": ["StableDiffcoderForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 4,
        "head_dim": 6,
        "attention_bias": False,
    },
    "a2d_qwen3": {
        **_SIZES,
        "architectures": ["A2DQwen3LMHeadModel"],
        "model_type": "a2d-qwen3",
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "a2d_qwen2": {
        **_SIZES,
        "architectures": ["A2DQwen2LMHeadModel"],
        "model_type": "a2d-qwen2",
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    "a2d_llama": {
        **_SIZES,
        "architectures": ["A2DLlamaLMHeadModel"],
        "model_type": "a2d-llama",
        "hidden_size": 24,
        "head_dim": 8,
    },
    "dream": {
        **_SIZES,
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "use_mrope": False,
    },
    "fast_dllm_v2": {
        **_SIZES,
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    "llada": {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "block_size": BLOCK,
        "block_type": "llama",
        "d_model": 24,
        "embedding_size": 53,
        "include_bias": False,
        "include_qkv_bias": False,
        "layer_norm_type": "rms",
        "mask_token_id": 52,
        "max_sequence_length": 64,
        "mlp_hidden_size": 28,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "rms_norm_eps": 3e-3,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 1234.5,
        "scale_logits": False,
        "vocab_size": 53,
        "weight_tying": False,
    },
    "llada2": {
        **_SIZES,
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "head_dim": 8,
        "num_hidden_layers": 3,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 9,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "use_qkv_bias": False,
        "use_bias": False,
        "norm_head": False,
    },
}
WRITTEN = ("sdar_moe", "stable_diffcoder", "llada2", "llada", "dream")
"""Families with a file here; the bodies of the others are those of `make_qwen3.py`."""

_LLADA_NAMES = (
    ("lm_head.", "model.transformer.ff_out."),
    ("model.embed_tokens.", "model.transformer.wte."),
    ("model.norm.", "model.transformer.ln_f."),
    ("model.layers.", "model.transformer.blocks."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ff_norm."),
    (".self_attn.o_proj.", ".attn_out."),
    (".self_attn.", "."),
    (".mlp.gate_proj.", ".ff_proj."),
    (".mlp.up_proj.", ".up_proj."),
    (".mlp.down_proj.", ".ff_out."),
)
_LLADA2_NAMES = (
    ("model.embed_tokens.", "model.word_embeddings."),
    (".self_attn.q_norm.", ".attention.query_layernorm."),
    (".self_attn.k_norm.", ".attention.key_layernorm."),
    (".self_attn.o_proj.", ".attention.dense."),
    (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
)


def reference_model(name: str, published: dict[str, Any], seed: int) -> Any:
    """The family's reference with every parameter and bias random."""
    import torch

    from convert.families import families
    from convert.references import build

    reference = families()[name].reference
    assert reference is not None
    model = build(reference, published)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if key.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * noise - 0.4)
            elif tensor.ndim == 1:
                tensor.copy_(0.3 * noise + (0 if key.endswith("bias") else 1))
            else:
                tensor.copy_(noise * 1.5 * tensor.shape[-1] ** -0.5)
        if published.get("tie_word_embeddings"):
            model.tie_weights()
    return model


def saved_tensors(model: Any) -> dict[str, np.ndarray]:
    """What transformers saves."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def published_tensors(name: str, model: Any) -> dict[str, np.ndarray]:
    """What transformers saves, under the names of the family."""
    saved = saved_tensors(model)
    if name == "llada":
        return {_renamed(key, _LLADA_NAMES): array for key, array in saved.items()}
    if name != "llada2":
        return saved
    found: dict[str, np.ndarray] = {}
    for key, array in saved.items():
        if key.endswith(".self_attn.q_proj.weight"):
            prefix = key.removesuffix(".self_attn.q_proj.weight")
            parts = [saved[f"{prefix}.self_attn.{p}_proj.weight"] for p in "qkv"]
            found[f"{prefix}.attention.query_key_value.weight"] = np.concatenate(parts)
        elif ".self_attn.k_proj" not in key and ".self_attn.v_proj" not in key:
            found[_renamed(key, _LLADA2_NAMES)] = array
    return found


def _renamed(key: str, names: tuple[tuple[str, str], ...]) -> str:
    for old, new in names:
        key = key.replace(old, new)
    return key


def write_folder(
    folder: Path, published: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1
) -> Path:
    """A published folder; with several shards, neighbouring tensors go to different ones."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published))
    keys = list(tensors)
    for number in range(shards):
        part = {key: np.ascontiguousarray(tensors[key]) for key in keys[number::shards]}
        end = f"-{number + 1:05d}-of-{shards:05d}" if shards > 1 else ""
        save_file(part, folder / f"model{end}.safetensors")
    return folder


def main() -> None:
    """Writes one file for every family, or for those named on the command line."""
    from convert.families import families
    from convert.references import block_causal_logits

    for seed, name in enumerate(WRITTEN):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        published = PUBLISHED[name]
        model = reference_model(name, published, seed)
        tokens = np.random.default_rng(seed).integers(0, published["vocab_size"], (2, 18))
        block = tokens.shape[1] if families()[name].attention == "full" else BLOCK
        np.savez_compressed(
            FOLDER / f"family_{name}.npz",
            config=np.array(json.dumps(published)),
            tokens=tokens,
            logits=block_causal_logits(model, tokens, block),
            **{f"tensor:{k}": v for k, v in published_tensors(name, model).items()},
        )


if __name__ == "__main__":
    main()
