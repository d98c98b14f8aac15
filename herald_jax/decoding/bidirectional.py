"""Generation with full-attention models, after Fast-dLLM, as one jitted function.

A text is the prompt and `max_tokens` masked positions. It is denoised in blocks from left to
right, counted from the end of the prompt. The first step of a block runs the whole text; what
the other steps run depends on the cache:

| Cache | A step runs | It sees as they were at the block's first step |
|---|---|---|
| `none` | the whole text | nothing: exact |
| `prefix` | from the block to the end of the text | all before the block |
| `dual` | the block | all before and after the block |

A model that predicts a position from the one before it needs the output at the position before
the block, so its windows begin there.

The rows of a batch begin each block together: a step costs the same for a row that has finished
the block already, but its text, steps and passes are those it has alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from herald_jax._checks import require
from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import check_index_range
from herald_jax.cache.window import TextPass
from herald_jax.configs import ModelConfig
from herald_jax.decoding.generate import check_batch, check_sampling
from herald_jax.decoding.options import decoding_options, proposal_spec, stop_ids
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.steps import BlockState, DecodingOptions, commit, offer_from
from herald_jax.decoding.texts import GenerationOutput, Texts
from herald_jax.models.decoder import Decoder, Params, bind, check_params
from herald_jax.sampling import SamplingParams

CACHES = ("none", "prefix", "dual")
"""What is kept from a block's first step for its others."""


class _Batch(NamedTuple):
    """What stays the same through a generation."""

    decoder: Decoder
    prompt_lengths: Int[Array, " R"]
    text_lengths: Int[Array, " R"]
    options: DecodingOptions
    spec: ProposalSpec

    @property
    def shift(self) -> int:
        """How far before a token the output stands that predicts it."""
        return int(self.decoder.config.shifts_predictions)


def generate_bidirectional(
    params: Params,
    prompts: Integer[Any, "R P"],
    prompt_lengths: Integer[Any, " R"],
    seeds: Integer[Any, " R"],
    *,
    model: ModelConfig,
    sampling: SamplingParams,
    cache: str = "none",
) -> GenerationOutput:
    """Generates with a full-attention model (LLaDA, Dream) in one jitted call.

    `max_tokens` is part of what the model sees: a longer text has more masked positions. A row
    ends with the block that holds its first stop id. Blocks have `model.block_length` tokens,
    the last one what is left; `dataclasses.replace` gives another length. Every distinct (R, P,
    model, sampling, cache) compiles once.

    Args:
        params: Parameters as `load_params` returns them.
        prompts: Prompt ids, right-padded (any valid id may stand in the padding).
        prompt_lengths: Tokens of each prompt, 0..P.
        seeds: Random seed of each row, 0..2^32-1 (unused by greedy rows).
        model: The model's config (static).
        sampling: Options shared by all rows (static), as for `generate`. Fast-dLLM's rules are
            the strategies `threshold` and `factor`; one token a step is `low_confidence_static`.
        cache: `none`, exact and slowest; `prefix` or `dual`, approximate and faster.

    Returns:
        As `generate`. `forwards` counts passes, of which the first of each block runs the whole
        text.

    Raises:
        ConfigError: If a parameter, shape, dtype, id, length or option is not allowed, or the
            model's attention is block-causal.
    """
    require(
        model.is_bidirectional,
        "attention",
        model.attention,
        "'full' in generate_bidirectional",
        "Use herald_jax.generate or LLM for a block-causal model, herald_jax.generate_canvas for a "
        "model of canvases.",
    )
    require(
        isinstance(cache, str) and cache in CACHES,
        "cache",
        cache,
        "'none', 'prefix' or 'dual'",
        "Keys and values of a full-attention model change with every token and are renewed in "
        "every block, so placing them on the host or selecting a few once a block is for "
        "block-causal models.",
    )
    check_sampling(model, sampling)
    check_batch(prompts, prompt_lengths, seeds, model, sampling.max_tokens)
    check_params(model, params)
    return generate_bidirectional_program(
        params, prompts, prompt_lengths, seeds, model=model, sampling=sampling, cache=cache
    )


