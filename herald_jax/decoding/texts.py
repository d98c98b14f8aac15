"""The texts of a batch while a jitted generation writes them, and what it returns of them."""

from __future__ import annotations

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from herald_jax.decoding.steps import BlockState

FINISH_LENGTH, FINISH_STOP = 0, 1
"""Values of `GenerationOutput.finish_reasons`."""

PAD = -1
"""Value of `tokens` and `unmask_steps` past a row's length."""


class GenerationOutput(NamedTuple):
    """What a jitted generation returns; N = max_tokens, M = most blocks a row can touch.

    Attributes:
        tokens: Generated ids, the stop id included; -1 past the length.
        lengths: Generated tokens of each row.
        finish_reasons: `FINISH_STOP` or `FINISH_LENGTH`.
        steps_per_block: Denoising steps of each block that the row decoded, then zeros.
        forwards: Denoising and commit passes of each row; prefill is not counted.
        unmask_steps: Step within its block at which a token was committed; -1 past the length.
        confidences: Confidence of each token when it was committed.
        logprobs: Log-probability under the raw softmax when it was committed.
    """

    tokens: Int[Array, "R N"]
    lengths: Int[Array, " R"]
    finish_reasons: Int[Array, " R"]
    steps_per_block: Int[Array, "R M"]
    forwards: Int[Array, " R"]
    unmask_steps: Int[Array, "R N"]
    confidences: Float[Array, "R N"]
    logprobs: Float[Array, "R N"]


class Texts(NamedTuple):
    """Prompts and generated tokens by position, and where each row stands.

    A row is active until a stop id or its length ends it; later writes leave it alone.
    """

    tokens: Int[Array, "R S"]
    unmask_steps: Int[Array, "R S"]
    confidences: Float[Array, "R S"]
    logprobs: Float[Array, "R S"]
    lengths: Int[Array, " R"]
    finish_reasons: Int[Array, " R"]
    is_active: Bool[Array, " R"]

    @classmethod
    def start(cls, prompts: Int[Array, "R P"], capacity: int) -> Self:
        """Texts of `capacity` positions that begin with the prompts."""
        rows = prompts.shape[0]
        shape = rows, capacity
        tokens = jnp.zeros(shape, jnp.int32)
        return cls(
            tokens=tokens.at[:, : prompts.shape[1]].set(prompts.astype(jnp.int32)),
            unmask_steps=jnp.full(shape, PAD, jnp.int32),
            confidences=jnp.zeros(shape, jnp.float32),
            logprobs=jnp.zeros(shape, jnp.float32),
            lengths=jnp.zeros((rows,), jnp.int32),
            finish_reasons=jnp.zeros((rows,), jnp.int32),
            is_active=jnp.ones((rows,), bool),
        )

    def write_block(
        self,
        state: BlockState,
        positions: Int[Array, "R B"],
        prompt_lengths: Int[Array, " R"],
        stop_token_ids: tuple[int, ...],
        max_tokens: int,
    ) -> Self:
        """The texts with a finished block of each active row, which may end the row."""
        is_new = (positions >= prompt_lengths[:, None]) & self.is_active[:, None]
        row = jnp.arange(positions.shape[0])[:, None]

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            kept = jnp.take_along_axis(old, positions, axis=1)
            return old.at[row, positions].set(jnp.where(is_new, new, kept))

        stops = jnp.asarray(stop_token_ids, jnp.int32)
        is_stop = is_new & (state.tokens[..., None] == stops).any(-1)
        made = jnp.where(is_stop, positions - prompt_lengths[:, None] + 1, max_tokens + 1)
        stop_length = made.min(-1)
        is_stopped = stop_length <= max_tokens
        total = positions[:, -1] + 1 - prompt_lengths
        length = jnp.where(is_stopped, stop_length, jnp.minimum(total, max_tokens))
        reason = jnp.where(is_stopped, FINISH_STOP, FINISH_LENGTH)
        return type(self)(
            tokens=put(self.tokens, state.tokens),
            unmask_steps=put(self.unmask_steps, state.unmask_steps),
            confidences=put(self.confidences, state.confidences),
            logprobs=put(self.logprobs, state.logprobs),
            lengths=jnp.where(self.is_active, length, self.lengths),
            finish_reasons=jnp.where(self.is_active, reason, self.finish_reasons),
            is_active=self.is_active & ~is_stopped & (total < max_tokens),
        )

    def output(
        self,
        prompt_lengths: Int[Array, " R"],
        max_tokens: int,
        steps_per_block: Int[Array, "R M"],
        forwards: Int[Array, " R"],
    ) -> GenerationOutput:
        """Each row's generated span from the front, with what lies past its length cleared."""
        offsets = jnp.arange(max_tokens)
        source = jnp.minimum(prompt_lengths[:, None] + offsets, self.tokens.shape[1] - 1)
        is_text = offsets < self.lengths[:, None]

        def span(values: jax.Array, fill: int | float) -> jax.Array:
            return jnp.where(is_text, jnp.take_along_axis(values, source, axis=1), fill)

        return GenerationOutput(
            tokens=span(self.tokens, PAD),
            lengths=self.lengths,
            finish_reasons=self.finish_reasons,
            steps_per_block=steps_per_block,
            forwards=forwards,
            unmask_steps=span(self.unmask_steps, PAD),
            confidences=span(self.confidences, 0.0),
            logprobs=span(self.logprobs, 0.0),
        )
