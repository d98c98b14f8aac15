"""Attention over a KV cache for block-diffusion decoding: what the models call.

Each operation has a plain-JAX form in `reference`, which defines its meaning and runs on
every backend.
"""

from pallas_kernels.reference import block_attention, paged_attention, prefill_attention

__all__ = ["block_attention", "paged_attention", "prefill_attention"]
