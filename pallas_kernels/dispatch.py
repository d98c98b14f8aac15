"""Chooses between a kernel and the plain form when a program is traced.

A kernel runs where the default device is a Hopper GPU and the kernel knows the shapes and dtypes;
everything else takes the plain form of `reference`, which defines the meaning of both. The choice
is part of the traced program: `using` has no effect on one that is compiled already.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import reference
from pallas_kernels.reference import GreedyHead, HeadNorms, PagedSegment, Pooling, Segment

Choice = Literal["auto", "reference", "kernel"]

HEAD_SIZES = (64, 128)

MAX_GROUP = 8
"""Query heads of a KV head."""

MAX_ROWS = 512
"""Queries of a block times heads of a KV head; the results of more would fill the memory."""

MAX_POSITIONS = 128
"""Queries of a block whose keys' importance a kernel finds: columns of its products."""

MAX_PRODUCT_ROWS = 256
"""Rows of a product with weights that a kernel takes: with more, the compiler's is as good."""

COPY_ROWS = 64
"""Keys that a kernel fetches at a time; a page is a multiple of it, or it of a page."""

ALIGNMENT = 8
"""Keys of a pool's row that count as one for the copy engine; short rows are filled up."""

MAX_POOL_ROWS = 2**31 - 2**16
"""Rows, heads and tokens of a pool multiplied: numbers of keys are 32-bit integers."""

_choice: ContextVar[Choice] = ContextVar("choice", default="auto")


@contextlib.contextmanager
def using(choice: Choice) -> Iterator[None]:
    """Makes programs that are traced inside take the plain form, or the kernel unasked."""
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def _runs_kernels() -> bool:
    """Whether the program being traced is for one Hopper GPU."""
    choice = _choice.get()
    if choice != "auto":
        return choice == "kernel"
    if _platform() != "gpu":
        return False
    # Pallas does not partition: over several devices a kernel belongs into a `shard_map`.
    mesh = jax.sharding.get_abstract_mesh()
    is_whole = mesh.empty or all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types)
    return is_whole and jax.devices()[0].compute_capability == "9.0"


def _platform() -> str:
    """The platform of the default device, which `jax.default_device` may have changed."""
    device = getattr(jax.config, "jax_default_device", None)
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _processors() -> int:
    """Multiprocessors of the default device; those of an H200 when there is no GPU to ask."""
    if _platform() != "gpu":
        return 132
    return jax.devices()[0].core_count


def _fits_pool(*pools: jax.Array) -> bool:
    return all(
        pool.dtype == jnp.bfloat16
        and pool.shape[0] * pool.shape[1] * pool.shape[2] <= MAX_POOL_ROWS
        and (pool.shape[2] % ALIGNMENT == 0 or pool.shape[2] <= COPY_ROWS)
        for pool in pools
    )


def _fits_segment(segment: Segment | PagedSegment) -> bool:
    if isinstance(segment, PagedSegment):
        page = segment.k.shape[2]
        if page % COPY_ROWS and (COPY_ROWS % page or page % ALIGNMENT):
            return False
    return _fits_pool(segment.k, segment.v)


def _fits_queries(q: jax.Array, kv_heads: int) -> bool:
    group = q.shape[2] // kv_heads
    return q.dtype == jnp.bfloat16 and q.shape[3] in HEAD_SIZES and group <= MAX_GROUP


