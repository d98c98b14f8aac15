"""Canvas decoding against a loop in NumPy that recomputes the whole text at every step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import CanvasSampling, ConfigError, SamplingParams, generate, generate_canvas
from herald_jax.cache.canvas import canvas_attend, canvas_window, empty_cache, text_attend
from herald_jax.configs import ModelConfig
from herald_jax.decoding import canvas as canvas_module
from herald_jax.decoding.canvas import random_ids, surest_together
from herald_jax.decoding.propose import gumbel_noise
from herald_jax.models.decoder import bind_canvas
from tests.canvas_model import tiny_config, tiny_params

MODEL = tiny_config(stop_token_ids=(1, 6, 27))
SAMPLING = CanvasSampling(
    max_tokens=13,
    denoising_steps=8,
    first_temperature=0.6,
    last_temperature=0.1,
    entropy_bound=4.0,
    confidence_threshold=1.0,
)


@pytest.fixture(scope="module")
def params() -> Any:
    return tiny_params(MODEL, seed=4)


class SlowModel:
    """Logits of a canvas after a text, nothing kept between calls; one compile for all lengths."""

    def __init__(self, params: Any, capacity: int) -> None:
        @jax.jit
        def run(text: jax.Array, length: jax.Array, canvas: jax.Array, previous: jax.Array):
            decoder = bind_canvas(MODEL, params)
            start, end = jnp.zeros(1, jnp.int32), length[None]
            cache = empty_cache(MODEL, 1, capacity, jnp.float32)
            places = jnp.arange(capacity)[None]
            _, fresh = decoder.encode(text[None], places, text_attend(MODEL, cache, start))
            cache = cache.append_chunk(fresh, jnp.int32(0))
            is_first = jnp.isinf(previous[0, 0])
            soft = jnp.where(is_first, 0, decoder.soft_embeddings(previous))
            attend = canvas_attend(MODEL, cache, end)
            at = length + jnp.arange(MODEL.block_length)[None]
            return decoder.logits(decoder.denoise(canvas[None], soft[None], at, attend))[0]

        self._run, self._capacity = run, capacity

    def logits(self, text: list[int], canvas: np.ndarray, previous: np.ndarray) -> np.ndarray:
        padded = np.zeros(self._capacity, np.int32)
        padded[: len(text)] = text
        return np.asarray(self._run(padded, np.int32(len(text)), canvas, previous))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def noise(seed: int, block: int, step: int) -> np.ndarray:
    row, *numbers = jnp.asarray([seed], "u4"), jnp.asarray([block]), jnp.asarray([step])
    return np.asarray(_gumbel(row, *numbers, MODEL.block_length, MODEL.vocab_size))[0]


_gumbel = jax.jit(gumbel_noise, static_argnums=(3, 4))
_uniform = jax.jit(random_ids, static_argnums=3)


def ids(seed: int, block: int, step: int) -> np.ndarray:
    row = jnp.asarray([seed], jnp.uint32), jnp.asarray([block], jnp.int32)
    return np.asarray(_uniform(*row, jnp.int32(step), MODEL))[0]


def slow_text(
    model: SlowModel, prompt: list[int], seed: int, sampling: CanvasSampling
) -> tuple[list[int], list[int]]:
    """Generated tokens and the steps of every canvas, by the published rules."""
    text, steps = list(prompt), []
    while True:
        block = len(steps)
        canvas, likeliest = ids(seed, block, 0), None
        scaled = np.full((MODEL.block_length, MODEL.vocab_size), np.inf, np.float32)
        for left in range(sampling.denoising_steps, 0, -1):
            step = sampling.denoising_steps - left
            share = left / sampling.denoising_steps
            low, high = sampling.last_temperature, sampling.first_temperature
            scaled = model.logits(text, canvas, scaled) / np.float32(low + (high - low) * share)
            p = softmax(scaled)
            drawn = (scaled + noise(seed, block, step)).argmax(-1)
            before, likeliest = likeliest, scaled.argmax(-1)
            entropy = -(p * np.log(p)).sum(-1)
            canvas, together = ids(seed, block, step + 1).copy(), 0.0
            for position in np.argsort(entropy, kind="stable"):
                if together <= sampling.entropy_bound:
                    canvas[position] = drawn[position]
                together += entropy[position]
            same = before is not None and (before == likeliest).all()
            if same and entropy.mean() < sampling.confidence_threshold:
                break
        steps.append(sampling.denoising_steps - left + 1)
        assert likeliest is not None
        text += likeliest.tolist()
        made = text[len(prompt) :]
        ends = [n for n, token in enumerate(made) if token in MODEL.stop_token_ids]
        if ends and ends[0] < sampling.max_tokens:
            return made[: ends[0] + 1], steps
        if len(made) >= sampling.max_tokens:
            return made[: sampling.max_tokens], steps


def test_equals_a_plain_loop(params: Any) -> None:
    """Prompts below the window and above it; canvases and rows end early and late."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 53, n).tolist() for n in (1, 5, 17, 11)]
    padded, lengths = np.zeros((4, 17), np.int32), np.array([len(p) for p in prompts])
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    seeds = np.array([7, 8, 9, 2**32 - 1], np.uint32)
    found = generate_canvas(params, padded, lengths, seeds, model=MODEL, sampling=SAMPLING)
    slow = SlowModel(params, 17 + 3 * MODEL.block_length)
    counts = set()
    for row, prompt in enumerate(prompts):
        tokens, steps = slow_text(slow, prompt, int(seeds[row]), SAMPLING)
        length = int(found.lengths[row])
        assert np.asarray(found.tokens)[row, :length].tolist() == tokens, row
        assert (np.asarray(found.tokens)[row, length:] == -1).all()
        assert np.asarray(found.steps_per_block)[row].tolist()[: len(steps)] == steps
        assert int(found.forwards[row]) == sum(steps) + len(steps) - 1
        assert int(found.finish_reasons[row]) == int(tokens[-1] in MODEL.stop_token_ids)
        counts |= set(steps)
    assert len(counts) > 1 and min(counts) < SAMPLING.denoising_steps
    assert len(set(np.asarray(found.finish_reasons).tolist())) == 2
    one = np.asarray(found.confidences)[2, : int(found.lengths[2])]
    assert ((one > 0) & (one <= 1)).all()


