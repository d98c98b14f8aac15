"""Settings of the engine, and what they come to in a given memory: plain arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_jax import LLM
from herald_jax._checks import ConfigError
from herald_jax.cache.paged import PagedCache
from herald_jax.configs import ModelConfig
from herald_jax.engine.config import (
    CPU_KV_BYTES,
    MAX_ROWS,
    EngineConfig,
    EngineSizes,
    device_bytes_limit,
    size_engine,
    working_bytes,
)

CONFIG = ModelConfig(
    family="test",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    block_length=4,
    mask_token_id=60,
    stop_token_ids=(1,),
    max_position_embeddings=1000,
)
PAGE_BYTES = 64 * CONFIG.kv_values_per_token * 4


def sizes(free: int, model: ModelConfig = CONFIG, is_cpu: bool = False, **options: Any):
    return size_engine(EngineConfig(**options), model, itemsize=4, free_bytes=free, is_cpu=is_cpu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes=-1"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens=0"),
        ({"run_ahead": 0}, "run_ahead=0"),
        ({"run_ahead": 1.5}, "run_ahead=1.5"),
        ({"max_waiting": 0}, "max_waiting=0"),
        ({"aging_ticks": 0}, "aging_ticks=0"),
        ({"share_prefixes": 1}, "share_prefixes=1"),
        ({"device_memory_fraction": 0.0}, "device_memory_fraction=0.0"),
        ({"device_memory_fraction": 1.5}, "device_memory_fraction=1.5"),
    ],
)
def test_settings_that_cannot_be_used_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)
    if set(options) <= {"max_waiting", "aging_ticks"}:
        return
    with pytest.raises(ConfigError, match=message):  # before the folder is looked for
        LLM("/none/such", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1001}, "max_model_len=1001.*at most 1000"),
        ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000.*Lower max_num_seqs or max_prefill_tok"),
        ({"kv_cache_bytes": 10**12}, "kv_cache_bytes=1000000000000.*device_memory_fraction"),
        ({"kv_cache_bytes": PAGE_BYTES - 1}, "Raise kv_cache_bytes"),
        (
            {"kv_cache_bytes": 2 * PAGE_BYTES, "max_model_len": 129},
            "max_model_len=129 needs .*Lower max_model_len.*raise kv_cache_bytes",
        ),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes(10**9, **options)


def test_no_memory_at_all() -> None:
    with pytest.raises(ConfigError, match=r"0\.00 GB are left.*device_memory_fraction"):
        sizes(-5)


def test_a_long_context_that_does_not_fit() -> None:
    free = working_bytes(CONFIG, 1, 128) + 3 * PAGE_BYTES
    assert sizes(free, max_num_seqs=1).max_model_len == 3 * 64
    assert sizes(free, max_num_seqs=1, max_model_len=192).num_pages == 3
    with pytest.raises(ConfigError, match="max_model_len=193 needs .*raise device_memory_fraction"):
        sizes(free, max_num_seqs=1, max_model_len=193)


@given(
    block_length=st.sampled_from([1, 3, 4, 32, 48]),
    longest=st.integers(1, 1000) | st.none(),
    rows=st.integers(1, 80) | st.none(),
    prefill=st.integers(1, 4096),
    spare=st.integers(0, 10**8),
)
def test_sizes_fit_and_hold_the_longest_sample(
    block_length: int, longest: int | None, rows: int | None, prefill: int, spare: int
) -> None:
    model = dataclasses.replace(CONFIG, block_length=block_length)
    least = working_bytes(model, rows or 1, max(prefill // block_length, 1))
    free = least + spare
    options = dict(max_model_len=longest, max_num_seqs=rows, max_prefill_tokens=prefill)
    try:
        found: EngineSizes = sizes(free, model, **options)
    except ConfigError:
        # Only if the pages of one sample find no room.
        assert spare < 17 * 2 * PAGE_BYTES * 96 // 64 or rows is None
        return
    assert found.max_rows == rows or (rows is None and 1 <= found.max_rows <= MAX_ROWS)
    assert found.page_tokens % block_length == 0
    assert found.table_pages <= found.num_pages <= found.max_rows * found.table_pages
    blocks = -(-found.max_model_len // block_length)
    assert (found.table_pages - 1) * found.page_tokens < blocks * block_length
    assert blocks * block_length <= found.table_pages * found.page_tokens
    assert found.max_model_len == longest or longest is None
    assert found.prefill_slots == max(prefill // block_length, 1)
    working = working_bytes(model, found.max_rows, found.prefill_slots)
    assert found.kv_bytes + working <= free
    assert found.kv_bytes == found.page_bytes * found.num_pages


def test_kv_bytes_are_those_of_the_pool() -> None:
    found = sizes(10**9, max_num_seqs=3, max_model_len=200)
    assert (found.num_pages, found.table_pages) == (12, 4)
    cache = jax.eval_shape(lambda: PagedCache.zeros(CONFIG, 12, found.page_tokens, jnp.float32))
    leaves = jax.tree.leaves(cache)
    assert found.kv_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_a_cpu_is_not_taken_whole() -> None:
    model = dataclasses.replace(CONFIG, max_position_embeddings=2**20)
    assert sizes(10**12, model).kv_bytes > CPU_KV_BYTES
    found = sizes(10**12, model, is_cpu=True)
    assert found.kv_bytes <= CPU_KV_BYTES and found.max_model_len == 2**20
    asked = sizes(10**12, model, is_cpu=True, kv_cache_bytes=2 * CPU_KV_BYTES)
    assert asked.kv_bytes > CPU_KV_BYTES


def test_the_device_has_a_limit() -> None:
    assert device_bytes_limit(jax.devices()[0]) > 2**20
