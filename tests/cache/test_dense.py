"""Writes into the dense cache, and its limits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import kv_bytes_per_token, round_up
from herald_jax.configs import ModelConfig
from herald_jax.models.attention import FreshKV


def fresh_blocks(config: ModelConfig, rows: int, count: int) -> list[FreshKV]:
    """Values that differ by layer, row, position, head and feature."""
    shape = (rows, count, config.num_kv_heads, config.head_dim)
    size = int(np.prod(shape))
    numbers = jnp.arange(1, size + 1, dtype=jnp.float32).reshape(shape)
    return [FreshKV(numbers + 1e4 * i, -numbers - 1e4 * i) for i in range(config.num_layers)]


def test_blocks_go_to_each_rows_own_place(tiny_config: ModelConfig) -> None:
    cache = DenseCache.zeros(tiny_config, 3, 12, jnp.float32)
    fresh = fresh_blocks(tiny_config, 3, 4)
    starts = jnp.array([8, 0, 4], jnp.int32)
    out = cache.append_blocks(fresh, starts, jnp.array([True, True, False]))
    for layer in range(3):
        for array, new in ((out.k[layer], fresh[layer].k), (out.v[layer], fresh[layer].v)):
            expected = np.zeros((3, 2, 12, 8), np.float32)
            expected[0, :, 8:12] = np.asarray(new)[0].swapaxes(0, 1)
            expected[1, :, 0:4] = np.asarray(new)[1].swapaxes(0, 1)
            np.testing.assert_array_equal(array, expected)


def test_a_block_past_the_end_is_dropped_and_not_clamped(tiny_config: ModelConfig) -> None:
    """An out-of-range update that is moved into range overwrites the last block."""
    cache = DenseCache.zeros(tiny_config, 2, 8, jnp.float32)
    fresh = fresh_blocks(tiny_config, 2, 4)
    last_and_past = jnp.array([4, 8], jnp.int32)
    out = jax.jit(DenseCache.append_blocks)(cache, fresh, last_and_past, jnp.ones(2, bool))
    assert not np.asarray(out.k[0][1]).any()
    np.testing.assert_array_equal(out.k[0][0, :, 4:], np.asarray(fresh[0].k)[0].swapaxes(0, 1))


def test_a_chunk_goes_to_the_same_place_in_all_rows(tiny_config: ModelConfig) -> None:
    cache = DenseCache.zeros(tiny_config, 2, 16, jnp.float32)
    fresh = fresh_blocks(tiny_config, 2, 8)
    out = cache.append_chunk(fresh, jnp.int32(4))
    for layer in range(3):
        np.testing.assert_array_equal(
            out.v[layer][:, :, 4:12], np.asarray(fresh[layer].v).swapaxes(1, 2)
        )
        assert not np.asarray(out.v[layer][:, :, :4]).any()
        assert not np.asarray(out.v[layer][:, :, 12:]).any()


def test_a_cache_beyond_32_bit_indices_is_refused(tiny_config: ModelConfig) -> None:
    """Indices that overflow 32 bits read or write other places without a word."""
    values_per_slot = tiny_config.num_kv_heads * tiny_config.head_dim
    slots = 2**31 // values_per_slot
    with pytest.raises(ValueError, match=r"2\^31"):
        DenseCache.zeros(tiny_config, 1, slots, jnp.float32)
    shapes = jax.eval_shape(lambda: DenseCache.zeros(tiny_config, 1, slots - 1, jnp.float32))
    assert shapes.k[0].shape == (1, 2, slots - 1, 8)


def test_bytes_per_token_count_keys_and_values_of_all_layers(tiny_config: ModelConfig) -> None:
    assert kv_bytes_per_token(tiny_config, 2) == 2 * 3 * 2 * 8 * 2
    wide = dataclasses.replace(tiny_config, num_kv_heads=6)
    cache = DenseCache.zeros(wide, 2, 8, jnp.bfloat16)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert total == 2 * 8 * kv_bytes_per_token(wide, 2)
    assert cache.capacity == 8


@pytest.mark.parametrize(("value", "multiple", "up"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 3, 6)])
def test_round_up(value: int, multiple: int, up: int) -> None:
    assert round_up(value, multiple) == up
