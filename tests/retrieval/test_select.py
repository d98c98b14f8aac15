"""Selection in plain JAX against loops over single keys."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_selection import slow_choice, slow_columns, slow_scores

from herald_jax import ConfigError
from herald_jax.cache.budget import Budget
from herald_jax.retrieval import (
    SelectionConfig,
    choose,
    column_group,
    columns,
    gather_rows,
    importance,
)

SLOTS, POSITIONS, HEADS, KV_HEADS, KEYS, DIM = 3, 5, 6, 2, 41, 8


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    """Queries [M, n, H, D] and keys [M, K, S, D]; every number differs."""
    draw = np.random.default_rng(7)
    q = draw.normal(size=(SLOTS, POSITIONS, HEADS, DIM)).astype(np.float32) * 2
    return q, draw.normal(size=(SLOTS, KV_HEADS, KEYS, DIM)).astype(np.float32) * 2


@pytest.mark.parametrize("heads", ["mean", "apart"])
def test_columns(data, heads):
    q, _ = data
    cols = columns(jnp.asarray(q), KV_HEADS, heads)
    for slot in range(SLOTS):
        np.testing.assert_allclose(cols[slot], slow_columns(q[slot], KV_HEADS, heads), rtol=1e-5)
    assert columns(jnp.asarray(q, jnp.bfloat16), KV_HEADS, heads).dtype == jnp.bfloat16


@pytest.mark.parametrize("heads", ["mean", "apart"])
@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize(("dilation", "weight"), [(0, 0.1), (3, 0.0), (3, 0.25), (9, 1.0)])
def test_importance(data, heads, pooling, dilation, weight):
    q, k = data
    spec = SelectionConfig(heads=heads, pooling=pooling, dilation=dilation, dilation_weight=weight)
    group = column_group(spec, HEADS, KV_HEADS)
    cols = columns(jnp.asarray(q), KV_HEADS, heads)
    candidates = np.array([KEYS, 1, 17])
    k = k.copy()
    for slot, count in enumerate(candidates):
        k[slot, :, count:] = np.nan  # what another request left behind
    score = np.asarray(
        jax.jit(importance, static_argnums=(3, 4))(cols, k, jnp.asarray(candidates), spec, group)
    )
    for slot, count in enumerate(candidates):
        expected = slow_scores(np.asarray(cols[slot]), k[slot], count, spec, group)
        np.testing.assert_allclose(score[slot, :, :count], expected, rtol=2e-5, atol=1e-9)
        assert np.isneginf(score[slot, :, count:]).all()


def test_a_key_or_a_query_that_is_not_a_number_does_not_spread(data):
    q, k = data
    spec = SelectionConfig(dilation=2, dilation_weight=0.5)
    k, q = k.copy(), q.copy()
    k[0, 1, 4] = np.nan
    q[1, 2] = np.nan
    cols = columns(jnp.asarray(q), KV_HEADS, "mean")
    full = jnp.full(SLOTS, KEYS)
    score = np.asarray(importance(cols, jnp.asarray(k), full, spec))
    assert score[0, 1, 4] == -1
    assert (np.delete(score[0, 1], 4) >= 0).all() and (score[0, 0] >= 0).all()
    without = slow_scores(np.delete(np.asarray(cols[1]), 2, axis=1), k[1], KEYS, spec)
    np.testing.assert_allclose(score[1], without, rtol=2e-5)
    k[2, 0, 3] = 1e30  # an overflow is a very good key
    cols = jnp.ones((SLOTS, KV_HEADS, 1, DIM)) * 1e30
    score = np.asarray(importance(cols, jnp.abs(jnp.asarray(k)), full, spec))
    assert score[2, 0].argmax() == 3 and np.isfinite(score[2]).all()


def test_a_column_of_one_dtype_meets_keys_of_another(data):
    q, k = data
    cols = columns(jnp.asarray(q), KV_HEADS, "mean")
    low = jnp.asarray(k, jnp.bfloat16)
    score = importance(cols, low, jnp.full(SLOTS, KEYS), SelectionConfig())
    rounded = importance(
        cols.astype(jnp.bfloat16).astype(jnp.float32),
        low.astype(jnp.float32),
        jnp.full(SLOTS, KEYS),
        SelectionConfig(),
    )
    assert score.dtype == jnp.float32
    np.testing.assert_allclose(score, rounded, rtol=1e-5)


@pytest.mark.parametrize("sinks", [0, 3])
def test_choose(sinks):
    """Scores with many ties, NaN and negative numbers; rows with few and with no candidates."""
    draw = np.random.default_rng(3)
    score = draw.integers(-3, 4, size=(6, KV_HEADS, KEYS)).astype(np.float32)
    score[1, 0, [0, 5, 9]] = np.nan
    score[2] = -np.inf
    score[3, 1] = -0.0
    score[3, 1, ::2] = 0.0
    score[4] = np.nan
    candidates = np.array([KEYS, 23, 30, 41, 7, 0])
    for wanted in ([0, 1, 5, 9, 2, 3], [100, 20, 27, 1, 4, 0]):
        index, counts = jax.jit(choose, static_argnums=(2, 4))(
            jnp.asarray(score), jnp.asarray(candidates), sinks, jnp.asarray(wanted), 44
        )
        for slot in range(6):
            expected = slow_choice(score[slot], candidates[slot], sinks, wanted[slot])
            count = int(counts[slot])
            assert count == len(expected[0])
            assert np.asarray(index)[slot, :, :count].tolist() == expected
            assert not np.asarray(index)[slot, :, count:].any()


def test_equal_scores_go_to_the_first_positions():
    """Kind of fault: different devices choose different keys of equal score."""
    score = jnp.full((1, KV_HEADS, KEYS), 0.25)
    index, _ = choose(score, jnp.array([KEYS]), 0, jnp.array([10]), 10)
    assert index[0].tolist() == [list(range(10))] * KV_HEADS


@pytest.mark.parametrize("length", range(1, 12))
def test_a_budget_that_covers_the_candidates_takes_every_one(length):
    """Kind of fault: fewer keys than the budget are chosen where the text is shorter than it."""
    score = jnp.asarray(np.random.default_rng(1).normal(size=(1, KV_HEADS, 16)), jnp.float32)
    for wanted in (length, length + 1, 2**30):
        index, counts = choose(score, jnp.array([length]), 2, jnp.array([wanted]), 16)
        assert counts.tolist() == [length]
        assert index[0, :, :length].tolist() == [list(range(length))] * KV_HEADS


def test_choice_never_exceeds_the_capacity():
    """Kind of fault: a buffer that is too small is overwritten silently."""
    score = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 16)), jnp.float32)
    index, counts = choose(score, jnp.array([16]), 2, jnp.array([9]), 6)
    assert counts.tolist() == [6]
    assert index[0].tolist() == slow_choice(np.asarray(score[0]), 16, 2, 4)
    with pytest.raises(ConfigError, match="capacity"):
        choose(score, jnp.array([16]), 7, jnp.array([9]), 6)


def test_gather_rows(data):
    _, k = data
    index = jnp.asarray(np.random.default_rng(2).integers(0, KEYS, size=(SLOTS, KV_HEADS, 7)))
    rows = gather_rows(jnp.asarray(k), index)
    for slot in range(SLOTS):
        for head in range(KV_HEADS):
            np.testing.assert_array_equal(rows[slot, head], k[slot, head][index[slot, head]])


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.025, 0.999999, 1.0, 1e-9, 0.123456, 7])
def test_a_share_is_its_decimal_number(budget):
    """Exact: 5 % of 1,000 tokens are 50 and not 51, although 0.05 * 1000 is not exact."""
    share = Fraction(str(budget))
    for index in (0, 1, 19, 20, 21, 992, 1000, 32768, 131_072, 1_000_003, 2**30 + 12345):
        expected = budget if isinstance(budget, int) else -(-share * index * 5 // 1)
        assert Budget(budget, 4, 1, block_length=5).wanted(index) == expected
