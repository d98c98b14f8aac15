"""`generate_bidirectional` against the plain NumPy loop, and what it promises and refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from herald_jax import LLM, CacheConfig, ConfigError, ModelConfig, SamplingParams, generate
from herald_jax.decoding.bidirectional import CACHES, generate_bidirectional
from herald_jax.decoding.generate import pad_prompts
from herald_jax.models import random_params
from tests.bidirectional_oracle import decode_bidirectional, run_window
from tests.oracle import (
    MARGIN,
    Decoded,
    assert_row,
    count_compilations,
    forward,
    sharpen,
    to_float64,
)

LLADA = ModelConfig(
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
    stop_token_ids=(0, 1),
    rope_theta=1234.5,
    rms_norm_eps=3e-5,
    qk_norm=False,
    attention="full",
)
# The mask id stands inside the vocabulary here, and the last ids are padding of the table.
VARIANTS = {
    "llada": LLADA,
    "dream": dataclasses.replace(
        LLADA,
        shifts_predictions=True,
        qkv_bias=True,
        num_kv_heads=3,
        block_length=5,
        mask_token_id=7,
        tokenizer_vocab_size=53,
    ),
}
PROMPT_LENGTHS = (0, 1, 3, 4, 7, 10)


@functools.cache
def params_of(variant: str) -> Any:
    return sharpen(random_params(VARIANTS[variant], seed=len(variant)))


@functools.cache
def oracle_params(variant: str) -> Any:
    return to_float64(params_of(variant))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Prompts that hold every kind of id: stop ids, mask ids and padding of the table too."""
    return [int(i) for i in np.random.default_rng([length, salt]).integers(0, 61, length)]


def compare(variant: str, cache: str, sampling: SamplingParams) -> list[Decoded]:
    config = VARIANTS[variant]
    prompts = [prompt_of(length) for length in PROMPT_LENGTHS]
    seeds = np.arange(len(prompts), dtype=np.uint32) * np.uint32(1_000_000_007)
    padded, sizes = pad_prompts(prompts, 4)
    output = generate_bidirectional(
        params_of(variant), padded, sizes, seeds, model=config, sampling=sampling, cache=cache
    )
    rows = [
        decode_bidirectional(config, oracle_params(variant), prompt, int(seed), sampling, cache)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    clear = [index for index, row in enumerate(rows) if row.margin > MARGIN]
    assert len(clear) >= len(rows) - 2, [row.margin for row in rows]
    for index in clear:
        assert_row(output, index, rows[index], commit_passes=0)
    return rows


DRAW = {"temperature": 0.8, "ignore_eos": True, "stop_token_ids": (2, 3)}
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("llada", "none", 11, {"strategy": "low_confidence_static"}),
    ("llada", "prefix", 18, {"strategy": "low_confidence_static"}),
    ("llada", "dual", 11, {"strategy": "low_confidence_static"}),
    ("llada", "none", 9, {"strategy": "threshold", "threshold": 0.3}),
    ("llada", "dual", 9, {"strategy": "factor", "factor": 1.4}),
    ("llada", "prefix", 8, {"strategy": "threshold", "threshold": 0.3, **DRAW}),
    ("llada", "dual", 3, {"strategy": "low_confidence_static", "denoising_steps": 2}),
    ("dream", "none", 12, {"strategy": "low_confidence_static"}),
    ("dream", "prefix", 10, {"strategy": "factor", "factor": 1.4}),
    ("dream", "dual", 12, {"strategy": "low_confidence_static"}),
    ("dream", "dual", 17, {"strategy": "threshold", "threshold": 0.3, **DRAW}),
    ("dream", "prefix", 18, {"strategy": "sequential", "denoising_steps": 2, **DRAW}),
]


@pytest.mark.parametrize(
    ("variant", "cache", "max_tokens", "options"), CASES, ids=range(len(CASES))
)
def test_equals_the_numpy_loop(
    variant: str, cache: str, max_tokens: int, options: dict[str, Any]
) -> None:
    rows = compare(variant, cache, SamplingParams(max_tokens=max_tokens, **options))
    assert len({tuple(row.tokens) for row in rows}) > 4


