"""The scan of host memory against loops over single keys and against the device's form."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_selection import slow_choice, slow_scores

from herald_jax import ConfigError
from herald_jax.retrieval import SelectionConfig, choose, importance, scan
from herald_jax.retrieval.scan import (
    MatrixScores,
    NumbaScores,
    ScanScratch,
    XlaScores,
    gather_layer,
    scan_layer,
)

HEADS, KEYS, DIM = 3, 1700, 12  # more than one chunk, and no whole number of chunks
IMPORTANCE = jax.jit(importance, static_argnums=(3, 4))
CHOOSE = jax.jit(choose, static_argnums=(2, 4))


def draw(seed: int, columns: int, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Keys [K, S, D] and columns [K, c, D]."""
    numbers = np.random.default_rng(seed)
    k = numbers.normal(size=(HEADS, KEYS, DIM)).astype(np.float32)
    cols = numbers.normal(size=(HEADS, columns, DIM)).astype(np.float32)
    return k.astype(np.dtype(dtype)), cols


@pytest.fixture(scope="module")
def scratch() -> ScanScratch:
    return ScanScratch(HEADS, KEYS, 12)


def on_device(k, cols, candidates, sinks, wanted, spec, group=1) -> np.ndarray:
    limits = jnp.array([candidates])
    score = IMPORTANCE(jnp.asarray(cols)[None], jnp.asarray(k)[None], limits, spec, group)
    index, counts = CHOOSE(score, limits, sinks, jnp.array([wanted]), k.shape[1])
    return np.asarray(index)[0, :, : int(counts[0])]


@pytest.mark.parametrize(
    ("columns", "group", "changes"),
    [
        (8, 1, {}),
        (1, 1, {"dilation": 0}),
        (6, 2, {"pooling": "mean", "dilation": 1, "dilation_weight": 0.5}),
        (12, 3, {"dilation": 40, "dilation_weight": 1.0}),
        (5, 1, {"pooling": "mean", "dilation_weight": 0.0}),
    ],
)
@pytest.mark.parametrize("stage", [NumbaScores(), XlaScores()], ids=lambda stage: stage.name)
def test_the_choice_is_that_of_the_device(scratch, columns, group, changes, stage):
    spec = SelectionConfig(**changes)
    for seed, (candidates, sinks, wanted) in enumerate(
        [(KEYS, 4, 85), (1025, 0, 1), (513, 0, 500), (40, 4, 35), (KEYS, 4, KEYS - 5)]
    ):
        k, cols = draw(seed, columns)
        k[:, candidates:] = np.nan  # what another request left behind
        index = scan_layer(
            k, cols, candidates, sinks, wanted, spec, scratch, group=group, stage=stage
        )
        assert index.dtype == np.int32
        np.testing.assert_array_equal(
            index, on_device(k, cols, candidates, sinks, wanted, spec, group)
        )


@pytest.mark.parametrize(
    ("dim", "columns", "group", "changes"),
    [
        (128, 16, 1, {}),
        (64, 5, 1, {"dilation": 0}),
        (32, 12, 3, {"dilation": 900}),
        (96, 6, 2, {"pooling": "mean"}),
    ],
)
def test_matrix_units_choose_as_the_vector_units_do(dim, columns, group, changes):
    """Kinds of fault: keys behind the candidates are read; a NaN, or a filler column, counts."""
    from herald_jax.retrieval import _matrix

    if not _matrix.has_matrix_units():
        pytest.skip("this CPU has no matrix units")
    spec = SelectionConfig(**changes)
    scratch = ScanScratch(HEADS, KEYS, columns)
    numbers = np.random.default_rng(dim)
    for candidates, wanted in ((KEYS, 85), (1025, 500), (KEYS - 9, 1000), (31, 7)):
        k = numbers.normal(size=(HEADS, KEYS, dim)).astype(np.dtype(jnp.bfloat16))
        cols = 0.4 * numbers.normal(size=(HEADS, columns, dim)).astype(np.float32)
        k[:, candidates:] = np.nan
        k[1, 12], k[2, 13, 3], k[0, 5] = np.nan, np.inf, -np.inf
        index = [
            scan_layer(k, cols, candidates, 4, wanted, spec, scratch, group=group, stage=stage)
            for stage in (MatrixScores(), NumbaScores())
        ]
        for mine, other in zip(*index, strict=True):
            assert len(np.setdiff1d(mine, other)) <= wanted // 200  # closer than rounding
        assert 12 not in index[0][1] or wanted >= candidates - 5


