"""The passes of one block, and whole rows, on tables of logits where every answer is known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.cache.dense import DenseCache
from herald_jax.decoding.generate import generate
from herald_jax.decoding.options import decoding_options, proposal_spec
from herald_jax.decoding.steps import BlockState, decode_block
from herald_jax.decoding.texts import FINISH_LENGTH, FINISH_STOP
from herald_jax.sampling import SamplingParams
from tests.stub_decoder import (
    STUB,
    StubDecoder,
    logits_for,
    run_block,
    stub_bind,
    stub_config,
    stub_params,
)

STEADY = {"strategy": "low_confidence_static"}
STATIC = SamplingParams(**STEADY)


@pytest.fixture
def stub_generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`generate` over a table; returns tokens, finish reason and the whole output of each row."""
    monkeypatch.setattr("herald_jax.decoding.generate.bind", stub_bind)
    # A table is no parameter of the model, and is what the stub reads.
    monkeypatch.setattr("herald_jax.decoding.generate.check_params", lambda model, params: None)

    def call(table: np.ndarray, sampling: SamplingParams, prompts: Any = ((),), config: Any = STUB):
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        padded = np.zeros((len(prompts), 5), np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        seeds = np.zeros(len(prompts), np.int32)
        out = generate(
            stub_params(jnp.asarray(table)), padded, lengths, seeds, model=config, sampling=sampling
        )
        texts = [
            np.asarray(out.tokens)[row, : int(out.lengths[row])].tolist()
            for row in range(len(prompts))
        ]
        return texts, np.asarray(out.finish_reasons).tolist(), out

    return call


def test_the_most_confident_position_comes_first() -> None:
    block = run_block(logits_for([2, 3, 4, 5], [3.0, 5.0, 4.0, 2.0]), STATIC)
    assert block.tokens == [2, 3, 4, 5]
    assert block.steps == [2, 0, 1, 3]
    margins = np.exp([3.0, 5.0, 4.0, 2.0])
    np.testing.assert_allclose(block.confidences, margins / (margins + 7), rtol=1e-5)
    assert block.state.steps.tolist() == [4]


def test_equal_confidences_go_from_left_to_right() -> None:
    assert run_block(logits_for([2, 3, 4, 5]), STATIC).steps == [0, 1, 2, 3]
    two = SamplingParams(strategy="low_confidence_static", denoising_steps=2)
    assert run_block(logits_for([2, 3, 4, 5]), two).steps == [0, 0, 1, 1]


def test_equal_logits_go_to_the_lower_id() -> None:
    table = logits_for([6, 6, 6, 6])
    table[:, 3] = 3.0
    assert run_block(table, STATIC).tokens == [3, 3, 3, 3]


def test_the_remainder_of_the_schedule_comes_first() -> None:
    config = stub_config(block_length=7)
    sampling = SamplingParams(strategy="sequential", denoising_steps=3)
    block = run_block(logits_for([2] * 7), sampling, config=config)
    assert block.steps == [0, 0, 0, 1, 1, 2, 2]


def test_every_step_reads_fresh_logits() -> None:
    table = np.stack([logits_for([t] * 4) for t in (2, 3, 4, 5, 6)])
    block = run_block(table, SamplingParams(strategy="sequential", denoising_steps=2))
    # Two tokens stand before the second step, hence table row 2.
    assert block.tokens == [2, 2, 4, 4]


def test_a_prompt_tail_is_kept_even_in_one_step() -> None:
    """A schedule that asks for more positions than are masked overwrites the prompt's tail."""
    one = SamplingParams(strategy="low_confidence_static", denoising_steps=1)
    block = run_block(logits_for([2, 3, 4, 5], [9.0, 9.0, 1.0, 1.0]), one, prompt=(7, 8))
    assert block.tokens == [7, 8, 4, 5]
    assert block.steps == [-1, -1, 0, 0]
    assert block.confidences[:2] == [0.0, 0.0]


def test_the_commit_pass_sees_the_finished_tokens() -> None:
    """Keys and values of a half-masked block that stay in the cache."""
    block = run_block(np.tile(logits_for([2, 3, 4, 5]), (2, 1)), STATIC, index=1, prompt=(7,))
    for layer in range(STUB.num_layers):
        assert block.cache.k[layer][0, 0, :, 0].tolist() == [0, 0, 0, 0, 7, 3, 4, 5]
        assert block.cache.v[layer][0, 0, :, 1].tolist() == [0, 0, 0, 0, -7, -3, -4, -5]


def test_rows_that_are_not_active_keep_block_and_cache() -> None:
    rows = 3
    options = jax.tree.map(jnp.asarray, decoding_options([STATIC] * rows, [0] * rows, STUB))
    state = BlockState.start(
        jnp.array([0, 2, 1], jnp.int32),
        jnp.full((rows, 4), 6, jnp.int32),
        jnp.ones((rows, 4), bool),
    )
    cache = DenseCache.zeros(STUB, rows, 8, jnp.float32)
    decoder = StubDecoder(STUB, jnp.asarray(np.tile(logits_for([2, 3, 4, 5]), (3, 1))))
    is_active = jnp.array([True, False, False])
    cache, state = decode_block(decoder, cache, state, is_active, options, proposal_spec([STATIC]))
    assert state.tokens.tolist() == [[2, 3, 4, 5], [6] * 4, [6] * 4]
    assert state.steps.tolist() == [4, 0, 0]
    assert cache.k[1][:, 0, :, 0].tolist() == [[2, 3, 4, 5, 0, 0, 0, 0], [0.0] * 8, [0.0] * 8]


def test_a_model_that_always_prefers_the_mask_id_still_ends() -> None:
    """All masked positions predict the mask id: an endless loop, or mask ids in the text."""
    table = logits_for([2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0])
    table[:, STUB.mask_token_id] = 20.0
    for strategy in ("low_confidence_dynamic", "entropy_bounded"):
        block = run_block(table, SamplingParams(strategy=strategy))
        assert block.tokens == [2, 3, 4, 5]
        # The mask id has no share in the confidence either.
        margins = np.exp([1.0, 2.0, 3.0, 4.0])
        np.testing.assert_allclose(block.confidences, margins / (margins + 7), rtol=1e-5)


def test_the_logprob_leaves_the_mask_id_out() -> None:
    table = logits_for([2, 3, 4, 5])
    table[:, STUB.mask_token_id] = 20.0
    logprobs = np.asarray(run_block(table, STATIC).state.logprobs)[0]
    np.testing.assert_allclose(logprobs, 3 - np.log(np.exp(3) + 7), rtol=1e-5)


def test_ids_beyond_the_tokenizer_are_not_emitted() -> None:
    """Padding of the embedding table that is chosen as a token."""
    config = stub_config(tokenizer_vocab_size=6, mask_token_id=7)
    table = logits_for([2, 3, 4, 5])
    table[:, 6:] = 20.0
    block = run_block(table, STATIC, config=config)
    assert block.tokens == [2, 3, 4, 5]
    np.testing.assert_allclose(block.confidences, np.exp(3) / (np.exp(3) + 5), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["low_confidence_dynamic", "entropy_bounded", "sequential"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_end_without_the_mask_id(
    strategy: str, temperature: float
) -> None:
    table = np.full((4, STUB.vocab_size), np.nan, np.float32)
    block = run_block(table, SamplingParams(strategy=strategy, temperature=temperature))
    assert STUB.mask_token_id not in block.tokens
    assert block.state.steps.tolist() == [4]


def test_a_position_that_is_not_a_number_comes_last() -> None:
    table = logits_for([2, 3, 4, 5], [1.0, 1.0, 2.0, 3.0])
    table[0] = np.nan
    assert run_block(table, STATIC).steps == [3, 2, 1, 0]


def test_entropy_bound_commits_what_fits_below_it() -> None:
    table = logits_for([2, 3, 4, 5], [5.0, 8.0, 7.0, 1.0])
    p = np.exp(table[:, :8]) / np.exp(table[:, :8]).sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1)
    rising = np.cumsum(np.sort(entropy))
    for count in (1, 2, 3):
        bound = float(rising[count - 1] + rising[count]) / 2
        sampling = SamplingParams(strategy="entropy_bounded", entropy_bound=bound)
        first = [i for i, step in enumerate(run_block(table, sampling).steps) if step == 0]
        assert first == sorted([1, 2, 0, 3][:count])


def test_raw_confidence_follows_the_margins_at_a_low_temperature() -> None:
    """Confidence taken after a small temperature saturates at 1 and decays to left-to-right."""
    table = logits_for([2, 3, 4, 5], [2.0, 4.0, 3.0, 5.0])
    options = {**STEADY, "temperature": 0.1}
    raw = run_block(table, SamplingParams(**options))
    assert raw.tokens == [2, 3, 4, 5]
    assert raw.steps == [3, 1, 2, 0]
    scaled = run_block(table, SamplingParams(**options, confidence="scaled"))
    assert scaled.confidences == [1.0] * 4
    assert scaled.steps == [0, 1, 2, 3]


def test_stop_id_committed_before_the_positions_in_front_of_it(stub_generate: Any) -> None:
    """A stop seen before earlier positions are settled ends the text early, or is not cut."""
    table = logits_for([2, 3, 1, 1], [1.0, 3.0, 5.0, 2.0])
    texts, reasons, out = stub_generate(table, SamplingParams(**STEADY, max_tokens=9))
    assert texts == [[2, 3, 1]]
    assert reasons == [FINISH_STOP]
    assert out.unmask_steps[0, :4].tolist() == [3, 1, 0, -1]
    assert out.forwards.tolist() == [5]
    assert out.logprobs[0, 3:].tolist() == [0.0] * 6


def test_a_stop_id_in_the_prompt_ends_nothing(stub_generate: Any) -> None:
    table = logits_for([2] * 8)
    texts, reasons, _ = stub_generate(table, SamplingParams(**STEADY, max_tokens=3), [(1, 1, 5)])
    assert texts == [[2, 2, 2]] and reasons == [FINISH_LENGTH]


@pytest.mark.parametrize(("max_tokens", "reason"), [(2, FINISH_LENGTH), (3, FINISH_STOP)])
def test_a_stop_id_counts_up_to_max_tokens_and_not_past_it(
    stub_generate: Any, max_tokens: int, reason: int
) -> None:
    table = logits_for([2, 3, 1, 5])
    texts, reasons, _ = stub_generate(table, SamplingParams(**STEADY, max_tokens=max_tokens))
    assert texts == [[2, 3, 1][:max_tokens]] and reasons == [reason]


def test_own_stop_ids_are_added_and_eos_can_be_ignored(stub_generate: Any) -> None:
    table = logits_for([2, 1, 5, 6])
    both = SamplingParams(**STEADY, max_tokens=4, stop_token_ids=(5,))
    assert stub_generate(table, both)[0] == [[2, 1]]
    own = SamplingParams(**STEADY, max_tokens=4, stop_token_ids=(5,), ignore_eos=True)
    assert stub_generate(table, own)[0] == [[2, 1, 5]]
    none = SamplingParams(**STEADY, max_tokens=4, ignore_eos=True)
    texts, reasons, _ = stub_generate(table, none)
    assert texts == [[2, 1, 5, 6]] and reasons == [FINISH_LENGTH]


def test_a_model_that_never_stops_ends_at_exactly_max_tokens(stub_generate: Any) -> None:
    """Generation that only ends at a stop id, or that drops the last partial block."""
    table = logits_for([2 + i % 6 for i in range(20)])
    prompts = [(), (7,), (7,) * 4, (7,) * 5]
    texts, reasons, out = stub_generate(table, SamplingParams(**STEADY, max_tokens=10), prompts)
    for row, prompt in enumerate(prompts):
        start = len(prompt)
        assert texts[row] == [2 + i % 6 for i in range(start, start + 10)]
    assert reasons == [FINISH_LENGTH] * 4
    assert out.steps_per_block.tolist() == [[4, 4, 4, 0], [3, 4, 4, 0], [4, 4, 4, 0], [3, 4, 4, 0]]


def test_a_block_larger_than_prompt_and_answer_gives_an_answer(stub_generate: Any) -> None:
    """Empty answers in a batch when the block is large."""
    config = stub_config(block_length=32)
    table = logits_for([2 + i % 6 for i in range(64)])
    sampling = SamplingParams(max_tokens=2, denoising_steps=3)
    prompts = [(), (7, 7, 7), (7, 7, 7, 7, 7)]
    texts, _, out = stub_generate(table, sampling, prompts, config)
    assert texts == [[2, 3], [5, 6], [7, 2]]
    # The whole block is denoised; three steps owe 11, 11 and 10 positions.
    assert out.steps_per_block[:, 0].tolist() == [3, 3, 3]


def test_more_steps_than_needed_are_not_taken(stub_generate: Any) -> None:
    table = logits_for([2] * 12, [9.0] * 12)
    sampling = SamplingParams(max_tokens=8, threshold=0.9)
    _, _, out = stub_generate(table, sampling)
    assert out.steps_per_block.tolist() == [[1, 1, 0]]
    assert out.forwards.tolist() == [4]


def test_a_mask_that_is_not_boolean_is_refused_or_means_the_same() -> None:
    """Integer masks where boolean ones are meant: inverted bits select other positions."""
    state = BlockState.start(
        jnp.zeros(1, jnp.int32), jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
    )
    with pytest.raises(Exception, match="is_masked"):
        BlockState.start(state.index, state.tokens, jnp.ones((1, 4), jnp.int32))
