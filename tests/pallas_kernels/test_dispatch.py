"""When a kernel is traced in place of the plain form."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import PagedSegment, Segment, dispatch, reference

BF16 = jnp.bfloat16


def takes_kernel(function: Any, *operands: Any) -> bool:
    """Whether a program would run a Pallas kernel."""
    with dispatch.using("kernel"):
        text = str(jax.make_jaxpr(function)(*operands))
    return "mpmd_map" in text or "core_map" in text or "pallas_call" in text


def shape(*sizes: int, dtype: Any = BF16) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def segment_inputs(block=32, heads=8, kv_heads=2, dim=64, tokens=128, dtype=BF16) -> Any:
    pool, index = shape(3, kv_heads, tokens, dim, dtype=dtype), shape(2, dtype=jnp.int32)
    return shape(2, block, heads, dim, dtype=dtype), [Segment(pool, pool, index, index)]


def paged_inputs(page: int) -> Any:
    pool, tables = shape(9, 2, page, 64), shape(2, 4, dtype=jnp.int32)
    return shape(2, 32, 8, 64), [PagedSegment(pool, pool, tables, shape(2, dtype=jnp.int32))]


@pytest.mark.parametrize(
    "expected, inputs",
    {
        "plain case": (True, segment_inputs()),
        "head size 128": (True, segment_inputs(dim=128)),
        "head size 32": (False, segment_inputs(dim=32)),
        "fp32": (False, segment_inputs(dtype=jnp.float32)),
        "group of 9": (False, segment_inputs(heads=18)),
        "wide": (True, segment_inputs(block=64, heads=16)),
        "too wide": (False, segment_inputs(block=129)),
        "short rows": (True, segment_inputs(tokens=12)),
        "odd rows": (False, segment_inputs(tokens=132)),
        "pages": (True, paged_inputs(64)),
        "small pages": (True, paged_inputs(16)),
        "large pages": (True, paged_inputs(192)),
        "odd pages": (False, paged_inputs(96)),
        "tiny pages": (False, paged_inputs(4)),
    }.values(),
)
def test_segment_attention(expected: bool, inputs: Any) -> None:
    assert takes_kernel(pallas_kernels.segment_attention, *inputs) is expected


def test_the_plain_form_runs_on_a_cpu() -> None:
    """Bit for bit: without a GPU nothing changes."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s), BF16)
        for s in ((2, 32, 8, 64), (3, 2, 128, 64), (3, 2, 128, 64))
    )
    index = jnp.asarray([2, 0], jnp.int32)
    segments = [Segment(k, v, index, jnp.asarray([128, 5], jnp.int32))]
    got = pallas_kernels.segment_attention(q, segments)
    want = reference.segment_attention(q, segments)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_other_functions_have_kernels() -> None:
    index = shape(2, dtype=jnp.int32)
    q, cache, fresh = shape(2, 32, 8, 64), shape(2, 2, 256, 64), shape(2, 32, 2, 64)
    assert takes_kernel(pallas_kernels.block_attention, q, cache, cache, index, fresh, fresh)
    length = shape(dtype=jnp.int32)
    assert takes_kernel(
        lambda *inputs: pallas_kernels.prefill_attention(*inputs, 8),
        q,
        cache,
        cache,
        length,
        fresh,
        fresh,
    )
    entries = shape(2, 2, 40, dtype=jnp.int32)
    assert takes_kernel(pallas_kernels.gather_rows, cache, index, entries)
    assert takes_kernel(pallas_kernels.append_kv, cache, shape(2, 2, 4, 64), index, index)
    head = functools.partial(pallas_kernels.greedy_head, mask_id=3, end=250)
    assert takes_kernel(head, shape(40, 128), shape(128, 256))
    assert not takes_kernel(head, shape(257, 128), shape(128, 256))
    assert not takes_kernel(head, shape(40, 96), shape(96, 256))
    assert takes_kernel(
        functools.partial(pallas_kernels.key_importance, pooling="max"),
        q,
        shape(2, 32, 8, dtype=jnp.float32),
        Segment(cache, cache, index, index),
    )
    tables = shape(2, 4, dtype=jnp.int32)
    pages = shape(9, 2, 64, 64)
    assert takes_kernel(pallas_kernels.paged_attention, q, pages, pages, tables, index)
