"""What the engine uses of its runner; tests put scripts in the runner's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from herald_jax.decoding.propose import ProposalSpec
from herald_jax.engine.plan import StepPlan
from herald_jax.engine.retrievals import RowFailure
from herald_jax.engine.slot_arrays import RowSampling
from herald_jax.engine.slot_runner import CommittedBlock


@runtime_checkable
class PendingLike(Protocol):
    """What of `engine.slot_runner.PendingStep` the engine uses."""

    def read(self) -> Sequence[CommittedBlock | RowFailure]:
        """The blocks that the step committed, and rows that failed; waits for it."""
        ...


@runtime_checkable
class RunnerLike(Protocol):
    """What of `engine.slot_runner.SlotRunner` the engine uses.

    Attributes:
        params: Parameters of the next step.
    """

    params: Any

    @property
    def compile_seconds(self) -> float:
        """Time that programs took to compile so far."""
        ...

    def dispatch(self, plan: StepPlan, options: dict[int, RowSampling]) -> Sequence[PendingLike]:
        """Sends a plan to the device without waiting for it."""
        ...

    def warmup(self, specs: Sequence[ProposalSpec] = ...) -> None:
        """Compiles ahead of time all programs, or those of these kinds of step."""
        ...

    def stats(self) -> dict[str, float]:
        """What it counted of its own."""
        ...

    def reset(self) -> None:
        """Makes the device's state anew."""
        ...
