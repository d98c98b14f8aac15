"""Scores keys and chooses the best of each KV head: the meaning of every scan, in plain JAX.

Shape letters: M slots, n query positions, H query heads, K KV heads, G = H / K, c score
columns, S keys, C entries of a selected pool, D head size. Everything here is pure and can be
traced; `retrieval.scan` does the same over host memory.

Order. A key's importance is a probability, so scores are at least 0. A key whose logits are
all NaN scores -1, below every other candidate, and lends nothing to its neighbours; what is no
candidate scores -inf. Equal scores go to the lower position. The result is therefore the same
set wherever it is computed, except where two scores are closer than rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from herald_jax._checks import require
from herald_jax.retrieval.settings import SelectionConfig

BROKEN_SCORE = -1.0
"""Score of a candidate that has no number for a score."""


def columns(q: Float[Array, "M n H D"], num_kv_heads: int, heads: str) -> Float[Array, "M K c D"]:
    """The queries that score, by KV head, scaled by D^-0.5, in the dtype of `q`.

    Args:
        q: Rotated queries of the chosen positions.
        num_kv_heads: K.
        heads: `mean` gives one column a position, c = n; `apart` one for each query head,
            c = n * G, those of a position side by side.
    """
    slots, positions, num_heads, dim = q.shape
    group = num_heads // num_kv_heads
    grouped = q.reshape(slots, positions, num_kv_heads, group, dim).astype(jnp.float32)
    grouped = grouped.transpose(0, 2, 1, 3, 4) * dim**-0.5
    if heads == "mean":
        return grouped.mean(3).astype(q.dtype)
    return grouped.reshape(slots, num_kv_heads, positions * group, dim).astype(q.dtype)


def column_group(spec: SelectionConfig, num_heads: int, num_kv_heads: int) -> int:
    """Columns of `columns` that belong to one position."""
    return num_heads // num_kv_heads if spec.heads == "apart" else 1


def importance(
    cols: Float[Array, "M K c D"],
    k: Float[Array, "M K S D"],
    candidates: Int[Array, " M"],
    spec: SelectionConfig,
    group: int = 1,
) -> Float[Array, "M K S"]:
    """Scores of the first `candidates[m]` keys of each slot, fp32; -inf for the others.

    The columns are rounded to the dtype of `k`; logits and softmax are fp32. The softmax runs
    over the candidates, apart for each column.

    Args:
        cols: What `columns` gave.
        k: Rotated keys; what lies past the candidates may be anything.
        candidates: Keys that may be chosen.
        spec: Pooling and dilation.
        group: Columns of one position, as `column_group` gives it.
    """
    return importance_of_logits(logits(cols, k), candidates, spec, group)


def logits(cols: Float[Array, "M K c D"], k: Float[Array, "M K S D"]) -> Float[Array, "M K c S"]:
    """Products of columns and keys in fp32; the columns are rounded to the dtype of `k`."""
    return jnp.einsum(
        "mkcd,mksd->mkcs",
        cols.astype(k.dtype),
        k,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,  # fp32 keys would be rounded to 10 bits on a GPU
    )


def importance_of_logits(
    logits: Float[Array, "M K c S"],
    candidates: Int[Array, " M"],
    spec: SelectionConfig,
    group: int = 1,
) -> Float[Array, "M K S"]:
    """Scores of keys from the fp32 products of columns and keys; else as `importance`."""
    columns = logits.shape[2]
    require(columns % group == 0, "group", group, f"a divisor of {columns} columns")
    is_candidate = jnp.arange(logits.shape[3]) < candidates[:, None]
    is_number = ~jnp.isnan(logits)
    # An overflow to +inf is a very good key, and must not turn its column into NaN.
    logits = jnp.minimum(logits, jnp.finfo(jnp.float32).max)
    logits = jnp.where(is_number & is_candidate[:, None, None], logits, -jnp.inf)
    top = jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(logits - top)
    share = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    slots, kv_heads, _, size = share.shape
    share = share.reshape(slots, kv_heads, columns // group, group, size).mean(3)
    score = share.max(2) if spec.pooling == "max" else share.mean(2)
    score = _dilated(score, spec)
    score = jnp.where(is_number.any(2), score, BROKEN_SCORE)
    return jnp.where(is_candidate[:, None], score, -jnp.inf)


def _dilated(score: Float[Array, "M K S"], spec: SelectionConfig) -> Float[Array, "M K S"]:
    """Each score, or a share of the best score within the window if that is more."""
    if spec.dilation == 0 or spec.dilation_weight == 0:
        return score
    width = 2 * spec.dilation + 1
    edges = ((0, 0), (0, 0), (spec.dilation, spec.dilation))
    best = lax.reduce_window(score, -jnp.inf, lax.max, (1, 1, width), (1, 1, 1), edges)
    return jnp.maximum(score, jnp.float32(spec.dilation_weight) * best)


def _sort_keys(score: Float[Array, "M K S"]) -> UInt32[Array, "M K S"]:
    """Integers in the order of the scores, at least 2; NaN is 1."""
    bits = lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.uint32)
    is_negative = bits >> 31 == 1
    ordered = jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
    return jnp.where(jnp.isnan(score), jnp.uint32(1), ordered)


def choose(
    score: Float[Array, "M K S"],
    candidates: Int[Array, " M"],
    sinks: int,
    wanted: Int[Array, " M"],
    capacity: int,
) -> tuple[Int[Array, "M K C"], Int[Array, " M"]]:
    """Positions of the chosen keys, ascending, and how many there are in each slot.

    The first `sinks` candidates are always chosen; of the others the `wanted` best, or all
    that there are. A slot has the same number in every KV head; past it the positions are 0.

    Args:
        score: What `importance` gave; NaN counts as the lowest.
        candidates: Keys that may be chosen.
        sinks: First positions that are chosen whatever they score.
        wanted: Further keys.
        capacity: C; no more are chosen, so give it room for `sinks` and the most `wanted`.
    """
    require(capacity >= sinks, "capacity", capacity, f"at least the {sinks} sinks")
    position = jnp.arange(score.shape[2], dtype=jnp.int32)
    candidates = jnp.clip(candidates, 0, score.shape[2]).astype(jnp.int32)
    taken_sinks = jnp.minimum(candidates, sinks)
    number = jnp.clip(wanted, 0, jnp.minimum(candidates - taken_sinks, capacity - taken_sinks))
    is_free = (position >= taken_sinks[:, None]) & (position < candidates[:, None])
    # 0 is below every key, so what is no candidate is never among the best.
    keys = jnp.where(is_free[:, None], _sort_keys(score), jnp.uint32(0))
    bound = _nth_largest(keys, number[:, None])[..., None]
    is_above = keys > bound
    is_tied = (keys == bound) & is_free[:, None]
    ties = number[:, None, None] - is_above.sum(-1, keepdims=True, dtype=jnp.int32)
    is_first_tie = is_tied & (jnp.cumsum(is_tied, -1, dtype=jnp.int32) <= ties)
    is_sink = (position < taken_sinks[:, None])[:, None]
    is_chosen = is_above | is_first_tie | is_sink
    rank = jnp.cumsum(is_chosen, -1, dtype=jnp.int32) - 1
    # Every other place is past the end and different, so the scatter drops it.
    place = jnp.where(is_chosen, rank, capacity + position)
    slots, kv_heads, _ = score.shape
    index = jnp.zeros((slots, kv_heads, capacity), jnp.int32)
    index = index.at[jnp.arange(slots)[:, None, None], jnp.arange(kv_heads)[:, None], place].set(
        position, mode="drop", unique_indices=True
    )
    return index, (taken_sinks + number).astype(jnp.int32)


def _nth_largest(keys: UInt32[Array, "M K S"], number: Int[Array, "M 1"]) -> UInt32[Array, "M K"]:
    """The largest value that at least `number` keys reach, found bit by bit without sorting."""

    def add_bit(step: jax.Array, bound: jax.Array) -> jax.Array:
        trial = bound | jnp.uint32(1) << (31 - step).astype(jnp.uint32)
        count = (keys >= trial[..., None]).sum(-1, dtype=jnp.int32)
        return jnp.where(count >= number, trial, bound)

    return lax.fori_loop(0, 32, add_bit, jnp.zeros(keys.shape[:2], jnp.uint32))


def gather_rows(k: Float[Array, "M K S D"], index: Int[Array, "M K C"]) -> Float[Array, "M K C D"]:
    """The rows of `k` at `index`."""
    return jnp.take_along_axis(k, index[..., None], axis=2)
