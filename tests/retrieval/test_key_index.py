"""The 8-bit key index: its error, what it writes, and what is chosen with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.cache.budget import Budget
from herald_jax.cache.key_index import KeyIndex
from herald_jax.retrieval import SelectionConfig, select
from herald_jax.retrieval.device import BudgetTable, Selector

ROWS, KV_HEADS, TOKENS, DIM, BLOCK, LAYERS = 3, 2, 96, 24, 8, 2


def keys(seed, dtype=jnp.float32):
    """Keys whose size differs by head and token, as real ones' does."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(size=(ROWS, KV_HEADS, TOKENS, 1)))
    return jnp.asarray(rng.normal(size=(ROWS, KV_HEADS, TOKENS, DIM)) * size, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_error_is_half_a_code(dtype):
    k = keys(0, dtype)
    index = KeyIndex.of(k)
    assert index.codes.dtype == jnp.int8 and index.scale.dtype == dtype
    wide, scale = np.asarray(k, np.float32), np.asarray(index.scale, np.float32)[..., None]
    error = np.abs(np.asarray(index.codes, np.float32) * scale - wide)
    # A rounded-down scale clips the largest number by up to 2^-8 of it, half a code at 127.
    assert (error <= 0.51 * scale + 1e-7).all()
    assert np.abs(np.asarray(index.codes)).max(-1).min() >= 126


def test_logits_are_close():
    k = keys(1)
    cols = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, KV_HEADS, 5, DIM)), jnp.float32)
    found = np.asarray(KeyIndex.of(k).logits(cols))
    exact = np.einsum("mkcd,mksd->mkcs", cols, k)
    norms = np.linalg.norm(cols, axis=-1)[..., None] * np.linalg.norm(k, axis=-1)[:, :, None]
    assert (np.abs(found - exact) / norms).max() < 0.02
    assert np.abs(found - exact).max() > 0


def test_a_broken_key_is_never_chosen_before_a_sound_one():
    k = keys(3).at[:, 1, 7, 2].set(jnp.nan)
    cols = jnp.ones((ROWS, KV_HEADS, 1, DIM))
    score = select.importance_of_logits(
        KeyIndex.of(k).logits(cols), jnp.full(ROWS, TOKENS), SelectionConfig(dilation=0)
    )
    assert (np.asarray(score)[:, 1, 7] == select.BROKEN_SCORE).all()
    assert (np.asarray(score)[:, 0] >= 0).all()


def test_write_places_rows_and_drops_those_past_the_last(tiny_config):
    config = dataclasses.replace(tiny_config, head_dim=DIM)
    new = KeyIndex.of(keys(4)[:2, :, :BLOCK])
    empty = KeyIndex.zeros(config, ROWS, TOKENS, jnp.float32)
    index = empty.write(jnp.array([2, ROWS]), jnp.array([16, 40]), new)
    assert np.array_equal(index.codes[2, :, 16:24], new.codes[0])
    assert np.array_equal(index.scale[2, :, 16:24], new.scale[0])
    assert not np.asarray(index.codes[:2]).any() and not np.asarray(index.codes[2, :, 24:]).any()


@pytest.mark.parametrize("heads", ["mean", "apart"])
def test_choice_is_nearly_the_exact_one(heads):
    """Ascending, in each layer its own, sinks first, nearly the entries of exact keys."""
    spec = SelectionConfig(queries="even4", heads=heads, dilation=2)
    budget = Budget(12, 3, 1, BLOCK)
    selector = Selector(spec, BLOCK, 3, 16)
    numbers = BudgetTable.of(budget, 13).at(jnp.array([11]))
    layers = [keys(10), keys(11)]
    rng = np.random.default_rng(12)
    q = [jnp.asarray(rng.normal(size=(1, BLOCK, 6, DIM)), jnp.float32) for _ in layers]
    picked = [selector.queries(one, jnp.zeros(1, jnp.int32)) for one in q]
    row = jnp.array([1])

    @jax.jit
    def choose(keys):
        scores = [
            selector.scores(one, k, row, numbers) for one, k in zip(picked, keys, strict=True)
        ]
        return jnp.concatenate(selector.choose(scores, numbers))

    found = np.asarray(choose([KeyIndex.of(k) for k in layers]))
    exact = np.asarray(choose(layers))
    assert found.shape == (LAYERS, KV_HEADS, 16)
    common = 0
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            mine, theirs = found[layer, head, :15], exact[layer, head, :15]
            assert (np.diff(mine) > 0).all() and mine[:3].tolist() == [0, 1, 2]
            assert mine[-1] < budget.candidates(11)
            common += len(np.intersect1d(mine, theirs))
    assert common >= 0.93 * LAYERS * KV_HEADS * 15
    assert not np.array_equal(found[0], found[1])


def test_slots_of_all_rows_and_of_some_rows_score_alike():
    """Whichever way a slot's row is found, and whatever padding says."""
    selector = Selector(SelectionConfig(queries="even4", dilation=1), BLOCK, 2, 16)
    q = jnp.asarray(np.random.default_rng(20).normal(size=(ROWS, BLOCK, 6, DIM)), jnp.float32)
    table = BudgetTable.of(Budget(10, 2, 1, BLOCK), 13)
    for stored in (keys(21), KeyIndex.of(keys(21))):
        rows, targets = jnp.array([2, 0, ROWS]), jnp.array([9, 12, 4])
        full = selector.scores(q, stored, rows, table.at(targets))
        some = selector.scores(q[:2], stored, rows[:2], table.at(targets[:2]))
        np.testing.assert_allclose(full[:2], some, rtol=1e-5)
        assert not np.allclose(full[0], full[1])
