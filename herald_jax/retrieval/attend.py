"""Exact attention over a row of host memory: what the paper's retrieval pass asks of the host.

A layer's queries then depend on the attention of the layer below, so a store chooses, copies and
attends apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from herald_jax.cache.host import PinnedPool
from herald_jax.retrieval.recall import HostStore, RecallNotes
from herald_jax.retrieval.scan import (
    chunk_tokens,
    key_bits,
    padded_columns,
    read_only,
    turn,
)
from herald_jax.retrieval.settings import SelectionConfig


def attend_row(
    k: Float[np.ndarray, "K S D"],
    v: Float[np.ndarray, "K S D"],
    q: Float[np.ndarray, "n H D"],
    tokens: int,
) -> tuple[Float[np.ndarray, "n H D"], Float[np.ndarray, "n H"]]:
    """Attention of n queries over the first tokens of a row, and each query's log-sum-exp.

    Both are fp32. Without tokens they are 0 and -inf.

    Args:
        k: Rotated keys in place; what lies past the tokens may be anything.
        v: Values.
        q: Rotated queries, not scaled.
        tokens: Keys that are seen.
    """
    from herald_jax.retrieval import _attention

    kv_heads, _, dim = k.shape
    count, heads, _ = q.shape
    if tokens == 0:
        return np.zeros(q.shape, np.float32), np.full((count, heads), -np.inf, np.float32)
    grouped = q.astype(np.float32).reshape(count, kv_heads, heads // kv_heads, dim)
    columns = grouped.transpose(1, 0, 2, 3).reshape(kv_heads, -1, dim) * np.float32(dim**-0.5)
    columns = padded_columns(columns, np.dtype(np.float32))
    chunk = chunk_tokens(kv_heads, tokens)
    stats = (kv_heads, -(-tokens // chunk), columns.shape[1])
    partial = _attention.Partial(
        np.empty(stats, np.float32),
        np.empty(stats, np.float32),
        np.empty((*stats, dim), np.float32),
    )
    bits = key_bits(k.dtype)
    # Parallel loops of numba need not stand being called from two threads at once.
    with turn:
        _attention.attend(
            read_only(k.view(bits)), read_only(v.view(bits)), columns, tokens, chunk, partial
        )
    top = partial.tops.max(1, keepdims=True)
    decay = np.exp(partial.tops - top)
    total = (partial.sums * decay).sum(1)
    out = (partial.out * decay[..., None]).sum(1) / total[..., None]
    log_sum = top[:, 0] + np.log(total)

    def ungrouped(x: np.ndarray) -> np.ndarray:
        own = x[:, : count * (heads // kv_heads)]
        split = own.reshape(kv_heads, count, heads // kv_heads, *x.shape[2:])
        return np.ascontiguousarray(split.swapaxes(0, 1)).reshape(count, heads, *x.shape[2:])

    return ungrouped(out), ungrouped(log_sum)


class AttendingStore(HostStore):
    """A `HostStore` that attends as well."""

    def __init__(self, pool: PinnedPool, spec: SelectionConfig, **options: Any) -> None:
        super().__init__(pool, spec, **options)
        k, v = pool.view(0, 0)
        heads = np.zeros((1, pool.shape.kv_heads, pool.shape.head_dim), np.float32)
        attend_row(k, v, heads, 1)  # compiles it

    def attend(
        self, row: int, epoch: int, layer: int, q: Float[np.ndarray, "n H D"], tokens: int
    ) -> tuple[Float[np.ndarray, "n H D"], Float[np.ndarray, "n H"], RecallNotes]:
        """`attend_row` over what a stay has written of a layer, and what it took.

        Raises:
            RuntimeError: If the stay has not written so many tokens.
        """
        self._checked(row, epoch, layer, tokens)
        begin = self._clock()
        out, log_sum = attend_row(*self._pool.view(layer, row), q, tokens)
        scanned = 2 * tokens * self._token_bytes
        notes = RecallNotes(bytes_scanned=scanned, scan_seconds=self._clock() - begin)
        return out, log_sum, notes
