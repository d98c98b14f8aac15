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

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from herald_jax.cache.paged import PagedCache, PagedPass
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rows import DecodeSlots, RowStarts, RowStates, RunningSlots, SlotOutput
from herald_jax.decoding.steps import DecodingOptions, commit, offer_from
from herald_jax.models.decoder import Decoder


class PrefillSlots(NamedTuple):
    """Whole prompt blocks; `rows` is padded with the number of rows."""

    rows: Int[Array, " P"]
    index: Int[Array, " P"]
    tokens: Int[Array, "P B"]


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
    states = states.begin(starts)
    running = RunningSlots.of(states, decode)
    hidden, cache = run_blocks(decoder, cache, tables, running, decode, prefill)
    own = hidden[: decode.rows.shape[0]]
    proposal = offer_from(decoder, own, running.block, options, spec)
    after = commit(decoder.config, proposal, running.block, options)
    states, output = running.finish(states, after, None)
    return cache, states, output


def run_blocks(
    decoder: Decoder,
    cache: PagedCache,
    tables: Int[Array, "R W"],
    running: RunningSlots,
    decode: DecodeSlots,
    prefill: PrefillSlots,
) -> tuple[Float[Array, "M B E"], PagedCache]:
    """Hidden states of the decode slots' blocks, then of the prompts', and the cache after them."""
    config, block = decoder.config, running.states.block
    block_length = config.block_length
    index = jnp.concatenate([block.index, prefill.index])
    tokens = jnp.concatenate([block.inputs(config.mask_token_id), prefill.tokens])
    slot_rows = jnp.concatenate([decode.rows, prefill.rows])
    is_written = jnp.concatenate([running.is_running, prefill.rows < tables.shape[0]])
    slot_tables = jnp.take(tables, slot_rows, axis=0, mode="clip")
    slots = PagedPass(cache, slot_tables, index, is_written, block_length)
    positions = (index * block_length)[:, None] + jnp.arange(block_length)
    hidden, _ = decoder(tokens, positions, slots.attend)
    return hidden, slots.cache
