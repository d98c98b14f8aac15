"""Generation with canvas models (DiffusionGemma), as one jitted function.

There is no mask. A canvas of `block_length` positions begins as random ids. A step predicts all of
it, draws an id for every position, keeps the drawn ids of the positions that are surest together
and puts new random ids everywhere else. What becomes text is the likeliest id of every position
by the last step. A canvas ends when these ids are those of the step before and the step was sure
of them, or when its steps are used up; then it goes through the encoder, and the next one begins.

Randomness depends on (seed, canvas, step, position) alone, and the rows of a batch begin each
canvas together, so a row's text is the one that it has alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from herald_jax._checks import require, require_float, require_int
from herald_jax.cache.canvas import canvas_attend, empty_cache, text_attend
from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import round_up
from herald_jax.configs import ModelConfig
from herald_jax.decoding.generate import PREFILL_CHUNK_TOKENS, check_batch
from herald_jax.decoding.propose import gumbel_noise, suppress
from herald_jax.decoding.steps import BlockState
from herald_jax.decoding.texts import GenerationOutput, Texts
from herald_jax.models.canvas import CanvasDecoder
from herald_jax.models.decoder import Params, bind_canvas, check_params

_NOISE_STREAM = 1
"""Sets the random ids of a position apart from the noise that its token is drawn with."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasSampling:
    """How canvases are decoded; the defaults are those published for DiffusionGemma.

    Attributes:
        max_tokens: Most tokens to generate. The last canvas is denoised whole, then cut.
        denoising_steps: Most steps that a canvas may take.
        first_temperature: Divides the logits of the first step.
        last_temperature: What the temperature falls to, evenly; the last of all steps is one
            part above it.
        entropy_bound: Positions are kept in the order of their entropies while those before
            them add up to at most this, in nats.
        confidence_threshold: A canvas may end early if its mean entropy is below this.
        stop_token_ids: Ids that end the text besides the model's own.
        ignore_eos: True if the model's own stop ids do not end the text.
    """

    max_tokens: int = 256
    denoising_steps: int = 48
    first_temperature: float = 0.8
    last_temperature: float = 0.4
    entropy_bound: float = 0.1
    confidence_threshold: float = 0.005
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Checks every field."""
        is_list = isinstance(self.stop_token_ids, tuple | list)
        require(is_list, "stop_token_ids", self.stop_token_ids, "a tuple or list of ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        require_int("max_tokens", self.max_tokens, 1)
        require_int("denoising_steps", self.denoising_steps, 1)
        for name in ("first_temperature", "last_temperature"):
            require_float(name, getattr(self, name), 1e-4, 1e4, "a number >= 0.0001")
        require_float("entropy_bound", self.entropy_bound, 0.0, 1e6, "nats, >= 0")
        threshold = self.confidence_threshold
        require_float("confidence_threshold", threshold, 0.0, 1e6, "nats, >= 0")
        for token_id in self.stop_token_ids:
            require_int("stop_token_ids", token_id, 0)
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "a bool")

    def temperature(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The temperature of a step, counted from 0."""
        left = (self.denoising_steps - step) / self.denoising_steps
        return self.last_temperature + (self.first_temperature - self.last_temperature) * left


class CanvasState(NamedTuple):
    """The running canvas of each row.

    `likeliest` is what would become text now, `since` the step from which on it is that; `soft` is
    what the next step is conditioned on.
    """

    canvas: Int[Array, "R B"]
    soft: Float[Array, "R B E"]
    likeliest: Int[Array, "R B"]
    since: Int[Array, "R B"]
    confidences: Float[Array, "R B"]
    logprobs: Float[Array, "R B"]
    steps: Int[Array, " R"]
    is_running: Bool[Array, " R"]


class Prediction(NamedTuple):
    """What one step says of a canvas; entropies and confidences are those after temperature."""

    drawn: Int[Array, "R B"]
    likeliest: Int[Array, "R B"]
    entropy: Float[Array, "R B"]
    confidence: Float[Array, "R B"]
    logprob: Float[Array, "R B"]
    soft: Float[Array, "R B E"]


class _Progress(NamedTuple):
    cache: DenseCache
    texts: Texts
    steps_per_block: Int[Array, "R M"]
    block: Int[Array, ""]


