"""Attention over a KV cache for block-diffusion decoding: what the models call.

Each operation has a plain-JAX form in `reference`, which defines its meaning and runs on
every backend.
"""

from pallas_kernels.reference import (
    PagedSegment,
    Segment,
    block_attention,
    paged_attention,
    prefill_attention,
    segment_attention,
)

__all__ = [
    "PagedSegment",
    "Segment",
    "block_attention",
    "paged_attention",
    "prefill_attention",
    "segment_attention",
]
