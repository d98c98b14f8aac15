"""What fits: bytes that a batch needs against bytes that the device has.

Estimates are kept on the safe side of what the programs allocate; the KV cache is exact.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from herald_jax._checks import ConfigError
from herald_jax.cache.layout import kv_bytes_per_token, round_up
from herald_jax.configs import ModelConfig

PREFILL_TOKENS = 4096
"""Tokens of all rows together that one prefill pass takes, before rounding to whole blocks."""

MAX_ROWS = 256
"""Rows of a batch that is not limited by memory or by the caller."""

SMALLEST_CAPACITY = 128
"""Slots of the smallest cache bucket."""

LOGIT_COPIES = 6
"""fp32 arrays of a block's full-vocabulary logits that a sampling step may hold at once."""


def device_bytes_limit(device: Any) -> int:
    """Bytes that JAX may use on a device; on a CPU, the machine's memory."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def row_bucket(rows: int, limit: int) -> int:
    """The batch size that a program is compiled for: a power of two, or `limit` itself."""
    return min(1 << (rows - 1).bit_length(), limit)


def capacity_bucket(tokens: int, block_length: int, limit: int) -> int:
    """Cache slots for `tokens`: 2^n or 3 * 2^(n-1) in whole blocks, at most `limit`."""
    bucket = SMALLEST_CAPACITY
    while bucket < tokens:
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 else bucket * 4 // 3
    return min(round_up(bucket, block_length), round_up(limit, block_length))


def prefill_chunk_length(rows: int, capacity: int, block_length: int) -> int:
    """Tokens of each row in one prefill pass: whole blocks, no more than the cache holds."""
    return min(max(PREFILL_TOKENS // rows // block_length, 1) * block_length, capacity)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one engine: what it may use, and what a batch of a given shape takes."""

    model: ModelConfig
    itemsize: int
    available_bytes: int

    def kv_bytes(self, rows: int, capacity: int) -> int:
        """Bytes of the dense KV cache of a batch, exactly."""
        return rows * capacity * kv_bytes_per_token(self.model, self.itemsize)

    def batch_bytes(self, rows: int, capacity: int) -> int:
        """KV cache and working memory of a batch."""
        model = self.model
        logits = LOGIT_COPIES * 4 * rows * model.block_length * model.vocab_size
        scores = 3 * 4 * rows * model.num_heads * model.block_length * capacity
        chunk = rows * prefill_chunk_length(rows, capacity, model.block_length)
        width = 4 * model.intermediate_size + model.num_heads * (1024 + chunk // rows)
        return self.kv_bytes(rows, capacity) + logits + max(scores, 3 * 4 * chunk * width)

    def rows_that_fit(self, capacity: int) -> int:
        """Most rows of `capacity` slots, at most `MAX_ROWS`."""
        rows = 0
        while rows < MAX_ROWS and self.batch_bytes(rows + 1, capacity) <= self.available_bytes:
            rows += 1
        return rows

    def require_fit(self, rows: int, capacity: int) -> None:
        """Checks that a batch fits.

        Raises:
            ConfigError: With the bytes needed, the bytes there are, and what to change.
        """
        need = self.batch_bytes(rows, capacity)
        if need > self.available_bytes:
            raise ConfigError(
                f"max_num_seqs={rows} with max_model_len={capacity} needs "
                f"{need / 1e9:.2f} GB for the KV cache and working memory, but "
                f"{max(self.available_bytes, 0) / 1e9:.2f} GB are left beside the weights. "
                "Lower max_num_seqs or max_model_len, or raise device_memory_fraction."
            )
