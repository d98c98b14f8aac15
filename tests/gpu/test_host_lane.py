"""Pinned memory and the host lane on a real device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.cache.host import HostShape, PinnedPool, StagingRing, host_sharding
from herald_jax.cache.host_link import measure_link
from tests.engine.test_lane import Gate, assert_pool, make

pytestmark = pytest.mark.gpu


def test_pools_and_staging_are_pinned_and_hold_what_is_written():
    """Kind of fault: indexing pinned arrays raises, and a scatter on one ends the process."""
    sharding = host_sharding(jax.devices()[0])
    assert sharding.memory_kind == "pinned_host"
    shape = HostShape(layers=2, rows=3, kv_heads=2, row_tokens=256, head_dim=64, dtype=jnp.bfloat16)
    pool = PinnedPool(shape, sharding)
    numbers = np.random.default_rng(0).normal(size=(2, 3, 2, 64, 64)).astype(jnp.bfloat16)
    for place, start in enumerate((0, 96, 192)):  # first, middle and last of a row
        pool.write(1, 2, start, numbers[0, place], numbers[1, place])
    k, v = pool.view(1, 2)
    for place, start in enumerate((0, 96, 192)):
        np.testing.assert_array_equal(k[:, start : start + 64], numbers[0, place])
        np.testing.assert_array_equal(v[:, start : start + 64], numbers[1, place])
    ring = StagingRing(2, 2, (2, 64, 64), jnp.bfloat16, sharding)
    for turn in range(6):
        slot = ring.acquire()
        assert slot is not None
        slot.k[:], slot.v[:] = numbers[0, turn % 3], numbers[1, turn % 3]
        sent = ring.send(slot)
        for array, right in zip(sent, numbers[:, turn % 3], strict=True):
            assert array.sharding.memory_kind == "device"
            np.testing.assert_array_equal(np.asarray(array)[1], right)


def test_recalls_are_what_the_device_would_have_chosen():
    setup = make(Gate())
    with setup.lane:
        for index in range(4):
            setup.append(1, 5, index, seed=10)
            if index:
                assert_pool(setup.recall(1, 5, index + 1, seed=10), 10)


def test_the_link_is_not_slow(caplog):
    """Kind of fault: copies go through ordinary memory, at a tenth of the rate."""
    rates = measure_link(host_sharding(jax.devices()[0]))
    assert min(rates.to_host, rates.to_device) > 8e9 and not caplog.records
