"""Buckets and byte counts: plain arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_jax._checks import ConfigError
from herald_jax.cache.dense import DenseCache
from herald_jax.engine.memory import (
    MAX_ROWS,
    MemoryPlan,
    capacity_bucket,
    device_bytes_limit,
    prefill_chunk_length,
    row_bucket,
)


@given(tokens=st.integers(1, 5000), block_length=st.integers(1, 64), extra=st.integers(0, 5000))
def test_capacity_holds_the_tokens_in_whole_blocks(
    tokens: int, block_length: int, extra: int
) -> None:
    limit = tokens + extra
    capacity = capacity_bucket(tokens, block_length, limit)
    assert capacity % block_length == 0
    assert tokens <= capacity < limit + block_length
    assert capacity < max(128, 1.5 * tokens) + block_length
    assert capacity_bucket(capacity - block_length + 1, block_length, limit) <= capacity


def test_capacity_buckets_are_few() -> None:
    buckets = sorted({capacity_bucket(tokens, 4, 32768) for tokens in range(1, 32769)})
    assert buckets[:5] == [128, 192, 256, 384, 512]
    assert buckets[-1] == 32768 and len(buckets) == 17


def test_row_buckets_are_powers_of_two_up_to_the_limit() -> None:
    assert [row_bucket(rows, 6) for rows in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert [row_bucket(rows, 256) for rows in (1, 3, 65, 256)] == [1, 4, 128, 256]


@given(
    rows=st.integers(1, 256),
    blocks=st.integers(1, 500),
    block_length=st.sampled_from([1, 3, 4, 32]),
)
def test_a_prefill_chunk_is_whole_blocks_within_the_cache(
    rows: int, blocks: int, block_length: int
) -> None:
    capacity = blocks * block_length
    chunk = prefill_chunk_length(rows, capacity, block_length)
    assert chunk % block_length == 0 and block_length <= chunk <= capacity
    assert rows * chunk <= max(4096, rows * block_length)


def plan_of(config: object, available: int) -> MemoryPlan:
    return MemoryPlan(model=config, itemsize=4, available_bytes=available)  # type: ignore[arg-type]


def test_kv_bytes_are_those_of_the_cache(tiny_config: object) -> None:
    cache = jax.eval_shape(lambda: DenseCache.zeros(tiny_config, 3, 20, jnp.float32))  # type: ignore[arg-type]
    leaves = jax.tree.leaves(cache)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert plan_of(tiny_config, 0).kv_bytes(3, 20) == total


def test_rows_that_fit_is_the_largest_batch_that_passes(tiny_config: object) -> None:
    plan = plan_of(tiny_config, plan_of(tiny_config, 0).batch_bytes(5, 256))
    rows = plan.rows_that_fit(256)
    assert rows >= 5
    plan.require_fit(rows, 256)
    with pytest.raises(ConfigError, match=r"max_num_seqs=\d+ with max_model_len=256 needs"):
        plan.require_fit(rows + 1, 256)
    assert plan_of(tiny_config, -1).rows_that_fit(128) == 0
    assert plan_of(tiny_config, 10**15).rows_that_fit(128) == MAX_ROWS


def test_the_device_has_a_limit() -> None:
    assert device_bytes_limit(jax.devices()[0]) > 2**20
