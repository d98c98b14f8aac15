"""A whole batch generation as one jitted function: prefill, then blocks until all rows end.

For callers that hold token ids and want one program: data generation, RL rollouts, or a
larger jitted program around it. `LLM` drives the same block program from the host instead,
which lets it stream, and stop at strings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Int, Integer, UInt32

from herald_jax._checks import require, require_int
from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import round_up
from herald_jax.configs import ModelConfig
from herald_jax.decoding.editing import Editing, decode_edited_block
from herald_jax.decoding.options import (
    decoding_options,
    proposal_spec,
    require_block_decoding,
    stop_ids,
)
from herald_jax.decoding.shifted import FirstToken, decode_shifted_block, first_after_prompt
from herald_jax.decoding.steps import BlockState, decode_block, prefill_chunk
from herald_jax.decoding.sub_block_cache import check_sub_block_cache, decode_cached_block
from herald_jax.decoding.texts import GenerationOutput, Texts
from herald_jax.models.decoder import Decoder, Params, bind, check_params
from herald_jax.sampling import SamplingParams

PREFILL_CHUNK_TOKENS = 512
"""Prompt tokens of each row that one prefill pass takes, before rounding to whole blocks."""


class _Progress(NamedTuple):
    """Loop state: the cache, the texts, and the blocks that each row has done.

    `ahead` is there if the model shifts its predictions.
    """

    cache: DenseCache
    texts: Texts
    ahead: FirstToken | None
    steps_per_block: Int[Array, "R M"]
    block: Int[Array, " R"]


class _Policy(NamedTuple):
    """How blocks are decoded; static."""

    sampling: SamplingParams
    editing: Editing | None
    decode_shifted: Callable[..., tuple[DenseCache, BlockState, FirstToken]]


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
    editing: Editing | None = None,
    sub_block_cache: bool = False,
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
        editing: How committed tokens of a running block may be replaced, as LLaDA2.1 was trained
            to do (static); left out, they stay.
        sub_block_cache: True if passes may cover a sub-block of a Fast-dLLM v2 model alone, with
            strategy `sub_blocks` (static); faster, and an approximation.

    Raises:
        ConfigError: If a parameter, shape, dtype, id, length or option is not allowed.
    """
    require_block_decoding(model, may_shift=True)
    check_sampling(model, sampling)
    check_batch(prompts, prompt_lengths, seeds, model, sampling.max_tokens)
    require(
        editing is None or not model.shifts_predictions,
        "editing",
        editing,
        "None for a model that shifts its predictions",
    )
    if sub_block_cache:
        check_sub_block_cache(model, sampling)
    check_params(model, params)
    return generate_program(
        params,
        prompts,
        prompt_lengths,
        seeds,
        model=model,
        sampling=sampling,
        editing=editing,
        sub_block_cache=sub_block_cache,
    )


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


@functools.partial(jax.jit, static_argnames=("model", "sampling", "editing", "sub_block_cache"))
def generate_program(
    params: Params,
    prompts: Integer[Array, "R P"],
    prompt_lengths: Integer[Array, " R"],
    seeds: Integer[Array, " R"],
    *,
    model: ModelConfig,
    sampling: SamplingParams,
    editing: Editing | None = None,
    sub_block_cache: bool = False,
) -> GenerationOutput:
    """The jitted program behind `generate`, without its checks; lower it to compile ahead."""
    rows, width = prompts.shape
    block_length = model.block_length
    decoder = bind(model, params)
    chunk = round_up(min(PREFILL_CHUNK_TOKENS, width), block_length)
    width = round_up(width, chunk)
    capacity = max(round_up(prompts.shape[1] + sampling.max_tokens, block_length), width)
    dtype = params["embed_tokens"]["embedding"].dtype
    texts = Texts.start(prompts, capacity)
    lengths = prompt_lengths.astype(jnp.int32)

    first_block = lengths // block_length
    chunks = (first_block.max() * block_length + chunk - 1) // chunk

    def prefill(index: jax.Array, cache: DenseCache) -> DenseCache:
        piece = lax.dynamic_slice(texts.tokens, (0, index * chunk), (rows, chunk))
        return prefill_chunk(decoder, cache, piece, index * chunk)

    cache = DenseCache.zeros(model, rows, capacity, dtype)
    cache = lax.fori_loop(0, chunks, prefill, cache)

    most_blocks = -(-sampling.max_tokens // block_length) + 1
    progress = _Progress(
        cache=cache,
        texts=texts,
        ahead=first_after_prompt(decoder, cache, texts.tokens, first_block)
        if model.shifts_predictions
        else None,
        steps_per_block=jnp.zeros((rows, most_blocks), jnp.int32),
        block=first_block,
    )
    seeds = seeds.astype(jnp.uint32)
    policy = _Policy(
        sampling, editing, decode_cached_block if sub_block_cache else decode_shifted_block
    )
    advance = functools.partial(_advance, decoder, policy, lengths, seeds)
    progress = lax.while_loop(lambda p: p.texts.is_active.any(), advance, progress)
    steps = progress.steps_per_block
    forwards = steps.sum(-1) + (steps > 0).sum(-1)  # every block has one commit pass
    return progress.texts.output(lengths, sampling.max_tokens, steps, forwards)


def _advance(
    decoder: Decoder,
    policy: _Policy,
    prompt_lengths: Int[Array, " R"],
    seeds: UInt32[Array, " R"],
    progress: _Progress,
) -> _Progress:
    """One more block of every active row."""
    model, sampling = decoder.config, policy.sampling
    block_length = model.block_length
    rows = progress.block.shape[0]
    options = decoding_options([sampling] * rows, [0] * rows, model)
    options = jax.tree.map(jnp.asarray, options)._replace(seeds=seeds)
    positions = progress.block[:, None] * block_length + jnp.arange(block_length)
    texts = progress.texts
    state = BlockState.start(
        progress.block,
        jnp.take_along_axis(texts.tokens, positions, axis=1),
        positions >= prompt_lengths[:, None],
    )
    spec = proposal_spec([sampling])
    cache, ahead = progress.cache, progress.ahead
    if ahead is not None:
        cache, state, ahead = policy.decode_shifted(
            decoder, cache, state, ahead, texts.is_active, options, spec
        )
    elif policy.editing is not None:
        cache, state = decode_edited_block(
            decoder, cache, state, texts.is_active, options, spec, policy.editing
        )
    else:
        cache, state = decode_block(decoder, cache, state, texts.is_active, options, spec)
    stops = stop_ids(sampling, model)
    written = texts.write_block(state, positions, prompt_lengths, stops, sampling.max_tokens)
    row = jnp.arange(rows)
    nth = progress.block - prompt_lengths // block_length
    steps = jnp.where(texts.is_active, state.steps, progress.steps_per_block[row, nth])
    return _Progress(
        cache=cache,
        texts=written,
        ahead=ahead,
        steps_per_block=progress.steps_per_block.at[row, nth].set(steps),
        block=jnp.where(written.is_active, progress.block + 1, progress.block),
    )
