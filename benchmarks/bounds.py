"""What a pass cannot do without, part by part, and the least time that this takes.

A matmul reads its weights, and attention the keys and values that its queries see; what passes
between them may stay in the caches of the processor and is not counted. Each part needs the
larger of its bytes over the copy rate and its floating-point operations over the matmul rate,
and parts follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from herald_jax.configs import ModelConfig


class Ceilings(NamedTuple):
    """Measured rates of a device."""

    bytes_per_second: float
    flops_per_second: float


class Part(NamedTuple):
    """One kind of operation of a pass; bytes and operations are those of a single one."""

    name: str
    count: int
    bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """Least seconds of all of its operations."""
        by_bytes = self.bytes / ceilings.bytes_per_second
        return self.count * max(by_bytes, self.flops / ceilings.flops_per_second)


def layer_matmuls(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every matmul of a dense layer."""
    if config.num_experts:
        raise ValueError("a pass of a mixture reads the experts that its tokens chose: not counted")
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": (hidden, heads),
        "k_proj": (hidden, kv_heads),
        "v_proj": (hidden, kv_heads),
        "o_proj": (heads, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def step_parts(config: ModelConfig, itemsize: int, rows: int, context: int) -> list[Part]:
    """The parts of one pass over a block in each of `rows` rows, behind `context` tokens."""
    queries = rows * config.block_length
    matmuls = {**layer_matmuls(config), "lm_head": (config.hidden_size, config.vocab_size)}
    parts = [
        Part(
            name,
            1 if name == "lm_head" else config.num_layers,
            inputs * outputs * itemsize,
            2 * queries * inputs * outputs,
        )
        for name, (inputs, outputs) in matmuls.items()
    ]
    seen = context + config.block_length
    token_bytes = 2 * config.num_kv_heads * config.head_dim * itemsize
    attention = Part(
        "attention",
        config.num_layers,
        rows * seen * token_bytes,
        4 * config.num_heads * config.head_dim * queries * seen,
    )
    return [*parts, attention]


def bound_seconds(parts: Iterable[Part], ceilings: Ceilings) -> float:
    """Least seconds of all parts, one after the other."""
    return sum(part.seconds(ceilings) for part in parts)


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Operations that the keys and values of a prompt need; pairs that are masked do not count."""
    products = sum(inputs * outputs for inputs, outputs in layer_matmuls(config).values())
    blocks = tokens // config.block_length
    pairs = config.block_length**2 * blocks * (blocks + 1) // 2
    attention = 4 * config.num_heads * config.head_dim * pairs
    return float(config.num_layers * (2 * products * tokens + attention))


def part_figures(parts: Iterable[Part], ceilings: Ceilings) -> dict[str, Any]:
    """The bound and what it is made of, for a record."""
    parts = list(parts)
    return {
        "bound_ms": 1e3 * bound_seconds(parts, ceilings),
        "bound_parts": [part._asdict() for part in parts],
        "copy_bytes_per_second": ceilings.bytes_per_second,
        "matmul_flops_per_second": ceilings.flops_per_second,
    }
