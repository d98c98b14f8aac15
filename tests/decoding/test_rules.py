"""Unmask rules against a restatement in plain Python, over ties, edges and odd values."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_jax.decoding.options import decoding_options
from herald_jax.decoding.rules import RULES, BlockView, most_confident, quota
from herald_jax.sampling import SamplingParams
from tests.oracle import best_first, choose
from tests.stub_decoder import stub_config

BLOCK = 6
ROWS = 3
# Few values, so that ties are common; halves and quarters are exact in fp32.
confidences = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 1.0, math.nan])
entropies = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.5])


def place(rows: int) -> tuple[Any, Any, Any]:
    """Seed, block and step of rows whose rules do not look at them."""
    return jnp.arange(rows, dtype=jnp.uint32), jnp.arange(rows), jnp.arange(rows)


def rows_of(values: Any) -> Any:
    row = st.lists(values, min_size=BLOCK, max_size=BLOCK)
    return st.lists(row, min_size=ROWS, max_size=ROWS)


@pytest.mark.parametrize("strategy", RULES)
@settings(max_examples=25)
@given(
    is_masked=rows_of(st.booleans()),
    confidence=rows_of(confidences),
    entropy=rows_of(entropies),
    options=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=ROWS, max_size=ROWS),
    denoising_steps=st.integers(1, BLOCK),
    step=st.integers(0, BLOCK),
)
def test_rules_choose_what_the_plain_rules_choose(
    strategy: str,
    is_masked: list[list[bool]],
    confidence: list[list[float]],
    entropy: list[list[float]],
    options: list[float],
    denoising_steps: int,
    step: int,
) -> None:
    rule = RULES[strategy].of_rows(jnp.asarray(options, jnp.float32))
    steps = jnp.full(ROWS, denoising_steps, jnp.int32)
    view = BlockView(
        jnp.asarray(is_masked),
        jnp.asarray(confidence, jnp.float32),
        jnp.asarray(entropy, jnp.float32),
        quota(jnp.full(ROWS, step, jnp.int32), steps, BLOCK),
        *place(ROWS),
    )
    chosen = np.asarray(rule(view))
    for row in range(ROWS):
        masked = [i for i in range(BLOCK) if is_masked[row][i]]
        named = {} if rule.option is None else {rule.option: options[row]}
        sampling = SamplingParams(strategy=strategy, denoising_steps=denoising_steps, **named)
        expected = choose(
            sampling,
            {i: confidence[row][i] for i in masked},
            {i: entropy[row][i] for i in masked},
            step,
            BLOCK,
        )
        assert np.flatnonzero(chosen[row]).tolist() == sorted(expected)


def view_of(confidence: list[float], count: int, entropy: list[float] | None = None) -> BlockView:
    values = jnp.asarray([confidence], jnp.float32)
    nats = values if entropy is None else jnp.asarray([entropy], jnp.float32)
    owed = jnp.array([count], jnp.int32)
    return BlockView(jnp.ones(values.shape, bool), values, nats, owed, *place(1))


def pick(strategy: str, option: float, view: BlockView) -> list[int]:
    rule = RULES[strategy].of_rows(jnp.array([option], jnp.float32))
    return np.flatnonzero(np.asarray(rule(view))[0]).tolist()


def test_the_threshold_itself_does_not_pass() -> None:
    view = view_of([0.5, 0.75, 0.5, 0.25], 1)
    assert pick("low_confidence_dynamic", 0.5, view) == [1]
    # None passes: the most confident, ties to the left.
    assert pick("low_confidence_dynamic", 0.75, view) == [1]
    assert pick("low_confidence_dynamic", 1.0, view_of([0.5, 0.25, 0.5, 0.25], 2)) == [0, 2]


def test_too_few_above_the_threshold_fall_back_to_the_quota() -> None:
    view = view_of([0.5, 0.95, 0.75, 0.25], 2)
    assert pick("low_confidence_dynamic", 0.9, view) == [1, 2]
    assert pick("low_confidence_dynamic", 0.6, view) == [1, 2]
    assert pick("low_confidence_dynamic", 0.3, view) == [0, 1, 2]


def test_fast_dllm_lets_the_threshold_itself_pass() -> None:
    view = view_of([0.5, 0.75, 0.5, 0.25], 1)
    assert pick("threshold", 0.5, view) == [0, 1, 2]
    assert pick("threshold", 0.625, view) == [1]
    # The most confident one is committed whatever the threshold is, ties to the left.
    assert pick("threshold", 1.0, view_of([0.5, 0.25, 0.5, 0.25], 0)) == [0]
    assert pick("threshold", 0.9, view_of([0.5, 0.95, 0.75, 0.25], 2)) == [1, 2]


def test_the_factor_asks_more_of_each_when_there_are_more() -> None:
    # (n + 1) (1 - c_n) is 0.25, 0.75, 1.0, 2.5 in falling order of confidence.
    view = view_of([0.75, 0.5, 0.875, 0.75], 1)
    assert pick("factor", 1.0, view) == [0, 2]  # the bound itself does not pass
    assert pick("factor", 1.25, view) == [0, 2, 3]
    assert pick("factor", 0.25, view) == [2]
    assert pick("factor", 3.0, view) == [0, 1, 2, 3]
    assert pick("factor", 0.25, view_of([0.75, 0.5, 0.875, 0.75], 3)) == [0, 2, 3]


def test_the_factor_does_not_take_the_last_one_that_fails() -> None:
    """The published code does, when all others pass."""
    assert pick("factor", 1.0, view_of([1.0, 1.0, 0.0], 1)) == [0, 1]
    assert pick("factor", 1.0, view_of([1.0, math.nan, 1.0], 1)) == [0, 2]


def test_sub_blocks_are_finished_from_the_left() -> None:
    """Six positions in parts of two."""
    view = view_of([0.25, 0.5, 1.0, 1.0, 1.0, 1.0], 1)
    assert pick("sub_blocks", 0.9, view) == [1]
    assert pick("sub_blocks", 0.5, view) == [1]
    assert pick("sub_blocks", 0.125, view) == [0, 1]
    assert pick("sub_blocks", 0.9, view._replace(quota=jnp.array([3], jnp.int32))) == [0, 1, 2]
    left = view._replace(is_masked=jnp.array([[False, False, False, True, True, True]]))
    assert pick("sub_blocks", 0.5, left) == [3]
    assert pick("sub_blocks", 0.5, left._replace(is_masked=left.is_masked & False)) == []


def test_the_entropy_bound_itself_is_not_below_the_bound() -> None:
    view = view_of([0.1] * 4, 1, [0.5, 0.25, 0.25, 1.0])
    assert pick("entropy_bounded", 1.0, view) == [1, 2]
    assert pick("entropy_bounded", 1.0 + 1e-6, view) == [0, 1, 2]
    assert pick("entropy_bounded", 0.0, view) == [1]


def test_entropies_that_are_not_numbers_come_last() -> None:
    view = view_of([0.1] * 4, 2, [math.nan, 0.5, math.nan, 0.1])
    assert pick("entropy_bounded", 0.0, view) == [1, 3]
    assert pick("entropy_bounded", 9.0, view) == [1, 3]


def test_quota_gives_the_remainder_to_the_first_steps() -> None:
    def schedule(steps: int, block_length: int) -> list[int]:
        return [
            int(quota(jnp.array([s], jnp.int32), jnp.array([steps], jnp.int32), block_length)[0])
            for s in range(steps)
        ]

    assert schedule(3, 8) == [3, 3, 2]
    assert schedule(4, 4) == [1] * 4
    assert schedule(5, 7) == [2, 2, 1, 1, 1]
    for steps in range(1, 8):
        assert sum(schedule(steps, 7)) == 7


@settings(max_examples=25)
@given(
    is_masked=rows_of(st.booleans()),
    score=rows_of(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0, math.inf, math.nan])),
    counts=st.lists(st.integers(0, BLOCK + 1), min_size=ROWS, max_size=ROWS),
)
def test_most_confident_ranks_masked_positions_only(
    is_masked: list[list[bool]], score: list[list[float]], counts: list[int]
) -> None:
    chosen = np.asarray(
        most_confident(
            jnp.asarray(score, jnp.float32), jnp.asarray(is_masked), jnp.asarray(counts, jnp.int32)
        )
    )
    for row in range(ROWS):
        # -inf and NaN share the last place.
        scores = {
            i: -1e9 if math.isnan(score[row][i]) or score[row][i] == -math.inf else score[row][i]
            for i in range(BLOCK)
            if is_masked[row][i]
        }
        expected = best_first({i: min(s, 1e9) for i, s in scores.items()}, counts[row])
        assert np.flatnonzero(chosen[row]).tolist() == sorted(expected)


def test_every_rule_names_its_option_and_default() -> None:
    for name, rule in RULES.items():
        assert (rule.option is None) == (rule.option_default is None), name
        if rule.option is not None:
            assert SamplingParams(strategy=name).rule_option == rule.option_default
            assert SamplingParams(strategy=name, **{rule.option: 0.125}).rule_option == 0.125


def test_rows_with_different_rules_are_each_decided_by_their_own() -> None:
    rows = [
        SamplingParams(strategy="sequential", denoising_steps=2),
        SamplingParams(threshold=0.5),
        SamplingParams(strategy="entropy_bounded", entropy_bound=0.75),
        SamplingParams(strategy="low_confidence_static", denoising_steps=3),
        SamplingParams(threshold=0.125),
    ]
    rng = np.random.default_rng(0)
    confidence, entropy = rng.random((2, 5, BLOCK)).astype(np.float32)
    is_masked = rng.random((5, BLOCK)) < 0.8
    config = stub_config(block_length=BLOCK)
    options = decoding_options(rows, [0] * 5, config)
    owed = quota(jnp.zeros(5, jnp.int32), jnp.asarray(options.rows.denoising_steps), BLOCK)
    view = BlockView(
        jnp.asarray(is_masked),
        jnp.asarray(confidence),
        jnp.asarray(entropy),
        owed,
        *place(len(owed)),
    )
    chosen = np.asarray(options.rule(view))
    for row, sampling in enumerate(rows):
        masked = np.flatnonzero(is_masked[row]).tolist()
        expected = choose(
            sampling,
            {i: float(confidence[row, i]) for i in masked},
            {i: float(entropy[row, i]) for i in masked},
            0,
            BLOCK,
        )
        assert np.flatnonzero(chosen[row]).tolist() == sorted(expected)