def test_the_choice_is_that_of_loops_over_keys(scratch):
    k, cols = draw(11, 4)
    spec = SelectionConfig(dilation=3, dilation_weight=0.3)
    expected = slow_choice(slow_scores(cols, k, 600, spec), 600, 4, 60)
    assert scan_layer(k, cols, 600, 4, 60, spec, scratch).tolist() == expected


def test_bfloat16_keys_meet_rounded_columns(scratch):
    k, cols = draw(5, 8, jnp.bfloat16)
    index = scan_layer(k, cols, KEYS, 4, 85, SelectionConfig(), scratch)
    rounded = cols.astype(k.dtype).astype(np.float32)
    wide = scan_layer(k.astype(np.float32), rounded, KEYS, 4, 85, SelectionConfig(), scratch)
    np.testing.assert_array_equal(index, wide)
    same = on_device(k, cols, KEYS, 4, 85, SelectionConfig())
    assert np.mean([len(np.intersect1d(a, b)) for a, b in zip(index, same, strict=True)]) > 87


def test_equal_scores_go_to_the_first_positions_in_every_chunk(scratch):
    """Kind of fault: chosen keys depend on how the work was divided."""
    cols = np.ones((HEADS, 4, DIM), np.float32)
    k = np.zeros((HEADS, KEYS, DIM), np.float32)
    spec = SelectionConfig(dilation=0)
    for wanted in (1, 700, 1500, KEYS - 3):
        index = scan_layer(k, cols, KEYS, 2, wanted, spec, scratch)
        assert index.tolist() == [list(range(2 + wanted))] * HEADS
    best = [100, 511, 512, 1024, 1600]  # a level above the ties, on both sides of chunk borders
    k[:, best] = 1
    index = scan_layer(k, cols, KEYS, 0, 9, spec, scratch)
    assert index.tolist() == [sorted([0, 1, 2, 3, *best])] * HEADS
    index = scan_layer(k, cols, KEYS, 0, 3, spec, scratch)
    assert index.tolist() == [best[:3]] * HEADS


def test_keys_that_are_no_numbers_come_last(scratch):
    k, cols = draw(2, 4)
    k[1, [3, 520]] = np.nan
    k[2] = np.nan
    k[0, 7] = np.inf
    spec = SelectionConfig(dilation=4, dilation_weight=1.0)
    index = scan_layer(k, cols, 600, 1, 597, spec, scratch)
    assert sorted(set(range(600)) - set(index[1].tolist())) == [3, 520]
    assert index[2].tolist() == list(range(598))
    cols[0, 2] = np.nan  # one broken query does not hide what the others see
    k, good = draw(2, 4)
    good[0] = cols[0]
    whole = slow_scores(np.delete(good[:1], 2, axis=1), k[:1], 600, spec)
    index = scan_layer(k, good, 600, 0, 30, spec, scratch)
    assert [index[0].tolist()] == slow_choice(whole, 600, 0, 30)


def test_scores_that_underflow_are_ordered_by_position(scratch):
    """Most keys of a sharp head have no weight at all; the first of them fill the budget."""
    k = np.zeros((HEADS, KEYS, DIM), np.float32)
    k[:, 900, 0] = 300
    cols = np.zeros((HEADS, 4, DIM), np.float32)
    cols[:, :, 0] = 1
    index = scan_layer(k, cols, KEYS, 0, 20, SelectionConfig(dilation=2), scratch)
    assert index.tolist() == [[*range(15), 898, 899, 900, 901, 902]] * HEADS


@pytest.mark.parametrize("length", [0, 1, 4, 5, 600])
def test_a_budget_that_covers_the_candidates_reads_no_key(scratch, length):
    """Kind of fault: fewer keys than the budget are chosen where the text is shorter than it."""
    k, cols = draw(1, 4)
    for wanted in (max(length - 4, 0), length, 10**9):
        index = scan_layer(k, cols, length, 4, wanted, SelectionConfig(), scratch)
        assert index.tolist() == [list(range(length))] * HEADS
    assert scan_layer(k, cols, 600, 4, 0, SelectionConfig(), scratch).tolist() == [[0, 1, 2, 3]] * 3


