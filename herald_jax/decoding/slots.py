"""One step of a continuous batch: rows in any phase, and prompt blocks, in one program.

A slot is one block of one request. Decode slots hold the running block of a row: if it has
masked positions the pass denoises it, and if not the pass is its commit pass, after which the
row moves on to its next block by itself. Prefill slots hold whole prompt blocks; because every
slot writes its keys and values before it attends, blocks of one prompt may share a step. Rows
never wait for each other, and the host need not look at a step's result before it sends the
next one (block-boundary batching after BlockServe, HERALD's token slots).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from herald_jax.cache.paged import PagedCache, PagedPass
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.steps import BlockState, DecodingOptions, commit, offer_from
from herald_jax.models.decoder import Decoder


class RowStates(NamedTuple):
    """The running block of every row of the engine; lives on the device between steps."""

    block: BlockState
    is_stopped: Bool[Array, " R"]

    @classmethod
    def empty(cls, rows: int, block_length: int) -> RowStates:
        """States in which no row has begun."""
        zeros = jnp.zeros((rows, block_length), jnp.int32)
        block = BlockState.start(jnp.zeros((rows,), jnp.int32), zeros, zeros > 0)
        return cls(block, jnp.ones((rows,), bool))


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


class PrefillSlots(NamedTuple):
    """Whole prompt blocks; `rows` is padded with the number of rows."""

    rows: Int[Array, " P"]
    index: Int[Array, " P"]
    tokens: Int[Array, "P B"]


class SlotOutput(NamedTuple):
    """The decode slots' blocks after the step.

    `is_committed` is True where the step was the block's commit pass: the block is final, its
    keys and values are in the cache, and it is the block to read.
    """

    is_committed: Bool[Array, " M"]
    block: BlockState


def _gather_rows(tree: RowStates, rows: Int[Array, " M"]) -> RowStates:
    # Padding reads the last row; whatever it computes is dropped when rows are written back.
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), tree)


def _begin(states: RowStates, starts: RowStarts) -> RowStates:
    fresh = BlockState.start(starts.index, starts.tokens, starts.is_masked)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(starts.is_started.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    block = jax.tree.map(choose, fresh, states.block)
    return RowStates(block, states.is_stopped & ~starts.is_started)


def run_slots(
    decoder: Decoder,
    cache: PagedCache,
    states: RowStates,
    tables: Int[Array, "R W"],
    starts: RowStarts,
    decode: DecodeSlots,
    prefill: PrefillSlots,
    options: DecodingOptions,
    spec: ProposalSpec,
) -> tuple[PagedCache, RowStates, SlotOutput]:
    """One pass over all slots.

    Args:
        decoder: The model.
        cache: Page pool, written in place when donated.
        states: Running blocks of all rows.
        tables: Page ids of every row.
        starts: Blocks that begin now.
        decode: Rows to run.
        prefill: Prompt blocks to run; may have no slots.
        options: Options of the decode slots' rows, in their order.
        spec: Static facts of the decode slots.
    """
    config = decoder.config
    block_length = config.block_length
    states = _begin(states, starts)
    block, is_stopped = _gather_rows(states, decode.rows)
    is_row = decode.rows < tables.shape[0]
    is_running = is_row & ~is_stopped & (block.index < decode.block_limits)
    is_masked = block.is_masked & is_running[:, None]
    is_committing = is_running & ~is_masked.any(-1)

    index = jnp.concatenate([block.index, prefill.index])
    tokens = jnp.concatenate([block.inputs(config.mask_token_id), prefill.tokens])
    slot_rows = jnp.concatenate([decode.rows, prefill.rows])
    is_written = jnp.concatenate([is_running, prefill.rows < tables.shape[0]])
    slot_tables = jnp.take(tables, slot_rows, axis=0, mode="clip")
    slots = PagedPass(cache, slot_tables, index, is_written, block_length)
    positions = (index * block_length)[:, None] + jnp.arange(block_length)
    hidden, _ = decoder(tokens, positions, slots.attend)

    running = block._replace(is_masked=is_masked)
    proposal = offer_from(decoder, hidden[: decode.rows.shape[0]], running, options, spec)
    after = commit(config, proposal, running, options)
    after = after._replace(
        is_masked=jnp.where(is_running[:, None], after.is_masked, block.is_masked)
    )
    is_stop = (after.tokens[..., None] == decode.stop_ids[:, None, :]).any(-1)
    is_stopped = is_stopped | (is_committing & (is_stop & (after.unmask_steps >= 0)).any(-1))

    all_masked = jnp.ones_like(after.is_masked)
    following = BlockState.start(after.index + 1, jnp.zeros_like(after.tokens), all_masked)

    def advance(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_committing.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    moved = RowStates(jax.tree.map(advance, following, after), is_stopped)
    states = jax.tree.map(lambda old, new: old.at[decode.rows].set(new, mode="drop"), states, moved)
    return slots.cache, states, SlotOutput(is_committing, after)
