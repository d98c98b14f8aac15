"""The passes of one block: denoising steps until nothing is masked, then the commit pass.

Masked-ness is a boolean array beside the ids and never a comparison with the mask id, so a
prompt may hold the mask id and keeps it. The keys and values of a block enter the cache only
from the commit pass, which runs on the finished tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.head import propose_blocks
from herald_jax.decoding.propose import (
    Proposal,
    ProposalSpec,
    RowOptions,
    propose,
    suppress,
)
from herald_jax.decoding.rules import BlockView, Chooser, most_confident, quota
from herald_jax.models.decoder import Decoder


class DecodingOptions(NamedTuple):
    """What decides a row's tokens besides its logits."""

    rule: Chooser
    rows: RowOptions
    seeds: UInt32[Array, " R"]


class BlockState(NamedTuple):
    """The running block of each row.

    `index` is the block's place on the absolute grid: it covers positions index * B to
    (index + 1) * B - 1. `unmask_steps` is -1 where no token was generated.
    """

    index: Int[Array, " R"]
    tokens: Int[Array, "R B"]
    is_masked: Bool[Array, "R B"]
    unmask_steps: Int[Array, "R B"]
    confidences: Float[Array, "R B"]
    logprobs: Float[Array, "R B"]
    steps: Int[Array, " R"]

    @classmethod
    def start(
        cls, index: Int[Array, " R"], tokens: Int[Array, "R B"], is_masked: Bool[Array, "R B"]
    ) -> BlockState:
        """A block before its first step; positions that are not masked are kept as given."""
        return cls(
            index=index,
            tokens=tokens,
            is_masked=is_masked,
            unmask_steps=jnp.full(tokens.shape, -1, jnp.int32),
            confidences=jnp.zeros(tokens.shape, jnp.float32),
            logprobs=jnp.zeros(tokens.shape, jnp.float32),
            steps=jnp.zeros(index.shape, jnp.int32),
        )

    @property
    def starts(self) -> Int[Array, " R"]:
        """First position of each row's block, which is also the length of its prefix."""
        return self.index * self.tokens.shape[1]

    @property
    def positions(self) -> Int[Array, "R B"]:
        """Absolute position of every token of the block."""
        return self.starts[:, None] + jnp.arange(self.tokens.shape[1])

    def inputs(self, mask_token_id: int) -> Int[Array, "R B"]:
        """What the model reads: the mask embedding stands where nothing is committed yet."""
        return jnp.where(self.is_masked, mask_token_id, self.tokens)


def prefill_chunk(
    decoder: Decoder, cache: DenseCache, tokens: Int[Array, "R C"], start: Int[Array, ""]
) -> DenseCache:
    """The cache after a chunk of whole prompt blocks that starts at `start` in all rows."""
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    attend = cache.prefill_attend(start, decoder.config.block_length)
    _, fresh = decoder(tokens, positions, attend)
    return cache.append_chunk(fresh, start)


def denoise_step(
    decoder: Decoder,
    cache: DenseCache,
    state: BlockState,
    options: DecodingOptions,
    spec: ProposalSpec,
) -> BlockState:
    """The blocks after one forward pass; rows without masked positions do not change."""
    inputs = state.inputs(decoder.config.mask_token_id)
    hidden, _ = decoder(inputs, state.positions, cache.block_attend(state.starts))
    proposal = offer_from(decoder, hidden, state, options, spec)
    return commit(decoder.config, proposal, state, options)


def offer_from(
    decoder: Decoder,
    hidden: Float[Array, "R B E"],
    state: BlockState,
    options: DecodingOptions,
    spec: ProposalSpec,
) -> Proposal:
    """What each position would become by one pass's outputs; the mask id is not offered."""
    numbers = (options.seeds, state.index, state.steps)
    head = (decoder.logits, decoder.config)
    return propose_blocks(*head, hidden, options.rows, spec, *numbers, decoder.head_table)


def unmask(
    config: ModelConfig,
    logits: Float[Array, "R B V"],
    state: BlockState,
    options: DecodingOptions,
    spec: ProposalSpec,
) -> BlockState:
    """The blocks after committing what the rule chooses from one pass's logits."""
    return commit(config, offer(config, logits, state, options, spec), state, options)


def offer(
    config: ModelConfig,
    logits: Float[Array, "R B V"],
    state: BlockState,
    options: DecodingOptions,
    spec: ProposalSpec,
) -> Proposal:
    """What each position would become by one pass's logits; the mask id is not offered."""
    logits = suppress(logits, config)
    return propose(logits, options.rows, spec, options.seeds, state.index, state.steps)


def commit(
    config: ModelConfig, proposal: Proposal, state: BlockState, options: DecodingOptions
) -> BlockState:
    """The blocks with the masked positions filled that the rule chooses."""
    owed = quota(state.steps, options.rows.denoising_steps, config.block_length)
    view = BlockView(
        is_masked=state.is_masked,
        confidence=proposal.confidence,
        entropy=proposal.entropy,
        quota=owed,
        seed=options.seeds,
        block=state.index,
        step=state.steps,
    )
    chosen = options.rule(view) & state.is_masked
    fallback = most_confident(proposal.confidence, state.is_masked, jnp.ones_like(owed))
    chosen = jnp.where(chosen.any(-1, keepdims=True), chosen, fallback)
    return BlockState(
        index=state.index,
        tokens=jnp.where(chosen, proposal.tokens, state.tokens),
        is_masked=state.is_masked & ~chosen,
        unmask_steps=jnp.where(chosen, state.steps[:, None], state.unmask_steps),
        confidences=jnp.where(chosen, proposal.confidence, state.confidences),
        logprobs=jnp.where(chosen, proposal.logprob, state.logprobs),
        steps=state.steps + state.is_masked.any(-1).astype(jnp.int32),
    )


def commit_block(
    decoder: Decoder, cache: DenseCache, state: BlockState, is_active: Bool[Array, " R"]
) -> DenseCache:
    """The cache with the finished blocks of the active rows appended."""
    _, fresh = decoder(state.tokens, state.positions, cache.block_attend(state.starts))
    return cache.append_blocks(fresh, state.starts, is_active)


def decode_block(
    decoder: Decoder,
    cache: DenseCache,
    state: BlockState,
    is_active: Bool[Array, " R"],
    options: DecodingOptions,
    spec: ProposalSpec,
) -> tuple[DenseCache, BlockState]:
    """One whole block of every active row: all its denoising steps and the commit pass."""
    state = state._replace(is_masked=state.is_masked & is_active[:, None])
    state = lax.while_loop(
        lambda state: state.is_masked.any(),
        lambda state: denoise_step(decoder, cache, state, options, spec),
        state,
    )
    return commit_block(decoder, cache, state, is_active), state
