"""`generate` against the plain NumPy loop, and what it promises about batches and limits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_jax._checks import ConfigError
from herald_jax.configs import ModelConfig
from herald_jax.decoding.generate import generate, pad_prompts
from herald_jax.models import random_params
from herald_jax.sampling import SamplingParams
from tests.oracle import (
    MARGIN,
    Decoded,
    assert_row,
    count_compilations,
    decode,
    sharpen,
    to_float64,
)

CONFIG = ModelConfig(
    family="test",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    block_length=4,
    mask_token_id=60,
    stop_token_ids=(1,),
    rope_theta=1234.5,
    rms_norm_eps=3e-5,
)
# The mask id stands inside the vocabulary here, and the last ids are padding of the table.
VARIANTS = {
    "plain": CONFIG,
    "bias": dataclasses.replace(CONFIG, qkv_bias=True, qk_norm=False, mask_token_id=7),
    "tied": dataclasses.replace(CONFIG, tie_word_embeddings=True, tokenizer_vocab_size=53),
    "half-rotary": dataclasses.replace(
        CONFIG, rotary_fraction=0.5, mask_token_id=0, num_kv_heads=3, block_length=5
    ),
    "shifted": dataclasses.replace(
        CONFIG,
        shifts_predictions=True,
        qkv_bias=True,
        qk_norm=False,
        block_length=8,
        mask_token_id=7,
        tokenizer_vocab_size=53,
    ),
}
PROMPT_LENGTHS = (0, 1, 3, 4, 5, 8, 9, 18)


@functools.cache
def params_of(variant: str) -> Any:
    return sharpen(random_params(VARIANTS[variant], seed=len(variant)))


@functools.cache
def oracle_params(variant: str) -> Any:
    return to_float64(params_of(variant))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Prompts that hold every kind of id: stop ids, mask ids and padding of the table too."""
    return [int(i) for i in np.random.default_rng([length, salt]).integers(0, 61, length)]


