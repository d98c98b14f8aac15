"""Left-to-right unmasking."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from herald_jax.decoding.rules.base import BlockView, register_rule


@register_rule
@dataclasses.dataclass(frozen=True)
class Sequential:
    """Commits the first `quota` masked positions from the left."""

    option: ClassVar[str | None] = None
    option_default: ClassVar[float | None] = None

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        """The rule; it has no option."""
        return cls()

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True at the leftmost masked positions."""
        rank = jnp.cumsum(view.is_masked, axis=-1)
        return view.is_masked & (rank <= view.quota[:, None])
