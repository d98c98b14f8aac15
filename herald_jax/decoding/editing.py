"""LLaDA2.1's blocks, in which committed tokens may still be replaced (arXiv 2602.08676).

Each pass fills masked positions by the row's unmask rule, as always, and also replaces every other
generated token of the block that it would now choose differently with a confidence above a second
threshold. A block ends with the first pass that begins without masks and replaces nothing, or
after so many passes without masks.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from herald_jax._checks import require_float, require_int
from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.steps import BlockState, DecodingOptions, commit, commit_block, offer
from herald_jax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Editing:
    """How far the tokens of a running block may be replaced.

    The published quality setting is a threshold of 0.7 for `low_confidence_dynamic` with 0.5 here.

    Attributes:
        threshold: Confidence above which another token takes the place of a committed one.
        max_steps: Most passes over a block that has no masks left.
    """

    threshold: float = 0.5
    max_steps: int = 16

    def __post_init__(self) -> None:
        """Checks both fields."""
        require_float("threshold", self.threshold, 0.0, 1.0, "a number in [0, 1]")
        require_int("max_steps", self.max_steps, 0)


class _Edited(NamedTuple):
    """A block, its passes without masks so far, and whether it goes on."""

    state: BlockState
    passes: Int[Array, " R"]
    is_open: Bool[Array, " R"]


def edit_step(
    config: ModelConfig,
    logits: Float[Array, "R B V"],
    state: BlockState,
    editable: Bool[Array, "R B"],
    options: DecodingOptions,
    spec: ProposalSpec,
    threshold: float,
) -> tuple[BlockState, Bool[Array, " R"]]:
    """The blocks after one pass's logits, and which of them had a token replaced.

    Tokens that were masked before the pass are filled by the rule; of the others, those that are
    `editable` may be replaced.
    """
    proposal = offer(config, logits, state, options, spec)
    is_edited = editable & ~state.is_masked & (proposal.tokens != state.tokens)
    is_edited &= proposal.confidence > threshold

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(is_edited, new, old)

    filled = commit(config, proposal, state, options)
    written = filled._replace(
        tokens=put(filled.tokens, proposal.tokens),
        unmask_steps=put(filled.unmask_steps, state.steps[:, None]),
        confidences=put(filled.confidences, proposal.confidence),
        logprobs=put(filled.logprobs, proposal.logprob),
    )
    return written, is_edited.any(-1)


def decode_edited_block(
    decoder: Decoder,
    cache: DenseCache,
    state: BlockState,
    is_active: Bool[Array, " R"],
    options: DecodingOptions,
    spec: ProposalSpec,
    editing: Editing,
) -> tuple[DenseCache, BlockState]:
    """One whole block of every active row: passes that fill and replace, then the commit pass."""
    state = state._replace(is_masked=state.is_masked & is_active[:, None])
    is_own = state.is_masked  # tokens of the prompt are not edited

    def step(carry: _Edited) -> _Edited:
        state, passes, is_open = carry
        inputs = state.inputs(decoder.config.mask_token_id)
        hidden, _ = decoder(inputs, state.positions, cache.block_attend(state.starts))
        logits = decoder.logits(hidden)
        editable = is_own & is_open[:, None]
        had_masks = state.is_masked.any(-1)
        written, is_edited = edit_step(
            decoder.config, logits, state, editable, options, spec, editing.threshold
        )
        passes = passes + (is_open & ~had_masks).astype(jnp.int32)
        is_settled = ~written.is_masked.any(-1) & (passes >= editing.max_steps)
        is_settled |= ~had_masks & ~is_edited
        steps = state.steps + is_open.astype(jnp.int32)
        return _Edited(written._replace(steps=steps), passes, is_open & ~is_settled)

    start = _Edited(state, jnp.zeros_like(state.steps), is_active)
    state = lax.while_loop(lambda carry: carry.is_open.any(), step, start).state
    return commit_block(decoder, cache, state, is_active), state