def compare(
    variant: str, sampling: SamplingParams, lengths: tuple[int, ...] = PROMPT_LENGTHS
) -> list[Decoded]:
    config = VARIANTS[variant]
    prompts = [prompt_of(length) for length in lengths]
    seeds = np.arange(len(lengths), dtype=np.uint32) * np.uint32(1_000_000_007)
    padded, sizes = pad_prompts(prompts, 4)
    output = generate(params_of(variant), padded, sizes, seeds, model=config, sampling=sampling)
    rows = [
        decode(config, oracle_params(variant), prompt, int(seed), sampling)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    clear = [index for index, row in enumerate(rows) if row.margin > MARGIN]
    assert len(clear) >= len(rows) - 2, [row.margin for row in rows]
    for index in clear:
        assert_row(output, index, rows[index])
    return rows


DRAW = {"temperature": 0.8, "ignore_eos": True}
CASES = [
    ("plain", {"strategy": "low_confidence_static"}),
    ("plain", {"strategy": "low_confidence_dynamic", "threshold": 0.3}),
    ("bias", {"strategy": "sequential", "denoising_steps": 3}),
    ("tied", {"strategy": "entropy_bounded", "entropy_bound": 4.0}),
    ("half-rotary", {"strategy": "low_confidence_static", "denoising_steps": 2}),
    ("tied", {"strategy": "low_confidence_dynamic", "denoising_steps": 1}),
    ("plain", {"strategy": "low_confidence_static", "denoising_steps": 3, **DRAW}),
    (
        "tied",
        {"strategy": "low_confidence_static", "confidence": "filtered", "top_k": 7, "top_p": 0.8}
        | DRAW,
    ),
    (
        "bias",
        {"strategy": "low_confidence_dynamic", "threshold": 0.5, "confidence": "scaled"}
        | {"temperature": 0.4},
    ),
    (
        "half-rotary",
        {"strategy": "low_confidence_dynamic", "threshold": 0.25, "top_p": 0.7}
        | {"denoising_steps": 2}
        | DRAW,
    ),
    ("half-rotary", {"strategy": "sequential", "top_k": 5, "confidence": "filtered"} | DRAW),
    (
        "plain",
        {"strategy": "entropy_bounded", "entropy_bound": 3.0, "confidence": "scaled"}
        | {"top_p": 0.9}
        | DRAW,
    ),
    (
        "bias",
        {"strategy": "entropy_bounded", "entropy_bound": 1.0, "confidence": "filtered"}
        | {"top_k": 4, "denoising_steps": 3}
        | DRAW,
    ),
    ("shifted", {"strategy": "low_confidence_static"}),
    ("shifted", {"strategy": "sub_blocks", "threshold": 0.3}),
    ("shifted", {"strategy": "sub_blocks", "threshold": 0.2, "denoising_steps": 3, **DRAW}),
]


@pytest.mark.parametrize(("variant", "options"), CASES, ids=range(len(CASES)))
def test_equals_the_numpy_loop(variant: str, options: dict[str, Any]) -> None:
    stops = tuple(range(2, 8)) if options.get("ignore_eos") else ()
    rows = compare(variant, SamplingParams(max_tokens=10, stop_token_ids=stops, **options))
    assert len({tuple(row.tokens) for row in rows}) > 4


GREEDY = SamplingParams(max_tokens=7, denoising_steps=3, threshold=0.4)
SAMPLED = SamplingParams(
    max_tokens=7, strategy="low_confidence_static", denoising_steps=3, temperature=1.0, top_p=0.95
)


def run(
    prompts: list[list[int]], sampling: SamplingParams, seeds: Any = None, params: Any = None
) -> Any:
    """Eight rows of width 20, so that all calls with one `sampling` share a program."""
    assert len(prompts) == 8
    padded, lengths = pad_prompts([*prompts, [0] * 20])
    seeds = np.arange(8, dtype=np.uint32) if seeds is None else seeds
    params = params_of("plain") if params is None else params
    return generate(params, padded[:8], lengths[:8], seeds, model=CONFIG, sampling=sampling)


def test_the_mask_id_in_a_prompt_is_a_token_like_any_other() -> None:
    """Masked positions found by comparing ids rewrite prompts that hold the mask id."""
    prompt = [5, 60, 7, 9, 60]
    output = run([prompt] * 8, GREEDY)
    expected = decode(CONFIG, oracle_params("plain"), prompt, 0, GREEDY)
    assert expected.margin > MARGIN
    assert expected.text[:5] == prompt
    for row in range(8):
        assert_row(output, row, expected)
    other = run([[5, 3, 7, 9, 3]] * 8, GREEDY)
    assert not np.allclose(other.logprobs[0], output.logprobs[0], atol=1e-2)


def test_what_stands_in_the_padding_of_a_prompt_changes_nothing() -> None:
    """Padded positions that are attended to, because a mask is accepted and then ignored."""
    prompts = [prompt_of(length) for length in (0, 1, 3, 4, 5, 9, 13, 20)]
    padded, lengths = pad_prompts(prompts)
    other = np.where(np.arange(20) < lengths[:, None], padded, 1 + np.arange(20))
    seeds = np.arange(8, dtype=np.uint32)
    first, second = (
        generate(params_of("plain"), p, lengths, seeds, model=CONFIG, sampling=GREEDY)
        for p in (padded, other.astype(np.int32))
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert (first.lengths > 0).all()


def test_ids_that_must_not_be_emitted_are_not_even_when_the_model_prefers_them() -> None:
    """The mask id as an output token runs the step budget out and reaches the text."""
    config = VARIANTS["plain"]
    params = params_of("plain")
    kernel = np.array(params["lm_head"]["kernel"])
    kernel[:, config.mask_token_id] = 3 * kernel[:, 30]
    greedy_at_30 = {**params, "lm_head": {"kernel": jax.numpy.asarray(kernel)}}
    output = run([prompt_of(length) for length in PROMPT_LENGTHS], GREEDY, params=greedy_at_30)
    text = np.asarray(output.tokens)
    assert not (text == config.mask_token_id).any()
    assert (text >= -1).all() and (np.asarray(output.lengths) > 0).all()
    for row in range(1, 8):
        expected = decode(
            config, to_float64(greedy_at_30), prompt_of(PROMPT_LENGTHS[row]), row, GREEDY
        )
        if expected.margin > MARGIN:
            assert_row(output, row, expected)


def test_samples_of_one_prompt_differ_by_seed_and_repeat_with_it() -> None:
    """A key that is not advanced gives the same text for every sample."""
    prompt = prompt_of(5)
    output = run([prompt] * 8, SAMPLED)
    texts = {tuple(row) for row in np.asarray(output.tokens).tolist()}
    assert len(texts) >= 6
    # Other row, other neighbours, same seed: same text.
    again = run([prompt] * 8, SAMPLED, seeds=np.arange(8, dtype=np.uint32)[::-1].copy())
    np.testing.assert_array_equal(again.tokens[::-1], output.tokens)
    same = run([prompt] * 8, SAMPLED, seeds=np.full(8, 2**32 - 1, np.uint32))
    assert (np.asarray(same.tokens) == np.asarray(same.tokens)[0]).all()
    wide = run([prompt] * 8, SAMPLED, seeds=np.full(8, 2**32 - 1, np.int64))
    np.testing.assert_array_equal(wide.tokens, same.tokens)


def test_greedy_rows_do_not_read_their_seed() -> None:
    """Temperature 0 that still draws."""
    prompts = [prompt_of(length) for length in PROMPT_LENGTHS]
    first = run(prompts, GREEDY)
    second = run(prompts, GREEDY, seeds=np.arange(100, 108, dtype=np.uint32))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_the_trajectory_adds_up_and_never_outruns_the_schedule() -> None:
    """Static strategies that write more tokens a step than the schedule asks for."""
    prompts = [prompt_of(length) for length in PROMPT_LENGTHS]
    output = jax.device_get(run(prompts, SAMPLED))
    for row, length in enumerate(PROMPT_LENGTHS):
        count = int(output.lengths[row])
        steps = output.steps_per_block[row]
        blocks = int((steps > 0).sum())
        assert int(output.forwards[row]) == steps.sum() + blocks
        place = (length % 4 + np.arange(count)) // 4
        for block in range(blocks):
            committed = output.unmask_steps[row, :count][place == block]
            counts = np.bincount(committed, minlength=3)
            assert (counts <= [2, 1, 1]).all()
            assert (committed < steps[block]).all()
        assert (steps[:blocks] <= 3).all()


@functools.cache
def batch_sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, threshold=0.5, temperature=0.6, top_k=20, denoising_steps=3
    )


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    max_tokens=st.sampled_from([1, 6, 13]),
    salt=st.integers(0, 99),
)
def test_a_row_alone_equals_that_row_in_a_batch(
    lengths: list[int], max_tokens: int, salt: int
) -> None:
    """Batches with different padding that decode wrongly, or rows that share randomness."""
    prompts = [prompt_of(length, salt) for length in lengths]
    padded, sizes = pad_prompts([*prompts, [0] * 20])
    padded, sizes = padded[:4], sizes[:4]
    seeds = np.arange(salt, salt + 4, dtype=np.uint32)
    call = functools.partial(
        generate, params_of("plain"), model=CONFIG, sampling=batch_sampling(max_tokens)
    )
    together = jax.device_get(call(padded, sizes, seeds))
    for row in range(4):
        sampling = batch_sampling(max_tokens)
        if not lengths[row]:
            # Its first block is the same at all positions: often a tie, broken by rounding.
            plain = decode(CONFIG, oracle_params("plain"), [], int(seeds[row]), sampling)
            if plain.margin < MARGIN:
                continue
        alone = jax.device_get(
            call(padded[row : row + 1], sizes[row : row + 1], seeds[row : row + 1])
        )
        for name in ("tokens", "lengths", "finish_reasons", "unmask_steps", "forwards"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[row])
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=1e-4)


