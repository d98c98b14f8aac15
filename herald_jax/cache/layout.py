"""Sizes of the KV cache in bytes, in one place. Plain Python: no JAX."""

from __future__ import annotations

import math

from herald_jax._checks import require
from herald_jax.configs import ModelConfig


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes that one token keeps in the cache over all layers, K and V together."""
    return config.kv_values_per_token * itemsize


def index_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    """Bytes that one token of one layer has in an 8-bit key index: codes, and a scale a KV head."""
    return model.num_kv_heads * (model.head_dim + itemsize)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def check_index_range(what: str, shape: tuple[int, ...]) -> None:
    """Checks that an array can be indexed with 32 bits, as the scatters on it are.

    Raises:
        ConfigError: If it holds 2^31 elements or more.
    """
    elements = math.prod(shape)
    require(elements < 2**31, f"{what} {shape}", elements, "fewer than 2^31 elements")
