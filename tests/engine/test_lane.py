"""The host lane: what it recalls, in what order, and what is left after failures and cancels."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.cache.host import HostShape, PinnedPool, StagingRing, host_sharding
from herald_jax.engine.lane import HostLane
from herald_jax.engine.lane_jobs import Append, Job, LaneError, Recall
from herald_jax.retrieval import SelectionConfig, choose, gather_rows, importance
from herald_jax.retrieval.recall import HostStore

LAYERS, ROWS, KV_HEADS, TOKENS, DIM = 3, 2, 2, 96, 8
BLOCK, ROOM, COLUMNS, SINKS, SLOTS = 16, 40, 5, 2, 2
SPEC = SelectionConfig(dilation=2, dilation_weight=0.3)
SECONDS = 30


class Gate:
    """A `before_job` that stops the worker before chosen jobs, or fails them."""

    def __init__(self) -> None:
        self.begun: list[Job] = []
        self.is_held: Callable[[Job], bool] = lambda job: False
        self.fails: Callable[[Job], bool] = lambda job: False
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, job: Job) -> None:
        self.begun.append(job)
        if self.is_held(job):
            self.reached.set()
            assert self.opened.wait(SECONDS)
        if self.fails(job):
            raise OSError("the disk is on fire")


@dataclasses.dataclass
class Setup:
    lane: HostLane
    ring: StagingRing
    gate: Gate
    store: HostStore

    def append(self, row: int, epoch: int, index: int, seed: int = 0) -> Append:
        k, v = block(seed + index)
        return self.lane.append(row, epoch, 0, index * BLOCK, k, v)

    def recall(self, row: int, epoch: int, target: int, seed: int = 0, wanted: int = 7) -> Recall:
        cols = columns(seed + target)
        return self.lane.recall(row, epoch, target, cols, (target - 1) * BLOCK, wanted)

    def free_slots(self) -> int:
        """Slots that are free once sent ones have arrived and the lane is idle."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if self.lane.pending == 0 and self.ring.collect() == SLOTS:
                break
            time.sleep(0.001)
        return self.ring.collect()


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = make(Gate())
    yield made
    made.gate.opened.set()
    made.lane.close()


def make(gate: Gate, layers_of_slot: int = 2) -> Setup:
    sharding = host_sharding(jax.devices()[0])
    shape = HostShape(
        layers=LAYERS,
        rows=ROWS,
        kv_heads=KV_HEADS,
        row_tokens=TOKENS,
        head_dim=DIM,
        dtype=jnp.float32,
    )
    pool = PinnedPool(shape, sharding)
    store = HostStore(pool, SPEC, columns=COLUMNS, group=1, sinks=SINKS)
    ring = StagingRing(SLOTS, layers_of_slot, (KV_HEADS, ROOM, DIM), jnp.float32, sharding)
    return Setup(HostLane(store, ring, sharding, threads=2, before_job=gate), ring, gate, store)