def test_what_a_canvas_sees() -> None:
    """One token of the text is changed at a time; layers with a window see its last part only.

    All positions of the canvas see the same part, and the rows their own.
    """
    body = dataclasses.replace(MODEL.canvas, full_layers=())  # type: ignore[type-var]
    model = tiny_config(canvas=body, num_layers=1)
    params = tiny_params(model, seed=5)
    lengths = jnp.asarray([11, 4])
    rng = np.random.default_rng(1)
    text = rng.integers(0, 53, (2, 12))

    @jax.jit
    def outputs(text: jax.Array) -> jax.Array:
        decoder = bind_canvas(model, params)
        cache = empty_cache(model, 2, 12, jnp.float32)
        places = jnp.broadcast_to(jnp.arange(12), text.shape)
        zero = jnp.zeros(2, jnp.int32)
        _, fresh = decoder.encode(text, places, text_attend(model, cache, zero))
        cache = cache.append_chunk(fresh, jnp.int32(0))
        soft = jnp.zeros((2, 5, model.hidden_size))
        at = lengths[:, None] + jnp.arange(5)
        attend = canvas_attend(model, cache, lengths)
        return decoder.denoise(jnp.asarray(rng.integers(0, 53, (2, 5))), soft, at, attend)

    plain = np.asarray(outputs(text))
    seen = np.zeros((2, 12, 5), bool)
    for position in range(12):
        other = text.copy()
        other[:, position] = (other[:, position] + 1) % 53
        seen[:, position] = (np.asarray(outputs(other)) != plain).any(-1)
    assert canvas_window(model) == 6
    for row, length in enumerate((11, 4)):
        wanted = [max(length - 6, 0) <= position < length for position in range(12)]
        assert (seen[row] == np.array(wanted)[:, None]).all(), row


