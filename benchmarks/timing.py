"""Timing of asynchronous device work, and the measured ceilings of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def seconds_per_call(call: Callable[[], Any], repeats: int, samples: int = 5) -> float:
    """Median seconds of one call when calls are queued back to back.

    The time of `repeats` calls is subtracted from that of `3 * repeats`, which takes off the
    constant cost of starting and of waiting for the end.
    """

    def run(count: int) -> float:
        begin = time.perf_counter()
        out = None
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    for _ in range(3):  # command buffers record on the second run and replay from the third
        run(1)
    return statistics.median(
        (run(3 * repeats) - run(repeats)) / (2 * repeats) for _ in range(samples)
    )


def measured_bandwidth(gigabytes: float = 2.0) -> float:
    """Bytes per second of a device-to-device copy, reads and writes counted."""
    count = int(gigabytes * 1e9 / 4)
    array = jnp.arange(count, dtype=jnp.int32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * array.nbytes / seconds_per_call(lambda: copy(array), repeats=5)


def measured_matmul_rate(size: int = 8192) -> float:
    """bf16 floating-point operations per second of a square matrix product."""
    key = jax.random.key(0)
    a = jax.random.normal(key, (size, size), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    return 2 * size**3 / seconds_per_call(lambda: product(a), repeats=5)