def test_the_number_of_threads_changes_nothing(scratch):
    k, cols = draw(9, 8)
    spec = SelectionConfig(pooling="mean")
    found = []

    def run(threads: int) -> None:
        scan.set_threads(threads)
        found.append(scan_layer(k, cols, KEYS, 4, 300, spec, scratch))

    for threads in (1, 2, 64):
        worker = threading.Thread(target=run, args=(threads,))
        worker.start()
        worker.join()
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    with pytest.raises(ConfigError, match="threads=0"):
        scan.set_threads(0)


def test_no_more_threads_are_taken_than_help():
    """Kind of fault: the thread that keeps the device busy is left no core."""
    assert scan.thread_counts(16) == [8, 12, 15] and scan.thread_counts(1) == [1]
    for seconds, best in (((9, 5, 4), 15), ((9, 4.1, 4), 12), ((4, 4, 5), 8)):
        cost = dict(zip((8, 12, 15), seconds, strict=True))
        now, set_to = [0.0], [0]

        def run(cost: dict[int, float] = cost, now: list = now, set_to: list = set_to) -> None:
            now[0] += cost[set_to[0]]

        def set_count(count: int, set_to: list = set_to) -> int:
            set_to[0] = count
            return count

        found = scan.fewest_threads(
            run, (8, 12, 15), clock=lambda now=now: now[0], set_count=set_count
        )
        assert found == best == set_to[0]


