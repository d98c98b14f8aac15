"""How fast arrays move between the device and host memory, measured."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from herald_jax.cache.host import start_copy

SLOW_BYTES_PER_SECOND = 8e9
"""Below this, copies go through ordinary memory, or the link is not what it should be."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second.

    Attributes:
        to_host: From the device to host memory.
        to_device: From host memory to the device.
    """

    to_host: float
    to_device: float


def measure_link(
    sharding: SingleDeviceSharding,
    nbytes: int = 1 << 28,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkRates:
    """The rates of one large copy each way; a slow one is warned of.

    Args:
        sharding: Host memory, as `host_sharding` gives it.
        nbytes: Size of the copy; smaller ones are slower.
        clock: Gives seconds.
    """
    device = SingleDeviceSharding(next(iter(sharding.device_set)))
    array = jax.device_put(jnp.zeros((nbytes // 4,), jnp.int32), device)

    def rate(copy: Callable[[], jax.Array]) -> tuple[jax.Array, float]:
        jax.block_until_ready(copy())  # the first one allocates
        begin = clock()
        copied = jax.block_until_ready(copy())
        return copied, nbytes / max(clock() - begin, 1e-9)

    on_host, to_host = rate(lambda: start_copy(jax.block_until_ready(array), sharding))
    _, to_device = rate(lambda: jax.device_put(on_host, device))
    rates = LinkRates(to_host, to_device)
    is_slow = min(to_host, to_device) < SLOW_BYTES_PER_SECOND
    _log.log(
        logging.WARNING if is_slow else logging.INFO,
        "Copies to host memory run at %.1f GB/s and back at %.1f GB/s%s.",
        to_host / 1e9,
        to_device / 1e9,
        f", which is less than {SLOW_BYTES_PER_SECOND / 1e9:.0f}" if is_slow else "",
    )
    return rates
