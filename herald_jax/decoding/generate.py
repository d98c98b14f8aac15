"""A whole batch generation as one jitted function: prefill, then blocks until all rows end.

For callers that hold token ids and want one program: data generation, RL rollouts, or a
larger jitted program around it. `LLM` drives the same block program from the host instead,
which lets it stream, and stop at strings.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from herald_jax._checks import require, require_int
from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import round_up
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import (
    decoding_options,
    proposal_spec,
    require_block_decoding,
    stop_ids,
)
from herald_jax.decoding.steps import BlockState, decode_block, prefill_chunk
from herald_jax.models.decoder import Decoder, Params, bind, check_params
from herald_jax.sampling import SamplingParams

FINISH_LENGTH, FINISH_STOP = 0, 1
"""Values of `GenerationOutput.finish_reasons`."""

PAD = -1
"""Value of `tokens` and `unmask_steps` past a row's length."""

PREFILL_CHUNK_TOKENS = 512
"""Prompt tokens of each row that one prefill pass takes, before rounding to whole blocks."""


class GenerationOutput(NamedTuple):
    """What `generate` returns; N = max_tokens, M = most blocks a row can touch.

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


class _Progress(NamedTuple):
    """Loop state: the cache, the text by position, and what each row has done."""

    cache: DenseCache
    tokens: Int[Array, "R S"]
    unmask_steps: Int[Array, "R S"]
    confidences: Float[Array, "R S"]
    logprobs: Float[Array, "R S"]
    steps_per_block: Int[Array, "R M"]
    block: Int[Array, " R"]
    lengths: Int[Array, " R"]
    finish_reasons: Int[Array, " R"]
    is_active: Bool[Array, " R"]


def pad_prompts(
    prompts: Sequence[Any], multiple: int = 1
) -> tuple[Int[np.ndarray, "R P"], Int[np.ndarray, " R"]]:
    """Right-padded prompts and their lengths, P rounded up to a multiple (a shape bucket).

    Args:
        prompts: Sequences of ids.
        multiple: Width of the bucket.

    Raises:
        ConfigError: If a prompt is not made of ids, or `multiple` is below 1.
    """
    require_int("multiple", multiple, 1)
    for row, prompt in enumerate(prompts):
        allowed = "a sequence of ids, integers in 0..2^31-1"
        require(not isinstance(prompt, str), f"prompts[{row}]", prompt, allowed)
        for token_id in prompt:
            is_id = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            require(is_id and 0 <= int(token_id) < 2**31, f"prompts[{row}]", token_id, allowed)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    width = max(round_up(int(lengths.max(initial=1)), multiple), 1)
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    return padded, lengths


def generate(
    params: Params,
    prompts: Integer[Any, "R P"],
    prompt_lengths: Integer[Any, " R"],
    seeds: Integer[Any, " R"],
    *,
    model: ModelConfig,
    sampling: SamplingParams,
) -> GenerationOutput:
    """Generates for a batch of ragged prompts in one jitted call.

    Every distinct (R, P, model, sampling) compiles once; pad prompts to few widths with
    `pad_prompts`. To compile ahead of time, lower `generate_program` with the same arguments.

    Args:
        params: Parameters as `load_params` returns them.
        prompts: Prompt ids, right-padded (any valid id may stand in the padding).
        prompt_lengths: Tokens of each prompt, 0..P.
        seeds: Random seed of each row, 0..2^32-1 (unused by greedy rows).
        model: The model's config (static).
        sampling: Options shared by all rows (static). `n`, `seed` and `stop` belong to `LLM`:
            repeat a prompt for several samples, pass `seeds`, and search strings afterwards.

    Raises:
        ConfigError: If a parameter, shape, dtype, id, length or option is not allowed.
    """
    require_block_decoding(model)
    check_sampling(model, sampling)
    check_batch(prompts, prompt_lengths, seeds, model, sampling.max_tokens)
    check_params(model, params)
    return generate_program(params, prompts, prompt_lengths, seeds, model=model, sampling=sampling)


def check_sampling(model: ModelConfig, sampling: SamplingParams) -> None:
    """Checks the options of a generation that is one program.

    Raises:
        ConfigError: If one belongs to `LLM` or does not fit the model.
    """
    sampling.check_against(model.block_length, model.vocab_size)
    require(sampling.n == 1, "n", sampling.n, "1 in generate", "Repeat the prompt instead.")
    require(sampling.seed is None, "seed", sampling.seed, "None in generate", "Pass `seeds`.")
    require(
        not sampling.stop,
        "stop",
        sampling.stop,
        "empty in generate, which knows no tokenizer",
        "Use LLM.generate, or search the decoded text.",
    )


def check_batch(
    prompts: Any, lengths: Any, seeds: Any, model: ModelConfig, max_tokens: int
) -> None:
    """Checks shapes, dtypes and, outside a trace, values of a batch of prompts.

    Raises:
        ConfigError: If one is not allowed.
    """
    shape = jnp.shape(prompts)
    require(len(shape) == 2 and min(shape) > 0, "prompts.shape", shape, "[R, P], both positive")
    for name, array in (("prompt_lengths", lengths), ("seeds", seeds)):
        require(jnp.shape(array) == shape[:1], f"{name}.shape", jnp.shape(array), f"{shape[:1]}")
    for name, array in (("prompts", prompts), ("prompt_lengths", lengths), ("seeds", seeds)):
        dtype = jnp.result_type(array)
        require(jnp.issubdtype(dtype, jnp.integer), f"{name}.dtype", str(dtype), "an integer")
    if any(isinstance(array, Tracer) for array in (prompts, lengths, seeds)):
        return  # inside a caller's trace there are no values to look at
    lengths = np.asarray(lengths)
    is_length = (lengths >= 0) & (lengths <= shape[1])
    require(bool(is_length.all()), "prompt_lengths", lengths.tolist(), f"in 0..{shape[1]}")
    longest = model.max_position_embeddings
    total = int(lengths.max()) + max_tokens
    require(
        total <= longest,
        "prompt tokens + max_tokens",
        total,
        f"at most {longest}, the checkpoint's max_position_embeddings",
    )
    ids = np.asarray(prompts)
    is_id = (ids >= 0) & (ids < model.vocab_size)
    if not is_id.all():
        row, position = np.argwhere(~is_id)[0]
        value = int(ids[row, position])
        allowed = f"an id in 0..{model.vocab_size - 1}, padding included"
        require(False, f"prompts[{row}, {position}]", value, allowed)
    is_seed = (np.asarray(seeds) >= 0) & (np.asarray(seeds) < 2**32)
    require(bool(is_seed.all()), "seeds", np.asarray(seeds).tolist(), "in 0..2^32-1")


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def generate_program(
    params: Params,
    prompts: Integer[Array, "R P"],
    prompt_lengths: Integer[Array, " R"],
    seeds: Integer[Array, " R"],
    *,
    model: ModelConfig,
    sampling: SamplingParams,
) -> GenerationOutput:
    """The jitted program behind `generate`, without its checks; lower it to compile ahead."""
    rows, width = prompts.shape
    block_length = model.block_length
    decoder = bind(model, params)
    chunk = round_up(min(PREFILL_CHUNK_TOKENS, width), block_length)
    width = round_up(width, chunk)
    capacity = max(round_up(prompts.shape[1] + sampling.max_tokens, block_length), width)
    dtype = params["embed_tokens"]["embedding"].dtype
    tokens = jnp.zeros((rows, capacity), jnp.int32)
    tokens = tokens.at[:, : prompts.shape[1]].set(prompts.astype(jnp.int32))
    lengths = prompt_lengths.astype(jnp.int32)

    first_block = lengths // block_length
    chunks = (first_block.max() * block_length + chunk - 1) // chunk

    def prefill(index: jax.Array, cache: DenseCache) -> DenseCache:
        piece = lax.dynamic_slice(tokens, (0, index * chunk), (rows, chunk))
        return prefill_chunk(decoder, cache, piece, index * chunk)

    cache = DenseCache.zeros(model, rows, capacity, dtype)
    cache = lax.fori_loop(0, chunks, prefill, cache)

    most_blocks = -(-sampling.max_tokens // block_length) + 1
    zeros = jnp.zeros((rows,), jnp.int32)
    progress = _Progress(
        cache=cache,
        tokens=tokens,
        unmask_steps=jnp.full((rows, capacity), PAD, jnp.int32),
        confidences=jnp.zeros((rows, capacity), jnp.float32),
        logprobs=jnp.zeros((rows, capacity), jnp.float32),
        steps_per_block=jnp.zeros((rows, most_blocks), jnp.int32),
        block=first_block,
        lengths=zeros,
        finish_reasons=zeros,
        is_active=jnp.ones((rows,), bool),
    )
    advance = functools.partial(_advance, decoder, sampling, lengths, seeds.astype(jnp.uint32))
    progress = lax.while_loop(lambda p: p.is_active.any(), advance, progress)
    return _collect(progress, lengths, sampling.max_tokens)


def _advance(
    decoder: Decoder,
    sampling: SamplingParams,
    prompt_lengths: Int[Array, " R"],
    seeds: UInt32[Array, " R"],
    progress: _Progress,
) -> _Progress:
    """One more block of every active row."""
    model = decoder.config
    block_length = model.block_length
    rows = progress.block.shape[0]
    options = decoding_options([sampling] * rows, [0] * rows, model)
    options = jax.tree.map(jnp.asarray, options)._replace(seeds=seeds)
    positions = progress.block[:, None] * block_length + jnp.arange(block_length)
    state = BlockState.start(
        progress.block,
        jnp.take_along_axis(progress.tokens, positions, axis=1),
        positions >= prompt_lengths[:, None],
    )
    spec = proposal_spec([sampling])
    cache, state = decode_block(decoder, progress.cache, state, progress.is_active, options, spec)

    is_new = (positions >= prompt_lengths[:, None]) & progress.is_active[:, None]
    row = jnp.arange(rows)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        kept = jnp.take_along_axis(old, positions, axis=1)
        return old.at[row[:, None], positions].set(jnp.where(is_new, new, kept))

    stops = jnp.asarray(stop_ids(sampling, model), jnp.int32)
    is_stop = is_new & (state.tokens[..., None] == stops).any(-1)
    made = jnp.where(is_stop, positions - prompt_lengths[:, None] + 1, sampling.max_tokens + 1)
    stop_length = made.min(-1)
    is_stopped = stop_length <= sampling.max_tokens
    total = (progress.block + 1) * block_length - prompt_lengths
    length = jnp.where(is_stopped, stop_length, jnp.minimum(total, sampling.max_tokens))
    is_active = progress.is_active & ~is_stopped & (total < sampling.max_tokens)
    nth = progress.block - prompt_lengths // block_length
    steps = jnp.where(progress.is_active, state.steps, progress.steps_per_block[row, nth])
    reason = jnp.where(is_stopped, FINISH_STOP, FINISH_LENGTH)
    return _Progress(
        cache=cache,
        tokens=put(progress.tokens, state.tokens),
        unmask_steps=put(progress.unmask_steps, state.unmask_steps),
        confidences=put(progress.confidences, state.confidences),
        logprobs=put(progress.logprobs, state.logprobs),
        steps_per_block=progress.steps_per_block.at[row, nth].set(steps),
        block=jnp.where(is_active, progress.block + 1, progress.block),
        lengths=jnp.where(progress.is_active, length, progress.lengths),
        finish_reasons=jnp.where(progress.is_active, reason, progress.finish_reasons),
        is_active=is_active,
    )


def _collect(
    progress: _Progress, prompt_lengths: Int[Array, " R"], max_tokens: int
) -> GenerationOutput:
    """Moves each row's generated span to the front and clears what lies past its length."""
    offsets = jnp.arange(max_tokens)
    capacity = progress.tokens.shape[1]
    source = jnp.minimum(prompt_lengths[:, None] + offsets, capacity - 1)
    is_text = offsets < progress.lengths[:, None]

    def span(values: jax.Array, fill: int | float) -> jax.Array:
        return jnp.where(is_text, jnp.take_along_axis(values, source, axis=1), fill)

    blocks = (progress.steps_per_block > 0).sum(-1)
    return GenerationOutput(
        tokens=span(progress.tokens, PAD),
        lengths=progress.lengths,
        finish_reasons=progress.finish_reasons,
        steps_per_block=progress.steps_per_block,
        forwards=progress.steps_per_block.sum(-1) + blocks,
        unmask_steps=span(progress.unmask_steps, PAD),
        confidences=span(progress.confidences, 0.0),
        logprobs=span(progress.logprobs, 0.0),
    )
