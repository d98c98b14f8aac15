"""Drawn numbers of denoising steps, replayed by a rule, and the schedules that they lead to.

Random weights never pass a confidence threshold, so the study of batching draws for each block
of each request how many steps it takes: the rule `replay` commits the whole block at that step.
The same draws go through the real scheduler with no device behind it, where a step is a tick:
that gives the steps of any policy, which times the time of a step is its duration.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from herald_jax.decoding.rules import BlockView
from herald_jax.decoding.rules.base import register_rule
from herald_jax.engine.pages import PageAllocator
from herald_jax.engine.request import RowBlock, RowProgress
from herald_jax.engine.scheduler import Scheduler
from herald_jax.sampling import SamplingParams

MOST_STEPS, MOST_BLOCKS = 32, 64
QUANTILES = 4096


def geometric(uniform: Any, mean: float, most: int) -> Any:
    """Numbers 1..most, geometric with that mean before the cut; a mean of 1 gives ones."""
    log_fail = np.log1p(-1 / np.maximum(mean, 1 + 1e-6))
    return np.clip(np.ceil(np.log1p(-uniform) / log_fail), 1, most)


# Steps of a block by quantile; a mean of about 8 in all of them.
DISTRIBUTIONS: dict[str, Callable[[Any], Any]] = {
    "constant": lambda u: np.full_like(u, 8),
    "even6to10": lambda u: np.floor(6 + 5 * u),
    "even1to15": lambda u: np.floor(1 + 15 * u),
    "geometric": lambda u: geometric(u, 8.0, MOST_STEPS),
    "two": lambda u: np.where(u < 24 / 31, 1, MOST_STEPS),
}


def _table() -> Int[np.ndarray, "D Q"]:
    middle = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.stack([np.asarray(draw(middle), np.int32) for draw in DISTRIBUTIONS.values()])


def step_variance(name: str) -> tuple[float, float]:
    """Mean and variance of a block's steps in a distribution."""
    steps = _table()[list(DISTRIBUTIONS).index(name)]
    return float(steps.mean()), float(steps.var())


def drawn_steps(
    kind: Int[Any, " R"], seed: Int[Any, " R"], block: Int[Any, " R"]
) -> Int[Array, " R"]:
    """Denoising steps of these blocks; the same on every device."""

    def draw(seed: jax.Array, block: jax.Array) -> jax.Array:
        return jax.random.randint(jax.random.fold_in(jax.random.key(seed), block), (), 0, QUANTILES)

    return jnp.asarray(_table())[kind, jax.vmap(draw)(seed, block)]


@register_rule
@dataclasses.dataclass(frozen=True)
class Replay:
    """Commits nothing but one position a step until the drawn last step, then all the rest."""

    kind: Float[Any, " R"]
    option: ClassVar[str | None] = "entropy_bound"  # carries the distribution's number, plus one
    option_default: ClassVar[float | None] = 1.0

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        return cls(options)

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        kind = jnp.asarray(self.kind, jnp.int32) - 1
        last = drawn_steps(kind, view.seed, view.block) - 1
        leftmost = view.is_masked & (jnp.cumsum(view.is_masked, axis=-1) <= 1)
        return jnp.where((view.step >= last)[:, None], view.is_masked, leftmost)


