"""Rotation, norm, and the bits of a layer that bf16 or an odd option would break."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.configs import ModelConfig
from herald_jax.models import Decoder, abstract_params, bind, random_params
from herald_jax.models.layers import RMSNorm
from herald_jax.models.rope import rotary_phases, rotate
from tests.models.passes import block_logits, prefill_logits
from tests.oracle import forward, to_float64
from tests.oracle import rotate as rotate_plainly


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("position", [0, 3, 100_000])
def test_bf16_heads_are_rotated_with_fp32_phases(theta: float, position: int) -> None:
    """Phases computed in bf16 go wrong from a few hundred positions on."""
    x = np.random.default_rng(position).standard_normal((1, 1, 2, 64))
    x = jnp.asarray(x, jnp.bfloat16)
    phases = rotary_phases(jnp.full((1, 1), position, jnp.int32), 64, theta)
    assert phases.cos.dtype == jnp.float32
    found = np.asarray(rotate(x, phases), np.float64)[0, 0]
    exact = np.asarray(x, np.float64)[0, 0]
    place = np.full(2, position, np.float64)
    expected = rotate_plainly(exact, place, 64, theta)
    # One bf16 step at the size of the rotated pair, and half a step for the final rounding.
    size = np.hypot(exact[:, :32], exact[:, 32:])
    step = 1.5 * np.exp2(np.floor(np.log2(size)) - 7)
    assert (np.abs(found - expected) <= np.concatenate([step, step], -1)).all()


def test_rotation_pairs_halves_and_leaves_the_rest() -> None:
    x = jnp.arange(1.0, 9.0).reshape(1, 1, 1, 8)
    phases = rotary_phases(jnp.array([[2]], jnp.int32), 4, 100.0)
    found = np.asarray(rotate(x, phases))[0, 0, 0]
    np.testing.assert_array_equal(found[4:], [5, 6, 7, 8])
    for i, angle in enumerate([2.0, 0.2]):
        a, b = i + 1, i + 3
        np.testing.assert_allclose(found[i], a * np.cos(angle) - b * np.sin(angle), rtol=1e-6)
        np.testing.assert_allclose(found[i + 2], b * np.cos(angle) + a * np.sin(angle), rtol=1e-6)


def test_norm_casts_before_the_gain_and_has_fp32_statistics() -> None:
    norm = RMSNorm(64, 1e-6, jnp.bfloat16, "embed")
    rng = np.random.default_rng(0)
    gain = jnp.asarray(1 + 0.3 * rng.standard_normal(64), jnp.bfloat16)
    norm.scale[...] = gain
    x = jnp.asarray(rng.standard_normal((200, 64)) * 3, jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    scaled = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(1e-6))
    cast_first = np.asarray(jnp.asarray(scaled, jnp.bfloat16) * gain, np.float32)
    gain_first = np.asarray(jnp.asarray(scaled * np.asarray(gain, np.float32), jnp.bfloat16))
    found = np.asarray(norm(x), np.float32)
    assert norm(x).dtype == jnp.bfloat16
    # The two orders can be told apart, and ours is the first; rsqrt may round a few otherwise.
    assert (cast_first != gain_first.astype(np.float32)).mean() > 0.05
    assert (found != cast_first).mean() < 0.005


def test_norm_adds_epsilon_inside_the_root() -> None:
    norm = RMSNorm(2, 0.75, jnp.float32, "embed")
    np.testing.assert_allclose(norm(jnp.array([[0.5, 0.5]])), 0.5, rtol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"qkv_bias": True},
    "no-norm": {"qk_norm": False, "qkv_bias": True},
    "tied": {"tie_word_embeddings": True},
    "half": {"rotary_fraction": 0.5, "num_kv_heads": 3},
    "one-head": {"num_kv_heads": 1, "num_heads": 5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_equals_numpy_over_the_cache(tiny_config: ModelConfig, name: str) -> None:
    config = dataclasses.replace(tiny_config, num_layers=2, **OPTIONS[name])
    params = random_params(config, seed=3)
    tokens = np.random.default_rng(1).integers(0, 61, (2, 16))
    expected = np.stack([forward(config, to_float64(params), row.tolist()) for row in tokens])
    np.testing.assert_allclose(block_logits(config, params, tokens), expected, atol=1e-5)
    found = prefill_logits(config, params, tokens, chunk_blocks=2)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_options_decide_which_parameters_there_are(tiny_config: ModelConfig) -> None:
    full = abstract_params(tiny_config)
    assert full["lm_head"]["kernel"].shape == (24, 61)
    assert full["layers"][2]["attention"]["q_norm"]["scale"].shape == (8,)
    assert "bias" not in full["layers"][0]["attention"]["q_proj"]
    other = dataclasses.replace(tiny_config, tie_word_embeddings=True, qk_norm=False, qkv_bias=True)
    bare = abstract_params(other, jnp.float32)
    assert "lm_head" not in bare and "q_norm" not in bare["layers"][0]["attention"]
    assert bare["layers"][0]["attention"]["k_proj"]["bias"].shape == (16,)
    assert "bias" not in bare["layers"][0]["attention"]["o_proj"]
    assert {leaf.dtype for leaf in jax.tree.leaves(full)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(bare)} == {jnp.dtype(jnp.float32)}


def test_random_parameters_all_differ_and_repeat(tiny_config: ModelConfig) -> None:
    params = random_params(tiny_config, seed=5)
    leaves = jax.tree.leaves(params)
    assert all(np.unique(leaf).size > 1 for leaf in leaves)
    assert len({float(leaf.ravel()[0]) for leaf in leaves}) == len(leaves)
    jax.tree.map(np.testing.assert_array_equal, params, random_params(tiny_config, seed=5))
    other = jax.tree.leaves(random_params(tiny_config, seed=6))
    assert all((a != b).all() for a, b in zip(leaves, other, strict=True))


def test_a_bf16_model_stays_bf16_with_fp32_logits(tiny_config: ModelConfig) -> None:
    params = random_params(tiny_config, dtype=jnp.bfloat16)
    decoder = bind(tiny_config, params)
    assert isinstance(decoder, Decoder)
    tokens = jnp.zeros((1, 4), jnp.int32)
    hidden, fresh = decoder(tokens, tokens, lambda layer, q, fresh: q)
    assert hidden.dtype == fresh[0].k.dtype == fresh[2].v.dtype == jnp.bfloat16
    assert decoder.logits(hidden).dtype == jnp.float32
    assert len(fresh) == 3 and fresh[0].k.shape == (1, 4, 2, 8)