def block(seed: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values [L, K, B, D] of a block."""
    numbers = np.random.default_rng(seed).normal(size=(2, LAYERS, KV_HEADS, BLOCK, DIM))
    k, v = jnp.asarray(numbers, jnp.float32)
    return k, v


def columns(seed: int) -> jax.Array:
    numbers = np.random.default_rng(1000 + seed).normal(size=(LAYERS, KV_HEADS, COLUMNS, DIM))
    return jnp.asarray(numbers, jnp.float32)


IMPORTANCE = jax.jit(importance, static_argnums=3)
CHOOSE = jax.jit(choose, static_argnums=(2, 4))


def expected_pool(seed: int, target: int, wanted: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Entries [L, K, n, D] that the device's form chooses for block `target`."""
    blocks = [block(seed + index) for index in range(target - 1)]
    padding = ((0, 0), (0, 0), (0, TOKENS - BLOCK * len(blocks)), (0, 0))
    k, v = (jnp.pad(jnp.concatenate(part, 2), padding) for part in zip(*blocks, strict=True))
    limits = jnp.full(LAYERS, BLOCK * len(blocks))
    score = IMPORTANCE(columns(seed + target), k, limits, SPEC)
    index, counts = CHOOSE(score, limits, SINKS, jnp.full(LAYERS, wanted), ROOM)
    index = index[:, :, : int(counts[0])]
    return np.asarray(gather_rows(k, index)), np.asarray(gather_rows(v, index))


def take(recall: Recall) -> tuple[np.ndarray, np.ndarray]:
    """What a recall brings to the device, as a caller between steps collects it."""
    number = recall.sinks + recall.selected
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    while not recall.is_taken:
        assert recall.wait(SECONDS)
        if recall.error:
            raise recall.error
        for chunk in recall.ready_chunks():
            k, v = chunk.send()
            for at in range(chunk.count):
                entries = np.asarray(k[at, :, :number]), np.asarray(v[at, :, :number])
                found[chunk.first_layer + at] = entries
    assert sorted(found) == list(range(LAYERS))
    return (
        np.stack([found[layer][0] for layer in range(LAYERS)]),
        np.stack([found[layer][1] for layer in range(LAYERS)]),
    )


def assert_pool(recall: Recall, seed: int, wanted: int = 7) -> None:
    for found, right in zip(take(recall), expected_pool(seed, recall.target, wanted), strict=True):
        np.testing.assert_array_equal(found, right)


def test_rows_that_take_turns_get_what_the_device_would_have_chosen(setup):
    for index in range(4):
        setup.append(0, 1, index, seed=100)
        setup.append(1, 9, index, seed=200)
        if index:
            recalls = [setup.recall(0, 1, index + 1, 100), setup.recall(1, 9, index + 1, 200)]
            assert_pool(recalls[0], 100)
            assert_pool(recalls[1], 200)
    assert setup.free_slots() == SLOTS


def test_a_prompt_comes_layer_by_layer_with_padding(setup):
    """Buffers of a prefill are [1, K, S, D], and only the prompt's own tokens count."""
    blocks = [block(index) for index in range(3)]
    k, v = (jnp.concatenate(part, 2) for part in zip(*blocks, strict=True))
    for layer in range(LAYERS):
        padded = [
            jnp.pad(x[layer : layer + 1], ((0, 0), (0, 0), (0, 9), (0, 0)), constant_values=99)
            for x in (k, v)
        ]
        setup.lane.append(0, 1, layer, 0, *padded, tokens=3 * BLOCK)
        for array in padded:
            array.delete()  # as a program that takes them by donation does
    setup.append(0, 1, 3)
    assert_pool(setup.recall(0, 1, 4), 0)
    assert_pool(setup.recall(0, 1, 5), 0)


def test_accounts_of_a_recall(setup):
    for index in range(5):
        setup.append(0, 1, index)
    first, second = setup.recall(0, 1, 5), None
    take(first)
    token = KV_HEADS * DIM * 4
    number = SINKS + 7
    assert (first.sinks, first.selected) == (SINKS, 7)
    assert first.notes.entries == LAYERS * KV_HEADS * number and first.notes.hits == 0
    assert first.account.bytes_scanned == LAYERS * 4 * BLOCK * token
    assert first.account.bytes_gathered == 2 * LAYERS * number * token
    assert first.account.bytes_sent == 2 * 2 * 2 * ROOM * token  # two slots of two layers
    assert first.account.seconds >= first.notes.scan_seconds > 0
    second = setup.lane.recall(0, 1, 6, columns(5), 4 * BLOCK, 7)
    take(second)
    assert second.account.hit_share == 1.0  # the same queries over the same keys
    third = setup.recall(0, 1, 6)
    take(third)
    sinks_alone = SINKS / number
    assert sinks_alone <= third.account.hit_share < 1.0
    short = setup.recall(0, 1, 2, wanted=BLOCK)
    take(short)
    assert (short.sinks, short.selected) == (SINKS, BLOCK - SINKS)
    assert short.account.bytes_scanned == 0  # everything is taken, so nothing is scored


def test_recalls_see_every_append_before_them_however_late_the_worker_is():
    """Kinds of fault: a scan reads what is being written; a copy starts before its source."""
    chance = random.Random(5)
    gate = Gate()

    def dawdle(job: Job) -> None:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.003)

    gate.fails = lambda job: dawdle(job) or False
    setup = make(gate)

    @jax.jit
    def late(x: jax.Array) -> jax.Array:
        y = jnp.ones((80, 80))
        for _ in range(4):
            y = y @ y / 80.0
        return jnp.where(y[0, 0] > 0, x, -x)

    with setup.lane:
        for turn in range(20):
            epoch, row, seed = turn, turn % ROWS, 1000 * turn
            for index in range(3):
                k, v = block(seed + index)
                setup.lane.append(row, epoch, 0, index * BLOCK, late(k), late(v))
            assert_pool(setup.recall(row, epoch, 4, seed), seed)
            setup.lane.cancel(row, epoch)
        assert setup.free_slots() == SLOTS


