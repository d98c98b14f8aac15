"""The loops of the host scan, compiled by numba. `retrieval.scan` is their front.

Shape letters as in `retrieval.select`; N chunks of consecutive keys. Work is split over
(KV head, chunk), so that all cores are busy with two heads as with eight. A chunk's size
follows from the shapes alone and sums over chunks are taken in their order: the result does
not depend on the number of threads.

A key's weight is its exponential relative to the largest logit of its chunk; the share of the
whole softmax is that times a factor of the chunk, known once all chunks have been seen.

Scores become integers of the same order: 0 for a key without a number, else the bits of the
fp32 score plus 1. The best n are found without sorting: a histogram of the upper bits finds the
bin that the n-th key is in, the few keys of that bin are collected, and a second histogram of
their lower bits finds the n-th key itself.

All functions are here, in one file, because numba's cache on disk notices a change of a
function's own file only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import prange
from numba.extending import intrinsic

from herald_jax.retrieval._numba_cache import cache_folder, in_folder

COLUMN_BLOCK = 4
"""Columns are padded to a multiple of this; so many are scored in one pass over a key."""

BINS = 2048
_LOW_BITS = 19
_MIDDLE_BITS = 9
_MIDDLE_BINS = 1 << (_LOW_BITS - _MIDDLE_BITS)

_LOW_MASK = np.uint32((1 << _LOW_BITS) - 1)
_LARGEST_KEY = np.uint32(BINS * (1 << _LOW_BITS) - 1)
_MIDDLE_MASK = np.uint32((1 << _MIDDLE_BITS) - 1)

_SUMS = {"reassoc", "contract", "nsz"}
"""Lets a sum be taken in vector lanes; NaN and infinity keep their meaning."""

PARALLEL: list[Any] = []
"""The compiled functions that `retrieval.scan` calls."""

_LOWEST = np.float32(np.finfo(np.float32).min)
_HIGHEST = np.float32(np.finfo(np.float32).max)
_LOWEST_ORDER = np.int32(_LOWEST.view(np.int32) ^ 0x7FFFFFFF)
_ONE = np.float32(1)
_ZERO = np.float32(0)
_LEAST_FACTOR = np.float32(1e-37)
"""Above 0, so that a weight of -1 keeps its sign; a share is never as small."""

ROW_COLUMNS = 16
"""Columns of `Work.rows`."""


class Plan(NamedTuple):
    """What a scan is asked for.

    Attributes:
        columns: Columns that are none of the padding.
        group: Columns of one position.
        takes_max: True pools positions by the maximum, false by the mean.
        dilation: Keys on each side that lift a key.
        weight: Their share.
        candidates: Keys that may be chosen.
        chunk: Keys of a chunk.
        sinks: First keys, which are chosen whatever they score.
        number: Further keys.
        threads: Threads that share the work, each taking the next piece that is left; one that the
            system gives to somebody else then holds up no more than its own piece.
        has_rows: True if the weights are in `Work.rows`, false if in `Work.weights`.
    """

    columns: int
    group: int
    takes_max: bool
    dilation: int
    weight: np.float32
    candidates: int
    chunk: int
    sinks: int
    number: int
    threads: int
    has_rows: bool


class Work(NamedTuple):
    """Scratch of a scan.

    Attributes:
        weights: Relative to the chunk's largest logit [K, c, S], fp32; -1 for NaN.
        rows: The same with a key's sixteen side by side [K, S, 16]; one of the two is filled.
        tops: Largest logit of a chunk [K, N, c], fp32.
        sums: Sum of the chunk's weights relative to it [K, N, c], fp32.
        order: Integers in the order of the scores [K, S], uint32.
        histogram: Of their upper bits [K, N, BINS], int32.
        found: Of the last key to choose: its bin, its number within it, itself [K, 3], int64.
        counts: Of a chunk [K, N, 2], int64: first the keys above that bin and in it, then the
            place of the first key it writes and how many it takes that equal the last.
        listed: The keys of that bin [K, S], uint32.
    """

    weights: np.ndarray
    rows: np.ndarray
    tops: np.ndarray
    sums: np.ndarray
    order: np.ndarray
    histogram: np.ndarray
    found: np.ndarray
    counts: np.ndarray
    listed: np.ndarray


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compiled on first use without the interpreter lock, kept on disk if allowed."""

    def decorate(function: Callable[..., Any]) -> Any:
        # The type checker of the tests wraps functions in a way that numba cannot read.
        plain = inspect.unwrap(function)
        if not options.get("parallel"):
            # Called from here only: without a way in from Python it compiles much faster.
            inner = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
            return numba.njit(plain, nogil=True, error_model="numpy", **inner, **options)
        folder = cache_folder()
        with in_folder(folder):
            made = numba.njit(
                plain, nogil=True, error_model="numpy", cache=folder is not None, **options
            )
        PARALLEL.append(made)
        return made

    return decorate