def test_the_reference_loop_runs_the_network_of_the_other_tests() -> None:
    """Windows that cover the text give the logits of a plain pass; kept keys are then seen."""
    config, params = LLADA, oracle_params("llada")
    tokens = prompt_of(9)
    kept: Any = {}
    found = run_window(config, params, tokens, range(9), kept)
    np.testing.assert_allclose([found[i] for i in range(9)], forward(config, params, tokens))
    part = run_window(config, params, tokens, range(3, 6), kept)
    np.testing.assert_allclose([part[i] for i in (3, 4, 5)], [found[i] for i in (3, 4, 5)])


def test_the_caches_are_different_approximations() -> None:
    """Otherwise the comparisons above would not tell one from another."""
    sampling = SamplingParams(max_tokens=12, strategy="low_confidence_static", ignore_eos=True)
    for variant, config in VARIANTS.items():
        rows = [
            decode_bidirectional(config, oracle_params(variant), prompt_of(3), 0, sampling, cache)
            for cache in CACHES
        ]
        none, prefix, dual = (np.array(row.logprobs) for row in rows)
        assert abs(none - prefix).max() > 1e-3 and abs(none - dual).max() > 1e-3
        assert abs(prefix - dual).max() > 1e-3


GREEDY = SamplingParams(max_tokens=10, strategy="threshold", threshold=0.4)


def run(
    variant: str,
    sampling: SamplingParams = GREEDY,
    prompts: list[list[int]] | None = None,
    cache: str = "dual",
    seeds: Any = None,
    params: Any = None,
) -> Any:
    """Six rows of width 12, so that calls share programs."""
    prompts = [prompt_of(length) for length in PROMPT_LENGTHS] if prompts is None else prompts
    assert len(prompts) == 6
    padded, lengths = pad_prompts([*prompts, [0] * 12])
    seeds = np.arange(6, dtype=np.uint32) if seeds is None else seeds
    return generate_bidirectional(
        params_of(variant) if params is None else params, padded[:6], lengths[:6], seeds,
        model=VARIANTS[variant], sampling=sampling, cache=cache,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_alone_equals_that_row_in_a_batch(variant: str) -> None:
    """Rows that finish a block early wait for the others, and must not go on meanwhile."""
    sampling = SamplingParams(max_tokens=10, strategy="threshold", threshold=0.3, temperature=0.7)
    together = jax.device_get(run(variant, sampling))
    assert len({tuple(steps) for steps in together.steps_per_block.tolist()}) > 2
    for row in range(1, 6):
        prompt = prompt_of(PROMPT_LENGTHS[row])
        alone = jax.device_get(
            run(variant, sampling, [prompt] * 6, seeds=np.full(6, row, np.uint32))
        )
        for name in ("tokens", "lengths", "finish_reasons", "steps_per_block", "forwards"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[row])
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=1e-4)


def test_what_stands_in_the_padding_of_a_prompt_changes_nothing() -> None:
    padded, lengths = pad_prompts([*(prompt_of(n) for n in PROMPT_LENGTHS), [0] * 12])
    other = np.where(np.arange(12) < lengths[:, None], padded, 1 + np.arange(12)).astype(np.int32)
    call = functools.partial(
        generate_bidirectional, params_of("llada"), model=LLADA, sampling=GREEDY, cache="dual"
    )
    seeds = np.arange(6, dtype=np.uint32)
    first, second = (call(text[:6], lengths[:6], seeds) for text in (padded, other))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_the_mask_id_in_a_prompt_is_a_token_like_any_other() -> None:
    prompt = [5, 60, 7, 9, 60]
    output = run("llada", prompts=[prompt] * 6)
    expected = decode_bidirectional(LLADA, oracle_params("llada"), prompt, 0, GREEDY, "dual")
    assert expected.margin > MARGIN and expected.text[:5] == prompt
    assert_row(output, 0, expected, commit_passes=0)


def test_a_longer_text_is_another_text() -> None:
    """Masks to come are seen: a program that hides them would give the same beginning."""
    short, long = (
        run("llada", dataclasses.replace(GREEDY, max_tokens=count, ignore_eos=True))
        for count in (4, 10)
    )
    assert not np.allclose(short.logprobs, long.logprobs[:, :4], atol=1e-2)