def test_a_pool_is_not_taken_before_its_last_chunk(setup):
    """Kind of fault: a worker that is late leaves a pool half filled, and it is used."""
    for index in range(3):
        setup.append(0, 1, index)
    setup.gate.is_held = lambda job: isinstance(job, Recall)
    recall = setup.recall(0, 1, 4)
    assert setup.gate.reached.wait(SECONDS)
    assert not recall.wait(0.01) and not recall.ready_chunks() and not recall.is_taken
    setup.gate.opened.set()
    seen = 0
    while not recall.is_taken:
        assert recall.wait(SECONDS) and not recall.error
        for chunk in recall.ready_chunks():
            assert seen == chunk.first_layer
            seen += chunk.count
            chunk.release()
    assert seen == LAYERS


def test_a_failure_stays_with_its_stay_and_the_others_go_on(setup):
    """Kind of fault: an exception in a thread is lost, or ends everybody's work."""
    for index in range(3):
        setup.append(1, 4, index, seed=50)
    setup.gate.fails = lambda job: job.row == 0 and isinstance(job, Append)
    bad = [setup.append(0, 3, 0), setup.recall(0, 3, 2)]
    good = setup.recall(1, 4, 4, seed=50)
    assert_pool(good, 50)
    for job in bad:
        assert job.wait(SECONDS) and job.is_done
        assert isinstance(job.error, LaneError)
        assert (job.error.row, job.error.epoch) == (0, 3)
        assert isinstance(job.error.__cause__, OSError) and "fire" in str(job.error)
    assert not bad[1].is_taken and not bad[1].ready_chunks()
    # The next stay in that row has nothing to do with it.
    setup.gate.fails = lambda job: False
    setup.lane.cancel(0, 3)
    for index in range(3):
        setup.append(0, 5, index, seed=70)
    assert_pool(setup.recall(0, 5, 4, seed=70), 70)
    assert setup.free_slots() == SLOTS


def test_a_recall_that_fails_half_way_leaves_no_chunk(setup, monkeypatch):
    for index in range(3):
        setup.append(0, 1, index)
    recall_layer = setup.store.recall

    def fail_at_last_layer(row, epoch, layer, *rest):
        if layer == LAYERS - 1 and epoch == 1:
            raise ArithmeticError("cosmic ray")
        return recall_layer(row, epoch, layer, *rest)

    monkeypatch.setattr(setup.store, "recall", fail_at_last_layer)
    recall = setup.recall(0, 1, 4)
    while not recall.is_done:
        assert setup.lane.wait([recall], SECONDS)
        time.sleep(0.001)
    assert recall.error and "cosmic ray" in str(recall.error)
    assert not recall.ready_chunks() and not recall.is_taken
    assert setup.free_slots() == SLOTS
    for index in range(3):
        setup.append(1, 2, index)
    assert_pool(setup.recall(1, 2, 4), 0)


def test_nothing_is_selected_that_the_stay_itself_has_not_written(setup):
    """Kind of fault: a row's new request is given keys of the request before it."""
    for index in range(4):
        setup.append(0, 1, index)
    take(setup.recall(0, 1, 5))
    setup.lane.cancel(0, 1)
    setup.append(0, 2, 0, seed=60)
    stale = setup.recall(0, 2, 3, seed=60)
    assert stale.wait(SECONDS) and stale.error and "16 tokens" in str(stale.error)
    of_old_stay = setup.recall(0, 1, 3)
    assert of_old_stay.wait(SECONDS) and "has written 0 tokens" in str(of_old_stay.error)
    gap = setup.lane.append(1, 1, 0, BLOCK, *block(0))
    assert gap.wait(SECONDS) and "cannot be appended at 16" in str(gap.error)
    twice = [setup.lane.append(1, 2, 0, 0, *block(0)) for _ in range(2)]
    assert twice[1].wait(SECONDS) and not twice[0].error and twice[1].error
    outside = setup.lane.append(1, 3, 0, 0, *(jnp.tile(x, (1, 1, 7, 1)) for x in block(0)))
    assert outside.wait(SECONDS) and isinstance(outside.error.__cause__, IndexError)


