"""Blocks of a block-causal model whose output at a position predicts the next one (Fast-dLLM v2).

Within a block the logits of position i are the outputs at i - 1. The first position is predicted by
the last output of the block before, which no later token can change: it comes with the pass that
commits that block, and is written before the first step, the most probable token whatever the
temperature is, as in the published loop. In the first block of a text, where nothing stands before
it, position 0 is predicted in place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from herald_jax.cache.dense import DenseCache
from herald_jax.decoding.propose import ProposalSpec, suppress
from herald_jax.decoding.steps import BlockState, DecodingOptions, commit, offer_from
from herald_jax.models.decoder import Decoder


class FirstToken(NamedTuple):
    """The token that follows the newest finished block of each row."""

    tokens: Int[Array, " R"]
    logprobs: Float[Array, " R"]

    def begin(self, state: BlockState) -> BlockState:
        """The block with this token in its first position, if that is masked and not the text's."""
        is_first = jnp.arange(state.tokens.shape[1]) == 0
        chosen = is_first & state.is_masked & (state.index > 0)[:, None]
        logprobs = self.logprobs[:, None]
        return state._replace(
            tokens=jnp.where(chosen, self.tokens[:, None], state.tokens),
            is_masked=state.is_masked & ~chosen,
            unmask_steps=jnp.where(chosen, 0, state.unmask_steps),
            confidences=jnp.where(chosen, jnp.exp(logprobs), state.confidences),
            logprobs=jnp.where(chosen, logprobs, state.logprobs),
        )


def first_token(decoder: Decoder, hidden: Float[Array, "R B E"]) -> FirstToken:
    """What the last output of a finished block predicts."""
    logits = suppress(decoder.logits(hidden[:, -1:]), decoder.config)[:, 0]
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return FirstToken(tokens, jnp.take_along_axis(log_p, tokens[:, None], axis=1)[:, 0])


def first_after_prompt(
    decoder: Decoder, cache: DenseCache, texts: Int[Array, "R S"], blocks: Int[Array, " R"]
) -> FirstToken:
    """What follows the `blocks` whole prompt blocks in the cache; the last one is run again."""
    block_length = decoder.config.block_length
    starts = jnp.maximum(blocks - 1, 0) * block_length
    positions = starts[:, None] + jnp.arange(block_length)
    tokens = jnp.take_along_axis(texts, positions, axis=1)
    hidden, _ = decoder(tokens, positions, cache.block_attend(starts))
    return first_token(decoder, hidden)


def decode_shifted_block(
    decoder: Decoder,
    cache: DenseCache,
    state: BlockState,
    ahead: FirstToken,
    is_active: Bool[Array, " R"],
    options: DecodingOptions,
    spec: ProposalSpec,
) -> tuple[DenseCache, BlockState, FirstToken]:
    """One whole block of every active row, and what comes after it."""
    state = ahead.begin(state)
    state = state._replace(is_masked=state.is_masked & is_active[:, None])

    def denoise(state: BlockState) -> BlockState:
        inputs = state.inputs(decoder.config.mask_token_id)
        hidden, _ = decoder(inputs, state.positions, cache.block_attend(state.starts))
        proposal = offer_from(decoder, shift_right(hidden), state, options, spec)
        return commit(decoder.config, proposal, state, options)

    state = lax.while_loop(lambda state: state.is_masked.any(), denoise, state)
    return commit_shifted_block(decoder, cache, state, is_active)


def shift_right(hidden: Float[Array, "R W E"]) -> Float[Array, "R W E"]:
    """For each position of a pass the output that predicts it; for the first one its own."""
    return jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)


def commit_shifted_block(
    decoder: Decoder, cache: DenseCache, state: BlockState, is_active: Bool[Array, " R"]
) -> tuple[DenseCache, BlockState, FirstToken]:
    """The cache with the finished blocks of the active rows, the blocks, and what follows them."""
    hidden, fresh = decoder(state.tokens, state.positions, cache.block_attend(state.starts))
    cache = cache.append_blocks(fresh, state.starts, is_active)
    return cache, state, first_token(decoder, hidden)