def test_a_stop_id_ends_the_row_and_spares_it_the_blocks_after() -> None:
    kernel = params_of("llada")["lm_head"]["kernel"]
    out = run("llada", params={**params_of("llada"), "lm_head": {"kernel": 0 * kernel}})
    # All logits are equal, and ties go to id 0, which is a stop id.
    assert out.lengths.tolist() == [1] * 6 and out.finish_reasons.tolist() == [1] * 6
    assert (np.asarray(out.steps_per_block)[:, 1:] == 0).all()
    assert out.forwards.tolist() == [4] * 6


def test_one_block_for_the_whole_text() -> None:
    """A block may be longer than what is asked for: then no text is ever left to the right."""
    model = dataclasses.replace(LLADA, block_length=32)
    sampling = SamplingParams(max_tokens=6, strategy="low_confidence_static", ignore_eos=True)
    prompt = prompt_of(7)
    padded, lengths = pad_prompts([prompt])
    found = {}
    for cache in ("prefix", "dual"):
        out = generate_bidirectional(
            params_of("llada"),
            padded,
            lengths,
            np.zeros(1, np.uint32),
            model=model,
            sampling=sampling,
            cache=cache,
        )
        expected = decode_bidirectional(model, oracle_params("llada"), prompt, 0, sampling, cache)
        assert expected.margin > MARGIN
        assert_row(out, 0, expected, commit_passes=0)
        found[cache] = np.asarray(out.logprobs)
    np.testing.assert_allclose(found["prefix"], found["dual"], atol=1e-5)


def test_other_values_in_the_same_shapes_compile_nothing() -> None:
    run("llada", prompts=[[3]] * 6)
    with count_compilations() as compiled:
        run("llada", prompts=[prompt_of(12)] * 6)
        run("llada", prompts=[[]] * 6, seeds=np.full(6, 9, np.uint32))
    assert compiled == []


def test_it_works_inside_a_larger_program() -> None:
    padded, lengths = pad_prompts([*(prompt_of(n) for n in PROMPT_LENGTHS), [0] * 12])
    call = functools.partial(generate_bidirectional, model=LLADA, sampling=GREEDY, cache="dual")
    seeds = np.arange(6, dtype=np.uint32)
    inside = jax.jit(lambda *a: call(*a).tokens.sum())(
        params_of("llada"), padded[:6], lengths[:6], seeds
    )
    assert int(inside) == int(run("llada").tokens.sum())


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"cache": "host"}, {}, "cache='host'.*'none', 'prefix' or 'dual'.*block-causal models"),
    ({"cache": None}, {}, "cache=None.*renewed"),
    ({"model": dataclasses.replace(LLADA, attention="block_causal")}, {}, "LLM for a block-causal"),
    ({}, {"denoising_steps": 5}, "denoising_steps=5"),
    ({}, {"n": 2}, "n=2"),
    ({}, {"max_tokens": 40_000}, "max_position_embeddings"),
]


@pytest.mark.parametrize(("changes", "options", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_honoured_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    call = generate_bidirectional
    while hasattr(call, "__wrapped__"):  # the shape checker would step in before the message
        call = call.__wrapped__  # type: ignore[attr-defined]
    arguments = {"model": LLADA, "sampling": SamplingParams(**options), **changes}
    prompts = np.zeros((2, 4), np.int32)
    with pytest.raises(ConfigError, match=message):
        call({}, prompts, prompts[:, 0], prompts[:, 0], **arguments)


def test_block_decoding_says_what_to_use_instead() -> None:
    prompts = np.zeros((2, 4), np.int32)
    with pytest.raises(ConfigError, match=r"attention='full'.*herald_jax\.generate_bidirectional"):
        generate({}, prompts, prompts[:, 0], prompts[:, 0], model=LLADA, sampling=GREEDY)
    with pytest.raises(ConfigError, match="None are ever final.*to keep on the host"):
        LLM.from_params(LLADA, params_of("llada"))
    shifted = dataclasses.replace(LLADA, attention="block_causal", shifts_predictions=True)
    with pytest.raises(ConfigError, match=r"shifts_predictions=True.*herald_jax\.generate"):
        LLM.from_params(shifted, params_of("llada"), cache=CacheConfig())