def test_cancel_at_any_time_and_twice(setup):
    """Kind of fault: an abort is dropped, or frees what is still in use."""
    setup.lane.cancel(0, 77)  # nobody has heard of it
    for index in range(3):
        setup.append(0, 1, index)
    # While it waits behind another job.
    setup.gate.is_held = lambda job: job.row == 1
    blocker = setup.append(1, 1, 0)
    assert setup.gate.reached.wait(SECONDS)
    waiting = setup.recall(0, 1, 4)
    setup.lane.cancel(0, 1)
    setup.lane.cancel(0, 1)
    assert waiting.is_done and waiting.is_cancelled and not waiting.is_taken
    setup.gate.opened.set()
    assert blocker.wait(SECONDS) and not blocker.error
    assert waiting not in setup.gate.begun
    # While it waits for a slot, with chunks that nobody has taken.
    for index in range(3):
        setup.append(0, 2, index)
    held = [setup.ring.acquire() for _ in range(SLOTS - 1)]
    running = setup.recall(0, 2, 4)
    assert running.wait(SECONDS) and len(running.chunks) == 1 and not running.is_done
    setup.lane.cancel(0, 2)
    assert setup.lane.wait([running], SECONDS) and running.is_cancelled
    assert not running.ready_chunks() and not running.error
    for slot in held:
        setup.ring.release(slot)
    assert setup.free_slots() == SLOTS
    # When all is done: chunks that were taken remain the caller's.
    for index in range(3):
        setup.append(0, 3, index)
    done = setup.recall(0, 3, 4)
    assert done.wait(SECONDS)
    (first, *_) = done.ready_chunks()
    setup.lane.cancel(0, 3)
    k, _ = first.send()
    right = expected_pool(0, 4)[0]
    np.testing.assert_array_equal(np.asarray(k)[0, :, : right.shape[2]], right[0])
    assert setup.free_slots() == SLOTS


def test_close_ends_the_thread_whatever_it_is_doing():
    for state in ("idle", "no slot", "before a job"):
        gate = Gate()
        setup = make(gate)
        for index in range(3):
            setup.append(0, 1, index)
        jobs: list[Job] = []
        if state == "no slot":
            for _ in range(SLOTS):
                setup.ring.acquire()
            jobs = [setup.recall(0, 1, 4), setup.recall(0, 1, 4)]
        if state == "before a job":
            gate.is_held = lambda job: isinstance(job, Recall)
            jobs = [setup.recall(0, 1, 4), setup.append(0, 1, 3)]
            assert gate.reached.wait(SECONDS)
            threading.Timer(0.02, gate.opened.set).start()
        setup.lane.close()
        setup.lane.close()
        assert not any(t.name == "herald-host-lane" and t.is_alive() for t in threading.enumerate())
        assert all(job.is_done and job.is_cancelled and job.wait(0) for job in jobs)
        assert setup.lane.pending == 0
        with pytest.raises(RuntimeError, match="closed"):
            setup.recall(0, 1, 4)


def test_a_process_ends_with_an_open_lane(run_python):
    printed = run_python(
        "import time\n"
        "from tests.engine.test_lane import Gate, make\n"
        "setup = make(Gate())\n"
        "for index in range(3):\n"
        "    setup.append(0, 1, index)\n"
        "setup.recall(0, 1, 4)\n"
        "print('end')\n",
        timeout=120,
    )
    assert printed.strip() == "end"


def test_recalls_that_cannot_fit_are_refused_by_the_caller(setup):
    """Kind of fault: a fixed buffer is too small for the longest request."""
    cols = columns(0)
    with pytest.raises(ValueError, match="2 sinks and 39 entries do not fit a pool of 40"):
        setup.lane.recall(0, 1, 6, cols, 5 * BLOCK, ROOM - SINKS + 1)
    with pytest.raises(ValueError, match=r"columns are \[3, 2, 4, 8\]"):
        setup.lane.recall(0, 1, 6, cols[:, :, :4], 5 * BLOCK, 3)
    for index in range(5):
        setup.append(0, 1, index)
    assert_pool(setup.recall(0, 1, 6, wanted=ROOM - SINKS), 0, wanted=ROOM - SINKS)