def test_other_values_in_the_same_shapes_compile_nothing() -> None:
    run([[3]] * 8, GREEDY)
    with count_compilations() as compiled:
        run([prompt_of(20)] * 8, GREEDY)
        run([[]] * 8, GREEDY, seeds=np.full(8, 9, np.uint32))
    assert compiled == []


def test_generate_works_inside_a_larger_program() -> None:
    padded, lengths = pad_prompts([prompt_of(length) for length in PROMPT_LENGTHS] + [[0] * 20])
    seeds = np.arange(8, dtype=np.uint32)
    call = functools.partial(generate, model=CONFIG, sampling=GREEDY)
    inside = jax.jit(lambda *a: call(*a).tokens.sum())(
        params_of("plain"), padded[:8], lengths[:8], seeds
    )
    outside = call(params_of("plain"), padded[:8], lengths[:8], seeds).tokens.sum()
    assert int(inside) == int(outside)


PROMPTS = np.zeros((2, 4), np.int32)
BAD = {
    "prompts.shape": (PROMPTS[0], [1, 1], [0, 0]),
    "prompt_lengths.shape": (PROMPTS, [1], [0, 0]),
    "seeds.shape": (PROMPTS, [1, 1], [0]),
    "prompt_lengths=": (PROMPTS, [1, 5], [0, 0]),
    "prompt_lengths=.*-1": (PROMPTS, [1, -1], [0, 0]),
    r"prompts\[1, 2\]": (np.where(np.arange(8).reshape(2, 4) == 6, 61, 0), [1, 4], [0, 0]),
    r"prompts\[0, 0\]=-1": (np.full((2, 4), -1), [0, 0], [0, 0]),
    "seeds=": (PROMPTS, [1, 1], [0, -1]),
}


