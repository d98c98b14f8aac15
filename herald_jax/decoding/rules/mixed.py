"""Several rules in one batch: every row is decided by its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from herald_jax.decoding.rules.base import BlockView, Chooser, register_rule


@register_rule
@dataclasses.dataclass(frozen=True)
class MixedRules:
    """Runs all of a few rules and keeps, in each row, what that row's rule chose.

    A rule costs little beside the forward pass, so rows with different rules need not wait
    for a batch of their own.
    """

    choice: Int[Any, " R"]
    members: Sequence[Chooser]

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True where the row's own rule commits."""
        picks = jnp.stack([member(view) for member in self.members])
        return picks[self.choice, jnp.arange(picks.shape[1])]
