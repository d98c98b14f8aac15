"""Where the keys and values of finished blocks live, and what they cost."""

from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import kv_bytes_per_token

__all__ = ["DenseCache", "kv_bytes_per_token"]
