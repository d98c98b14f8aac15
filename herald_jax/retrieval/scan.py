"""Selection over keys in host memory: the same choice as `retrieval.select`, by the CPU.

A scan reads the keys of one row and layer in place, at the speed of memory, and keeps the best
of each KV head. It works without the interpreter lock, on all threads that `set_threads` gave
the calling thread. Scoring is a stage that can be chosen: the matrix units of the CPU where it has
any, its vector units, or XLA.

numba is imported, and its loops are compiled, by the first call of `compile_scan` for a dtype;
a later call never compiles. Parallel loops of numba need not stand being called from two
threads at once, so calls take turns.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from herald_jax._checks import require, require_int, require_one_of
from herald_jax.retrieval.settings import SelectionConfig

CHUNK_TOKENS = 2048
"""Keys of a piece of work; fewer where there would be too few pieces."""

LEAST_CHUNK_TOKENS = 512
LEAST_PIECES = 64
"""Pieces, over all KV heads, below which they are made smaller."""

XLA_BUCKETS = 8
"""Lengths of a row that the XLA stage is compiled for; it scores up to the next one."""

_BITS = {"bfloat16": np.uint16, "float32": np.float32}

turn = threading.Lock()
"""Held while a parallel loop of numba runs."""

_compiled: set[tuple[str, int, bool]] = set()


def _kernels() -> Any:
    from herald_jax.retrieval import _kernels

    return _kernels


def key_bits(dtype: Any) -> Any:
    """The type that a loop reads keys of this dtype as."""
    name = np.dtype(dtype).name
    require_one_of("dtype of keys on the host", name, _BITS)
    return _BITS[name]


def _words(array: np.ndarray) -> np.ndarray:
    """The same rows as the widest integers that divide them."""
    row_bytes = array.shape[-1] * array.itemsize
    return array.view(np.uint64 if row_bytes % 8 == 0 else np.uint16)


def read_only(array: np.ndarray) -> np.ndarray:
    """The same memory as loops are compiled to take it."""
    view = array.view()
    view.flags.writeable = False  # loops are compiled for arrays that they may not write
    return view


def default_threads() -> int:
    """Cores that a scan may use: all but the one that keeps the device busy."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)


