"""Settings of the engine, and the sizes that follow from them, the model and the memory."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from herald_jax._checks import ConfigError, require, require_float, require_int
from herald_jax.cache.layout import kv_bytes_per_token, round_up
from herald_jax.cache.shape import SparseShape
from herald_jax.cache_config import CacheConfig
from herald_jax.configs import ModelConfig
from herald_jax.engine.pages import PageBudget, pages_that_fit

PAGE_TOKENS = 64
"""Tokens of a page, before rounding to whole blocks."""

MAX_ROWS = 64
"""Rows of an engine whose `max_num_seqs` is not set."""

CPU_KV_BYTES = 1 << 29
"""Most bytes of the page pool on a CPU where nothing else is said."""

LOGIT_COPIES = 6
"""fp32 arrays of a block's full-vocabulary logits that a sampling step may hold at once."""

ATTENTION_TILE = 1024
"""Keys that attention scores at a time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much an engine runs at once.

    Attributes:
        max_model_len: Most tokens of a sample, prompt and generation together; `None` takes
            the checkpoint's `max_position_embeddings`, or what memory allows if that is less.
        max_num_seqs: Most samples that decode at the same time; `None` derives it.
        device_memory_fraction: Share of the device's memory that may be used, in (0, 1].
        kv_cache_bytes: Bytes of the page pool; `None` takes what memory leaves, and no more
            than all rows can use.
        max_prefill_tokens: Prompt tokens that share a step with the rows that decode. With a
            sparse cache a prompt is gathered at this rate and then prefilled in one go.
        run_ahead: Steps that are dispatched before the first of them is read; 1 reads every
            step before the next.
        max_waiting: Most samples that may wait for their first row.
        aging_ticks: Steps of waiting that count as one level of priority.
        share_prefixes: True if prompts reuse the keys and values of equal prefixes: whole pages
            of prompts and texts; with a sparse cache whole chunks of prompts that a row still has.
        cache: A sparse KV cache; `None` keeps everything on the device and attends to it.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    device_memory_fraction: float = 0.9
    kv_cache_bytes: int | None = None
    max_prefill_tokens: int = 512
    run_ahead: int = 2
    max_waiting: int = 4096
    aging_ticks: int = 256
    share_prefixes: bool = True
    cache: CacheConfig | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        for field in ("max_model_len", "max_num_seqs", "kv_cache_bytes"):
            if getattr(self, field) is not None:
                require_int(field, getattr(self, field), 1, "Leave it unset to derive it.")
        for field in ("max_prefill_tokens", "run_ahead", "max_waiting", "aging_ticks"):
            require_int(field, getattr(self, field), 1)
        fraction = self.device_memory_fraction
        require_float("device_memory_fraction", fraction, 1e-6, 1.0, "a number in (0, 1]")
        require(
            isinstance(self.share_prefixes, bool), "share_prefixes", self.share_prefixes, "a bool"
        )
        if self.cache is not None:
            is_config = isinstance(self.cache, CacheConfig)
            require(is_config, "cache", self.cache, "a CacheConfig or None")
            require(
                self.run_ahead <= 2,
                "run_ahead",
                self.run_ahead,
                "1 or 2 with a sparse cache",
                "A block's lookahead rides on its second step, which must be known by then.",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Numbers that size the engine's arrays.

    Attributes:
        max_model_len: Most tokens of a sample.
        max_rows: Rows that may decode at the same time.
        page_tokens: Tokens of a page.
        num_pages: Pages of the pool.
        table_pages: Pages of the longest sample.
        prefill_slots: Prompt blocks of a step.
        kv_bytes: Bytes of the pool.
        setting: The setting that makes the pool larger.
        sparse: The arrays of a sparse cache; `None` if everything is attended.
        host_bytes: Bytes of pinned host memory for finished blocks.
    """

    max_model_len: int
    max_rows: int
    page_tokens: int
    num_pages: int
    table_pages: int
    prefill_slots: int
    kv_bytes: int
    setting: str
    sparse: SparseShape | None = None
    host_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers together."""
        return self.kv_bytes // self.num_pages


def device_bytes_limit(device: Any) -> int:
    """Bytes that JAX may use on a device; on a CPU, the machine's memory."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_length(engine: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of a sample that the settings and the checkpoint allow.

    Raises:
        ConfigError: If the settings ask for more than the checkpoint has positions.
    """
    longest = engine.max_model_len or model.max_position_embeddings
    require(
        longest <= model.max_position_embeddings,
        "max_model_len",
        longest,
        f"at most {model.max_position_embeddings}, the checkpoint's max_position_embeddings",
    )
    return longest


def size_engine(
    engine: EngineConfig, model: ModelConfig, *, itemsize: int, free_bytes: int, is_cpu: bool
) -> EngineSizes:
    """Sizes that fit the memory.

    Args:
        engine: What was asked for.
        model: The model.
        itemsize: Bytes of a cached number.
        free_bytes: Device bytes for pages and working memory, the weights taken off.
        is_cpu: True where device memory is the machine's, which is not taken whole.

    Raises:
        ConfigError: If a sample of `max_model_len` would not fit, with what to change.
    """
    block = model.block_length
    longest = check_length(engine, model)
    rows = engine.max_num_seqs or MAX_ROWS
    page_tokens = round_up(PAGE_TOKENS, block)
    page_bytes = page_tokens * kv_bytes_per_token(model, itemsize)
    prefill_slots = max(engine.max_prefill_tokens // block, 1)
    working = working_bytes(model, rows, prefill_slots)
    if engine.max_num_seqs is None:
        while rows > 1 and working > free_bytes // 4:
            rows //= 2
            working = working_bytes(model, rows, prefill_slots)
    left = free_bytes - working
    if left < page_bytes:
        raise ConfigError(
            f"max_num_seqs={rows} with max_prefill_tokens={engine.max_prefill_tokens} needs "
            f"{working / 1e9:.2f} GB of working memory and a page of {page_bytes} bytes, but "
            f"{max(free_bytes, 0) / 1e9:.2f} GB are left beside the weights. Lower max_num_seqs "
            "or max_prefill_tokens, or raise device_memory_fraction."
        )
    if engine.kv_cache_bytes is not None:
        if engine.kv_cache_bytes > left:
            raise ConfigError(
                f"kv_cache_bytes={engine.kv_cache_bytes} is not allowed: {max(left, 0)} bytes are "
                "left beside weights and working memory. Lower it, lower max_num_seqs, or raise "
                "device_memory_fraction."
            )
        left = engine.kv_cache_bytes
    elif is_cpu:
        left = min(left, max(CPU_KV_BYTES, -(-longest // page_tokens) * page_bytes))
    setting = "device_memory_fraction" if engine.kv_cache_bytes is None else "kv_cache_bytes"
    budget = PageBudget(
        name="device", available_bytes=left, bytes_per_page=page_bytes, setting=setting
    )
    fitting = pages_that_fit([budget])
    if engine.max_model_len is None:
        longest = min(longest, fitting * page_tokens)
    table_pages = -(-round_up(longest, block) // page_tokens)
    if table_pages > fitting:
        raise ConfigError(
            f"max_model_len={longest} needs {table_pages * page_bytes / 1e9:.2f} GB of KV cache, "
            f"but {max(left, 0) / 1e9:.2f} GB are there beside weights and working memory. Lower "
            f"max_model_len or max_num_seqs, or raise {setting}."
        )
    pages = min(fitting, rows * table_pages)
    return EngineSizes(
        max_model_len=longest,
        max_rows=rows,
        page_tokens=page_tokens,
        num_pages=pages,
        table_pages=table_pages,
        prefill_slots=prefill_slots,
        kv_bytes=pages * page_bytes,
        setting=setting,
    )


def working_bytes(model: ModelConfig, rows: int, prefill_slots: int) -> int:
    """Bytes that a step may need besides weights and pages; an estimate on the safe side."""
    queries = (rows + prefill_slots) * model.block_length
    logits = LOGIT_COPIES * 4 * rows * model.block_length * model.vocab_size
    gathered = 4 * (rows + prefill_slots) * ATTENTION_TILE * model.num_kv_heads * model.head_dim
    scores = 3 * 4 * queries * model.num_heads * ATTENTION_TILE
    hidden = 4 * queries * (4 * model.intermediate_size + 8 * model.hidden_size)
    return logits + 2 * gathered + scores + hidden
