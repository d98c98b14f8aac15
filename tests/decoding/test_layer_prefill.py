"""The layer-segmented prefill against the dense one: same keys, values and first queries."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax._checks import ConfigError
from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding import layer_prefill
from herald_jax.decoding.layer_prefill import KnownKeys, LayerPrefill
from herald_jax.decoding.steps import prefill_chunk
from herald_jax.models import bind, random_params
from tests.oracle import count_compilations

BLOCK, CHUNK, CAPACITY = 4, 24, 68  # the capacity is no multiple of the chunk or a bucket
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"qkv_bias": True},
    "experts": {
        "num_experts": 6,
        "experts_per_token": 2,
        "expert_intermediate_size": 10,
        "num_shared_experts": 1,
        "first_dense_layers": 1,
        "router_score": "sigmoid",
        "router_bias": True,
        "rotary_fraction": 0.5,
    },
}
# Around one block, the buckets (4, 8, 24), one and two chunks, and the whole capacity.
LENGTHS = (0, 3, 4, 5, 8, 11, 12, 23, 24, 26, 31, 48, 52, 59, 64, 67)


@functools.cache
def model(variant: str) -> tuple[ModelConfig, Any]:
    config = ModelConfig(
        family="test",
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        block_length=BLOCK,
        mask_token_id=60,
        rope_theta=1234.5,
        rms_norm_eps=3e-5,
    )
    config = dataclasses.replace(config, **VARIANTS[variant])
    return config, random_params(config, seed=len(variant))


@functools.cache
def prefill_of(variant: str) -> LayerPrefill:
    return LayerPrefill(model(variant)[0], capacity=CAPACITY, chunk_tokens=CHUNK)


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 60, length).astype(np.int32)


def split(prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    whole = len(prompt) // BLOCK * BLOCK
    return prompt[:whole], prompt[whole:]


@functools.partial(jax.jit, static_argnames="variant")
def dense_program(variant: str, params: Any, tokens: jax.Array, block: jax.Array, start: jax.Array):
    """All layers' cache of one chunk that holds the prompt, and every layer's queries."""
    config, _ = model(variant)
    decoder = bind(config, params)
    cache = DenseCache.zeros(config, 1, CAPACITY, jnp.float32)
    cache = prefill_chunk(decoder, cache, tokens, jnp.int32(0))
    queries = []
    attend = cache.block_attend(start[None])

    def keep(layer: int, q: jax.Array, fresh: Any) -> jax.Array:
        queries.append(q[0])
        return attend(layer, q, fresh)

    decoder(block, start + jnp.arange(BLOCK)[None], keep)
    return cache, queries


def dense(variant: str, prompt: np.ndarray) -> tuple[DenseCache, list[jax.Array]]:
    whole, tail = split(prompt)
    # Padding stands after the text, in blocks that the text does not see.
    tokens = np.pad(whole, (0, CAPACITY - len(whole)), constant_values=7)[None]
    block = np.full((1, BLOCK), 60, np.int32)
    block[0, : len(tail)] = tail
    return dense_program(variant, model(variant)[1], tokens, block, np.int32(len(whole)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_the_dense_prefill(variant: str, length: int) -> None:
    """Wrong offsets in a later chunk, padding that is written or seen, or a wrong layer."""
    config, params = model(variant)
    prompt = prompt_of(length)
    whole, tail = split(prompt)
    cache, queries = dense(variant, prompt)
    seen = []

    def on_layer(layer: int, k: jax.Array, v: jax.Array, q: jax.Array | None) -> None:
        assert k.shape == v.shape == (1, 2, CAPACITY, 8)
        n = len(whole)
        for ours, theirs in ((k, cache.k[layer]), (v, cache.v[layer])):
            np.testing.assert_allclose(ours[:, :, :n], theirs[:, :, :n], rtol=0, atol=1e-5)
            assert not np.asarray(ours[:, :, n:]).any()
        assert q is not None
        np.testing.assert_allclose(q, queries[layer], rtol=0, atol=1e-5)
        seen.append(layer)

    prefill_of(variant).run(params, whole, tail, on_layer)
    assert seen == (list(range(config.num_layers)) if len(whole) else [])


@pytest.mark.parametrize(("length", "known_tokens"), [(26, 24), (64, 48), (59, 56)])
@pytest.mark.parametrize("first_layer", [0, 1])
def test_known_keys_change_no_bit(length: int, known_tokens: int, first_layer: int) -> None:
    """Also where all chunks are known, and where the source holds other things behind them."""
    _, params = model("dense")
    whole, tail = split(prompt_of(length))
    plain = list(prefill_of("dense").layers(params, whole, tail))
    fetched = []

    def fetch(layer: int) -> tuple[jax.Array, jax.Array]:
        fetched.append(layer)
        old = plain[layer]
        behind = (jnp.arange(CAPACITY) >= known_tokens)[:, None]
        return jnp.where(behind, jnp.nan, old.k), jnp.where(behind, 7.0, old.v)

    known = KnownKeys(known_tokens, first_layer, fetch)
    ours = list(prefill_of("dense").layers(params, whole, tail, known))
    assert fetched == list(range(first_layer, 3))
    for one, other in zip(ours, plain, strict=True):
        for a, b in zip(one[1:], other[1:], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a, b)


def test_the_comparison_can_tell_layers_and_positions_apart() -> None:
    """Equal keys everywhere would pass the test above whatever the code did."""
    cache, queries = dense("dense", prompt_of(26))
    k = np.stack(cache.k)[:, 0, :, :24]
    flat = k.reshape(-1, 8)
    distance = np.abs(flat[:, None] - flat[None]).max(-1) + np.eye(len(flat))
    assert distance.min() > 1e-3
    assert np.abs(np.asarray(queries[0]) - np.asarray(queries[1])).max() > 1e-2


def test_padding_of_the_last_chunk_may_be_anything() -> None:
    _, params = model("dense")
    prefill = prefill_of("dense")
    k, v = jnp.zeros((2, 1, 2, CAPACITY, 8))
    results = []
    for filler in (0, 9):
        tokens = np.concatenate([prompt_of(12), np.full(12, filler, np.int32)])
        hidden = prefill.embed(params, tokens)
        place = np.int32(64), np.int32(4)  # the bucket reaches past the capacity
        results.append(prefill.chunk(params, 1, hidden, k.copy(), v.copy(), *place))
    for first, second in zip(*results, strict=True):
        if first.ndim == 3:
            np.testing.assert_array_equal(first[:, :4], second[:, :4])
        else:
            np.testing.assert_array_equal(first, second)
    written = np.asarray(results[0][1])[0].any((0, 2))
    assert written.nonzero()[0].tolist() == [64, 65, 66, 67]


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_prompt_compiles_after_the_warm_up(variant: str) -> None:
    config, params = model(variant)
    # Another capacity, so that the programs of the other tests do not count.
    prefill = LayerPrefill(config, capacity=CAPACITY - BLOCK, chunk_tokens=CHUNK)
    assert prefill.buckets == (4, 8, 24)
    for program in ("_zeros", "_embed", "_chunk", "_query", "_first_tokens"):
        getattr(layer_prefill, program).clear_cache()
    with count_compilations() as compiled:
        prefill.warmup(params)
    structures = 2 if variant == "experts" else 1
    assert len(compiled) == prefill.program_count == structures * 4 + 3 + 2
    with count_compilations() as compiled:
        for length in (4, 9, 30, 51, 64):
            for tail in (split(prompt_of(length))[1], None):
                for output in prefill.layers(params, split(prompt_of(length))[0], tail):
                    output.v.block_until_ready()
    assert compiled == []


def live_sizes(known: set[int]) -> list[int]:
    return sorted(x.size for x in jax.live_arrays() if id(x) not in known)


def test_what_is_dropped_by_the_caller_is_gone() -> None:
    """A prefill that keeps references holds all layers' keys and values on the device."""
    config, params = model("dense")
    prefill = prefill_of("dense")
    known = {id(x) for x in jax.live_arrays()}
    buffer, q = 2 * CAPACITY * 8, BLOCK * 6 * 8
    hidden = [BLOCK * config.hidden_size, 24 * config.hidden_size, 24 * config.hidden_size]
    outputs = prefill.layers(params, prompt_of(48), prompt_of(2))
    for output in outputs:
        flags = [1] * min(output.layer + 1, 2)
        assert live_sizes(known) == sorted([*flags, q, *hidden, buffer, buffer])
        del output
        assert live_sizes(known) == sorted([*flags, *hidden])
    del outputs
    assert live_sizes(known) == []


def test_without_a_tail_there_are_no_queries() -> None:
    _, params = model("dense")
    outputs = list(prefill_of("dense").layers(params, prompt_of(8)))
    assert [output.q for output in outputs] == [None] * 3


@pytest.mark.parametrize(
    ("capacity", "chunk", "message"),
    [(66, 24, "capacity=66"), (64, 26, "chunk_tokens=26"), (64, 0, "chunk_tokens=0")],
)
def test_sizes_must_be_whole_blocks(capacity: int, chunk: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerPrefill(model("dense")[0], capacity=capacity, chunk_tokens=chunk)


@pytest.mark.parametrize(
    ("tokens", "tail", "message"),
    [(7, 0, "prompt tokens=7"), (72, 0, "prompt tokens=72"), (4, 4, "tail tokens=4")],
)
def test_prompts_that_do_not_fit_are_refused(tokens: int, tail: int, message: str) -> None:
    _, params = model("dense")
    with pytest.raises(ConfigError, match=message):
        next(prefill_of("dense").layers(params, prompt_of(tokens), prompt_of(tail)))