@pytest.mark.parametrize("message", BAD)
def test_arguments_that_cannot_be_used_are_named(message: str) -> None:
    prompts, lengths, seeds = (np.asarray(value) for value in BAD[message])
    # The shape checker would step in before the message that users see.
    call = getattr(generate, "__wrapped__", generate)
    while hasattr(call, "__wrapped__"):
        call = call.__wrapped__
    with pytest.raises(ConfigError, match=message):
        call({}, prompts, lengths, seeds, model=CONFIG, sampling=GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n=2"),
        ({"seed": 3}, "seed=3"),
        ({"stop": "end"}, "stop="),
        ({"denoising_steps": 5}, "denoising_steps=5"),
        ({"stop_token_ids": [61]}, "stop_token_ids=61"),
    ],
)
def test_options_that_generate_cannot_honour_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(
            {}, PROMPTS, PROMPTS[:, 0], PROMPTS[:, 0], model=CONFIG,
            sampling=SamplingParams(**options),
        )  # fmt: skip


def test_pad_prompts_rounds_the_width_up() -> None:
    padded, lengths = pad_prompts([[1, 2, 3, 4, 5], [6], []], multiple=4)
    assert padded.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6] + [0] * 7, [0] * 8]
    assert lengths.tolist() == [5, 1, 0]
    assert pad_prompts([[]])[0].shape == (1, 1)


@pytest.mark.parametrize("prompts", [[[1.5, 2]], ["12"], [[True]], [[2**40]], [[-1]]])
def test_padding_refuses_what_is_no_id(prompts):
    with pytest.raises(ConfigError, match=r"prompts\[0\]"):
        pad_prompts(prompts)


def test_padding_needs_a_width():
    with pytest.raises(ConfigError, match="multiple=0"):
        pad_prompts([[1]], multiple=0)