@functools.partial(jax.jit, static_argnames=("model", "sampling", "cache"))
def generate_bidirectional_program(
    params: Params,
    prompts: Integer[Array, "R P"],
    prompt_lengths: Integer[Array, " R"],
    seeds: Integer[Array, " R"],
    *,
    model: ModelConfig,
    sampling: SamplingParams,
    cache: str,
) -> GenerationOutput:
    """The jitted program behind `generate_bidirectional`, without its checks."""
    rows, width = prompts.shape
    block_length, max_tokens = model.block_length, sampling.max_tokens
    blocks = -(-max_tokens // block_length)
    capacity = width + blocks * block_length
    check_index_range("one layer's keys", (rows, model.num_kv_heads, capacity, model.head_dim))
    options = decoding_options([sampling] * rows, [0] * rows, model)
    options = jax.tree.map(jnp.asarray, options)._replace(seeds=seeds.astype(jnp.uint32))
    lengths = prompt_lengths.astype(jnp.int32)
    batch = _Batch(
        bind(model, params), lengths, lengths + max_tokens, options, proposal_spec([sampling])
    )
    stops = stop_ids(sampling, model)
    texts = Texts.start(prompts, capacity)
    steps_per_block = jnp.zeros((rows, blocks), jnp.int32)

    def run_block(
        window: int | None, carry: tuple[jax.Array, Texts, jax.Array]
    ) -> tuple[jax.Array, Texts, jax.Array]:
        block, texts, steps_per_block = carry
        positions = lengths[:, None] + block * block_length + jnp.arange(block_length)
        state = _denoise_block(batch, texts, block, positions, window)
        written = texts.write_block(state, positions, lengths, stops, max_tokens)
        return block + 1, written, steps_per_block.at[:, block].set(state.steps)

    carry = jnp.int32(0), texts, steps_per_block
    # One loop for each window length: shapes inside a loop cannot follow the block's number.
    for window, end in _windows(cache, blocks, block_length, int(model.shifts_predictions)):
        carry = lax.while_loop(
            lambda carry, end=end: (carry[0] < end) & carry[1].is_active.any(),
            functools.partial(run_block, window),
            carry,
        )
    _, texts, steps_per_block = carry
    return texts.output(lengths, max_tokens, steps_per_block, steps_per_block.sum(-1))


def _windows(
    cache: str, blocks: int, block_length: int, shift: int
) -> list[tuple[int | None, int]]:
    """Window lengths in order, each with the number of the first block that no longer needs it.

    `None` stands for the whole text. The rest of a text is rounded up to the whole generation,
    a half or a quarter of it: a program for each of three lengths, and at most twice the work
    above a quarter.
    """
    if cache == "none":
        return [(None, blocks)]
    if cache == "dual":
        return [(block_length + shift, blocks)]
    sizes = sorted({blocks, -(-blocks // 2), -(-blocks // 4)}, reverse=True)
    ends = [blocks - size for size in sizes[1:]] + [blocks]
    return [
        (size * block_length + shift, end) for size, end in zip(sizes, ends, strict=True) if end > 0
    ]


def _denoise_block(
    batch: _Batch,
    texts: Texts,
    block: Int[Array, ""],
    positions: Int[Array, "R B"],
    window: int | None,
) -> BlockState:
    """One block of each row from its masks to its tokens; ended rows keep zero steps."""
    tokens = jnp.take_along_axis(texts.tokens, positions, axis=1)
    is_masked = (positions < batch.text_lengths[:, None]) & texts.is_active[:, None]
    state = BlockState.start(jnp.broadcast_to(block, tokens.shape[:1]), tokens, is_masked)

    def is_left(carry: tuple[Any, BlockState]) -> jax.Array:
        return carry[1].is_masked.any()

    def whole(state: BlockState) -> tuple[DenseCache, BlockState]:
        hidden, kept = _text_outputs(batch, texts, state, positions)
        return kept, _filled(batch, hidden, state)

    if window is None:
        _, state = lax.while_loop(is_left, lambda carry: ((), whole(carry[1])[1]), ((), state))
        return state

    def step(carry: tuple[DenseCache, BlockState]) -> tuple[DenseCache, BlockState]:
        kept, state = carry
        hidden, kept = _window_outputs(batch, texts, state, positions, kept, window)
        return kept, _filled(batch, hidden, state)

    _, state = lax.while_loop(is_left, step, whole(state))
    return state


def _filled(batch: _Batch, hidden: Float[Array, "R B E"], state: BlockState) -> BlockState:
    """The blocks after committing what the rule chooses from one pass's outputs."""
    proposal = offer_from(batch.decoder, hidden, state, batch.options, batch.spec)
    return commit(batch.decoder.config, proposal, state, batch.options)


def _inputs(
    batch: _Batch, texts: Texts, state: BlockState, positions: Int[Array, "R B"]
) -> Int[Array, "R S"]:
    """What the model reads: the text so far with the running block in it, masks after it."""
    mask = batch.decoder.config.mask_token_id
    at = jnp.arange(texts.tokens.shape[1])
    read = jnp.where(at > positions[:, -1:], mask, texts.tokens)
    row = jnp.arange(positions.shape[0])[:, None]
    return read.at[row, positions].set(state.inputs(mask))


def _text_outputs(
    batch: _Batch, texts: Texts, state: BlockState, positions: Int[Array, "R B"]
) -> tuple[Float[Array, "R B E"], DenseCache]:
    """Hidden states of the block from a pass over the whole text, and all its keys and values."""
    inputs = _inputs(batch, texts, state, positions)
    places = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    run = TextPass(batch.text_lengths)
    hidden, _ = batch.decoder(inputs, places, run.attend)
    source = jnp.maximum(positions - batch.shift, 0)
    return _at(hidden, source), run.cache


def _window_outputs(
    batch: _Batch,
    texts: Texts,
    state: BlockState,
    positions: Int[Array, "R B"],
    kept: DenseCache,
    window: int,
) -> tuple[Float[Array, "R B E"], DenseCache]:
    """Hidden states of the block from a pass over a window, and keys and values with it renewed."""
    inputs = _inputs(batch, texts, state, positions)
    starts = jnp.maximum(positions[:, 0] - batch.shift, 0)
    places = starts[:, None] + jnp.arange(window)
    # Past the capacity nothing is seen, so any token may stand there.
    read = jnp.take_along_axis(inputs, jnp.minimum(places, inputs.shape[1] - 1), axis=1)
    run = TextPass(batch.text_lengths, kept, starts)
    hidden, _ = batch.decoder(read, places, run.attend)
    source = jnp.maximum(positions - batch.shift, 0) - starts[:, None]
    return _at(hidden, source), run.cache


def _at(hidden: Float[Array, "R W E"], source: Int[Array, "R B"]) -> Float[Array, "R B E"]:
    """Hidden states at some places of a pass; the head is not run on the others."""
    return jnp.take_along_axis(hidden, source[..., None], axis=1)
