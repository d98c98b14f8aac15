"""One step of a continuous batch for models whose output at a position predicts the next one.

As `slots.py`, with one thing more to pass on: the first token of a block comes from the last
output of the block before it. Where that block is committed, the row's next block begins with
the token. Where it is the last whole block of a prompt, the token is kept in the row's state, and
the row's first pass puts it in its place and does nothing else: it may be the very pass that
prefills the prompt's end, whose outputs come too late to be read in it.

The last whole block of every prompt must be run in the row's stay, so prompts cannot be shared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from herald_jax.cache.paged import PagedCache
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rows import (
    DecodeSlots,
    RowStarts,
    RowStates,
    RunningSlots,
    SlotOutput,
    choose_blocks,
)
from herald_jax.decoding.shifted import FirstToken, first_token, shift_right
from herald_jax.decoding.slots import PrefillSlots, run_blocks
from herald_jax.decoding.steps import DecodingOptions, commit, offer_from
from herald_jax.models.decoder import Decoder


def run_shifted_slots(
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
    """One pass over all slots, with the arguments of `run_slots`; the states have `ahead`."""
    states = states.begin(starts)
    running = RunningSlots.of(states, decode)
    block = running.block
    hidden, cache = run_blocks(decoder, cache, tables, running, decode, prefill)

    count = decode.rows.shape[0]
    ahead = _after_prompts(decoder, hidden[count:], prefill, states)
    own_ahead = jax.tree.map(lambda x: jnp.take(x, decode.rows, axis=0, mode="clip"), ahead)
    # After a commit the first position is never masked, so where it is the prompt is before it.
    is_waiting = block.is_masked[:, 0] & (block.index > 0)
    proposal = offer_from(decoder, shift_right(hidden[:count]), block, options, spec)
    after = commit(decoder.config, proposal, block, options)
    after = choose_blocks(is_waiting, own_ahead.begin(block), after)

    states, output = running.finish(states, after, None)
    moved = states.take(decode.rows)
    following = first_token(decoder, hidden[:count]).begin(moved.block)
    moved = moved._replace(block=choose_blocks(running.is_committing, following, moved.block))
    states = states.put(decode.rows, moved)._replace(ahead=ahead)
    return cache, states, output


def _after_prompts(
    decoder: Decoder, hidden: Float[Array, "P B E"], prefill: PrefillSlots, states: RowStates
) -> FirstToken:
    """What follows the newest whole prompt block of every row, those of this pass included."""
    assert states.ahead is not None, "states of a shifted model are made with it"
    if not prefill.rows.shape[0]:
        return states.ahead
    is_same = prefill.rows[:, None] == prefill.rows[None, :]
    is_newest = ~(is_same & (prefill.index[None, :] > prefill.index[:, None])).any(-1)
    rows = jnp.where(is_newest, prefill.rows, states.is_stopped.shape[0])
    found = first_token(decoder, hidden)
    return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), states.ahead, found)
