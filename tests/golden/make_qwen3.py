"""Writes `qwen3_*.npz`: tiny random Qwen models, tokens, and the logits of transformers.

Run at the repository root with the extra `parity` installed, after a change to the configs here:

    PYTHONPATH=. python -m tests.golden.make_qwen3

Each file holds the model's config (JSON), its tensors under their names on disk (`param:NAME`),
tokens [2, n] whose length is no multiple of the block, and fp32 logits [2, n, V] of an eager
forward under an additive 4-D block-causal mask. All sizes differ, norm gains and biases are random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from herald_jax.configs import ModelConfig

FOLDER = Path(__file__).parent

SIZES: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 53,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "block_length": 4,
    "mask_token_id": 52,
    "rope_theta": 1234.5,
    "rms_norm_eps": 3e-3,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3_untied": ModelConfig(**SIZES),
    "qwen3_tied": ModelConfig(
        **SIZES
        | {"vocab_size": 47, "mask_token_id": 3, "num_kv_heads": 3, "block_length": 5}
        | {"tie_word_embeddings": True, "qkv_bias": True}
    ),
    "qwen2_bias": ModelConfig(
        **SIZES
        | {"num_heads": 4, "num_kv_heads": 1, "head_dim": 10, "hidden_size": 40}
        | {"intermediate_size": 18, "vocab_size": 31, "mask_token_id": 30, "block_length": 3}
        | {"qk_norm": False, "qkv_bias": True}
    ),
}


def reference_model(config: ModelConfig, seed: int) -> Any:
    """The transformers model of a config, with every parameter random."""
    import torch
    import transformers

    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "attn_implementation": "eager",
    }
    if config.qk_norm:
        made = transformers.Qwen3Config(
            **shared, head_dim=config.head_dim, attention_bias=config.qkv_bias
        )
        model = transformers.Qwen3ForCausalLM(made)
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shared))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("o_proj.bias"):
                parameter.zero_()  # comes with the q, k and v biases, but no such model has it
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)
    return model.eval()


def reference_logits(model: Any, tokens: np.ndarray, block_length: int) -> np.ndarray:
    """Logits [R, n, V] of whole texts under the block-causal mask."""
    import torch

    count = tokens.shape[1]
    block = torch.arange(count) // block_length
    mask = torch.zeros(count, count)
    mask.masked_fill_(block[None, :] > block[:, None], torch.finfo(torch.float32).min)
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens),
            attention_mask=mask.expand(len(tokens), 1, count, count),
            use_cache=False,
        )
    return out.logits.numpy()


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """The state dict as NumPy arrays."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def main() -> None:
    """Writes one file for every config."""
    for seed, (name, config) in enumerate(CONFIGS.items()):
        model = reference_model(config, seed)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (2, 19))
        np.savez_compressed(
            FOLDER / f"{name}.npz",
            config=np.array(config.to_json()),
            tokens=tokens,
            logits=reference_logits(model, tokens, config.block_length),
            **{f"param:{key}": value for key, value in tensors_of(model).items()},
        )


if __name__ == "__main__":
    main()
