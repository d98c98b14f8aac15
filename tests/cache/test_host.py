"""Pinned pools and the staging ring, on the CPU backend's memory kinds."""

from __future__ import annotations

import ast
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import ConfigError, settings
from herald_jax.cache import host
from herald_jax.cache.host import HostShape, PinnedPool, StagingRing
from herald_jax.cache.host_link import LinkRates, measure_link
from herald_jax.cache.host_memory import available_host_bytes, check_host_memory
from herald_jax.cache.shape import staged_layers

LAYERS, ROWS, KV_HEADS, TOKENS, DIM = 3, 4, 2, 24, 8
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sharding():
    return host.host_sharding(jax.devices()[0])


def shape(**changes) -> HostShape:
    sizes = {
        "layers": LAYERS,
        "rows": ROWS,
        "kv_heads": KV_HEADS,
        "row_tokens": TOKENS,
        "head_dim": DIM,
        "dtype": jnp.float32,
    }
    return HostShape(**{**sizes, **changes})


def numbers(count: int, tokens: int, dtype=np.float32) -> list[np.ndarray]:
    """Arrays [K, T, D] in which every number of all arrays differs."""
    size = KV_HEADS * tokens * DIM
    return [
        (np.arange(size, dtype=np.float32) + 1 + i * size)
        .reshape(KV_HEADS, tokens, DIM)
        .astype(dtype)
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_is_written_is_read_back_and_nothing_else_changes(sharding, dtype):
    pool = PinnedPool(shape(dtype=dtype), sharding)
    expected = np.zeros((2, LAYERS, ROWS, KV_HEADS, TOKENS, DIM), np.dtype(dtype))
    places = [(0, 0, 0), (2, 3, TOKENS - 4), (1, 2, 8), (2, 3, 0)]
    fresh = numbers(2 * len(places), 4, np.dtype(dtype))
    for at, (layer, row, start) in enumerate(places):
        k, v = fresh[2 * at], fresh[2 * at + 1]
        pool.write(layer, row, start, k, v)
        expected[0, layer, row, :, start : start + 4] = k
        expected[1, layer, row, :, start : start + 4] = v
    for layer in range(LAYERS):
        for row in range(ROWS):
            k, v = pool.view(layer, row)
            np.testing.assert_array_equal(k, expected[0, layer, row])
            np.testing.assert_array_equal(v, expected[1, layer, row])
            assert k.dtype == dtype and not k.flags.writeable and not v.flags.writeable
    assert pool.nbytes == expected.nbytes == pool.shape.nbytes


def test_a_view_shows_later_writes_and_takes_values_that_are_not_contiguous(sharding):
    pool = PinnedPool(shape(), sharding)
    k, v = pool.view(1, 2)
    new = numbers(1, 6)[0]
    transposed = np.ascontiguousarray(new.swapaxes(0, 1)).swapaxes(0, 1)
    pool.write(1, 2, 3, transposed, transposed[:, ::-1])
    np.testing.assert_array_equal(k[:, 3:9], new)
    np.testing.assert_array_equal(v[:, 3:9], new[:, ::-1])


def test_no_write_or_view_leaves_its_row(sharding):
    """Kinds of fault: an update past the end that is moved into range, a negative index."""
    pool = PinnedPool(shape(), sharding)
    k, v = numbers(2, 4)
    pool.write(0, 0, TOKENS - 4, k, v)
    for layer, row, start in [
        (0, 0, TOKENS - 3),
        (0, 0, TOKENS),
        (0, 0, -1),
        (-1, 0, 0),
        (LAYERS, 0, 0),
        (0, -1, 0),
        (0, ROWS, 0),
    ]:
        with pytest.raises(IndexError):
            pool.write(layer, row, start, k, v)
    for place in [(-1, 0), (LAYERS, 0), (0, -1), (0, ROWS)]:
        with pytest.raises(IndexError, match="3 layers and 4 rows"):
            pool.view(*place)
    with pytest.raises(ValueError, match="float64"):
        pool.write(0, 0, 0, k.astype(np.float64), v)
    with pytest.raises(ValueError, match=r"v is float32\[2, 3, 8\]"):
        pool.write(0, 0, 0, k, v[:, :3])
    assert sum(np.count_nonzero(a) for i in range(ROWS) for a in pool.view(0, i)) == 2 * k.size


def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated(sharding, monkeypatch):
    """Kind of fault: an exhausted pool shows as an index error or kills the process."""

    def refuse(*_: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(host, "_allocate", refuse)
    need = shape().nbytes
    assert need == 2 * LAYERS * ROWS * KV_HEADS * TOKENS * DIM * 4
    with pytest.raises(ConfigError, match=rf"{need:,} bytes.*{need - 1:,} bytes.*`host_bytes`"):
        PinnedPool(shape(), sharding, host_bytes=need - 1)
    with pytest.raises(ConfigError, match=f"{need + 7:,}"):
        PinnedPool(shape(), sharding, host_bytes=need, more_bytes=7)
    # More elements than 32 bits can count are no fault, but more than this machine has is.
    with pytest.raises(ConfigError, match="available memory"):
        PinnedPool(shape(rows=2**40), sharding)
    with pytest.raises(AssertionError, match="allocated"):
        PinnedPool(shape(), sharding, host_bytes=need)


def test_the_gpu_runtimes_cap_binds_on_a_gpu_only(monkeypatch):
    monkeypatch.setenv(settings.PINNED_LIMIT_VARIABLE, "3")
    fits, plenty = 2 << 30, 100 << 30
    check_host_memory(fits, is_gpu=True, available=plenty)
    check_host_memory(fits + 1, is_gpu=False, available=plenty)
    with pytest.raises(ConfigError, match=f"2.00 GiB .*{settings.PINNED_LIMIT_VARIABLE}"):
        check_host_memory(fits + 1, is_gpu=True, available=plenty)
    with pytest.raises(ConfigError, match="need 2.00 GiB .* there are 1.00 GiB"):
        check_host_memory(fits, is_gpu=True, host_bytes=1 << 30, available=plenty)


def test_available_memory_is_that_of_the_container_if_it_is_less(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert available_host_bytes(meminfo, tmp_path) == 5000 << 10
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\nactive_file 30000\n")
    assert available_host_bytes(meminfo, tmp_path) == 330_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, tmp_path) == 5000 << 10
    assert available_host_bytes(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("row_tokens", 2**31), ("rows", True), ("dtype", np.int8)]
)
def test_a_shape_names_the_field_that_is_wrong(field, value):
    with pytest.raises(ConfigError, match=f"^{field}="):
        shape(**{field: value})


def test_memory_kinds_are_tried_in_order(caplog):
    """Kind of fault: pinned memory that does not work ends the process at the first transfer."""
    device = jax.devices()[0]

    def only_unpinned(_: object, kind: str) -> None:
        if kind == "pinned_host":
            raise RuntimeError("no such luck")

    assert host.host_sharding(device).memory_kind == "pinned_host"
    assert not caplog.records
    assert host.host_sharding(device, only_unpinned).memory_kind == "unpinned_host"
    assert len(caplog.records) == 1 and "no such luck" in caplog.text

    def none(_: object, kind: str) -> None:
        raise RuntimeError(f"{kind} is broken")

    with pytest.raises(ConfigError, match=r"pinned_host is broken.*placement='device'"):
        host.host_sharding(device, none)


def test_a_copy_to_the_host_waits_for_the_program_that_writes_the_array(sharding):
    """Kind of fault: the copy starts before the compute that writes its source is done."""

    @jax.jit
    def slow(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = x @ x / 300.0
        return x + 1

    x = jnp.ones((300, 300))
    expected = np.asarray(slow(x))
    for _ in range(30):
        copy = host.start_copy(slow(x), sharding)
        assert copy.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(host.finish_copy(copy), expected)


def test_a_slow_link_is_told_of(sharding, caplog):
    """Kind of fault: copies run at a tenth of the rate and nobody notices."""
    caplog.set_level("INFO")
    ticks = iter([0.0, 0.5, 0.0, 0.125])
    rates = measure_link(sharding, 4 << 20, clock=lambda: next(ticks))
    assert rates == LinkRates(to_host=8 << 20, to_device=32 << 20)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "less than 8" in caplog.text
    caplog.clear()
    ticks = iter([0.0, 1e-4, 0.0, 1e-5])
    assert measure_link(sharding, 4 << 20, clock=lambda: next(ticks)).to_host > 8e9
    assert [record.levelname for record in caplog.records] == ["INFO"]


ROW = (KV_HEADS, 6, DIM)


def test_staged_slots_arrive_as_they_were_filled(sharding):
    ring = StagingRing(2, 3, ROW, jnp.bfloat16, sharding)
    predicted = StagingRing.predicted_bytes(2, 3, ROW, jnp.bfloat16)
    assert ring.nbytes == predicted == 2 * 2 * 3 * KV_HEADS * 6 * DIM * 2
    for turn in range(7):  # every slot is used several times
        slot = ring.acquire()
        assert slot is not None
        slot.k[:] = np.arange(slot.k.size).reshape(slot.k.shape) + turn
        slot.v[:] = -slot.k
        k, v = ring.send(slot)
        expected = (np.arange(slot.k.size).reshape(slot.k.shape) + turn).astype(slot.k.dtype)
        np.testing.assert_array_equal(k, expected)
        np.testing.assert_array_equal(v, -expected)
        assert k.sharding.memory_kind == "device"


def test_a_slot_holds_the_layers_of_a_large_copy():
    row = 8 * 1664 * 128  # 3.25 MiB of bfloat16
    assert staged_layers(2 * row, 34) == 5
    assert staged_layers(4 * row, 34) == 3
    assert staged_layers(2 * row, 4) == 4
    assert staged_layers(2 * 8 * 2**17 * 128, 34) == 1


@pytest.fixture
def slow_ring(sharding, monkeypatch):
    """A ring of two slots, and the list of the copies that have ended as far as it knows."""
    arrived: list[jax.Array] = []
    monkeypatch.setattr(host, "_has_arrived", lambda array: any(array is a for a in arrived))
    return StagingRing(2, 1, ROW, jnp.float32, sharding), arrived


def test_a_slot_is_not_handed_out_before_its_copies_have_ended(slow_ring):
    """Kind of fault: buffers of a transfer under way are freed and filled anew."""
    ring, arrived = slow_ring
    first, second = ring.acquire(), ring.acquire()
    of_first, of_second = ring.send(first), ring.send(second)
    assert ring.collect() == 0
    deadline = time.monotonic() + 0.02
    assert ring.acquire(lambda: time.monotonic() > deadline) is None
    arrived.append(of_second[0])
    assert ring.collect() == 0  # its values are still on their way
    got: list = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire()))
    waiter.start()
    time.sleep(0.01)
    assert waiter.is_alive()
    arrived.append(of_second[1])
    waiter.join(5)
    assert got == [second]
    arrived += of_first
    assert ring.acquire() is first


def test_a_slot_is_given_back_once(slow_ring):
    """Kind of fault: a page is freed twice and then owned by two."""
    ring, _ = slow_ring
    slot = ring.acquire()
    ring.release(slot)
    for give in (ring.release, ring.send):
        with pytest.raises(RuntimeError, match="given back before"):
            give(slot)
    taken = {ring.acquire(), ring.acquire()}
    assert len(taken) == 2
    ring.send(slot)
    with pytest.raises(RuntimeError, match="given back before"):
        ring.release(slot)


def test_a_donated_copy_is_told_of(slow_ring):
    ring, _ = slow_ring
    ring.send(ring.acquire())[1].delete()
    with pytest.raises(RuntimeError, match="donated"):
        ring.collect()


def test_only_this_module_touches_host_memory():
    """Kind of fault: indexing or scattering on pinned arrays raises or ends the process."""
    users = {"unsafe_buffer_pointer": set(), "from_address": set(), "pinned_host": set()}
    for path in [*ROOT.glob("herald_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "value", None)
            if isinstance(name, str) and name in users:
                users[name].add(path.relative_to(ROOT).as_posix())
    assert set().union(*users.values()) == {"herald_jax/cache/host.py"}
