"""From logits to one proposed token a position, with its confidence, entropy and log-prob.

Every quantity of a position depends on that position's logits, its row's options and the
four numbers (seed, block, step, position) alone: a row's text cannot depend on its
neighbours. All arithmetic is fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from herald_jax.configs import ModelConfig


class RowOptions(NamedTuple):
    """Numeric sampling options of each row.

    `confidence` is a place in `CONFIDENCE_SOURCES`.
    """

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    denoising_steps: Int[Array, " R"]
    confidence: Int[Array, " R"]


CONFIDENCE_SOURCES = ("raw", "scaled", "filtered")
"""Distributions from which a rule's confidence and entropy may be taken."""


class ProposalSpec(NamedTuple):
    """Static facts that shape the program.

    Attributes:
        sources: The distributions that some row takes its confidences from.
        is_sampled: True if some row has a temperature above 0.
        is_filtered: True if some row uses top-k or top-p.
    """

    sources: tuple[str, ...]
    is_sampled: bool
    is_filtered: bool


class Proposal(NamedTuple):
    """What each position would become if it were committed now.

    `likeliest` is the token of the largest logit, whatever was drawn.
    """

    tokens: Int[Array, "R B"]
    confidence: Float[Array, "R B"]
    entropy: Float[Array, "R B"]
    logprob: Float[Array, "R B"]
    likeliest: Int[Array, "R B"]


class _Distribution(NamedTuple):
    """Unnormalised log-probabilities with their normaliser."""

    logits: Float[Array, "R B V"]
    log_total: Float[Array, "R B"]

    @classmethod
    def of(cls, logits: Float[Array, "R B V"]) -> _Distribution:
        return cls(logits, jax.nn.logsumexp(logits, axis=-1))

    def log_probability(self, chosen: Int[Array, "R B"]) -> Float[Array, "R B"]:
        picked = jnp.take_along_axis(self.logits, chosen[..., None], axis=-1)[..., 0]
        return picked - self.log_total

    def entropy(self) -> Float[Array, "R B"]:
        log_p = self.logits - self.log_total[..., None]
        # Forbidden ids have log_p = -inf and contribute 0, not 0 * inf.
        return -jnp.sum(jnp.exp(log_p) * jnp.where(jnp.isneginf(log_p), 0.0, log_p), axis=-1)


def suppress(logits: Float[Array, "R B V"], config: ModelConfig) -> Float[Array, "R B V"]:
    """Logits in which ids that must never be emitted count as minus infinity.

    These are the mask id and the padding of the table beyond the tokenizer's vocabulary.
    """
    ids = jnp.arange(config.vocab_size)
    last = config.tokenizer_vocab_size or config.vocab_size
    return jnp.where((ids == config.mask_token_id) | (ids >= last), -jnp.inf, logits)


def gumbel_noise(
    seeds: UInt32[Array, " R"],
    block: Int[Array, " R"],
    step: Int[Array, " R"],
    block_length: int,
    vocab_size: int,
) -> Float[Array, "R B V"]:
    """Gumbel noise that depends on (seed, block, step, position) alone."""

    def of_position(seed: jax.Array, block: jax.Array, step: jax.Array, position: jax.Array):
        key = jax.random.key(seed)
        for number in (block, step, position):
            key = jax.random.fold_in(key, number)
        return jax.random.gumbel(key, (vocab_size,))

    of_row = jax.vmap(of_position, in_axes=(None, None, None, 0))
    return jax.vmap(of_row, in_axes=(0, 0, 0, None))(seeds, block, step, jnp.arange(block_length))


def propose(
    logits: Float[Array, "R B V"],
    options: RowOptions,
    spec: ProposalSpec,
    seeds: UInt32[Array, " R"],
    block: Int[Array, " R"],
    step: Int[Array, " R"],
) -> Proposal:
    """One token for every position, drawn or greedy as the row's temperature says.

    Args:
        logits: fp32, with ids that may not be emitted at minus infinity.
        options: Numeric options of each row.
        spec: Static facts of the batch.
        seeds: Random seed of each row.
        block: Absolute index of each row's block.
        step: Denoising step within the block.
    """
    raw = _Distribution.of(logits)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not spec.is_sampled:
        log_p = raw.log_probability(greedy)
        return Proposal(greedy, jnp.exp(log_p), raw.entropy(), log_p, greedy)

    is_greedy = options.temperature == 0
    divisor = jnp.where(is_greedy, 1.0, options.temperature)
    # Relative to the largest logit, a tiny temperature sends the others to -inf and nothing to inf.
    scaled = (logits - logits.max(-1, keepdims=True)) / divisor[:, None, None]
    noise = gumbel_noise(seeds, block, step, *logits.shape[1:])
    source = _Distribution.of(scaled)
    if spec.is_filtered:
        # Work in descending order (ties to the lower id); the noise follows its id, so a
        # row draws the same token whether or not a neighbour switches the filters on.
        order = jnp.argsort(-scaled, axis=-1, stable=True)
        ranked = _filter(jnp.take_along_axis(scaled, order, axis=-1), options)
        rank = jnp.argmax(ranked + jnp.take_along_axis(noise, order, axis=-1), axis=-1)
        drawn = jnp.take_along_axis(order, rank[..., None], axis=-1)[..., 0]
        filtered = _Distribution.of(ranked)
    else:
        drawn = jnp.argmax(scaled + noise, axis=-1)
        rank, filtered = drawn, source
    tokens = jnp.where(is_greedy[:, None], greedy, drawn.astype(jnp.int32))
    log_p = raw.log_probability(tokens)
    drawn_from = {"raw": (raw, tokens), "scaled": (source, tokens), "filtered": (filtered, rank)}
    confidence, entropy = _select(
        [
            (jnp.exp(distribution.log_probability(chosen)), distribution.entropy())
            for distribution, chosen in (drawn_from[name] for name in spec.sources)
        ],
        [CONFIDENCE_SOURCES.index(name) for name in spec.sources],
        options.confidence,
    )
    return Proposal(tokens, confidence, entropy, log_p, greedy)


def _select(
    statistics: list[tuple[Float[Array, "R B"], Float[Array, "R B"]]],
    codes: list[int],
    wanted: Int[Array, " R"],
) -> tuple[Float[Array, "R B"], Float[Array, "R B"]]:
    """Each row's confidence and entropy from the source that it wants."""
    confidence, entropy = statistics[0]
    for code, (other_confidence, other_entropy) in zip(codes[1:], statistics[1:], strict=True):
        is_wanted = (wanted == code)[:, None]
        confidence = jnp.where(is_wanted, other_confidence, confidence)
        entropy = jnp.where(is_wanted, other_entropy, entropy)
    return confidence, entropy


def _filter(ranked: Float[Array, "R B V"], options: RowOptions) -> Float[Array, "R B V"]:
    """Top-k, then top-p, on scaled logits in descending order; the first is always kept."""
    vocab_size = ranked.shape[-1]
    top_k = jnp.where(options.top_k == 0, vocab_size, options.top_k)
    ranked = jnp.where(jnp.arange(vocab_size) < top_k[:, None, None], ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # `before` can exceed 1 by rounding: top_p = 1 must keep every token all the same.
    is_kept = (before < options.top_p[:, None, None]) | (options.top_p == 1)[:, None, None]
    return jnp.where(is_kept.at[..., 0].set(True), ranked, -jnp.inf)