@overload
def segment_attention(
    q: Float[Array, "M B H D"], segments: Sequence[Segment | PagedSegment]
) -> Float[Array, "M B H D"]: ...
@overload
def segment_attention(
    q: Float[Array, "M B H D"],
    segments: Sequence[Segment | PagedSegment],
    with_lse: Literal[True],
) -> tuple[Float[Array, "M B H D"], Float[Array, "M B H"]]: ...
def segment_attention(
    q: Float[Array, "M B H D"],
    segments: Sequence[Segment | PagedSegment],
    with_lse: bool = False,
) -> Any:
    """`reference.segment_attention`, by a kernel where one runs."""
    kv_heads = segments[0].k.shape[1]
    rows = q.shape[1] * (q.shape[2] // kv_heads)
    fits = _fits_queries(q, kv_heads) and rows <= MAX_ROWS and all(map(_fits_segment, segments))
    if not (fits and _runs_kernels()):
        return reference.segment_attention(q, segments, with_lse)  # type: ignore[call-overload]
    return _segment_kernel()(q, tuple(segments), programs=_processors(), with_lse=with_lse)


def key_importance(
    q: Float[Array, "M B H D"],
    lse: Float[Array, "M B H"],
    segment: Segment | PagedSegment,
    pooling: Pooling,
) -> Float[Array, "M K S"]:
    """`reference.key_importance`, by a kernel where one runs."""
    kv_heads = segment.k.shape[1]
    rows = q.shape[1] * (q.shape[2] // kv_heads)
    fits = _fits_queries(q, kv_heads) and rows <= MAX_ROWS and q.shape[1] <= MAX_POSITIONS
    if not (fits and _fits_segment(segment) and _runs_kernels()):
        return reference.key_importance(q, lse, segment, pooling)
    return _importance_kernel()(q, lse, segment, pooling=pooling)


@functools.cache
def _segment_kernel() -> Callable[..., jax.Array]:
    """The kernel as a function of its own, so that the layers of a program share one lowering."""
    from pallas_kernels.hopper.block_attention import segment_attention

    return jax.jit(segment_attention, static_argnames=("programs", "with_lse"))


@functools.cache
def _importance_kernel() -> Callable[..., jax.Array]:
    from pallas_kernels.hopper.key_importance import key_importance

    return jax.jit(key_importance, static_argnames="pooling")


@functools.cache
def _prefill_kernel() -> Callable[..., jax.Array]:
    from pallas_kernels.hopper.prefill_attention import prefill_attention

    return jax.jit(prefill_attention, static_argnames="block_length")


def paged_attention(
    q: Float[Array, "M B H D"],
    k_pages: Float[Array, "N K page D"],
    v_pages: Float[Array, "N K page D"],
    tables: Int[Array, "M W"],
    lengths: Int[Array, " M"],
) -> Float[Array, "M B H D"]:
    """`reference.paged_attention`, by a kernel where one runs."""
    return segment_attention(q, [PagedSegment(k_pages, v_pages, tables, lengths)])


def block_attention(
    q: Float[Array, "R Q H D"],
    k_prefix: Float[Array, "R K S D"],
    v_prefix: Float[Array, "R K S D"],
    prefix_lengths: Int[Array, " R"],
    k_block: Float[Array, "R Q K D"],
    v_block: Float[Array, "R Q K D"],
) -> Float[Array, "R Q H D"]:
    """`reference.block_attention`, by a kernel where one runs."""
    rows, queries, heads, _ = q.shape
    kv_heads = k_prefix.shape[1]
    fits = _fits_queries(q, kv_heads) and queries * (heads // kv_heads) <= MAX_ROWS
    k_own, v_own = (x.transpose(0, 2, 1, 3) for x in (k_block, v_block))
    if not (fits and _fits_pool(k_prefix, v_prefix, k_own, v_own) and _runs_kernels()):
        return reference.block_attention(q, k_prefix, v_prefix, prefix_lengths, k_block, v_block)
    index = jnp.arange(rows, dtype=jnp.int32)
    own = jnp.full((rows,), queries, jnp.int32)
    prefix = Segment(k_prefix, v_prefix, index, prefix_lengths)
    return segment_attention(q, [prefix, Segment(k_own, v_own, index, own)])


def prefill_attention(
    q: Float[Array, "R Q H D"],
    k_prefix: Float[Array, "R K S D"],
    v_prefix: Float[Array, "R K S D"],
    prefix_length: Int[Array, ""],
    k_chunk: Float[Array, "R Q K D"],
    v_chunk: Float[Array, "R Q K D"],
    block_length: int,
) -> Float[Array, "R Q H D"]:
    """`reference.prefill_attention`, by a kernel where one runs."""
    inputs = (q, k_prefix, v_prefix, prefix_length, k_chunk, v_chunk)
    is_aligned = k_prefix.shape[2] % ALIGNMENT == 0
    fits = is_aligned and _fits_queries(q, k_prefix.shape[1]) and _fits_pool(k_prefix, v_prefix)
    is_half = k_chunk.dtype == jnp.bfloat16 and v_chunk.dtype == jnp.bfloat16
    if not (fits and is_half and _runs_kernels()):
        return reference.prefill_attention(*inputs, block_length)
    return _prefill_kernel()(*inputs, block_length=block_length)


def gather_rows(
    pool: Float[Array, "N K S D"], rows: Int[Array, " M"], index: Int[Array, "M K C"]
) -> Float[Array, "M K C D"]:
    """`reference.gather_rows`, by a kernel where one runs.

    For a kernel the pool may lie in pinned host memory; the result is on the device.
    """
    if not (pool.shape[3] in HEAD_SIZES and _runs_kernels()):
        return reference.gather_rows(pool, rows, index)
    from pallas_kernels import triton_rows as kernels

    programs = kernels.LINK_PROGRAMS if _is_on_host(pool) else 8 * _processors()
    return kernels.gather_rows(pool, rows, index, programs)


def append_kv(
    pool: Float[Array, "N K S D"],
    new: Float[Array, "M K B D"],
    rows: Int[Array, " M"],
    starts: Int[Array, " M"],
) -> Float[Array, "N K S D"]:
    """`reference.append_kv`, by a kernel where one runs; a donated pool is written in place.

    For a kernel that may be one in pinned host memory, if `out_shardings` says that the result
    stays there.
    """
    if not (pool.shape[3] in HEAD_SIZES and _runs_kernels()):
        return reference.append_kv(pool, new, rows, starts)
    from pallas_kernels import triton_rows as kernels

    return kernels.append_kv(pool, new, rows, starts)


def fused_qkv_rope_append(
    q: Float[Array, "M B H D"],
    k: Float[Array, "M B K D"],
    v: Float[Array, "M B K D"],
    norms: HeadNorms,
    cos: Float[Array, "M B half"],
    sin: Float[Array, "M B half"],
    k_pool: Float[Array, "N K S D"],
    v_pool: Float[Array, "N K S D"],
    rows: Int[Array, " M"],
    starts: Int[Array, " M"],
) -> tuple[Float[Array, "M B H D"], Float[Array, "N K S D"], Float[Array, "N K S D"]]:
    """`reference.fused_qkv_rope_append`, by a kernel where one runs; donated pools stay in place.

    No model calls it: docs/performance.md compares it with what the compiler makes of the parts.
    """
    inputs = (q, k, v, norms, cos, sin, k_pool, v_pool, rows, starts)
    rotates_whole = 2 * cos.shape[-1] == q.shape[3]
    if not (q.shape[3] in HEAD_SIZES and rotates_whole and _runs_kernels()):
        return reference.fused_qkv_rope_append(*inputs)
    from pallas_kernels import triton_rows as kernels

    return kernels.fused_qkv_rope_append(*inputs)


def has_greedy_head(x: Float[Array, "rows E"], w: Float[Array, "E V"]) -> bool:
    """Whether a kernel finds the greedy tokens of these rows without writing their logits."""
    is_half = x.dtype == jnp.bfloat16 and w.dtype == jnp.bfloat16
    fits = x.shape[0] <= MAX_PRODUCT_ROWS and x.shape[1] % 128 == 0
    return is_half and fits and _runs_kernels()


def greedy_head(
    x: Float[Array, "rows E"], w: Float[Array, "E V"], mask_id: int, end: int
) -> GreedyHead:
    """`reference.greedy_head`, by a kernel where one runs."""
    if not has_greedy_head(x, w):
        return reference.greedy_head(x, w, mask_id, end)
    from pallas_kernels.hopper.skinny_matmul import greedy_head as kernel

    return kernel(x, w, mask_id, end, _processors())


def _is_on_host(x: jax.Array) -> bool:
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host