_intrinsic: Any = intrinsic  # what it makes is called without the first parameter


def _number_of(_: Any, x: Any) -> Any:
    """The fp32 value of a key's element: bfloat16 bits, or fp32 as it is."""
    from llvmlite import ir

    def widen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.zext(arguments[0], ir.IntType(32))
        bits = builder.shl(wide, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    if x == numba.uint16:
        return numba.float32(numba.uint16), widen
    if x == numba.float32:
        return numba.float32(numba.float32), lambda c, b, s, arguments: arguments[0]
    return None


def _cast(source: Any, target: Any) -> Callable[[Any, Any], Any]:
    """An intrinsic that reads the bits of one type as another of the same size."""

    def typed(_: Any, x: Any) -> Any:
        def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), cast

    return typed


_number: Any = intrinsic(_number_of)
_float_of_bits: Any = intrinsic(_cast(numba.int32, numba.float32))
_bits_of_float: Any = intrinsic(_cast(numba.float32, numba.uint32))


@_intrinsic
def _best_of_rows(_typing: Any, rows: Any, count: Any, factors: Any, out: Any) -> Any:
    """The largest weight times factor of each of [count, 16] rows; all four are addresses.

    numba has no vectors, and its loops over so few numbers are not made into any.
    """
    from llvmlite import ir
    from numba.core import cgutils

    word, address = ir.IntType(32), ir.IntType(64)
    lanes, words = (ir.VectorType(kind, ROW_COLUMNS) for kind in (ir.FloatType(), word))

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        def at(base: Any, index: Any, size: int, kind: Any) -> Any:
            place = builder.add(base, builder.mul(index, address(size)))
            return builder.inttoptr(place, ir.PointerType(kind))

        name = "llvm.vector.reduce.smax.v16i32"
        known = builder.module.globals.get(name)
        largest = known or ir.Function(builder.module, ir.FunctionType(word, [words]), name)
        factor = builder.load(at(args[2], address(0), 0, lanes), typ=lanes, align=4)
        with cgutils.for_range(builder, args[1], intp=address) as loop:
            row = at(args[0], loop.index, 4 * ROW_COLUMNS, lanes)
            shares = builder.fmul(builder.load(row, typ=lanes, align=4), factor)
            # Bits of numbers that are not negative have their order.
            best = builder.call(largest, [builder.bitcast(shares, words)])
            builder.store(best, at(args[3], loop.index, 4, word), align=4)
        return context.get_dummy_value()

    return numba.void(*[numba.int64] * 4), emit


@_intrinsic
def next_of(_typing: Any, counter: Any) -> Any:
    """The number at an address, which is one more from then on for whoever asks.

    Who asks sees what those did who asked before.
    """
    from llvmlite import ir

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        word = ir.IntType(64)
        place = builder.inttoptr(args[0], ir.PointerType(word))
        return builder.atomic_rmw("add", place, ir.Constant(word, 1), "acq_rel")

    return numba.int64(numba.int64), emit


# `reassoc` would take the two parts of ln 2 together again.
@compiled(fastmath={"contract"})
def _exponential(x: Any) -> Any:
    """e^x of x <= 0 to about 1e-7; 0 where fp32 has no normal number for it."""
    safe = max(x, np.float32(-87))
    whole = np.floor(safe * np.float32(1.44269504) + np.float32(0.5))
    rest = safe - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * rest + np.float32(1.3981999507e-3)
    p = p * rest + np.float32(8.3334519073e-3)
    p = p * rest + np.float32(4.1665795894e-2)
    p = p * rest + np.float32(1.6666665459e-1)
    p = p * rest + np.float32(5.0000001201e-1)
    p = p * rest * rest + rest + _ONE
    scale = _float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
    return p * scale if x >= np.float32(-87) else _ZERO