def test_positions_that_the_device_chose_are_copied(setup):
    """Kind of fault: the host trusts positions of another row, or of padding."""
    for index in range(4):
        setup.append(0, 1, index)
    chance = np.random.default_rng(8)
    order = np.argsort(chance.random((LAYERS, KV_HEADS, 4 * BLOCK)), -1)[:, :, : SINKS + 7]
    padding = np.full((LAYERS, KV_HEADS, 5), 2**30)
    positions = np.concatenate([np.sort(order, -1), padding], -1).astype(np.int32)

    def ask(positions: np.ndarray, candidates: int = 4 * BLOCK) -> Recall:
        return setup.lane.recall_positions(0, 1, 5, jnp.asarray(positions), candidates, 7)

    k, v = (np.concatenate(part, 2) for part in zip(*map(block, range(4)), strict=True))
    for recall, hit_share in ((ask(positions), 0.0), (ask(positions), 1.0)):
        for found, text in zip(take(recall), (k, v), strict=True):
            right = np.take_along_axis(text, positions[:, :, : SINKS + 7, None], 2)
            np.testing.assert_array_equal(found, right)
        account = recall.account
        assert (account.bytes_scanned, account.hit_share) == (0, hit_share)
        assert account.bytes_gathered == 2 * LAYERS * KV_HEADS * (SINKS + 7) * DIM * 4
    with pytest.raises(ValueError, match=r"positions are \[3, 2, 8\] instead of \[3, 2, 9 or more"):
        ask(positions[:, :, :8])
    outside = ask(positions, 3 * BLOCK)
    assert outside.wait(SECONDS) and isinstance(outside.error.__cause__, IndexError)
    assert "0 to 47" in str(outside.error)
    setup.lane.cancel(0, 1)
    early = ask(positions)
    assert early.wait(SECONDS) and "has written 0 tokens" in str(early.error)
    assert setup.free_slots() == SLOTS


def test_a_cancelled_recall_leaves_nothing_on_the_device(setup):
    """Kind of fault: arrays of the last request stay until somebody else asks."""
    for index in range(3):
        setup.append(0, 1, index)
    recall = setup.recall(0, 1, 4)
    assert recall.wait(SECONDS)
    sent = [weakref.ref(array) for chunk in recall.ready_chunks() for array in chunk.send()]
    setup.lane.cancel(0, 1)
    deadline = time.monotonic() + SECONDS
    while any(array() is not None for array in sent):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_random_traffic_leaks_nothing():
    """Kind of fault: aborts are where slots and threads leak."""
    chance = random.Random(3)
    gate = Gate()
    gate.fails = lambda job: chance.random() < 0.03
    setup = make(gate, layers_of_slot=1)
    epochs, lengths = [0] * ROWS, [0] * ROWS
    open_recalls: list[Recall] = []
    taken = failed = 0
    with setup.lane:
        for tick in range(20_000):
            if tick >= 400 and taken > 20 and failed > 0:
                break
            time.sleep(0.0005)  # a busy machine may give the lane less time than this thread
            row = chance.randrange(ROWS)
            fate = chance.random()
            if fate < 0.12 or lengths[row] == TOKENS // BLOCK:
                setup.lane.cancel(row, epochs[row])
                epochs[row], lengths[row] = tick + 1, 0
            elif fate < 0.6:
                setup.append(row, epochs[row], lengths[row])
                lengths[row] += 1
            elif lengths[row]:
                open_recalls.append(setup.recall(row, epochs[row], lengths[row] + 1))
            for recall in list(open_recalls):
                for chunk in recall.ready_chunks():
                    (chunk.send if chance.random() < 0.7 else chunk.release)()
                if recall.is_done and not recall.chunks:
                    assert recall.is_taken + recall.is_cancelled + bool(recall.error) == 1
                    taken, failed = taken + recall.is_taken, failed + bool(recall.error)
                    open_recalls.remove(recall)
        for row in range(ROWS):
            setup.lane.cancel(row, epochs[row])
        assert setup.free_slots() == SLOTS
        assert taken > 20 and failed > 0
        assert all(recall.is_done for recall in open_recalls)
