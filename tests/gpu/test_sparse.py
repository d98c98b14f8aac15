"""A sparse cache on the GPU: pinned memory and kernels give the texts of the plain forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import LLM, CacheConfig, ModelConfig, SamplingParams
from herald_jax.models import random_params
from tests.engine.sparse_engines import CONFIG, prompts
from tests.oracle import sharpen

pytestmark = pytest.mark.gpu

WIDE = ModelConfig(
    family="test",
    vocab_size=509,
    hidden_size=192,
    intermediate_size=320,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    block_length=32,
    mask_token_id=508,
    stop_token_ids=(1,),
    max_position_embeddings=1024,
)
"""Heads that the kernels take. Few layers, as every program takes seconds to compile."""

NARROW = dataclasses.replace(CONFIG, num_layers=2)
"""Heads that they do not take."""

PROMPT_TOKENS = 700
NEW_TOKENS = 130


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """fp32 matmuls without TF32, so that different programs decide alike."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def wide() -> Any:
    """Weights of `WIDE` in the dtype of the kernels."""
    params = sharpen(random_params(WIDE, seed=1))
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def greedy(cache: CacheConfig | None) -> list[int]:
    """The text of a prompt in fp32."""
    params = sharpen(random_params(NARROW, seed=4))
    llm = LLM.from_params(NARROW, params, max_model_len=256, max_num_seqs=1, cache=cache)
    sampling = SamplingParams(max_tokens=21, threshold=0.5, ignore_eos=True)
    return llm.generate(prompts()[4:5], sampling)[0].outputs[0].token_ids


HOST = CacheConfig(placement="host", budget=0.1, dense_layers=1)
PAPER = dataclasses.replace(HOST, retrieval="layerwise", selection_query="centre")


@pytest.mark.parametrize("cache", [HOST, PAPER], ids=lambda cache: cache.retrieval)
def test_offloaded_is_resident(cache: CacheConfig) -> None:
    assert greedy(cache) == greedy(dataclasses.replace(cache, placement="device"))


def test_a_whole_budget_is_dense() -> None:
    assert greedy(dataclasses.replace(HOST, budget=1.0)) == greedy(None)


@pytest.mark.parametrize("lookahead", [True, False])
def test_kernels_and_pinned_memory_in_bfloat16(lookahead: bool, wide: Any) -> None:
    prompt = np.random.default_rng(0).integers(2, 500, PROMPT_TOKENS).tolist()
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, ignore_eos=True, denoising_steps=4, threshold=0.5
    )
    texts: dict[str, list[int]] = {}
    for placement in ("device", "host"):
        cache = CacheConfig(placement=placement, budget=0.1, dense_layers=1, lookahead=lookahead)
        llm = LLM.from_params(WIDE, wide, max_model_len=1024, max_num_seqs=1, cache=cache)
        texts[placement] = llm.generate([prompt], sampling)[0].outputs[0].token_ids
        assert len(texts[placement]) == NEW_TOKENS
    same = np.mean([a == b for a, b in zip(*texts.values(), strict=True)])
    print(f"lookahead={lookahead}: {same:.3f} of the tokens are the same")
    assert same > 0.5
