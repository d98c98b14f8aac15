"""Attention over a KV cache for block-diffusion decoding: what the models call.

Each operation has a plain-JAX form in `reference`, which defines its meaning and runs on
every backend; `dispatch` takes a kernel in its place where one runs.
"""

from pallas_kernels.dispatch import (
    append_kv,
    block_attention,
    fused_qkv_rope_append,
    gather_rows,
    greedy_head,
    has_greedy_head,
    key_importance,
    paged_attention,
    prefill_attention,
    segment_attention,
)
from pallas_kernels.reference import HeadNorms, PagedSegment, Segment

__all__ = [
    "HeadNorms",
    "PagedSegment",
    "Segment",
    "append_kv",
    "block_attention",
    "fused_qkv_rope_append",
    "gather_rows",
    "greedy_head",
    "has_greedy_head",
    "key_importance",
    "paged_attention",
    "prefill_attention",
    "segment_attention",
]
