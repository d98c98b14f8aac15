"""From queries to selected keys, layer by layer, and how good a selection is.

`herald_jax.retrieval` does the scoring and the choice; here are the comparators (page bounds,
random keys, newest keys) and the measures (recall and captured mass).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from herald_jax.cache.key_index import KeyIndex
from herald_jax.retrieval import (
    SelectionConfig,
    choose,
    column_group,
    columns,
    gather_rows,
    importance,
)
from herald_jax.retrieval.select import importance_of_logits

PAGE_TOKENS = 16
"""Tokens of a page in Quest (arXiv 2406.10774)."""

REFERENCE = SelectionConfig(queries="all", heads="apart", pooling="mean", dilation=0)


def page_importance(
    cols: Float[Array, "R K c D"],
    k: Float[Array, "R K S D"],
    candidates: Int[Array, " R"],
    spec: SelectionConfig,
    group: int = 1,
) -> Float[Array, "R K S"]:
    """Scores of keys by the upper bound of their page's logits.

    A page's bound is what Quest computes from the smallest and the largest value of each
    feature among its keys. All keys of a page have its score, and the page as a whole takes the
    place of a key in the softmax.
    """
    rows, heads, size, dim = k.shape
    pages = -(-size // PAGE_TOKENS)
    padding = ((0, 0), (0, 0), (0, pages * PAGE_TOKENS - size), (0, 0))
    is_candidate = (jnp.arange(size) < candidates[:, None])[:, None, :, None]

    def over_pages(fill: float) -> jax.Array:
        kept = jnp.pad(jnp.where(is_candidate, k, fill), padding, constant_values=fill)
        return kept.reshape(rows, heads, pages, PAGE_TOKENS, dim)

    low, high = over_pages(jnp.inf).min(3), over_pages(-jnp.inf).max(3)
    count = -(-candidates // PAGE_TOKENS)
    is_page = (jnp.arange(pages) < count[:, None])[:, None, :, None]
    low, high = jnp.where(is_page, low, 0), jnp.where(is_page, high, 0)
    # max(q * low, q * high) is the positive part of q times high plus its negative part times low.
    both = jnp.concatenate([jnp.maximum(cols, 0), jnp.minimum(cols, 0)], axis=-1)
    score = importance(both, jnp.concatenate([high, low], axis=-1), count, spec, group)
    score = jnp.repeat(score, PAGE_TOKENS, axis=-1)[..., :size]
    return jnp.where(is_candidate[..., 0], score, -jnp.inf)


def indexed_importance(
    cols: Float[Array, "R K c D"],
    k: Float[Array, "R K S D"],
    candidates: Int[Array, " R"],
    spec: SelectionConfig,
    group: int = 1,
) -> Float[Array, "R K S"]:
    """Scores of keys of 8 bits, as `CacheConfig(key_index="int8")` has them."""
    return importance_of_logits(KeyIndex.of(k).logits(cols), candidates, spec, group)


@functools.partial(
    jax.jit, static_argnames=("scores", "spec", "span", "sinks", "capacity", "kv_heads")
)
def select(
    k: Float[Array, "R K S D"],
    v: Float[Array, "R K S D"],
    q: Float[Array, "R Q H D"],
    positions: Int[Array, "R n"],
    candidates: Int[Array, " R"],
    wanted: Int[Array, " R"],
    seed: Int[Array, ""],
    *,
    scores: str,
    spec: SelectionConfig,
    span: int,
    sinks: int,
    capacity: int,
    kv_heads: int,
) -> tuple[jax.Array, jax.Array, Int[Array, "R K C"], Int[Array, " R"]]:
    """Selected keys and values of one layer, their positions and their number.

    Args:
        k: Keys of the text.
        v: Its values.
        q: Queries of a block.
        positions: Those that score.
        candidates: First tokens of each row that may be selected.
        wanted: Tokens to select besides the sinks.
        seed: Of random scores.
        scores: One of `arms.SCORES`.
        spec: What becomes of the scores.
        span: No row has more candidates; what follows in the cache is not looked at.
        sinks: First tokens that are always taken.
        capacity: Entries of a pool.
        kv_heads: K.
    """
    k, v = k[:, :, :span], v[:, :, :span]
    if scores == "random":
        key = jax.random.key(seed)
        score = jax.random.uniform(key, k.shape[:3])
    elif scores == "recent":
        score = jnp.broadcast_to(jnp.arange(span, dtype=jnp.float32), k.shape[:3])
    else:
        picked = jnp.take_along_axis(q, positions[:, :, None, None], axis=1)
        cols = columns(picked, kv_heads, spec.heads)
        group = column_group(spec, q.shape[2], kv_heads)
        score_keys = {
            "attention": importance,
            "int8": indexed_importance,
            "pages": page_importance,
        }[scores]
        score = score_keys(cols, k, candidates, spec, group)
    index, counts = choose(score, candidates, sinks, wanted, capacity)
    return gather_rows(k, index), gather_rows(v, index), index, counts


@functools.partial(jax.jit, static_argnames=("span", "sinks", "kv_heads"))
def measure(
    k: Float[Array, "R K S D"],
    q: Float[Array, "R B H D"],
    index: Int[Array, "R K C"],
    counts: Int[Array, " R"],
    candidates: Int[Array, " R"],
    wanted: Int[Array, " R"],
    *,
    span: int,
    sinks: int,
    kv_heads: int,
) -> tuple[Float[Array, " R"], Float[Array, " R"], Float[Array, " R"]]:
    """Recall of the best keys, captured mass and the best possible mass, mean over KV heads.

    Importance is the mean over all queries of the block, those of a group apart, of their
    softmax over the candidates; `q` are the block's exact queries. Sinks, which every arm has,
    are left out of the recall and count in both masses.
    """
    k = k[:, :, :span]
    cols = columns(q, kv_heads, REFERENCE.heads)
    group = column_group(REFERENCE, q.shape[2], kv_heads)
    score = importance(cols, k, candidates, REFERENCE, group)
    score = jnp.where(jnp.isfinite(score), score, 0.0)
    capacity = index.shape[2]
    best, _ = choose(score, candidates, sinks, wanted, capacity)

    def flags(chosen: jax.Array) -> jax.Array:
        is_entry = jnp.arange(capacity) < counts[:, None, None]
        place = jnp.where(is_entry, chosen, span)
        rows, heads = jnp.arange(len(chosen))[:, None, None], jnp.arange(chosen.shape[1])[:, None]
        return jnp.zeros(score.shape, bool).at[rows, heads, place].set(True, mode="drop")

    is_ours, is_best = flags(index), flags(best)
    is_free = jnp.arange(span) >= sinks
    number = jnp.maximum((is_best & is_free).sum(-1), 1)
    recall = (is_ours & is_best & is_free).sum(-1) / number
    ours, most = (jnp.where(flag, score, 0.0).sum(-1) for flag in (is_ours, is_best))
    return recall.mean(1), ours.mean(1), most.mean(1)
