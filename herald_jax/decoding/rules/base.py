"""What every unmask rule sees and must return, and the orderings they share."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


class BlockView(NamedTuple):
    """One block of each row after a forward pass; what a rule decides from.

    `confidence` and `entropy` (nats) belong to the distribution that
    `SamplingParams.confidence` names. `quota` is the number of positions that the row's
    schedule asks this step to commit. A rule with a choice of its own may depend on `seed`,
    `block` (absolute) and `step` (within the block), and on nothing of another row.
    """

    is_masked: Bool[Array, "R B"]
    confidence: Float[Array, "R B"]
    entropy: Float[Array, "R B"]
    quota: Int[Array, " R"]
    seed: UInt32[Array, " R"]
    block: Int[Array, " R"]
    step: Int[Array, " R"]


class Chooser(Protocol):
    """A pytree of per-row options that picks the positions to commit.

    The loop adds two guarantees: only masked positions are committed, and a row with masks
    left commits at least one.
    """

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        """True where a token is committed."""
        ...


class UnmaskRule(Chooser, Protocol):
    """A chooser that a strategy name in `SamplingParams` stands for."""

    option: ClassVar[str | None]
    """The `SamplingParams` field that the rule reads besides `denoising_steps`, if any."""

    option_default: ClassVar[float | None]
    """Value of `option` where the caller leaves it unset."""

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        """The rule for rows whose `option` has these values (ignored without an option)."""
        ...


def quota(
    step: Int[Array, " R"], denoising_steps: Int[Array, " R"], block_length: int
) -> Int[Array, " R"]:
    """Positions that step number `step` of a block owes: B // T, the remainder first."""
    has_extra = step < block_length % denoising_steps
    return block_length // denoising_steps + has_extra.astype(jnp.int32)


def most_confident(
    score: Float[Array, "R B"], is_masked: Bool[Array, "R B"], count: Int[Array, " R"]
) -> Bool[Array, "R B"]:
    """True at the `count` masked positions of highest score; NaN last, ties to the left."""
    score = jnp.where(is_masked & ~jnp.isnan(score), score, -jnp.inf)
    # Candidates are told apart from the rest by the first key, so that a masked position
    # whose score is -inf still comes before every position that is not masked.
    order = jnp.lexsort((-score, ~is_masked), axis=-1)
    rank = jnp.argsort(order, axis=-1)
    return is_masked & (rank < count[:, None])


_Rule = TypeVar("_Rule")


def register_rule(cls: type[_Rule]) -> type[_Rule]:
    """Registers a rule dataclass as a pytree whose fields are all per-row arrays."""
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=[])