@dataclasses.dataclass(frozen=True)
class Work:
    """What the requests take: passes of each block, the commit pass included.

    Attributes:
        passes: For each request, the passes of each of its blocks.
        rows: R.
    """

    passes: tuple[tuple[int, ...], ...]
    rows: int

    @classmethod
    def draw(cls, distribution: str, blocks: Sequence[int], first_block: int, rows: int) -> Self:
        """The draws of requests whose seed is their number."""
        kind = list(DISTRIBUTIONS).index(distribution)
        seeds = np.repeat(np.arange(len(blocks)), blocks)
        index = np.concatenate([first_block + np.arange(count) for count in blocks])
        steps = np.asarray(jax.jit(drawn_steps)(np.full(seeds.size, kind), seeds, index)) + 1
        ends = np.cumsum(blocks)[:-1]
        return cls(tuple(tuple(part.tolist()) for part in np.split(steps, ends)), rows)

    @property
    def total(self) -> int:
        """Passes of all requests."""
        return sum(map(sum, self.passes))

    def bound(self) -> float:
        """Useful share of the shortest schedule that is known: the longest request first."""
        ends = [0] * self.rows
        for length in sorted(map(sum, self.passes), reverse=True):
            heapq.heappush(ends, heapq.heappop(ends) + length)
        return self.total / (self.rows * max(ends))

    def lockstep_steps(self) -> int:
        """Steps if the rows of a batch also wait for each other at the end of every block."""
        steps = 0
        for first in range(0, len(self.passes), self.rows):
            batch = self.passes[first : first + self.rows]
            for at in range(max(map(len, batch))):
                steps += max(blocks[at] for blocks in batch if at < len(blocks))
        return steps


def simulate(
    work: Work, batch: int, *, block_length: int, prompt_blocks: int, prefill_slots: int
) -> dict[str, Any]:
    """Device steps of a policy: requests are put in `batch` at a time, the next when all ended.

    Returns:
        `steps`, the steps in which requests waited and their passes, and for each request the
        step at which its end was read.
    """
    longest = (prompt_blocks + MOST_BLOCKS) * block_length
    scheduler = Scheduler(
        PageAllocator(work.rows * (-(-longest // 64) + 1), 64),
        block_length=block_length,
        max_rows=work.rows,
        max_step_tokens=(work.rows + prefill_slots) * block_length,
        max_model_len=longest,
    )
    zeros = np.zeros(block_length, np.float32)
    block = RowBlock(
        token_ids=np.zeros(block_length, np.int32),
        is_generated=np.ones(block_length, bool),
        unmask_steps=np.zeros(block_length, np.int32),
        confidences=zeros,
        logprobs=zeros,
        steps=1,
    )
    steps, busy_steps, busy_passes, passes = 0, 0, 0, 0
    ends: dict[int, int] = {}
    at: dict[int, list[int]] = {}  # by row: its block, and passes of it that were run
    pending: deque[list[tuple[int, int, int]]] = deque()

    def read() -> None:
        for committed in pending.popleft():
            sample = scheduler.on_block(*committed, block)
            if sample is not None and sample.progress.finish_reason is not None:
                ends[int(sample.request_id)] = steps

    for first in range(0, len(work.passes), batch):
        for number in range(first, min(first + batch, len(work.passes))):
            most = len(work.passes[number]) * block_length
            progress = RowProgress(SamplingParams(max_tokens=most), (), None)
            prompt = [0] * (prompt_blocks * block_length)
            scheduler.add(str(number), prompt, [progress], max_tokens=most)
        while not scheduler.is_idle or pending:
            while len(pending) >= scheduler.run_ahead:
                read()
            plan = scheduler.schedule()
            if plan is None:
                if pending:
                    read()
                continue
            extra = max(-(-len(plan.prefill) // prefill_slots) - 1, 0)
            steps += 1 + extra
            at |= {start.row: [start.index, 0] for start in plan.starts}
            done = []
            for slot in plan.decode:
                state, sample = at[slot.row], scheduler.sample_at(slot.row, slot.epoch)
                if sample is None or state[0] >= slot.block_limit:
                    continue
                state[1] += 1
                passes += 1
                if state[1] == work.passes[int(sample.request_id)][state[0] - prompt_blocks]:
                    done.append((slot.row, slot.epoch, state[0]))
                    at[slot.row] = [state[0] + 1, 0]
            pending += [[]] * extra
            pending.append(done)
            if scheduler.waiting:
                busy_steps, busy_passes = steps, passes
    scheduler.check()
    return {
        "steps": steps,
        "useful_share": work.total / (steps * work.rows),
        "useful_share_while_requests_wait": busy_passes / max(busy_steps * work.rows, 1),
        "ends": [ends[number] for number in range(len(work.passes))],
    }
