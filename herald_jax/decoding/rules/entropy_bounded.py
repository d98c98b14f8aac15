"""Entropy-bounded unmasking: as many positions as a total entropy allows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from herald_jax.decoding.rules.base import BlockView, most_confident, register_rule


@register_rule
@dataclasses.dataclass(frozen=True)
class EntropyBounded:
    """Commits the lowest-entropy positions while their summed entropy stays under a bound.

    The positions are taken in rising order of entropy (nats) as long as the running sum is
    strictly below `entropy_bound`, and never fewer than the row's `quota`.
    """

    entropy_bound: Float[Any, " R"]
    option: ClassVar[str | None] = "entropy_bound"
    option_default: ClassVar[float | None] = 0.35

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        """The rule with one bound a row, in nats."""
        return cls(entropy_bound=options)

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True at the lowest-entropy masked positions within the bound."""
        rising = jnp.sort(jnp.where(view.is_masked, view.entropy, jnp.inf), axis=-1)
        fitting = (jnp.cumsum(rising, axis=-1) < self.entropy_bound[:, None]).sum(-1)
        return most_confident(-view.entropy, view.is_masked, jnp.maximum(fitting, view.quota))
