"""Tokens, confidences and noise of single positions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import decoding_options, proposal_spec, stop_ids
from herald_jax.decoding.propose import Proposal, gumbel_noise, propose, suppress
from herald_jax.sampling import SamplingParams
from tests.oracle import MARGIN, noise_of
from tests.oracle import propose as plain_propose
from tests.stub_decoder import stub_config

CONFIG = stub_config(vocab_size=23, mask_token_id=4, tokenizer_vocab_size=21)
BLOCK = CONFIG.block_length


@functools.partial(jax.jit, static_argnames="spec")
def program(logits: Any, options: Any, spec: Any, seeds: Any, block: Any, step: Any) -> Proposal:
    return propose(logits, options, spec, seeds, block, step)


def run(
    logits: np.ndarray,
    rows: list[SamplingParams],
    seeds: Any = None,
    config: ModelConfig = CONFIG,
    block: int = 3,
    step: int = 2,
) -> Proposal:
    count = len(rows)
    seeds = list(range(count)) if seeds is None else seeds
    options = decoding_options(rows, seeds, config)
    numbers = (np.full(count, n, np.int32) for n in (block, step))
    spec = proposal_spec(rows)
    forbidden = suppress(jnp.asarray(logits), config)
    return jax.device_get(program(forbidden, options.rows, spec, options.seeds, *numbers))


def some_logits(rows: int, scale: float = 2.0, seed: int = 0) -> np.ndarray:
    shape = (rows, BLOCK, CONFIG.vocab_size)
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.5},
    {"temperature": 0.5, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 1000},
]


@pytest.mark.parametrize("confidence", ["raw", "scaled", "filtered"])
def test_equals_the_plain_proposal(confidence: str) -> None:
    options = OPTIONS if confidence == "raw" else OPTIONS[1:]
    rows = [SamplingParams(confidence=confidence, **named) for named in options * 4]
    logits = some_logits(len(rows))
    found = run(logits, rows)
    compared = 0
    for row, sampling in enumerate(rows):
        noise = noise_of(row, 3, 2, BLOCK, CONFIG.vocab_size)
        for place in range(BLOCK):
            plain = plain_propose(
                logits[row, place].astype(np.float64), CONFIG, sampling, noise[place]
            )
            if plain.gap < MARGIN:
                continue
            compared += 1
            assert found.tokens[row, place] == plain.token
            for name in ("confidence", "entropy", "logprob"):
                np.testing.assert_allclose(
                    getattr(found, name)[row, place], getattr(plain, name), atol=1e-5
                )
    assert compared > 0.95 * len(rows) * BLOCK


def test_rows_with_different_confidence_sources_each_keep_their_own() -> None:
    shared = {"temperature": 0.5, "top_k": 3}
    sources = ("filtered", "raw", "scaled")
    rows = [SamplingParams(confidence=name, **shared) for name in sources] + [SamplingParams()]
    logits = some_logits(4)
    together = run(logits, rows)
    for row, sampling in enumerate(rows):
        alone = run(logits[row : row + 1], [sampling], seeds=[row])
        for name in Proposal._fields:
            np.testing.assert_allclose(
                getattr(together, name)[row], getattr(alone, name)[0], atol=1e-6
            )


def test_top_k_comes_before_top_p() -> None:
    # Of 0.4, 0.3, 0.2, 0.1, top-k 2 leaves 0.571 and 0.429: top-p 0.5 then keeps one token. The
    # other order would keep two.
    logits = np.full((1, BLOCK, CONFIG.vocab_size), -np.inf, np.float32)
    logits[..., :4] = np.log([0.4, 0.3, 0.2, 0.1])
    sampling = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, confidence="filtered")
    rows = [sampling] * 64
    found = run(np.repeat(logits, 64, 0), rows)
    assert (found.tokens == 0).all() and (found.confidence == 1).all()
    both = run(
        np.repeat(logits, 64, 0),
        [SamplingParams(temperature=1.0, top_k=2, top_p=0.6, confidence="filtered")] * 64,
    )
    assert set(both.tokens.ravel().tolist()) == {0, 1}


def test_temperature_comes_before_top_p() -> None:
    logits = np.full((64, BLOCK, CONFIG.vocab_size), -np.inf, np.float32)
    logits[..., :3] = np.log([0.6, 0.3, 0.1])
    # Flattened by the temperature, the first token holds less than half of the probability.
    flat = run(logits, [SamplingParams(temperature=4.0, top_p=0.5)] * 64)
    assert set(flat.tokens.ravel().tolist()) == {0, 1}
    plain = run(logits, [SamplingParams(temperature=1.0, top_p=0.5)] * 64)
    assert set(plain.tokens.ravel().tolist()) == {0}


def test_the_token_that_reaches_top_p_is_kept() -> None:
    logits = np.full((64, BLOCK, CONFIG.vocab_size), -np.inf, np.float32)
    logits[..., :4] = np.log([0.5, 0.25, 0.125, 0.125])
    rows = [SamplingParams(temperature=1.0, top_p=0.75 + 1e-3)] * 64
    assert set(run(logits, rows).tokens.ravel().tolist()) == {0, 1, 2}
    rows = [SamplingParams(temperature=1.0, top_p=0.75 - 1e-3)] * 64
    assert set(run(logits, rows).tokens.ravel().tolist()) == {0, 1}


def test_filters_break_ties_towards_the_lower_id() -> None:
    logits = np.zeros((64, BLOCK, CONFIG.vocab_size), np.float32)
    rows = [SamplingParams(temperature=1.0, top_k=3)] * 64
    assert set(run(logits, rows).tokens.ravel().tolist()) == {0, 1, 2}


def test_draws_have_the_right_frequencies() -> None:
    rows = 4000
    logits = np.full((rows, BLOCK, CONFIG.vocab_size), -np.inf, np.float32)
    logits[..., :3] = np.log([0.6, 0.3, 0.1])
    found = run(logits, [SamplingParams(temperature=1.0)] * rows)
    for place in range(BLOCK):
        share = np.bincount(found.tokens[:, place], minlength=3) / rows
        np.testing.assert_allclose(share[:3], [0.6, 0.3, 0.1], atol=0.03)
    first, second = found.tokens[:, 0] == 0, found.tokens[:, 1] == 0
    assert abs((first & second).mean() - 0.36) < 0.03


def test_a_draw_is_the_same_whether_or_not_a_neighbour_filters() -> None:
    logits = some_logits(32, scale=1.0)
    plain = [SamplingParams(temperature=1.0)] * 32
    mixed = plain[:31] + [SamplingParams(temperature=1.0, top_k=3, top_p=0.5)]
    with_greedy = plain[:31] + [SamplingParams()]
    alone = run(logits, plain)
    for rows in (mixed, with_greedy):
        together = run(logits, rows)
        np.testing.assert_array_equal(alone.tokens[:31], together.tokens[:31])
        np.testing.assert_array_equal(alone.confidence[:31], together.confidence[:31])


def test_a_greedy_row_among_sampled_ones_stays_greedy() -> None:
    logits = some_logits(8)
    rows = [SamplingParams(temperature=5.0, top_k=7)] * 4 + [SamplingParams()] * 4
    greedy = run(logits, [SamplingParams()] * 8)
    found = run(logits, rows)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[4:], b[4:]), greedy, found)
    assert (found.tokens[:4] != greedy.tokens[:4]).any()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-44])
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_vanishing_temperature_is_greedy(temperature: float, top_k: int) -> None:
    """Logits divided by a tiny temperature overflow, and the draw is no longer the best token."""
    logits = some_logits(4, scale=5.0)
    rows = [SamplingParams(temperature=temperature, top_k=top_k, confidence="scaled")] * 4
    found = run(logits, rows)
    np.testing.assert_array_equal(found.tokens, run(logits, [SamplingParams()] * 4).tokens)
    assert np.isfinite(found.confidence).all() and np.isfinite(found.entropy).all()


def test_noise_depends_on_each_of_its_four_numbers() -> None:
    def noise(seed: int, block: int, step: int) -> np.ndarray:
        return noise_of(seed, block, step, BLOCK, 50)

    base = noise(7, 2, 1)
    for other in (noise(8, 2, 1), noise(7, 3, 1), noise(7, 2, 2), noise(7, 1, 2), noise(2, 7, 1)):
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.3
    for first in range(BLOCK):
        for second in range(first):
            assert abs(np.corrcoef(base[first], base[second])[0, 1]) < 0.5
    assert (noise(2**32 - 1, 0, 0) != noise(2**31 - 1, 0, 0)).all()


def test_noise_of_a_row_does_not_depend_on_the_batch() -> None:
    numbers = jnp.array([5, 6, 7], jnp.int32)
    together = gumbel_noise(jnp.array([5, 6, 7], jnp.uint32), numbers, numbers, BLOCK, 9)
    for row in range(3):
        np.testing.assert_array_equal(
            together[row], noise_of(5 + row, 5 + row, 5 + row, BLOCK, 9).astype(np.float32)
        )


def test_suppressed_ids_are_the_mask_id_and_the_padding() -> None:
    found = np.asarray(suppress(jnp.zeros((1, 2, 23), jnp.float32), CONFIG))
    assert np.flatnonzero(np.isneginf(found[0, 1])).tolist() == [4, 21, 22]
    plain = stub_config(vocab_size=23, mask_token_id=22)
    found = np.asarray(suppress(jnp.zeros((1, 2, 23), jnp.float32), plain))
    assert np.flatnonzero(np.isneginf(found[0, 0])).tolist() == [22]


def test_stop_ids_join_the_models_own_and_the_requests() -> None:
    assert stop_ids(SamplingParams(stop_token_ids=[7, 3]), CONFIG) == (1, 3, 7)
    assert stop_ids(SamplingParams(stop_token_ids=[7], ignore_eos=True), CONFIG) == (7,)
    assert stop_ids(SamplingParams(ignore_eos=True), CONFIG) == ()
