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
from jaxtyping import Array, Bool, Float, Int

from herald_jax.cache.paged import PagedCache, PagedPass
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rows import DecodeSlots, RowStarts, RowStates, RunningSlots, SlotOutput
from herald_jax.decoding.shifted import FirstToken, first_token, shift_right
from herald_jax.decoding.slots import PrefillSlots
from herald_jax.decoding.steps import BlockState, DecodingOptions, commit, offer_from
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
    config = decoder.config
    block_length = config.block_length
    states = states.begin(starts)
    running = RunningSlots.of(states, decode)
    block = running.block

    index = jnp.concatenate([block.index, prefill.index])
    tokens = jnp.concatenate([block.inputs(config.mask_token_id), prefill.tokens])
    slot_rows = jnp.concatenate([decode.rows, prefill.rows])
    is_written = jnp.concatenate([running.is_running, prefill.rows < tables.shape[0]])
    slot_tables = jnp.take(tables, slot_rows, axis=0, mode="clip")
    slots = PagedPass(cache, slot_tables, index, is_written, block_length)
    positions = (index * block_length)[:, None] + jnp.arange(block_length)
    hidden, _ = decoder(tokens, positions, slots.attend)

    count = decode.rows.shape[0]
    ahead = _after_prompts(decoder, hidden[count:], prefill, states)
    own_ahead = jax.tree.map(lambda x: jnp.take(x, decode.rows, axis=0, mode="clip"), ahead)
    # After a commit the first position is never masked, so where it is the prompt is before it.
    is_waiting = block.is_masked[:, 0] & (block.index > 0)
    proposal = offer_from(decoder, shift_right(hidden[:count]), block, options, spec)
    after = commit(config, proposal, block, options)
    after = _choose(is_waiting, own_ahead.begin(block), after)

    states, output = running.finish(states, after, None)
    moved = states.take(decode.rows)
    following = first_token(decoder, hidden[:count]).begin(moved.block)
    moved = moved._replace(block=_choose(running.is_committing, following, moved.block))
    states = states.put(decode.rows, moved)._replace(ahead=ahead)
    return slots.cache, states, output


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


def _choose(condition: Bool[Array, " M"], new: BlockState, old: BlockState) -> BlockState:
    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)
