"""Fast-dLLM v2's cache within a block against a NumPy loop that makes the same passes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from herald_jax import ConfigError, ModelConfig, SamplingParams, generate, pad_prompts
from herald_jax.models import random_params
from tests.bidirectional_oracle import Kept, run_window
from tests.oracle import MARGIN, choose, decode, noise_of, propose, sharpen, to_float64

CONFIG = ModelConfig(
    family="test",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    block_length=11,  # sub-blocks of 3, 3, 3 and 2
    mask_token_id=7,
    rope_theta=1234.5,
    rms_norm_eps=3e-5,
    qk_norm=False,
    qkv_bias=True,
    shifts_predictions=True,
)
SAMPLING = SamplingParams(max_tokens=24, strategy="sub_blocks", threshold=0.99)
LENGTHS = (0, 2, 8, 11, 14)


@functools.cache
def params() -> Any:
    return sharpen(random_params(CONFIG, seed=5))


def prompt_of(length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(length).integers(0, 61, length)]


def run(sampling: SamplingParams, lengths: Any = LENGTHS, seeds: Any = None, **options: Any) -> Any:
    prompts, sizes = pad_prompts([*(prompt_of(length) for length in lengths), [0] * 16])
    seeds = np.arange(len(lengths)) if seeds is None else seeds
    options = {"sub_block_cache": True, **options}
    return generate(
        params(), prompts[:-1], sizes[:-1], np.asarray(seeds, np.uint32),
        model=CONFIG, sampling=sampling, **options,
    )  # fmt: skip


def decode_cached(prompt: list[int], seed: int, sampling: SamplingParams) -> dict[str, Any]:
    """The loop for one row; counts the passes that covered a sub-block only."""
    size, part = CONFIG.block_length, 3
    weights, kept = to_float64(params()), Kept()
    text: list[Any] = list(prompt)
    logprobs, steps, parts, margin = {}, 0, 0, np.inf
    first_block = len(prompt) // size
    ahead = None

    def commit(block: int) -> Any:
        window = range(block * size, (block + 1) * size)
        return propose(
            run_window(CONFIG, weights, text[: window.stop], window, kept)[window.stop - 1],
            CONFIG, SamplingParams(), None,
        )  # fmt: skip

    for block in range(first_block):
        ahead = commit(block)
    block = first_block
    while len(text) < len(prompt) + sampling.max_tokens:
        first = block * size
        if len(text) == first and ahead is not None:
            text.append(ahead.token)
            logprobs[first], margin = ahead.logprob, min(margin, ahead.gap)
        text += [None] * (first + size - len(text))
        step, is_kept = 0, False
        while None in text[first:]:
            masked = [i for i in range(size) if text[first + i] is None]
            start = masked[0] // part * part
            window = range(first, first + size)
            if is_kept and start not in masked:
                begin = first + min(start, size - part)
                window = range(begin, begin + part)
                parts += 1
            is_kept = True
            inputs = [CONFIG.mask_token_id if token is None else token for token in text]
            logits = run_window(CONFIG, weights, inputs, window, kept)
            noise: Any = [None] * size
            if sampling.temperature > 0:
                noise = noise_of(seed, block, step, size, CONFIG.vocab_size)
            offers = {}
            for i in masked:
                if i < start + part:
                    source = max(first + i - 1, window.start)
                    offers[i] = propose(logits[source], CONFIG, sampling, noise[i])
            confidence = {i: offer.confidence for i, offer in offers.items()}
            for i in choose(sampling, confidence, confidence, step, size):
                text[first + i] = offers[i].token
                logprobs[first + i] = offers[i].logprob
                margin = min(margin, offers[i].gap)
            ranked = sorted(confidence.values(), reverse=True)
            margin = min(margin, *(abs(c - (sampling.threshold or 0)) for c in ranked))
            margin = min(margin, *(a - b for a, b in zip(ranked, ranked[1:], strict=False)), 1.0)
            step += 1
        steps += step
        ahead = commit(block)
        block += 1
    new = range(len(prompt), len(prompt) + sampling.max_tokens)
    return {
        "tokens": [text[i] for i in new],
        "logprobs": [logprobs[i] for i in new],
        "forwards": steps + block - first_block,
        "parts": parts,
        "margin": margin,
    }


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "threshold": 0.9}])
def test_equals_the_numpy_loop(options: dict[str, Any]) -> None:
    sampling = dataclasses.replace(SAMPLING, **options)
    output = run(sampling)
    rows = [decode_cached(prompt_of(n), seed, sampling) for seed, n in enumerate(LENGTHS)]
    clear = [index for index, row in enumerate(rows) if row["margin"] > MARGIN]
    assert len(clear) >= len(rows) - 1 and sum(rows[i]["parts"] for i in clear) > 10
    for index in clear:
        assert output.tokens[index].tolist() == rows[index]["tokens"]
        np.testing.assert_allclose(output.logprobs[index], rows[index]["logprobs"], atol=1e-4)
        assert int(output.forwards[index]) == rows[index]["forwards"]


def test_it_is_an_approximation_whose_commits_are_exact() -> None:
    """The first token of the second block follows from the first block's text alone."""
    cached, exact = run(SAMPLING), run(SAMPLING, sub_block_cache=False)
    assert not np.allclose(cached.logprobs, exact.logprobs, atol=1e-3)
    row = LENGTHS.index(8)
    text = prompt_of(8) + cached.tokens[row, :3].tolist()
    plain = decode(
        CONFIG, to_float64(params()), text, 0, dataclasses.replace(SAMPLING, max_tokens=1)
    )
    assert cached.tokens[row, 3] == plain.tokens[0]
    np.testing.assert_allclose(cached.logprobs[row, 3], plain.logprobs[0], atol=1e-4)


def test_a_row_alone_equals_that_row_in_a_batch() -> None:
    """Neighbours ask for whole passes where the row asks for a part."""
    together = jax.device_get(run(SAMPLING))
    for row in (1, 2, 4):
        alone = jax.device_get(run(SAMPLING, [LENGTHS[row]] * 5))
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_array_equal(alone.steps_per_block[0], together.steps_per_block[row])
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"shifts_predictions": False}, {}, "sub_block_cache=True.*Fast-dLLM v2"),
        ({}, {"strategy": "threshold"}, "strategy='threshold'.*'sub_blocks'"),
        ({}, {"denoising_steps": 4}, "denoising_steps=4.*sub_block_cache"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    zeros = np.zeros((1, 1), np.int32)
    with pytest.raises(ConfigError, match=message):
        generate(
            {}, zeros, zeros[0], zeros[0], model=dataclasses.replace(CONFIG, **changes),
            sampling=dataclasses.replace(SAMPLING, **options), sub_block_cache=True,
        )  # fmt: skip
