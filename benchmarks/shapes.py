"""Sizes of published models, for runs with random weights."""

from __future__ import annotations

from herald_jax.configs import ModelConfig

MODELS: dict[str, ModelConfig] = {
    # SDAR-8B-Chat in its block-32 variant.
    "sdar-8b": ModelConfig(
        family="sdar",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_length=32,
        mask_token_id=151669,
        stop_token_ids=(151643, 151645),
        tokenizer_vocab_size=151670,
    ),
    # Every dimension small and different: to try a benchmark on a CPU.
    "toy": ModelConfig(
        family="toy",
        vocab_size=509,
        hidden_size=96,
        intermediate_size=160,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        block_length=16,
        mask_token_id=508,
    ),
}
