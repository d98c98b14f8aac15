"""Keys and values in pinned host memory. No other module touches such memory.

Who writes, who reads, when:

- `PinnedPool` holds the finished blocks of all rows. One thread, the host lane's worker, writes
  and reads it. A writer never touches tokens that were written before in the same stay, and a
  row passes to another stay only through that thread's queue, so a scan cannot meet a half
  written block. JAX knows the pool's arrays only to keep the memory alive: no program takes
  them, and nobody may donate or index them. (On a GPU, indexing a pinned array raises and a
  scatter on one ends the process.)
- `StagingRing` hands slots from the worker to the thread that dispatches. The worker fills a
  slot it has acquired; the dispatching thread sends it to the device; the slot is free again
  once the device arrays are ready. In between nobody may write it, since the copy reads it.
- `start_copy` moves an array from the device into pinned memory of its own. The copy depends
  on the array, so it begins when the program that makes the array has ended.

Memory is allocated once, at the start: pinning is slow, and the allocator behind it fragments.
It is written through raw pointers, because JAX has no way to write an array in place from the
host. All copies here are of whole integers of the same width: NumPy then copies bytes without
the interpreter lock, which it holds for bfloat16.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from herald_jax._checks import ConfigError, require, require_int
from herald_jax.cache.host_memory import check_host_memory

HOST_KINDS = ("pinned_host", "unpinned_host")
"""Memory kinds in the order in which they are tried; the second is several times slower."""

POLL_SECONDS = 0.0005
"""Pause between two looks at a copy that has not ended."""

_BITS = {2: np.uint16, 4: np.uint32}

_log = logging.getLogger(__name__)


def _probe(device: Any, kind: str) -> None:
    """Raises unless memory of this kind can be allocated, written by the host and sent."""
    pinned = _allocate((2, 3), np.dtype(np.float32), SingleDeviceSharding(device, memory_kind=kind))
    _writable(pinned)[:] = np.arange(6, dtype=np.float32).reshape(2, 3)
    back = np.asarray(jax.device_put(pinned, SingleDeviceSharding(device)))
    if back.ravel().tolist() != [0, 1, 2, 3, 4, 5]:
        raise RuntimeError(f"the device read {back.tolist()}")


def host_sharding(device: Any, probe: Callable[[Any, str], None] = _probe) -> SingleDeviceSharding:
    """Where the host's part of an array on `device` lives: the best kind of memory that works.

    Args:
        device: A JAX device.
        probe: Raises if a kind does not work.

    Raises:
        ConfigError: If none works.
    """
    failures = []
    for kind in HOST_KINDS:
        try:
            probe(device, kind)
        except Exception as error:  # whatever the backend throws, the next kind may do
            failures.append(f"{kind}: {error}")
            continue
        if failures:
            _log.warning("Host memory is `%s`, which is slow. %s", kind, "; ".join(failures))
        return SingleDeviceSharding(device, memory_kind=kind)
    raise ConfigError(
        f"{device} can use no host memory ({'; '.join(failures)}). Use placement='device'."
    )


def _allocate(shape: tuple[int, ...], dtype: np.dtype, sharding: SingleDeviceSharding) -> jax.Array:
    """A zeroed array in host memory; it is there when this returns."""
    # Zeros from the host, as a program that makes them would need the same space on the device.
    return jax.block_until_ready(jax.device_put(np.zeros(shape, dtype), sharding))


def _writable(array: jax.Array) -> np.ndarray:
    """The array's memory, for writing. The caller keeps `array` alive and never donates it."""
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(raw).view(array.dtype).reshape(array.shape)


def start_copy(array: jax.Array, sharding: SingleDeviceSharding) -> jax.Array:
    """A copy of a device array in host memory, on its way; pass it to `finish_copy`."""
    return jax.device_put(array, sharding)


def finish_copy(array: jax.Array) -> np.ndarray:
    """The values of an array that `start_copy` gave, read-only; waits for the copy's end."""
    return np.asarray(array)