@pytest.mark.parametrize("heads", [1, 2, 8, 200])
def test_buffers_hold_every_length_of_row(heads):
    """Kind of fault: a fixed buffer is too small once heads times chunks passes its size."""
    for row in (1, 511, 4096, 70_000):
        chunks = ScanScratch(heads, 1, 1).work.tops.shape[1]
        chunks = max(chunks, -(-row // scan.CHUNK_TOKENS))
        for candidates in {1, row // 3 + 1, row - 1 or 1, row}:
            assert -(-candidates // scan.chunk_tokens(heads, candidates)) <= chunks
    scratch = ScanScratch(heads, 5000, 3)
    assert scratch.work.weights.shape == (heads, 4, 5000)
    unused = scratch.work._replace(weights=np.zeros(0)), scratch.work._replace(rows=np.zeros(0))
    assert scratch.nbytes == max(sum(buffer.nbytes for buffer in work) for work in unused)
    assert scratch.work.tops.shape[1] >= -(-5000 // scan.chunk_tokens(heads, 5000))


def test_shapes_that_do_not_fit_are_refused(scratch):
    k, cols = draw(1, 4)
    spec = SelectionConfig()
    with pytest.raises(ValueError, match="13 columns do not fit"):
        scan_layer(k, np.repeat(cols, 4, axis=1)[:, :13], 9, 1, 2, spec, scratch)
    with pytest.raises(ValueError, match="do not fit keys"):
        scan_layer(k[:, :, :11], cols[:, :, :11], 9, 1, 2, spec, scratch)
    with pytest.raises(ValueError, match="groups of 3"):
        scan_layer(k, cols, 9, 1, 2, spec, scratch, group=3)
    with pytest.raises(ConfigError, match="candidates=1701"):
        scan_layer(k, cols, KEYS + 1, 1, 2, spec, scratch)
    with pytest.raises(ConfigError, match="float16"):
        scan_layer(k.astype(np.float16), cols, 9, 1, 2, spec, scratch)


@pytest.mark.parametrize(("dtype", "dim"), [(np.float32, 6), (jnp.bfloat16, 8), (jnp.bfloat16, 5)])
def test_gathered_rows_are_those_of_the_positions(dtype, dim):
    numbers = np.random.default_rng(4)
    k, v = (numbers.normal(size=(HEADS, 300, dim)).astype(np.dtype(dtype)) for _ in range(2))
    k[0, 5] = np.nan  # bits are copied, whatever they stand for
    number = 150
    index = np.stack([np.sort(numbers.permutation(300)[:number]) for _ in range(HEADS)])
    out_k, out_v = (np.full((HEADS, 160, dim), 7, np.dtype(dtype)) for _ in range(2))
    gather_layer(k, v, index.astype(np.int32), out_k, out_v)
    for head in range(HEADS):
        assert out_k[head, :number].tobytes() == k[head, index[head]].tobytes()
        assert out_v[head, :number].tobytes() == v[head, index[head]].tobytes()
    assert (out_k[:, number:] == 7).all() and (out_v[:, number:] == 7).all()


def test_a_gather_stays_inside_its_arrays():
    k = np.zeros((HEADS, 10, 4), np.float32)
    index = np.tile(np.arange(4, dtype=np.int32), (HEADS, 1))
    with pytest.raises(ValueError, match="4 rows"):
        gather_layer(k, k, index, k[:, :3].copy(), k[:, :3].copy())
    for wrong in (index + 7, index - 1):
        with pytest.raises(IndexError, match="0 to 9"):
            gather_layer(k, k, wrong, k.copy(), k.copy())


def test_rows_past_the_reach_of_32_bits():
    """Kind of fault: an index of 32 bits overflows and zeros are read.

    The arrays are of 5 GB, of which only the pages that are touched take memory.
    """
    heads, keys, dim = 8, 2**21, 148
    try:
        k = np.zeros((heads, keys, dim), np.uint16).view(np.dtype(jnp.bfloat16))
        scratch = ScanScratch(heads, keys, 4)
    except MemoryError:
        pytest.skip("no address space")
    assert (heads - 1) * keys * dim > 2**31
    cols = np.ones((heads, 4, dim), np.float32)
    best = np.arange(heads) * 7 + 40
    for head in range(heads):
        k[head, best[head]] = 1
        k[head, keys - 1 - head] = 3 + head
    index = scan_layer(k, cols, 600, 0, 1, SelectionConfig(dilation=0), scratch)
    assert index[:, 0].tolist() == best.tolist()
    last = (keys - 1 - np.arange(heads, dtype=np.int32))[:, None]
    out = np.zeros((heads, 1, dim), k.dtype)
    gather_layer(k, k, last, out, np.zeros_like(out))
    assert (out[:, 0].astype(np.float32) == 3 + np.arange(heads)[:, None]).all()


def test_common_positions():
    before = np.array([[1, 4, 9, 12], [0, 1, 2, 3]], np.int32)
    after = np.array([[0, 4, 5, 12, 13], [3, 4, 5, 6, 7]], np.int32)
    scan.compile_scan(np.dtype(np.float32), 4)
    assert scan.count_common(before, after) == 3
    assert scan.count_common(before, before[:, :0]) == 0
    assert scan.count_common(before[:, :0], after) == 0


def test_nothing_is_compiled_after_the_first_time(scratch):
    """Kind of fault: a call of another length compiles and takes seconds."""
    from herald_jax.retrieval import _kernels

    scan.compile_scan(np.dtype(np.float32), DIM)
    before = [len(function.signatures) for function in _kernels.PARALLEL]
    for columns, candidates in ((1, 30), (12, KEYS)):
        k, cols = draw(columns, columns)
        k.flags.writeable = False
        index = scan_layer(k, cols, candidates, 1, 20, SelectionConfig(), scratch)
        gather_layer(k, k, index, np.empty_like(k), np.empty_like(k))
    scan.compile_scan(np.dtype(np.float32), DIM)
    assert [len(function.signatures) for function in _kernels.PARALLEL] == before
    with pytest.raises(TypeError):
        _kernels.gather(k[:, ::2], k[:, ::2], index, k, k)


def test_numba_is_imported_when_it_is_used(run_python):
    run_python(
        "import sys\n"
        "import herald_jax, herald_jax.retrieval.scan\n"
        "assert 'numba' not in sys.modules\n"
    )


def test_compiled_loops_are_kept_in_a_private_folder_or_not_at_all(run_python, tmp_path):
    """Kind of fault: a read-only installation cannot be used, or others can put code into it."""
    code = (
        "import numba\n"
        "from herald_jax.retrieval import _kernels\n"
        "print(_kernels.gather._cache.cache_path)\n"
        "assert not numba.config.CACHE_DIR\n"
    )
    env = {"HERALD_JAX_CACHE_DIR": str(tmp_path / "cache"), "HERALD_JAX_COMPILE_CACHE": "1"}
    assert run_python(code, env=env).startswith(str(tmp_path / "cache" / "numba"))
    (tmp_path / "cache" / "numba").chmod(0o777)
    assert run_python(code, env=env).strip() == "None"
    assert run_python(code, env={**env, "HERALD_JAX_COMPILE_CACHE": "0"}).strip() == "None"