def generate_canvas(
    params: Params,
    prompts: Integer[Any, "R P"],
    prompt_lengths: Integer[Any, " R"],
    seeds: Integer[Any, " R"],
    *,
    model: ModelConfig,
    sampling: CanvasSampling,
) -> GenerationOutput:
    """Generates with a canvas model (DiffusionGemma) in one jitted call.

    Every distinct (R, P, model, sampling) compiles once; pad prompts to few widths with
    `pad_prompts`.

    Args:
        params: Parameters as `load_params` returns them.
        prompts: Prompt ids, right-padded (any valid id may stand in the padding).
        prompt_lengths: Tokens of each prompt, 0..P.
        seeds: Random seed of each row, 0..2^32-1.
        model: The model's config (static).
        sampling: Options shared by all rows (static).

    Returns:
        As `generate`. `unmask_steps` has the step from which on the token was the likeliest,
        `confidences` its probability after temperature in the canvas' last step.

    Raises:
        ConfigError: If a parameter, shape, dtype, id, length or option is not allowed, or the
            model is no canvas model.
    """
    require(
        model.is_canvas,
        "attention",
        model.attention,
        "'canvas' in generate_canvas",
        "Use herald_jax.generate or LLM for a block-causal model, and "
        "herald_jax.generate_bidirectional where attention is full.",
    )
    require(
        isinstance(sampling, CanvasSampling),
        "sampling",
        sampling,
        "a CanvasSampling",
        "SamplingParams is for models that unmask.",
    )
    check_batch(prompts, prompt_lengths, seeds, model, sampling.max_tokens)
    for token_id in sampling.stop_token_ids:
        allowed = f"below the model's vocabulary size {model.vocab_size}"
        require(token_id < model.vocab_size, "stop_token_ids", token_id, allowed)
    check_params(model, params)
    return generate_canvas_program(
        params, prompts, prompt_lengths, seeds, model=model, sampling=sampling
    )


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def generate_canvas_program(
    params: Params,
    prompts: Integer[Array, "R P"],
    prompt_lengths: Integer[Array, " R"],
    seeds: Integer[Array, " R"],
    *,
    model: ModelConfig,
    sampling: CanvasSampling,
) -> GenerationOutput:
    """The jitted program behind `generate_canvas`, without its checks."""
    rows, width = prompts.shape
    length, blocks = model.block_length, -(-sampling.max_tokens // model.block_length)
    decoder = bind_canvas(model, params)
    chunk = min(PREFILL_CHUNK_TOKENS, width)
    capacity = max(width + blocks * length, round_up(width, chunk))
    lengths = prompt_lengths.astype(jnp.int32)
    seeds = seeds.astype(jnp.uint32)
    texts = Texts.start(prompts, capacity)
    own = () if sampling.ignore_eos else model.stop_token_ids
    stops = tuple(sorted({*own, *sampling.stop_token_ids}))

    def prefill(index: jax.Array, cache: DenseCache) -> DenseCache:
        start = index * chunk
        piece = lax.dynamic_slice(texts.tokens, (0, start), (rows, chunk))
        positions = jnp.broadcast_to(start + jnp.arange(chunk), piece.shape)
        # What is written for padding lies past the row's length, where canvases overwrite it.
        attend = text_attend(model, cache, jnp.full((rows,), start))
        return cache.append_chunk(decoder.encode(piece, positions, attend)[1], start)

    cache = empty_cache(model, rows, capacity, params["embed_tokens"]["embedding"].dtype)
    cache = lax.fori_loop(0, (lengths.max() + chunk - 1) // chunk, prefill, cache)

    def advance(progress: _Progress) -> _Progress:
        cache, texts, block = progress.cache, progress.texts, progress.block
        starts = lengths + block * length
        done = denoise_canvas(decoder, cache, starts, seeds, block, texts.is_active, sampling)
        positions = starts[:, None] + jnp.arange(length)
        index = jnp.broadcast_to(block, (rows,))
        state = BlockState.start(index, done.likeliest, jnp.zeros_like(done.likeliest, bool))
        state = state._replace(
            unmask_steps=done.since,
            confidences=done.confidences,
            logprobs=done.logprobs,
            steps=done.steps,
        )
        texts = texts.write_block(state, positions, lengths, stops, sampling.max_tokens)

        def encode(cache: DenseCache) -> DenseCache:
            attend = text_attend(model, cache, starts)
            _, fresh = decoder.encode(done.likeliest, positions, attend)
            return cache.append_blocks(fresh, starts, texts.is_active)

        cache = lax.cond(texts.is_active.any(), encode, lambda cache: cache, cache)
        steps = progress.steps_per_block.at[:, block].set(done.steps)
        return _Progress(cache, texts, steps, block + 1)

    start = _Progress(cache, texts, jnp.zeros((rows, blocks), jnp.int32), jnp.int32(0))
    done = lax.while_loop(lambda p: p.texts.is_active.any(), advance, start)
    steps = done.steps_per_block
    forwards = steps.sum(-1) + (steps > 0).sum(-1) - 1  # a text's last canvas is not encoded
    return done.texts.output(lengths, sampling.max_tokens, steps, forwards)


def denoise_canvas(
    decoder: CanvasDecoder,
    cache: DenseCache,
    starts: Int[Array, " R"],
    seeds: UInt32[Array, " R"],
    block: Int[Array, ""],
    is_active: Bool[Array, " R"],
    sampling: CanvasSampling,
) -> CanvasState:
    """One canvas of every active row from random ids to its last step."""
    model = decoder.config
    shape = len(starts), model.block_length
    positions = starts[:, None] + jnp.arange(shape[1])
    numbers = seeds, jnp.broadcast_to(block, shape[:1])
    dtype = decoder.embed_tokens.embedding[...].dtype
    state = CanvasState(
        canvas=random_ids(*numbers, jnp.int32(0), model),
        soft=jnp.zeros((*shape, model.hidden_size), dtype),
        likeliest=jnp.full(shape, -1, jnp.int32),
        since=jnp.zeros(shape, jnp.int32),
        confidences=jnp.zeros(shape, jnp.float32),
        logprobs=jnp.zeros(shape, jnp.float32),
        steps=jnp.zeros(shape[:1], jnp.int32),
        is_running=is_active,
    )

    def is_left(carry: tuple[Int[Array, ""], CanvasState]) -> jax.Array:
        return (carry[0] < sampling.denoising_steps) & carry[1].is_running.any()

    def advance(carry: tuple[Int[Array, ""], CanvasState]) -> tuple[jax.Array, CanvasState]:
        step, state = carry
        attend = canvas_attend(model, cache, starts)
        hidden = decoder.denoise(state.canvas, state.soft, positions, attend)
        found = predict(decoder, hidden, *numbers, step, sampling.temperature(step))
        fresh = random_ids(*numbers, step + 1, model)
        is_kept = surest_together(found.entropy, sampling.entropy_bound)
        is_stable = (found.likeliest == state.likeliest).all(-1)
        is_sure = found.entropy.mean(-1) < sampling.confidence_threshold
        after = CanvasState(
            canvas=jnp.where(is_kept, found.drawn, fresh),
            soft=found.soft,
            likeliest=found.likeliest,
            since=jnp.where(found.likeliest == state.likeliest, state.since, step),
            confidences=found.confidence,
            logprobs=found.logprob,
            steps=state.steps + 1,
            is_running=~(is_stable & is_sure),
        )

        def move(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(state.is_running.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return step + 1, jax.tree.map(move, after, state)

    return lax.while_loop(is_left, advance, (jnp.int32(0), state))[1]


def predict(
    decoder: CanvasDecoder,
    hidden: Float[Array, "R B E"],
    seeds: UInt32[Array, " R"],
    block: Int[Array, " R"],
    step: Int[Array, ""],
    temperature: Float[Array, ""],
) -> Prediction:
    """What a step's outputs say, a row at a time: one row's logits may be hundreds of megabytes."""
    model = decoder.config

    def of_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> Prediction:
        hidden, seed, block = row
        raw = suppress(decoder.logits(hidden[None]), model)
        scaled = raw / temperature
        noise = gumbel_noise(seed[None], block[None], step[None], *scaled.shape[1:])
        log_p = jax.nn.log_softmax(scaled, axis=-1)
        likeliest = jnp.argmax(raw, axis=-1).astype(jnp.int32)

        def of_likeliest(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, likeliest[..., None], axis=-1)[..., 0]

        entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(jnp.isneginf(log_p), 0.0, log_p), axis=-1)
        found = Prediction(
            drawn=jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32),
            likeliest=likeliest,
            entropy=entropy,
            confidence=jnp.exp(of_likeliest(log_p)),
            logprob=of_likeliest(raw) - jax.nn.logsumexp(raw, axis=-1),
            soft=decoder.soft_embeddings(scaled),
        )
        return jax.tree.map(lambda x: x[0], found)

    return lax.map(of_row, (hidden, seeds, block))


def surest_together(entropy: Float[Array, "R B"], bound: float) -> Bool[Array, "R B"]:
    """The positions before which, in the order of entropy, at most `bound` has come together.

    The first is always one; ties go to the lower position.
    """
    order = jnp.argsort(entropy, axis=-1, stable=True)
    ordered = jnp.take_along_axis(entropy, order, axis=-1)
    is_kept = jnp.cumsum(ordered, axis=-1) - ordered <= bound
    is_kept = is_kept.at[:, 0].set(True)  # a sum rounded down must not leave the canvas as noise
    return jnp.take_along_axis(is_kept, jnp.argsort(order, axis=-1), axis=-1)


def random_ids(
    seeds: UInt32[Array, " R"], block: Int[Array, " R"], step: Int[Array, ""], model: ModelConfig
) -> Int[Array, "R B"]:
    """Uniform ids that depend on (seed, canvas, step, position) alone; step 0 is the start."""
    last = model.tokenizer_vocab_size or model.vocab_size

    def of_position(seed: jax.Array, block: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        for number in (block, step, position, _NOISE_STREAM):
            key = jax.random.fold_in(key, number)
        return jax.random.randint(key, (), 0, last, jnp.int32)

    of_row = jax.vmap(of_position, in_axes=(None, None, 0))
    return jax.vmap(of_row, in_axes=(0, 0, None))(seeds, block, jnp.arange(model.block_length))
