"""Sizes of the KV cache in bytes, in one place. Plain Python: no JAX."""

from __future__ import annotations

from herald_jax.configs import ModelConfig


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes that one token keeps in the cache over all layers, K and V together."""
    return config.kv_values_per_token * itemsize


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
