"""Fast-dLLM's factor rule: the more positions at once, the surer each has to be."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from herald_jax.decoding.rules.base import BlockView, most_confident, register_rule


@register_rule
@dataclasses.dataclass(frozen=True)
class Factor:
    """Commits the n most confident positions, n the largest with (n + 1) (1 - c_n) < factor.

    c_n is the n-th highest confidence (arXiv 2505.22618, section 3.3); n is at least the row's
    `quota`. The paper is followed where its code differs: the code lets equality pass, and when
    all but the last masked position of a block pass, it commits that one as well.
    """

    factor: Float[Any, " R"]
    option: ClassVar[str | None] = "factor"
    option_default: ClassVar[float | None] = 1.0

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        """The rule with one factor a row."""
        return cls(factor=options)

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True at the most confident masked positions within the factor."""
        known = view.is_masked & ~jnp.isnan(view.confidence)
        falling = -jnp.sort(jnp.where(known, -view.confidence, jnp.inf), axis=-1)
        # The left side grows with n, so those that hold come first.
        n = 1 + jnp.arange(falling.shape[-1])
        holds = (n + 1).astype(jnp.float32) * (1 - falling) < self.factor[:, None]
        count = jnp.maximum(holds.sum(-1), jnp.maximum(view.quota, 1))
        return most_confident(view.confidence, view.is_masked, count)
