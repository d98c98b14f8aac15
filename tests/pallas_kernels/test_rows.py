"""Rows of pools: the plain forms against NumPy, the kernels against the plain forms."""

from __future__ import annotations

import functools
from typing import Any

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


def rotated(x: np.ndarray, gain: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Heads [M, B, N, D] normed, and turned as complex numbers."""
    x = x.astype(np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, :, None]
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("rows, starts", [([2, 0], [16, 3]), ([-1, 1], [0, 19]), ([3, 2], [0, -2])])
def test_fused_qkv_rope_append(rows: list[int], starts: list[int]) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 5, heads, 64)).astype(np.float32) for heads in (6, 2, 2))
    gains = rng.uniform(0.5, 2, (2, 64)).astype(np.float32)
    angles = rng.uniform(-3, 3, (2, 5, 32)).astype(np.float32)
    pools = [draw(3, 2, 21, 64) + shift for shift in (0, 5)]
    want_q, want_k = rotated(q, gains[0], angles), rotated(k, gains[1], angles)
    wanted = [pool.copy() for pool in pools]
    for m, (row, start) in enumerate(zip(rows, starts, strict=True)):
        for b in range(5):
            if 0 <= row < 3 and 0 <= start + b < 21:
                wanted[0][row, :, start + b] = want_k[m, b]
                wanted[1][row, :, start + b] = v[m, b]
    norms = reference.HeadNorms(*map(jnp.asarray, gains), 1e-6)
    inputs: Any = [jnp.asarray(x) for x in (np.cos(angles), np.sin(angles), *pools, rows, starts)]
    inputs = [*map(jnp.asarray, (q, k, v)), norms, *inputs]
    kernel = functools.partial(triton_rows.fused_qkv_rope_append, interpret=True)
    for form in (reference.fused_qkv_rope_append, kernel):
        for got, want in zip(form(*inputs), (want_q, *wanted), strict=True):
            np.testing.assert_allclose(got, want, atol=3e-6)


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
    gain = struct(128)
    phases = struct(2, 12, 64, dtype=jnp.float32)
    fresh = [struct(2, 12, heads, 128) for heads in (8, 2, 2)]
    fused = jax.jit(
        lambda q, k, v, a, b, *rest: triton_rows.fused_qkv_rope_append(
            q, k, v, reference.HeadNorms(a, b, 1e-6), *rest
        ),
        donate_argnums=(7, 8),
    )
    traced = fused.trace(*fresh, gain, gain, phases, phases, pool, pool, index, index)
    traced.lower(lowering_platforms=("cuda",))
