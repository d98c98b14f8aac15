"""Exact attention over a row of host memory: what the paper's retrieval pass asks of the host.

The store of finished blocks with, besides its recalls, the three parts that a recall consists
of when the queries of a layer depend on the attention of the layer below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from herald_jax.cache.host import PinnedPool
from herald_jax.retrieval.recall import HostStore, RecallNotes
from herald_jax.retrieval.scan import (
    chunk_tokens,
    count_common,
    gather_layer,
    key_bits,
    padded_columns,
    read_only,
    scan_layer,
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
    """A `HostStore` that attends, chooses and copies apart."""

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
        self._check_written(row, epoch, layer, tokens)
        begin = self._clock()
        out, log_sum = attend_row(*self._pool.view(layer, row), q, tokens)
        scanned = 2 * tokens * self._token_bytes
        notes = RecallNotes(bytes_scanned=scanned, scan_seconds=self._clock() - begin)
        return out, log_sum, notes

    def choose(
        self,
        row: int,
        epoch: int,
        layer: int,
        cols: Float[np.ndarray, "K c D"],
        candidates: int,
        wanted: int,
    ) -> tuple[Int[np.ndarray, "K n"], RecallNotes]:
        """Positions of the entries that `recall` would copy; the arguments are the same.

        Raises:
            RuntimeError: If the stay has not written all candidates.
        """
        self._check_written(row, epoch, layer, candidates)
        begin = self._clock()
        k, _ = self._pool.view(layer, row)
        index = scan_layer(
            k,
            cols,
            candidates,
            self.sinks,
            wanted,
            self._spec,
            self._scratch,
            group=self._group,
        )
        stay = self._stays[row]
        before, stay.chosen[layer] = stay.chosen[layer], index
        was_scanned = index.shape[1] not in (candidates, min(self.sinks, candidates))
        return index, RecallNotes(
            entries=index.size,
            hits=0 if before is None else count_common(before, index),
            bytes_scanned=candidates * self._token_bytes if was_scanned else 0,
            scan_seconds=self._clock() - begin,
        )

    def gather(
        self,
        row: int,
        epoch: int,
        layer: int,
        index: Int[np.ndarray, "K n"],
        out_k: Float[np.ndarray, "K C D"],
        out_v: Float[np.ndarray, "K C D"],
    ) -> RecallNotes:
        """Copies the keys and values at `index`, which `choose` gave."""
        self._check_written(row, epoch, layer, int(index.max(initial=-1)) + 1)
        begin = self._clock()
        k, v = self._pool.view(layer, row)
        gather_layer(k, v, index, out_k, out_v)
        return RecallNotes(
            bytes_gathered=2 * index.shape[1] * self._token_bytes,
            gather_seconds=self._clock() - begin,
        )

    @property
    def _token_bytes(self) -> int:
        """Bytes of the keys of a token in one layer."""
        shape = self.shape
        return shape.kv_heads * shape.head_dim * np.dtype(shape.dtype).itemsize

    def _check_written(self, row: int, epoch: int, layer: int, tokens: int) -> None:
        stay = self._stays.get(row)
        written = stay.written[layer] if stay is not None and stay.epoch == epoch else 0
        if stay is None or written < tokens:
            raise RuntimeError(
                f"stay {epoch} has written {written} tokens of layer {layer} of row {row}, and "
                f"{tokens} are to be read"
            )