def _has_arrived(array: Any) -> bool:
    return array.is_ready()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostShape:
    """Sizes of a host pool.

    Attributes:
        layers: Layers that keep keys and values on the host.
        rows: Rows, R.
        kv_heads: K.
        row_tokens: Tokens of a row, S.
        head_dim: D.
        dtype: Of keys and values, two or four bytes wide.
    """

    layers: int
    rows: int
    kv_heads: int
    row_tokens: int
    head_dim: int
    dtype: Any

    def __post_init__(self) -> None:
        """Checks every field."""
        for field in ("layers", "rows", "kv_heads", "row_tokens", "head_dim"):
            require_int(field, getattr(self, field), 1)
        # Larger numbers of bytes are fine: only positions within a row are of 32 bits.
        require(self.row_tokens < 2**31, "row_tokens", self.row_tokens, "less than 2^31")
        width = np.dtype(self.dtype).itemsize
        require(width in _BITS, "dtype", self.dtype, "two or four bytes wide")

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """Shape of one layer's keys."""
        return (self.rows, self.kv_heads, self.row_tokens, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, keys and values."""
        itemsize = np.dtype(self.dtype).itemsize
        return 2 * self.layers * math.prod(self.layer_shape) * itemsize


class PinnedPool:
    """Keys (rotated) and values of every finished block of the layers on the host.

    Args:
        shape: Sizes.
        sharding: Where, as `host_sharding` gives it.
        host_bytes: The user's limit of host memory, if any.
        more_bytes: Bytes that are going to be allocated besides, as by a `StagingRing`.

    Raises:
        ConfigError: If there is no room, before anything is allocated.
    """

    def __init__(
        self,
        shape: HostShape,
        sharding: SingleDeviceSharding,
        *,
        host_bytes: int | None = None,
        more_bytes: int = 0,
    ) -> None:
        is_gpu = next(iter(sharding.device_set)).platform == "gpu"
        check_host_memory(shape.nbytes + more_bytes, is_gpu=is_gpu, host_bytes=host_bytes)
        self.shape = shape
        dtype = np.dtype(shape.dtype)

        def allocate() -> list[jax.Array]:
            return [_allocate(shape.layer_shape, dtype, sharding) for _ in range(shape.layers)]

        self._k_arrays, self._v_arrays = allocate(), allocate()
        self._k = [_writable(array) for array in self._k_arrays]
        self._v = [_writable(array) for array in self._v_arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's arrays."""
        return sum(array.nbytes for array in (*self._k_arrays, *self._v_arrays))

    def _check_place(self, layer: int, row: int) -> None:
        # NumPy would take a negative number as one from the end.
        if not (0 <= layer < self.shape.layers and 0 <= row < self.shape.rows):
            raise IndexError(
                f"layer {layer} of row {row} is not among the pool's {self.shape.layers} layers "
                f"and {self.shape.rows} rows"
            )

    def write(self, layer: int, row: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Writes the keys and values [K, T, D] of T tokens of a row, from token `start` on.

        Raises:
            IndexError: If they are not all inside the row.
            ValueError: If shape or dtype are not the pool's.
        """
        self._check_place(layer, row)
        tokens, dtype = k.shape[1], np.dtype(self.shape.dtype)
        if not 0 <= start <= start + tokens <= self.shape.row_tokens:
            raise IndexError(
                f"tokens {start} to {start + tokens} do not fit a row of {self.shape.row_tokens}"
            )
        expected = (self.shape.kv_heads, tokens, self.shape.head_dim)
        for name, new in (("k", k), ("v", v)):
            if new.shape != expected or new.dtype != dtype:
                raise ValueError(
                    f"{name} is {new.dtype}{list(new.shape)}, but the pool takes "
                    f"{dtype}{list(expected)}"
                )
        bits = _BITS[dtype.itemsize]
        for pool, new in ((self._k[layer], k), (self._v[layer], v)):
            pool.view(bits)[row, :, start : start + tokens] = new.view(bits)

    def view(self, layer: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [K, S, D] of a row, in place and read-only."""
        self._check_place(layer, row)
        k, v = self._k[layer][row], self._v[layer][row]
        k.flags.writeable = v.flags.writeable = False
        return k, v


class StagingSlot:
    """Pinned keys and values [layers, K, C, D] on their way from the worker to the device."""

    def __init__(self, k: jax.Array, v: jax.Array) -> None:
        self.arrays = (k, v)
        self.k, self.v = _writable(k), _writable(v)


class StagingRing:
    """A few pinned buffers.

    Args:
        slots: Buffers.
        layers: Layers of a buffer.
        row_shape: K, C and D.
        dtype: Of keys and values.
        sharding: Where, as `host_sharding` gives it.
    """

    def __init__(
        self,
        slots: int,
        layers: int,
        row_shape: tuple[int, int, int],
        dtype: Any,
        sharding: SingleDeviceSharding,
    ) -> None:
        require_int("slots", slots, 1)
        require_int("layers", layers, 1)
        shape = (layers, *row_shape)
        self.layers, self.row_shape, self.dtype = layers, row_shape, np.dtype(dtype)
        self._device = SingleDeviceSharding(next(iter(sharding.device_set)))

        def allocate() -> jax.Array:
            return _allocate(shape, np.dtype(dtype), sharding)

        self._slots = [StagingSlot(allocate(), allocate()) for _ in range(slots)]
        self._changed = threading.Condition()
        # The rest belongs to the condition. A slot is in at most one of these; while the
        # worker fills it or the dispatching thread has not sent it, in `_held`.
        self._free = list(self._slots)
        self._held: list[StagingSlot] = []
        self._sent: list[tuple[StagingSlot, Sequence[jax.Array]]] = []

    @staticmethod
    def predicted_bytes(
        slots: int, layers: int, row_shape: tuple[int, int, int], dtype: Any
    ) -> int:
        """Bytes of such a ring."""
        return 2 * slots * layers * math.prod(row_shape) * np.dtype(dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the ring's arrays."""
        return sum(array.nbytes for slot in self._slots for array in slot.arrays)

    def acquire(self, is_over: Callable[[], bool] = lambda: False) -> StagingSlot | None:
        """A slot to fill, once there is one; `None` as soon as `is_over()`."""
        with self._changed:
            while not is_over():
                self._collect()
                if self._free:
                    slot = self._free.pop(0)
                    self._held.append(slot)
                    return slot
                self._changed.wait(POLL_SECONDS if self._sent else 20 * POLL_SECONDS)
        return None

    def send(self, slot: StagingSlot) -> tuple[jax.Array, jax.Array]:
        """The slot's keys and values on the device, on their way; the slot is given back.

        The slot is used again once the arrays are ready, so they may not be donated before.
        """
        k, v = jax.device_put(slot.arrays, self._device)
        with self._changed:
            self._give_up(slot)
            self._sent.append((slot, (k, v)))
            self._changed.notify_all()
        return k, v

    def release(self, slot: StagingSlot) -> None:
        """Gives a slot back that is not sent."""
        with self._changed:
            self._give_up(slot)
            self._free.append(slot)
            self._changed.notify_all()

    def collect(self) -> int:
        """Lets go of device arrays that have arrived; the number of slots that are free."""
        with self._changed:
            self._collect()
            return len(self._free)

    def is_quiet(self) -> bool:
        """True if nothing is on its way any more; lets go of arrays that have arrived.

        It says nothing of arrays that were donated: whoever needs a slot next does.
        """
        with self._changed:
            if not any(array.is_deleted() for _, arrays in self._sent for array in arrays):
                self._collect()
                return not self._sent
            return True

    def _give_up(self, slot: StagingSlot) -> None:
        if slot not in self._held:
            raise RuntimeError("the staging slot was given back before, or is not of this ring")
        self._held.remove(slot)

    def _collect(self) -> None:
        in_flight = []
        for slot, arrays in self._sent:
            if any(array.is_deleted() for array in arrays):
                raise RuntimeError(
                    "a recalled array was donated before its copy was known to have ended"
                )
            if all(_has_arrived(array) for array in arrays):
                self._free.append(slot)
            else:
                in_flight.append((slot, arrays))
        self._sent = in_flight
