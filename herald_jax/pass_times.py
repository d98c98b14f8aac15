"""Seconds of one pass over blocks, from its bytes and operations; plain arithmetic.

A pass reads all weights once, whatever the rows; its matrix products grow with the rows; and
attention reads what each row attends to. The first two overlap in part: the sum of their third
powers, to the power of a third, is within a tenth of what was measured for SDAR-8B's shapes
between 32 and 256 tokens.
"""

from __future__ import annotations

from herald_jax.configs import ModelConfig
from herald_jax.machine import Machine
from herald_jax.models.moe import DENSE_TOKENS

LOGIT_PASSES = 6
"""Times that unmasking reads or writes fp32 logits."""

EXPERT_TILE = 128
"""Rows of one tile of `models.moe.tiled_experts`."""

EXPERT_SECONDS = {"dense": 5e-5, "tiled": 4.5e-4}
"""Fixed part of one layer's experts: routing, and with tiles sorting."""


def dense_weights(model: ModelConfig) -> int:
    """Weights that every pass multiplies with every token: all but embedding, norms and experts."""
    heads = model.num_heads + 2 * model.num_kv_heads
    hidden = model.hidden_size
    attention = (heads + model.num_heads) * model.head_dim * hidden
    total = model.num_layers * attention + model.vocab_size * hidden
    for layer in range(model.num_layers):
        if model.has_experts(layer):
            shared = model.num_shared_experts * model.expert_intermediate_size
            total += hidden * (3 * shared + model.num_experts)
        else:
            total += 3 * hidden * model.intermediate_size
    return total


def expert_weights(model: ModelConfig) -> int:
    """Weights of one layer's routed experts."""
    return 3 * model.num_experts * model.hidden_size * model.expert_intermediate_size


def weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Bytes of all parameters but norms and biases."""
    layers = sum(model.has_experts(layer) for layer in range(model.num_layers))
    total = dense_weights(model) + layers * expert_weights(model)
    if not model.tie_word_embeddings:
        total += model.vocab_size * model.hidden_size
    return total * itemsize


def _overlapped(first: float, second: float) -> float:
    return (first**3 + second**3) ** (1 / 3)


def expert_seconds(model: ModelConfig, machine: Machine, itemsize: int, tokens: int) -> float:
    """Seconds of one layer's routed experts, by the form that `models.moe.mix` takes."""
    weights = expert_weights(model)
    if tokens <= DENSE_TOKENS:
        flops = 2 * weights * tokens  # every expert sees every token
        read = weights * itemsize / machine.device_bytes_per_second
        work = flops / machine.expert_flops_per_second
        return EXPERT_SECONDS["dense"] + _overlapped(read, work)
    tiles = tokens * model.experts_per_token // EXPERT_TILE + model.num_experts
    each = weights / model.num_experts
    # A tile's weights are gathered: read, written and read again.
    moved = 3 * tiles * each * itemsize / machine.device_bytes_per_second
    work = 2 * tiles * EXPERT_TILE * each / machine.expert_flops_per_second
    return EXPERT_SECONDS["tiled"] + _overlapped(moved, work)


def pass_seconds(
    model: ModelConfig,
    machine: Machine,
    itemsize: int,
    *,
    blocks: int,
    attended_bytes: float,
    pooled_bytes: float = 0,
    proposed: int | None = None,
) -> float:
    """Seconds of one pass.

    Args:
        model: The model.
        machine: Its rates.
        itemsize: Bytes of a weight and of a cached number.
        blocks: Blocks that go through the layers.
        attended_bytes: Keys and values that attention reads in layers that attend to everything,
            all layers and blocks together.
        pooled_bytes: The same in layers that attend to pools.
        proposed: Blocks whose logits are computed; all if left out.
    """
    tokens = blocks * model.block_length
    logits = (blocks if proposed is None else proposed) * model.block_length * model.vocab_size
    weights = dense_weights(model)
    read = weights * itemsize / machine.device_bytes_per_second
    seconds = machine.pass_seconds + _overlapped(
        read, 2 * weights * tokens / machine.flops_per_second
    )
    seconds += LOGIT_PASSES * 4 * logits / machine.device_bytes_per_second
    seconds += model.num_layers * machine.attention_seconds
    reading = attended_bytes / machine.attention_share + pooled_bytes / machine.pool_share
    seconds += reading / machine.device_bytes_per_second
    layers = sum(model.has_experts(layer) for layer in range(model.num_layers))
    if layers:
        seconds += layers * expert_seconds(model, machine, itemsize, tokens)
    return seconds