@compiled(fastmath=_SUMS)
def _score_keys(k: np.ndarray, cols: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
    """Logits of keys [S, D] and columns [c, D] into [c, S]."""
    dim = k.shape[1]
    count = cols.shape[0]
    column = 0
    while column + 8 <= count:
        for s in range(start, stop):
            a = b = c = d = e = f = g = h = _ZERO
            for i in range(dim):
                x = _number(k[s, i])
                a += x * cols[column, i]
                b += x * cols[column + 1, i]
                c += x * cols[column + 2, i]
                d += x * cols[column + 3, i]
                e += x * cols[column + 4, i]
                f += x * cols[column + 5, i]
                g += x * cols[column + 6, i]
                h += x * cols[column + 7, i]
            out[column, s] = a
            out[column + 1, s] = b
            out[column + 2, s] = c
            out[column + 3, s] = d
            out[column + 4, s] = e
            out[column + 5, s] = f
            out[column + 6, s] = g
            out[column + 7, s] = h
        column += 8
    if column < count:
        for s in range(start, stop):
            a = b = c = d = _ZERO
            for i in range(dim):
                x = _number(k[s, i])
                a += x * cols[column, i]
                b += x * cols[column + 1, i]
                c += x * cols[column + 2, i]
                d += x * cols[column + 3, i]
            out[column, s] = a
            out[column + 1, s] = b
            out[column + 2, s] = c
            out[column + 3, s] = d


@compiled()
def _find_top(logits: np.ndarray, start: int, stop: int) -> Any:
    """Cuts off infinities and gives the largest logit; NaN is passed over."""
    # Integers in the order of the numbers: their maximum is taken in vector lanes.
    top = _LOWEST_ORDER
    for s in range(start, stop):
        x = logits[s]
        x = _HIGHEST if x > _HIGHEST else x
        x = _LOWEST if x < _LOWEST else x
        logits[s] = x
        bits = np.int32(_bits_of_float(x))
        order = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        top = max(top, order if x == x else _LOWEST_ORDER)
    return _float_of_bits(np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@compiled(fastmath=_SUMS)
def _weigh(logits: np.ndarray, start: int, stop: int, top: Any) -> Any:
    """Logits become weights relative to `top`, -1 for NaN; their sum."""
    total = _ZERO
    for s in range(start, stop):
        x = logits[s]
        weight = _exponential(x - top if x == x else _LOWEST)
        total += weight
        logits[s] = weight if x == x else -_ONE
    return total


@compiled()
def _measure(plan: Plan, work: Work, head: int, at: int, start: int, stop: int) -> None:
    """Turns a chunk's logits into weights; notes each column's largest logit and their sum."""
    for column in range(plan.columns):
        row = work.weights[head, column]
        top = _find_top(row, start, stop)
        work.tops[head, at, column] = top
        work.sums[head, at, column] = _weigh(row, start, stop, top)


@compiled()
def _score_chunk(
    plan: Plan, work: Work, k: np.ndarray, cols: np.ndarray, head: int, at: int
) -> None:
    start, stop = at * plan.chunk, min((at + 1) * plan.chunk, plan.candidates)
    _score_keys(k[head], cols[head], start, stop, work.weights[head])
    _measure(plan, work, head, at, start, stop)


@compiled(parallel=True)
def score_keys(plan: Plan, work: Work, k: np.ndarray, cols: np.ndarray) -> None:
    """Fills `weights`, `tops` and `sums` from keys [K, S, D] and padded columns [K, c, D]."""
    chunks = (plan.candidates + plan.chunk - 1) // plan.chunk
    items = k.shape[0] * chunks
    counter = np.zeros(1, np.int64)
    for _thread in prange(plan.threads):
        item = next_of(counter.ctypes.data)
        while item < items:
            _score_chunk(plan, work, k, cols, item // chunks, item % chunks)
            item = next_of(counter.ctypes.data)


@compiled()
def _take_chunk(plan: Plan, work: Work, scores: np.ndarray, head: int, at: int) -> None:
    start, stop = at * plan.chunk, min((at + 1) * plan.chunk, plan.candidates)
    for column in range(plan.columns):
        for s in range(start, stop):
            work.weights[head, column, s] = scores[s, column]
    _measure(plan, work, head, at, start, stop)


@compiled(parallel=True)
def take_scores(plan: Plan, work: Work, scores: np.ndarray, head: int) -> None:
    """As `score_keys` for one KV head, from logits [S, c] that were computed elsewhere."""
    for at in prange((plan.candidates + plan.chunk - 1) // plan.chunk):
        _take_chunk(plan, work, scores, head, at)


@compiled()
def _find_factors(plan: Plan, work: Work, head: int, chunks: int, factors: np.ndarray) -> None:
    """What a weight of each chunk and column is to be multiplied with, [N, c], to be a share."""
    tops, sums = work.tops[head], work.sums[head]
    count = factors.shape[1]
    top = np.full(count, _LOWEST, np.float32)
    total = np.zeros(count, np.float32)
    for at in range(chunks):
        for column in range(count):
            top[column] = max(top[column], tops[at, column])
    for at in range(chunks):
        for column in range(count):
            factor = _exponential(tops[at, column] - top[column])
            factors[at, column] = factor
            total[column] += sums[at, column] * factor
    for at in range(chunks):
        for column in range(count):
            factor = factors[at, column] / max(total[column], np.float32(1e-30))
            factors[at, column] = max(factor, _LEAST_FACTOR)


@compiled()
def _pool_columns(
    plan: Plan,
    weights: np.ndarray,
    factors: np.ndarray,
    score: np.ndarray,
    is_number: np.ndarray,
) -> None:
    """Importance of keys of one chunk, pooled over their weights [c, s]."""
    size = score.shape[0]
    part = np.empty(size, np.float32)
    for i in range(size):
        score[i] = is_number[i] = _ZERO
    scale = _ONE / np.float32(plan.group if plan.takes_max else plan.columns)
    for first in range(0, plan.columns, plan.group):
        for i in range(size):
            part[i] = _ZERO
        for column in range(first, first + plan.group):
            row, factor = weights[column], factors[column]
            for i in range(size):
                x = row[i]
                part[i] += max(x, _ZERO) * factor
                is_number[i] = _ONE if x >= _ZERO else is_number[i]
        if plan.takes_max:
            for i in range(size):
                score[i] = max(score[i], part[i] * scale)
        else:
            for i in range(size):
                score[i] += part[i] * scale


@compiled()
def _pool_rows(
    plan: Plan,
    rows: np.ndarray,
    factors: np.ndarray,
    score: np.ndarray,
    is_number: np.ndarray,
) -> None:
    """As `_pool_columns`, over weights [s, 16]."""
    if plan.takes_max and plan.group == 1:
        _best_of_rows(rows.ctypes.data, score.shape[0], factors.ctypes.data, score.ctypes.data)
        for i in range(score.shape[0]):
            x = score[i]
            is_number[i] = _ONE if x >= _ZERO else _ZERO
            score[i] = max(x, _ZERO)
        return
    scale = _ONE / np.float32(plan.group if plan.takes_max else plan.columns)
    for i in range(score.shape[0]):
        best = found = _ZERO
        for first in range(0, plan.columns, plan.group):
            part = _ZERO
            for column in range(first, first + plan.group):
                x = rows[i, column]
                part += max(x, _ZERO) * factors[column]
                found = _ONE if x >= _ZERO else found
            best = max(best, part * scale) if plan.takes_max else best + part * scale
        score[i], is_number[i] = best, found


@compiled()
def _pool_range(
    plan: Plan,
    work: Work,
    head: int,
    chunks: int,
    low: int,
    high: int,
    score: np.ndarray,
    is_number: np.ndarray,
) -> None:
    """Importance of keys `low` to `high`, chunk by chunk."""
    factors = np.empty((chunks, ROW_COLUMNS if plan.has_rows else plan.columns), np.float32)
    _find_factors(plan, work, head, chunks, factors)
    for at in range(low // plan.chunk, (high - 1) // plan.chunk + 1):
        start, stop = max(at * plan.chunk, low), min((at + 1) * plan.chunk, high)
        # From 0 on, since numba lets an index be negative unless it can see that it is not.
        own, has = score[start - low : stop - low], is_number[start - low : stop - low]
        if plan.has_rows:
            _pool_rows(plan, work.rows[head, start:stop], factors[at], own, has)
        else:
            _pool_columns(plan, work.weights[head, :, start:stop], factors[at], own, has)


@compiled()
def _slide_max(values: np.ndarray, width: int) -> np.ndarray:
    """The largest of `values[i : i + width]` for every i that has as many; uses up `values`."""
    size = values.shape[0]
    other = np.empty(size, np.float32)
    reach = 1
    while reach < width:
        step = min(reach, width - reach)
        size -= step
        # Into another array, as a loop over overlapping parts of one is not vectorised.
        for i in range(size):
            other[i] = max(values[i], values[i + step])
        values, other = other, values
        reach += step
    return values


@compiled()
def _order_chunk(plan: Plan, work: Work, head: int, at: int, chunks: int) -> None:
    """Integers in the order of the chunk's scores, and the histogram of their upper bits."""
    start, stop = at * plan.chunk, min((at + 1) * plan.chunk, plan.candidates)
    reach = plan.dilation
    # A key's neighbours may lie in another chunk, so its edges are pooled twice.
    low, high = max(start - reach, 0), min(stop + reach, plan.candidates)
    score = np.empty(high - low, np.float32)
    is_number = np.empty(high - low, np.float32)
    _pool_range(plan, work, head, chunks, low, high, score, is_number)
    own, has_number = score[start - low :], is_number[start - low :]
    if reach > 0 and plan.weight > 0:
        window = np.zeros(stop - start + 2 * reach, np.float32)
        inside = window[low - start + reach :]
        for i in range(high - low):
            inside[i] = score[i]
        best = _slide_max(window, 2 * reach + 1)
        for i in range(stop - start):
            own[i] = max(own[i], plan.weight * best[i])
    order = work.order[head, start:stop]
    for i in range(stop - start):
        # Shares are at most 1; the bound keeps a key from ever pointing past the histogram.
        bits = min(_bits_of_float(own[i]) + np.uint32(1), _LARGEST_KEY)
        order[i] = bits if has_number[i] > _ZERO else np.uint32(0)
    bars = work.histogram[head, at]
    for i in range(BINS):
        bars[i] = 0
    for i in range(max(plan.sinks - start, 0), stop - start):
        bars[order[i] >> np.uint32(_LOW_BITS)] += 1


@compiled()
def _find_bin(plan: Plan, work: Work, head: int, chunks: int) -> None:
    """Notes the bin of the last key to choose, and how many of it are to be chosen."""
    total = np.zeros(BINS, np.int64)
    for at in range(chunks):
        for i in range(BINS):
            total[i] += work.histogram[head, at, i]
    left = plan.number
    i = BINS - 1
    while left > total[i]:
        left -= total[i]
        i -= 1
    work.found[head, 0], work.found[head, 1] = i, left


@compiled()
def _list_bin(plan: Plan, work: Work, head: int, at: int) -> None:
    """Collects the chunk's keys of the bin, after those of the chunks before it."""
    chosen = work.found[head, 0]
    place = 0
    for before in range(at):
        place += work.histogram[head, before, chosen]
    above = 0
    for i in range(chosen + 1, BINS):
        above += work.histogram[head, at, i]
    work.counts[head, at, 0] = above
    work.counts[head, at, 1] = work.histogram[head, at, chosen]
    order, listed = work.order[head], work.listed[head]
    start, stop = max(at * plan.chunk, plan.sinks), min((at + 1) * plan.chunk, plan.candidates)
    for s in range(start, stop):
        if order[s] >> np.uint32(_LOW_BITS) == chosen:
            listed[place] = order[s]
            place += 1


@compiled()
def _nth_of_bin(keys: np.ndarray, count: int, number: int) -> tuple:
    """The `number`-th largest of keys of one bin, and how many equal to it are wanted."""
    middle = np.zeros(_MIDDLE_BINS, np.int64)
    for i in range(count):
        middle[(keys[i] & _LOW_MASK) >> np.uint32(_MIDDLE_BITS)] += 1
    left = number
    chosen = _MIDDLE_BINS - 1
    while left > middle[chosen]:
        left -= middle[chosen]
        chosen -= 1
    last = np.zeros(1 << _MIDDLE_BITS, np.int64)
    prefix = np.uint32(0)
    for i in range(count):
        if (keys[i] & _LOW_MASK) >> np.uint32(_MIDDLE_BITS) == chosen:
            last[keys[i] & _MIDDLE_MASK] += 1
            prefix = keys[i] >> np.uint32(_MIDDLE_BITS)
    end = (1 << _MIDDLE_BITS) - 1
    while left > last[end]:
        left -= last[end]
        end -= 1
    return np.uint32(prefix << np.uint32(_MIDDLE_BITS)) | np.uint32(end), left


@compiled()
def _find_bound(plan: Plan, work: Work, head: int, chunks: int, index: np.ndarray) -> None:
    """Notes the last key to choose, and where each chunk writes; writes the sinks."""
    counts, listed = work.counts[head], work.listed[head]
    in_bin = 0
    for at in range(chunks):
        in_bin += counts[at, 1]
    bound, left = _nth_of_bin(listed, in_bin, work.found[head, 1])
    work.found[head, 2] = bound
    first, place = 0, plan.sinks
    for at in range(chunks):
        above, equal = counts[at, 0], 0
        for i in range(first, first + counts[at, 1]):
            above += listed[i] > bound
            equal += listed[i] == bound
        first += counts[at, 1]
        # Equal keys of earlier chunks come first, as lower positions do.
        taken = min(equal, left)
        left -= taken
        counts[at, 0] = place
        counts[at, 1] = taken
        place += above + taken
    for s in range(plan.sinks):
        index[head, s] = s


@compiled()
def _write_chunk(plan: Plan, work: Work, head: int, at: int, index: np.ndarray) -> None:
    """Writes the positions of the chunk's chosen keys."""
    order, bound = work.order[head], work.found[head, 2]
    place, left = work.counts[head, at, 0], work.counts[head, at, 1]
    start, stop = max(at * plan.chunk, plan.sinks), min((at + 1) * plan.chunk, plan.candidates)
    for s in range(start, stop):
        if order[s] > bound:
            index[head, place] = s
            place += 1
        elif order[s] == bound and left > 0:
            index[head, place] = s
            place += 1
            left -= 1


@compiled()
def _choose_step(
    plan: Plan, work: Work, step: int, item: int, chunks: int, done: Any, index: np.ndarray
) -> None:
    """One chunk's part of a step; the last of a head also does what is the head's."""
    head, at = item // chunks, item % chunks
    if step == 0:
        _order_chunk(plan, work, head, at, chunks)
        if next_of(done) == chunks - 1:
            _find_bin(plan, work, head, chunks)
    elif step == 1:
        _list_bin(plan, work, head, at)
        if next_of(done) == chunks - 1:
            _find_bound(plan, work, head, chunks, index)
    else:
        _write_chunk(plan, work, head, at, index)


@compiled(parallel=True)
def choose_keys(plan: Plan, work: Work, index: np.ndarray) -> None:
    """Positions of the sinks and of the best other keys, ascending, into `index` [K, n].

    There must be at least one other key to choose, and as many as are to be chosen.
    """
    heads = index.shape[0]
    chunks = (plan.candidates + plan.chunk - 1) // plan.chunk
    counters, done = np.zeros(3, np.int64), np.zeros((3, heads), np.int64)
    # One parallel loop with the steps inside compiles in a fraction of the time of three.
    for step in range(3):
        for _thread in prange(plan.threads):
            item = next_of(counters[step:].ctypes.data)
            while item < heads * chunks:
                own = done[step, item // chunks :].ctypes.data
                _choose_step(plan, work, step, item, chunks, own, index)
                item = next_of(counters[step:].ctypes.data)


_GATHER_ROWS = 64


@compiled(parallel=True)
def gather(
    k: np.ndarray, v: np.ndarray, index: np.ndarray, out_k: np.ndarray, out_v: np.ndarray
) -> None:
    """Rows `index` [K, n] of [K, S, W] into the first n of [K, C, W], for keys and values."""
    parts = (index.shape[1] + _GATHER_ROWS - 1) // _GATHER_ROWS
    for item in prange(k.shape[0] * parts):
        head, part = item // parts, item % parts
        stop = min((part + 1) * _GATHER_ROWS, index.shape[1])
        for i in range(part * _GATHER_ROWS, stop):
            s = index[head, i]
            for word in range(k.shape[2]):
                out_k[head, i, word] = k[head, s, word]
            for word in range(k.shape[2]):
                out_v[head, i, word] = v[head, s, word]


@compiled(parallel=True)
def common(before: np.ndarray, after: np.ndarray, found: np.ndarray) -> None:
    """How many of the ascending positions [K, n] are in [K, m] as well, into [K]."""
    for head in prange(before.shape[0]):
        i, count = 0, 0
        for j in range(after.shape[1]):
            while i < before.shape[1] and before[head, i] < after[head, j]:
                i += 1
            if i < before.shape[1] and before[head, i] == after[head, j]:
                count += 1
        found[head] = count
