"""Rows of pools: the plain forms against NumPy, the kernels against the plain forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference, triton_rows


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


GATHERS = [
    # slots, KV heads, pool rows, tokens, entries, head size
    (1, 1, 1, 1, 1, 64),
    (2, 3, 4, 21, 37, 64),
    (3, 1, 2, 100, 33, 128),
]


@pytest.mark.parametrize("sizes", GATHERS)
def test_gather_rows(sizes: tuple[int, ...]) -> None:
    slots, heads, pool_rows, tokens, entries, dim = sizes
    rng = np.random.default_rng(0)
    pool = draw(pool_rows, heads, tokens, dim)
    rows = rng.integers(0, pool_rows, slots).astype(np.int32)
    index = rng.integers(0, tokens, (slots, heads, entries)).astype(np.int32)
    want = np.stack([[pool[r, h][index[m, h]] for h in range(heads)] for m, r in enumerate(rows)])
    inputs = [jnp.asarray(x) for x in (pool, rows, index)]
    np.testing.assert_array_equal(reference.gather_rows(*inputs), want)
    for programs in (1, 3, 64):
        got = triton_rows.gather_rows(*inputs, programs=programs, interpret=True)
        np.testing.assert_array_equal(got, want)


APPENDS = [
    # tokens, block, rows, starts
    (16, 4, [1], [12]),
    (21, 5, [2, 0, 1], [0, 16, 19]),
    (21, 5, [-1, 3, 1], [0, 0, -2]),
    (8, 8, [0, 2], [0, 8]),
]


@pytest.mark.parametrize("tokens, block, rows, starts", APPENDS)
def test_append_kv(tokens: int, block: int, rows: list[int], starts: list[int]) -> None:
    pool, new = draw(3, 2, tokens, 64), draw(len(rows), 2, block, 64) + 10
    want = pool.copy()
    for m, (row, start) in enumerate(zip(rows, starts, strict=True)):
        for b in range(block):
            if 0 <= row < 3 and 0 <= start + b < tokens:
                want[row, :, start + b] = new[m, :, b]
    inputs = (jnp.asarray(pool), jnp.asarray(new), jnp.asarray(rows), jnp.asarray(starts))
    np.testing.assert_array_equal(reference.append_kv(*inputs), want)
    np.testing.assert_array_equal(triton_rows.append_kv(*inputs, interpret=True), want)


def test_kernels_lower() -> None:
    if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11):
        pytest.skip("this jax lowers Triton-style kernels only where there is a GPU")

    def struct(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pool, index = struct(3, 2, 40, 128), struct(2, dtype=jnp.int32)
    entries = struct(2, 2, 50, dtype=jnp.int32)
    traced = jax.jit(triton_rows.gather_rows).trace(pool, index, entries)
    traced.lower(lowering_platforms=("cuda",))
    append = jax.jit(triton_rows.append_kv, donate_argnums=0)
    traced = append.trace(pool, struct(2, 2, 12, 128), index, index)
    traced.lower(lowering_platforms=("cuda",))
