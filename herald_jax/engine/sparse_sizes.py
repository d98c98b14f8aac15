"""Sizes of an engine with a sparse cache, from the settings, the model and the memory.

Every row has room for its longest text from the start, in the dense layers' pages, in its pools
and in the store. So no row is ever set back for want of memory, which would compute the keys of
its finished blocks anew with more attention than they were made with.
"""

from __future__ import annotations

import dataclasses

from herald_jax._checks import ConfigError
from herald_jax.cache.layout import round_up
from herald_jax.cache.shape import SparseShape
from herald_jax.cache_config import CacheConfig
from herald_jax.configs import ModelConfig
from herald_jax.engine.config import (
    CPU_KV_BYTES,
    MAX_ROWS,
    PAGE_TOKENS,
    EngineConfig,
    EngineSizes,
    check_length,
    working_bytes,
)

SLOTS_PER_ROW = 3
"""Slots of a row in its fused step."""

LAYER_BUFFERS = 6
"""Buffers of one layer's keys or values that a prefill may hold: two layers and their copies."""


def sparse_shape(cache: CacheConfig, model: ModelConfig, rows: int, longest: int) -> SparseShape:
    """The arrays of an engine with so many rows for texts of `longest` tokens."""
    block = model.block_length
    page_tokens = round_up(PAGE_TOKENS, block)
    row_tokens, blocks = round_up(longest, page_tokens), -(-longest // block)
    return SparseShape(
        rows=rows,
        dense_layers=cache.dense_layers,
        num_pages=rows * row_tokens // page_tokens,
        page_tokens=page_tokens,
        pool_tokens=cache.budget_of(block).pool_tokens(blocks),
        recent_blocks=min(cache.recent_blocks, blocks),
        row_tokens=row_tokens,
        has_device_store=cache.placement == "device",
        has_key_index=cache.key_index != "none",
    )


def prefill_bytes(model: ModelConfig, row_tokens: int, itemsize: int) -> int:
    """Device bytes of one prompt on its way through the layers."""
    layer = row_tokens * model.num_kv_heads * model.head_dim
    return itemsize * (LAYER_BUFFERS * layer + row_tokens * model.hidden_size)


def size_sparse_engine(
    engine: EngineConfig,
    cache: CacheConfig,
    model: ModelConfig,
    *,
    itemsize: int,
    free_bytes: int,
    host_bytes: int,
    is_cpu: bool = False,
) -> EngineSizes:
    """Sizes that fit the memory.

    Args:
        engine: What was asked for.
        cache: What is selected, and where the rest lives.
        model: The model.
        itemsize: Bytes of a cached number.
        free_bytes: Device bytes beside the weights.
        host_bytes: Host bytes that may be pinned.
        is_cpu: True where device memory is the machine's, which is not taken whole.

    Raises:
        ConfigError: If a row of `max_model_len` would not fit, or `max_num_seqs` rows would not,
            with what is needed, what is there and what to change.
    """
    cache.check(model)
    longest = check_length(engine, model)

    def fits(rows: int, longest: int) -> bool:
        need = _needs(cache, model, rows, longest, itemsize)
        pool_limit = engine.kv_cache_bytes or need.pool
        return need.device <= free_bytes and need.pool <= pool_limit and need.host <= host_bytes

    def is_modest(rows: int, longest: int) -> bool:
        need = _needs(cache, model, rows, longest, itemsize)
        return not is_cpu or need.pool + need.host <= CPU_KV_BYTES

    rows = engine.max_num_seqs or MAX_ROWS
    if engine.max_num_seqs is None:
        while rows > 1 and not (fits(rows, longest) and is_modest(rows, longest)):
            rows -= 1
    if engine.max_model_len is None:
        while longest > model.block_length and not fits(rows, longest):
            longest //= 2
    need = _needs(cache, model, rows, longest, itemsize)
    if not fits(rows, longest):
        fewer = "max_num_seqs, max_model_len, the cache's budget, recent_blocks or dense_layers"
        device = f"lower {fewer}, or raise device_memory_fraction"
        host = (
            "lower max_num_seqs or max_model_len, or raise dense_layers or the cache's host_bytes"
        )
        limits = [
            ("device memory", need.device, free_bytes, device),
            ("host memory", need.host, host_bytes, host),
        ]
        if engine.kv_cache_bytes is not None:
            limit = f"lower {fewer}, or raise kv_cache_bytes"
            limits.append(("kv_cache_bytes", need.pool, engine.kv_cache_bytes, limit))
        faults = [
            f"{_amount(need)} of {name} ({_amount(have)} are there): {remedy}"
            for name, need, have, remedy in limits
            if need > have
        ]
        raise ConfigError(f"{rows} rows of max_model_len={longest} need {'; and '.join(faults)}.")
    shape = sparse_shape(cache, model, rows, longest)
    return EngineSizes(
        max_model_len=longest,
        max_rows=rows,
        page_tokens=shape.page_tokens,
        num_pages=shape.num_pages,
        table_pages=shape.row_tokens // shape.page_tokens,
        prefill_slots=max(engine.max_prefill_tokens // model.block_length, 1),
        kv_bytes=need.pool,
        setting="max_num_seqs",
        sparse=shape,
        host_bytes=need.host,
    )


def _amount(nbytes: int) -> str:
    """Bytes as a person reads them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} bytes"


@dataclasses.dataclass(frozen=True, slots=True)
class _Needs:
    device: int
    pool: int
    host: int


def _needs(
    cache: CacheConfig, model: ModelConfig, rows: int, longest: int, itemsize: int
) -> _Needs:
    shape = sparse_shape(cache, model, rows, longest)
    pool = shape.device_bytes(model, itemsize)
    slots = rows * (SLOTS_PER_ROW if cache.lookahead else 1)
    working = working_bytes(model, slots, 0) + prefill_bytes(model, shape.row_tokens, itemsize)
    return _Needs(pool + working, pool, shape.host_bytes(model, itemsize))