def set_threads(count: int) -> int:
    """Lets scans of the calling thread use up to `count` threads; how many they will use."""
    require_int("threads", count, 1)
    import numba

    count = min(count, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    numba.set_num_threads(count)
    return count


ENOUGH = 1.05
"""How much slower than the best a scan with fewer threads may be."""


def thread_counts(cores: int) -> list[int]:
    """Numbers of threads that `fewest_threads` tries: all cores but one, and shares of them."""
    return sorted({max(cores * part // 4, 1) for part in (2, 3)} | {max(cores - 1, 1)})


def fewest_threads(
    run: Callable[[], Any],
    counts: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    set_count: Callable[[int], int] = set_threads,
) -> int:
    """The fewest threads with which `run` is about as fast as with any; it sets that number.

    A scan is bound by the memory it reads, and cores that it need not have are left to the thread
    that keeps the device busy.

    Args:
        run: Scans for some milliseconds; called three times for each number, first unmeasured.
        counts: Numbers to try, ascending.
        clock: Gives seconds.
        set_count: Sets the number of threads.
    """
    seconds = []
    for count in counts:
        set_count(count)
        run()
        found = []
        for _ in range(2):
            begin = clock()
            run()
            found.append(clock() - begin)
        seconds.append(min(found))
    best = min(seconds)
    chosen = next(
        count for count, spent in zip(counts, seconds, strict=True) if spent <= ENOUGH * best
    )
    set_count(chosen)
    return chosen


@functools.cache
def compile_scan(dtype: np.dtype, head_dim: int) -> None:
    """Compiles the loops for keys of this dtype, unless that has been done.

    Raises:
        ConfigError: If keys of this dtype cannot be scanned on the host.
    """
    bits = key_bits(dtype)
    words = _words(np.zeros((1, 1, head_dim), bits)).dtype
    units = _matrix_units(dtype, head_dim)
    key = (dtype.name, words.itemsize, units is not None)
    if key in _compiled:
        return
    kernels = _kernels()
    with turn:
        for function in kernels.PARALLEL:
            function.disable_compile(False)
        try:
            scratch = ScanScratch(1, 8, 1)
            spec = SelectionConfig()
            plan = plan_scan(scratch, 1, 1, spec, candidates=4, sinks=1, number=2)
            k = read_only(np.zeros((1, 8, head_dim), bits))
            cols = np.zeros((1, kernels.COLUMN_BLOCK, head_dim), np.float32)
            kernels.score_keys(plan, scratch.work, k, cols)
            scores = read_only(np.zeros((8, kernels.COLUMN_BLOCK), np.float32))
            kernels.take_scores(plan, scratch.work, scores, 0)
            index = np.zeros((1, 3), np.int32)
            kernels.choose_keys(plan, scratch.work, index)
            rows = _words(k)
            out = np.zeros(rows.shape, rows.dtype)
            kernels.gather(rows, rows, index, out, out.copy())
            kernels.common(index, index, np.zeros(1, np.int64))
            if units is not None:
                tiles = units.tiled_columns(cols[:, :1], dtype)
                units.score_keys(plan, scratch.work, k, tiles, units.tile_layout())
        finally:
            # From now on an array of another kind is an error and no pause for compiling.
            for function in kernels.PARALLEL:
                if function.signatures:
                    function.disable_compile(True)
        _compiled.add(key)


class ScanScratch:
    """Buffers of the scans of one thread, made once for the largest of them.

    Args:
        kv_heads: K.
        row_tokens: Tokens of a row, S.
        columns: Most columns, c.
    """

    def __init__(self, kv_heads: int, row_tokens: int, columns: int) -> None:
        kernels = _kernels()
        self.kv_heads, self.row_tokens, self.columns = kv_heads, row_tokens, columns
        # Chunks are made smaller only while there are fewer than twice the least number.
        chunks = max(-(-row_tokens // CHUNK_TOKENS), 2 * LEAST_PIECES // kv_heads, 1)
        padded = -(-columns // kernels.COLUMN_BLOCK) * kernels.COLUMN_BLOCK
        by_chunk = (kv_heads, chunks)
        wide, whole_tiles = max(padded, kernels.ROW_COLUMNS), -(-row_tokens // 32) * 32
        self.work = kernels.Work(
            # Of these two the one that is not used takes no memory but addresses.
            weights=np.empty((kv_heads, padded, row_tokens), np.float32),
            rows=np.empty((kv_heads, whole_tiles, kernels.ROW_COLUMNS), np.float32),
            tops=np.zeros((*by_chunk, wide), np.float32),
            sums=np.zeros((*by_chunk, wide), np.float32),
            order=np.empty((kv_heads, row_tokens), np.uint32),
            histogram=np.empty((*by_chunk, kernels.BINS), np.int32),
            found=np.empty((kv_heads, 3), np.int64),
            counts=np.empty((*by_chunk, 2), np.int64),
            listed=np.empty((kv_heads, row_tokens), np.uint32),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, which are ordinary memory; of weights and rows one is used."""
        used = sum(buffer.nbytes for buffer in self.work)
        return used - min(self.work.weights.nbytes, self.work.rows.nbytes)


def chunk_tokens(kv_heads: int, candidates: int) -> int:
    """Keys of a piece of work; depends on the shapes alone, and so does every rounding."""
    chunk = CHUNK_TOKENS
    while chunk > LEAST_CHUNK_TOKENS and kv_heads * -(-candidates // chunk) < LEAST_PIECES:
        chunk //= 2
    return chunk


def plan_scan(
    scratch: ScanScratch,
    columns: int,
    group: int,
    spec: SelectionConfig,
    *,
    candidates: int,
    sinks: int,
    number: int,
) -> Any:
    """What the loops of one scan are asked for, on as many threads as the caller may use."""
    import numba

    return _kernels().Plan(
        columns=columns,
        group=group,
        takes_max=spec.pooling == "max",
        dilation=spec.dilation,
        weight=np.float32(spec.dilation_weight),
        candidates=candidates,
        chunk=chunk_tokens(scratch.kv_heads, candidates),
        sinks=sinks,
        number=number,
        threads=numba.get_num_threads(),
        has_rows=False,
    )


class ScoreStage(Protocol):
    """Scores the keys of a scan."""

    name: ClassVar[str]

    def __call__(self, plan: Any, scratch: ScanScratch, k: np.ndarray, cols: np.ndarray) -> Any:
        """Fills the scratch's `weights` or `rows`, `tops` and `sums`; the plan that says which.

        Args:
            plan: What is asked for.
            scratch: Buffers.
            k: Keys [K, S, D], in the dtype of the pool.
            cols: Columns [K, c, D], of any dtype.
        """
        ...


class NumbaScores:
    """Logits in fp32 by the vector units: bound by them from 8 columns on."""

    name: ClassVar[str] = "numba"

    def __call__(self, plan: Any, scratch: ScanScratch, k: np.ndarray, cols: np.ndarray) -> Any:
        """Fills `weights`, `tops` and `sums`."""
        bits = read_only(k.view(key_bits(k.dtype)))
        padded = padded_columns(cols, k.dtype)
        with turn:
            _kernels().score_keys(plan, scratch.work, bits, padded)
        return plan


class MatrixScores:
    """Logits by the matrix units of the CPU, for bfloat16 and up to sixteen columns.

    What they cannot do, and machines that have none, take the vector units.
    """

    name: ClassVar[str] = "matrix"

    def __init__(self) -> None:
        self._other = NumbaScores()

    def __call__(self, plan: Any, scratch: ScanScratch, k: np.ndarray, cols: np.ndarray) -> Any:
        """Fills `rows`, `tops` and `sums`."""
        units = _matrix_units(k.dtype, k.shape[2])
        if units is None or plan.columns > units.COLUMNS:
            return self._other(plan, scratch, k, cols)
        tiles = units.tiled_columns(cols, k.dtype)
        with turn:
            bits = read_only(k.view(np.uint16))
            units.score_keys(plan, scratch.work, bits, tiles, units.tile_layout())
        return plan._replace(has_rows=True)


@functools.cache
def _matrix_units(dtype: np.dtype, dim: int) -> Any:
    """The loops that use matrix units, or `None` if there are none for such keys."""
    if dtype.name != "bfloat16":
        return None
    from herald_jax.retrieval import _matrix

    return _matrix if _matrix.fits(dim) and _matrix.has_matrix_units() else None


class XlaScores:
    """Logits by XLA on the CPU, which has matrix units for bfloat16 on some machines.

    Keys are read in place where the row begins at a multiple of 64 bytes, else copied. XLA has
    threads of its own, whatever `set_threads` says.
    """

    name: ClassVar[str] = "xla"

    def __init__(self) -> None:
        self._device = jax.devices("cpu")[0]
        self._dot = jax.jit(
            functools.partial(jnp.einsum, "sd,dc->sc", preferred_element_type=jnp.float32)
        )

    def __call__(self, plan: Any, scratch: ScanScratch, k: np.ndarray, cols: np.ndarray) -> Any:
        """Fills `weights`, `tops` and `sums`."""
        step = max(-(-k.shape[1] // XLA_BUCKETS), 1)
        length = min(-(-plan.candidates // step) * step, k.shape[1])
        padded = padded_columns(cols, k.dtype)  # with one column XLA is much slower
        turned = np.ascontiguousarray(padded.transpose(0, 2, 1)).astype(k.dtype)
        results = [
            self._dot(*jax.device_put((k[head, :length], turned[head]), self._device))
            for head in range(k.shape[0])
        ]
        for head, result in enumerate(results):
            scores = read_only(np.asarray(result))
            with turn:
                _kernels().take_scores(plan, scratch.work, scores, head)
        return plan


SCORE_STAGES: dict[str, type[ScoreStage]] = {
    stage.name: stage for stage in (MatrixScores, NumbaScores, XlaScores)
}
"""Ways to score keys, by name."""

BEST_SCORES = MatrixScores()


def padded_columns(cols: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Columns rounded to the dtype of the keys, as fp32, with zeros up to whole blocks."""
    block = _kernels().COLUMN_BLOCK
    kv_heads, count, dim = cols.shape
    padded = np.zeros((kv_heads, -(-count // block) * block, dim), np.float32)
    padded[:, :count] = cols.astype(dtype, copy=False)
    return padded


def scan_layer(
    k: Float[np.ndarray, "K S D"],
    cols: Float[np.ndarray, "K c D"],
    candidates: int,
    sinks: int,
    wanted: int,
    spec: SelectionConfig,
    scratch: ScanScratch,
    *,
    group: int = 1,
    stage: ScoreStage = BEST_SCORES,
) -> Int[np.ndarray, "K n"]:
    """Positions of the chosen keys of each KV head, ascending.

    The first `sinks` candidates are always chosen; of the others the `wanted` best, or all that
    there are. Where all or none of them are chosen no key is read.

    Args:
        k: Rotated keys of one row and layer, in place; what lies past the candidates may be
            anything.
        cols: What `select.columns` gave.
        candidates: Keys that may be chosen.
        sinks: First positions that are chosen whatever they score.
        wanted: Further keys.
        spec: Pooling and dilation.
        scratch: Buffers for as many KV heads, keys and columns.
        group: Columns of one position, as `select.column_group` gives it.
        stage: What computes the logits.

    Raises:
        ValueError: If the shapes fit neither each other nor the scratch.
    """
    kv_heads, size, dim = k.shape
    count = cols.shape[1]
    if kv_heads != scratch.kv_heads or size > scratch.row_tokens or count > scratch.columns:
        raise ValueError(
            f"{kv_heads} KV heads, {size} keys and {count} columns do not fit buffers for "
            f"{scratch.kv_heads}, {scratch.row_tokens} and {scratch.columns}"
        )
    if cols.shape[::2] != (kv_heads, dim) or count % group or not k.flags.c_contiguous:
        raise ValueError(
            f"columns {list(cols.shape)} in groups of {group} do not fit keys {list(k.shape)}, "
            "which must be contiguous"
        )
    require(0 <= candidates <= size, "candidates", candidates, f"in 0 to {size}")
    require_int("sinks", sinks, 0)
    require_int("wanted", wanted, 0)
    taken_sinks = min(sinks, candidates)
    number = min(wanted, candidates - taken_sinks)
    index = np.empty((kv_heads, taken_sinks + number), np.int32)
    if number in (0, candidates - taken_sinks):
        index[:] = np.arange(taken_sinks + number)
        return index
    compile_scan(k.dtype, dim)
    plan = plan_scan(
        scratch, count, group, spec, candidates=candidates, sinks=taken_sinks, number=number
    )
    plan = stage(plan, scratch, k, cols)
    choose_scored(plan, scratch, index)
    return index


def choose_scored(plan: Any, scratch: ScanScratch, index: Int[np.ndarray, "K n"]) -> None:
    """Fills `index` with the best of the keys that a stage scored; `plan` is what it gave."""
    with turn:
        _kernels().choose_keys(plan, scratch.work, index)


def gather_layer(
    k: Float[np.ndarray, "K S D"],
    v: Float[np.ndarray, "K S D"],
    index: Int[np.ndarray, "K n"],
    out_k: Float[np.ndarray, "K C D"],
    out_v: Float[np.ndarray, "K C D"],
) -> None:
    """Copies the rows at `index`, ascending, to the first n places of `out_k` and `out_v`.

    Raises:
        ValueError: If the results have no room for them.
        IndexError: If a position is not among the keys.
    """
    number = index.shape[1]
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"values {v.dtype}{list(v.shape)} do not fit keys {list(k.shape)}")
    for out in (out_k, out_v):
        if out.shape[::2] != k.shape[::2] or out.shape[1] < number or out.dtype != k.dtype:
            raise ValueError(
                f"{number} rows of {k.dtype}{list(k.shape)} do not fit {out.dtype}{list(out.shape)}"
            )
    if number == 0:
        return
    if index[:, 0].min() < 0 or index[:, -1].max() >= k.shape[1]:
        raise IndexError(f"positions must be in 0 to {k.shape[1] - 1}")
    compile_scan(k.dtype, k.shape[2])
    with turn:
        _kernels().gather(
            read_only(_words(k)), read_only(_words(v)), index, _words(out_k), _words(out_v)
        )


def count_common(before: Int[np.ndarray, "K n"], after: Int[np.ndarray, "K m"]) -> int:
    """How many of the ascending positions `after` are in `before` too, all KV heads together.

    `compile_scan` must have been called, for any dtype.
    """
    found = np.zeros(before.shape[0], np.int64)
    with turn:
        _kernels().common(before, after, found)
    return int(found.sum())
