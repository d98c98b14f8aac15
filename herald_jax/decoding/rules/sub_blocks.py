"""Fast-dLLM v2's rule: a threshold within one part of the block at a time, from the left."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from herald_jax.decoding.rules.base import BlockView, register_rule

PARTS = 4
"""Sub-blocks of a block: 8 positions of 32, as published."""


def sub_block_length(block_length: int) -> int:
    """Positions of a sub-block; the last one may have fewer."""
    return -(-block_length // PARTS)


@register_rule
@dataclasses.dataclass(frozen=True)
class SubBlocks:
    """Commits the most confident position of the first unfinished sub-block, and those above.

    A sub-block is a quarter of the block, rounded up. A later one is begun when the earlier ones
    have no masks left (arXiv 2509.26328), or where the row's `quota` asks for more than is left
    there. A confidence equal to the threshold does not pass, as in the published loop.
    """

    threshold: Float[Any, " R"]
    option: ClassVar[str | None] = "threshold"
    option_default: ClassVar[float | None] = 0.9

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        """The rule with one threshold a row."""
        return cls(threshold=options)

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True above the threshold in one sub-block, and at its most confident positions."""
        block_length = view.is_masked.shape[-1]
        part = jnp.arange(block_length) // sub_block_length(block_length)
        part = jnp.where(view.is_masked, part, PARTS)
        is_current = view.is_masked & (part == part.min(-1, keepdims=True))
        passes = is_current & (view.confidence > self.threshold[:, None])
        score = jnp.where(jnp.isnan(view.confidence), -jnp.inf, view.confidence)
        rank = jnp.argsort(jnp.lexsort((-score, part), axis=-1), axis=-1)
        best = view.is_masked & (rank < jnp.maximum(view.quota, 1)[:, None])
        return passes | best