def test_text_in_parts_equals_text_at_once(params: Any) -> None:
    """Chunks of a ragged batch leave the keys and values that one pass leaves."""
    text = np.random.default_rng(2).integers(0, 53, (2, 18))
    starts = jnp.asarray([9, 11])

    @jax.jit
    def both(text: jax.Array) -> tuple[Any, Any]:
        decoder = bind_canvas(MODEL, params)
        cache = empty_cache(MODEL, 2, 18, jnp.float32)
        places = jnp.broadcast_to(jnp.arange(18), text.shape)
        zero = jnp.zeros(2, jnp.int32)
        _, fresh = decoder.encode(text, places, text_attend(MODEL, cache, zero))
        whole = cache.append_chunk(fresh, jnp.int32(0))
        parts = cache
        for first in (0, 6):
            at = jnp.full(2, first)
            piece = slice(first, first + 6)
            attend = text_attend(MODEL, parts, at)
            _, fresh = decoder.encode(text[:, piece], places[:, piece], attend)
            parts = parts.append_chunk(fresh, jnp.int32(first))
        places = starts[:, None] + jnp.arange(5)
        piece = jnp.take_along_axis(text, places, axis=1)
        _, fresh = decoder.encode(piece, places, text_attend(MODEL, parts, starts))
        return whole, parts.append_blocks(fresh, starts, jnp.asarray([True, True]))

    whole, parts = both(text)
    for row, start in enumerate((9, 11)):
        for one, other in zip((*whole.k, *whole.v), (*parts.k, *parts.v), strict=True):
            np.testing.assert_allclose(
                np.asarray(one)[row, :, : start + 5],
                np.asarray(other)[row, :, : start + 5],
                atol=2e-5,
            )


def test_surest_together() -> None:
    """The sum counts those before a position; the first is always in; ties go to the left."""
    entropy = jnp.asarray([[0.5, 0.25, 0.25, 2.0], [3.0, 2.0, 4.0, 2.0], [0, 0, 0, 0]])
    found = np.asarray(surest_together(entropy, 0.5))
    assert found.tolist() == [[True, True, True, False], [False, True, False, False], [True] * 4]
    found = np.asarray(surest_together(entropy, 0.0))
    assert found[:2].tolist() == [[False, True, False, False], [False, True, False, False]]


def test_random_ids_depend_on_all_four_numbers() -> None:
    base = ids(1, 2, 3)
    assert all((ids(*other) != base).any() for other in ((2, 2, 3), (1, 1, 3), (1, 2, 4)))
    many = np.concatenate([ids(5, block, step) for block in range(8) for step in range(8)])
    assert many.min() >= 0 and many.max() < 53 and len(set(many.tolist())) > 40


def test_what_is_refused(params: Any, tiny_config: ModelConfig, tiny_params: Any) -> None:
    batch = np.zeros((1, 3), np.int32), np.array([3]), np.array([0])
    with pytest.raises(ConfigError, match="generate_canvas"):
        generate(params, *batch, model=MODEL, sampling=SamplingParams())
    with pytest.raises(ConfigError, match="'canvas' in generate_canvas"):
        generate_canvas(tiny_params, *batch, model=tiny_config, sampling=SAMPLING)
    with pytest.raises(ConfigError, match="entropy_bound"):
        CanvasSampling(entropy_bound=-1.0)
    with pytest.raises(ConfigError, match="stop_token_ids"):
        options = dataclasses.replace(SAMPLING, stop_token_ids=(53,))
        generate_canvas(params, *batch, model=MODEL, sampling=options)
    with pytest.raises(ConfigError, match="a tuple or list of ids"):
        CanvasSampling(stop_token_ids=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="canvas"):
        dataclasses.replace(MODEL, attention="full", mask_token_id=3)
    assert canvas_module.CanvasSampling(max_tokens=1).temperature(jnp.int32(0)) == 0.8
