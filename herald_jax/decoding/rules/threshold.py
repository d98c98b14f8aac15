"""Fast-dLLM's threshold rule: the most confident position always, others from a threshold on."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from herald_jax.decoding.rules.base import BlockView, most_confident, register_rule


@register_rule
@dataclasses.dataclass(frozen=True)
class Threshold:
    """Commits the `quota` most confident positions and all others at or above the threshold.

    This is Fast-dLLM (arXiv 2505.22618) as its code has it: a confidence equal to the threshold
    passes, and the most confident position is committed besides those that pass. The paper says
    "exceeds". `LowConfidenceDynamic` is SDAR's rule, where equality does not pass.
    """

    threshold: Float[Any, " R"]
    option: ClassVar[str | None] = "threshold"
    option_default: ClassVar[float | None] = 0.9

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        """The rule with one threshold a row."""
        return cls(threshold=options)

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True from the threshold on, and at the most confident positions."""
        passes = view.is_masked & (view.confidence >= self.threshold[:, None])
        best = most_confident(view.confidence, view.is_masked, jnp.maximum(view.quota, 1))
        return passes | best
