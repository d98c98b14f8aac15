"""Attention of a few queries over keys and values in host memory, compiled by numba.

Work is split over (KV head, chunk). A chunk goes by in tiles with a running softmax, so that its
scores never leave the cache of a core; the chunks are joined in their order, and the result does
not depend on the number of threads.

The inner loops of `_kernels` are compiled into these, and numba's cache on disk would not notice
a change of theirs: nothing is kept there.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import prange

from herald_jax.retrieval import _kernels

TILE = 64
"""Keys of a tile."""

_LOWEST = np.float32(np.finfo(np.float32).min)
_ZERO = np.float32(0)
# The loops are one thing in two files.
_number: Any = _kernels._number  # pyright: ignore[reportPrivateUsage]
_exponential: Any = _kernels._exponential  # pyright: ignore[reportPrivateUsage]
_score_keys: Any = _kernels._score_keys  # pyright: ignore[reportPrivateUsage]


class Partial(NamedTuple):
    """What the chunks found, by KV head, chunk and query.

    Attributes:
        tops: Largest score [K, N, c], fp32.
        sums: Sum of the weights relative to it [K, N, c], fp32.
        out: Values times these weights [K, N, c, D], fp32.
    """

    tops: np.ndarray
    sums: np.ndarray
    out: np.ndarray


def _compiled(**options: Any) -> Any:
    def decorate(function: Any) -> Any:
        # The type checker of the tests wraps functions in a way that numba cannot read.
        return numba.njit(inspect.unwrap(function), nogil=True, error_model="numpy", **options)

    return decorate


@_compiled(fastmath={"reassoc", "contract", "nsz"})
def _add_values(v: np.ndarray, start: int, stop: int, weights: np.ndarray, out: np.ndarray) -> None:
    """Adds values [S, D] times weights [c, tile] to `out` [c, D]."""
    for s in range(start, stop):
        for column in range(out.shape[0]):
            weight = weights[column, s - start]
            for i in range(v.shape[1]):
                out[column, i] += weight * _number(v[s, i])


@_compiled()
def _attend_chunk(
    k: np.ndarray,
    v: np.ndarray,
    q: np.ndarray,
    start: int,
    stop: int,
    tops: np.ndarray,
    sums: np.ndarray,
    out: np.ndarray,
) -> None:
    """Running softmax of queries [c, D] over the keys of a chunk."""
    count = q.shape[0]
    scores = np.empty((count, TILE), np.float32)
    tops[:], sums[:], out[:] = _LOWEST, _ZERO, _ZERO
    for first in range(start, stop, TILE):
        last = min(first + TILE, stop)
        _score_keys(k[first:last], q, 0, last - first, scores)
        for column in range(count):
            row = scores[column]
            top = tops[column]
            for i in range(last - first):
                top = max(top, row[i])
            decay = _exponential(tops[column] - top)
            total = _ZERO
            for i in range(last - first):
                row[i] = _exponential(row[i] - top)
                total += row[i]
            sums[column] = sums[column] * decay + total
            tops[column] = top
            for i in range(out.shape[1]):
                out[column, i] *= decay
        _add_values(v, first, last, scores, out)


@_compiled(parallel=True)
def attend(
    k: np.ndarray, v: np.ndarray, q: np.ndarray, tokens: int, chunk: int, partial: Partial
) -> None:
    """Fills `partial` from the first keys and values [K, S, D] and queries [K, c, D].

    The number of queries is a multiple of `COLUMN_BLOCK`.
    """
    chunks = (tokens + chunk - 1) // chunk
    for item in prange(k.shape[0] * chunks):
        head, at = item // chunks, item % chunks
        _attend_chunk(
            k[head],
            v[head],
            q[head],
            at * chunk,
            min((at + 1) * chunk, tokens),
            partial.tops[head, at],
            partial.sums[head, at],
            partial.out[head, at],
        )
