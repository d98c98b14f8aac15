"""Attention over host memory against a plain softmax."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.retrieval.attend import attend_row

KV_HEADS, GROUP, KEYS, DIM = 2, 3, 700, 12  # more than one chunk, and no whole tile


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(("count", "tokens"), [(1, 700), (5, 515), (2, 3), (3, 0)])
def test_attention_over_a_row_is_that_of_a_plain_softmax(dtype, count: int, tokens: int) -> None:
    numbers = np.random.default_rng(tokens)
    size = (KV_HEADS, KEYS, DIM)
    k, v = (numbers.normal(size=size).astype(np.float32).astype(dtype) for _ in range(2))
    q = 5 * numbers.normal(size=(count, KV_HEADS * GROUP, DIM)).astype(np.float32)
    k[:, tokens:] = np.nan  # what another request left behind
    out, log_sum = attend_row(k, v, q, tokens)
    assert out.shape == q.shape and log_sum.shape == q.shape[:2]
    if tokens == 0:
        assert not out.any() and np.isneginf(log_sum).all()
        return
    for head in range(KV_HEADS * GROUP):
        keys = k[head // GROUP, :tokens].astype(np.float64)
        scores = q[:, head].astype(np.float64) @ keys.T / np.sqrt(DIM)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        expected = weights @ v[head // GROUP, :tokens].astype(np.float64)
        np.testing.assert_allclose(
            out[:, head], expected / weights.sum(-1, keepdims=True), atol=3e-6
        )
        np.testing.assert_allclose(log_sum[:, head], top[:, 0] + np.log(weights.sum(-1)), rtol=1e-6)
