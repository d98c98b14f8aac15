"""The running blocks of an engine's rows, and what a step does to them whatever its cache is.

They live on the device between steps. A step takes the decode slots' rows out, runs a pass over
them, and puts back what the pass made of them: a row whose block was committed moves on to its
next block by itself.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from herald_jax.decoding.shifted import FirstToken
from herald_jax.decoding.steps import BlockState


class RowStarts(NamedTuple):
    """Blocks that begin before the step, one a row; rows not started go on as they are."""

    is_started: Bool[Array, " R"]
    index: Int[Array, " R"]
    tokens: Int[Array, "R B"]
    is_masked: Bool[Array, "R B"]


class DecodeSlots(NamedTuple):
    """Rows that take part in a step, padded with the number of rows.

    Attributes:
        rows: Row of each slot.
        block_limits: A row runs only blocks below its limit.
        stop_ids: Ids that stop a row once its block is committed, padded with -1.
    """

    rows: Int[Array, " M"]
    block_limits: Int[Array, " M"]
    stop_ids: Int[Array, "M I"]


class SlotOutput(NamedTuple):
    """The decode slots' blocks after the step.

    `is_committed` is True where the step was the block's commit pass: the block is final, its
    keys and values are in the cache, and it is the block to read.
    """

    is_committed: Bool[Array, " M"]
    block: BlockState


class RowStates(NamedTuple):
    """The running block of every row, and what else a model or a cache needs.

    With a lookahead that is the draft that the block's step 0 left, and with shifted predictions
    the token that follows the prompt's last whole block.
    """

    block: BlockState
    is_stopped: Bool[Array, " R"]
    draft: Int[Array, "R B"] | None = None
    ahead: FirstToken | None = None

    @classmethod
    def empty(
        cls, rows: int, block_length: int, *, has_draft: bool = False, has_ahead: bool = False
    ) -> Self:
        """States in which no row has begun."""
        zeros = jnp.zeros((rows, block_length), jnp.int32)
        block = BlockState.start(jnp.zeros((rows,), jnp.int32), zeros, zeros > 0)
        # Another array than the block's tokens: a buffer can be donated once only.
        draft = jnp.zeros_like(zeros) if has_draft else None
        ahead = FirstToken(jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), jnp.float32))
        return cls(block, jnp.ones((rows,), bool), draft, ahead if has_ahead else None)

    def begin(self, starts: RowStarts) -> RowStates:
        """The states with fresh blocks in the rows that begin."""
        fresh = BlockState.start(starts.index, starts.tokens, starts.is_masked)
        return self._replace(
            block=choose_blocks(starts.is_started, fresh, self.block),
            is_stopped=self.is_stopped & ~starts.is_started,
        )

    def take(self, rows: Int[Array, " M"]) -> RowStates:
        """The states of some rows; a number past the last row reads the last."""
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), self)

    def put(self, rows: Int[Array, " M"], new: RowStates) -> RowStates:
        """The states with those of some rows replaced; numbers past the last row are dropped."""
        return jax.tree.map(lambda old, x: old.at[rows].set(x, mode="drop"), self, new)


def choose_blocks(condition: Bool[Array, " M"], new: BlockState, old: BlockState) -> BlockState:
    """The blocks of `new` where the condition holds, else those of `old`."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)


class RunningSlots(NamedTuple):
    """The decode slots as a pass begins.

    Attributes:
        decode: What was asked of them.
        states: States of their rows.
        is_running: False for padding and for rows that have stopped or reached their limit.
        is_committing: True where the pass is the block's commit pass.
        block: The blocks; of those that do not run nothing is masked.
    """

    decode: DecodeSlots
    states: RowStates
    is_running: Bool[Array, " M"]
    is_committing: Bool[Array, " M"]
    block: BlockState

    @classmethod
    def of(cls, states: RowStates, decode: DecodeSlots) -> Self:
        """The slots of some rows of all."""
        own = states.take(decode.rows)
        is_row = decode.rows < states.is_stopped.shape[0]
        is_running = is_row & ~own.is_stopped & (own.block.index < decode.block_limits)
        is_masked = own.block.is_masked & is_running[:, None]
        is_committing = is_running & ~is_masked.any(-1)
        return cls(decode, own, is_running, is_committing, own.block._replace(is_masked=is_masked))

    def finish(
        self, states: RowStates, after: BlockState, likeliest: Int[Array, "M B"] | None
    ) -> tuple[RowStates, SlotOutput]:
        """The states of all rows after the pass, and its blocks.

        Args:
            states: States of all rows before the pass.
            after: The blocks after it.
            likeliest: The likeliest token of every position, where the states have drafts.
        """
        before = self.states
        is_masked = jnp.where(self.is_running[:, None], after.is_masked, before.block.is_masked)
        after = after._replace(is_masked=is_masked)
        draft = before.draft
        if draft is not None and likeliest is not None:
            is_first = self.is_running & (before.block.steps == 0) & ~self.is_committing
            draft = jnp.where(is_first[:, None], likeliest, draft)
        is_stop = (after.tokens[..., None] == self.decode.stop_ids[:, None, :]).any(-1)
        has_stop = (is_stop & (after.unmask_steps >= 0)).any(-1)
        all_masked = jnp.ones_like(after.is_masked)
        following = BlockState.start(after.index + 1, jnp.zeros_like(after.tokens), all_masked)
        moved = before._replace(
            block=choose_blocks(self.is_committing, following, after),
            is_stopped=before.is_stopped | (self.is_committing & has_stop),
            draft=draft,
        )
        return states.put(self.decode.rows, moved), SlotOutput(self.is_committing, after)
