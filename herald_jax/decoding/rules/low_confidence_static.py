"""Static low-confidence remasking: a fixed number of positions a step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from jaxtyping import Array, Bool, Float

from herald_jax.decoding.rules.base import BlockView, most_confident, register_rule


@register_rule
@dataclasses.dataclass(frozen=True)
class LowConfidenceStatic:
    """Commits the `quota` most confident masked positions (SDAR, arXiv 2510.06303)."""

    option: ClassVar[str | None] = None
    option_default: ClassVar[float | None] = None

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        """The rule; it has no option."""
        return cls()

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True at the most confident masked positions."""
        return most_confident(view.confidence, view.is_masked, view.quota)
