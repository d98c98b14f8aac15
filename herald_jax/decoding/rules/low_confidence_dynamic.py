"""Dynamic low-confidence remasking: everything above a threshold."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from herald_jax.decoding.rules.base import BlockView, most_confident, register_rule


@register_rule
@dataclasses.dataclass(frozen=True)
class LowConfidenceDynamic:
    """Commits all masked positions strictly above the threshold (SDAR, arXiv 2510.06303).

    Where fewer than `quota` pass, the `quota` most confident are committed instead.
    """

    threshold: Float[Any, " R"]
    option: ClassVar[str | None] = "threshold"
    option_default: ClassVar[float | None] = 0.9

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        """The rule with one threshold a row."""
        return cls(threshold=options)

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True above the threshold, or at the most confident positions."""
        passes = view.is_masked & (view.confidence > self.threshold[:, None])
        is_enough = passes.sum(-1) >= view.quota
        fallback = most_confident(view.confidence, view.is_masked, view.quota)
        return jnp.where(is_enough[:, None], passes, fallback)
