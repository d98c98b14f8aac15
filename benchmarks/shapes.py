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
    # The shapes of assets/tiny-sdar, for contexts longer than it was trained on.
    "tiny": ModelConfig(
        family="sdar",
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=448,
        num_layers=8,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        block_length=32,
        mask_token_id=2,
        stop_token_ids=(1,),
        tie_word_embeddings=True,
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

BIDIRECTIONAL: dict[str, ModelConfig] = {
    # LLaDA-8B and LLaDA-1.5.
    "llada-8b": ModelConfig(
        family="llada",
        vocab_size=126464,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        block_length=32,
        mask_token_id=126336,
        attention="full",
        stop_token_ids=(126081, 126348),
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        qk_norm=False,
    ),
    "toy-full": ModelConfig(
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
        attention="full",
    ),
}
"""Models with full attention; `toy-full` is for a CPU."""
