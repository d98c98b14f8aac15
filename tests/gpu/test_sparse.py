"""A sparse cache on the GPU: pinned memory and kernels give the texts of the plain forms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import LLM, CacheConfig, ModelConfig, SamplingParams
from herald_jax.models import random_params
from tests.engine.sparse_engines import dense, make_llm, run
from tests.oracle import sharpen

pytestmark = pytest.mark.gpu

WIDE = ModelConfig(
    family="test",
    vocab_size=509,
    hidden_size=192,
    intermediate_size=320,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    block_length=32,
    mask_token_id=508,
    stop_token_ids=(1,),
    max_position_embeddings=4096,
)
"""Heads that the kernels take."""


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """fp32 matmuls without TF32, so that different programs decide alike."""
    with jax.default_matmul_precision("highest"):
        yield


def test_offloaded_is_resident_and_a_whole_budget_is_dense() -> None:
    host = run(make_llm(CacheConfig(placement="host", budget=0.1)))
    assert host == run(make_llm(CacheConfig(placement="device", budget=0.1)))
    assert run(make_llm(CacheConfig(placement="host", budget=1.0))) == dense()


@pytest.mark.parametrize("lookahead", [True, False])
def test_kernels_and_pinned_memory_in_bfloat16(lookahead: bool) -> None:
    params = sharpen(random_params(WIDE, seed=1))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    chance = np.random.default_rng(0)
    prompts = [chance.integers(2, 500, length).tolist() for length in (700, 1500, 40)]
    sampling = SamplingParams(max_tokens=150, ignore_eos=True, denoising_steps=4, threshold=0.5)
    texts: dict[str, Any] = {}
    for placement in ("device", "host"):
        cache = CacheConfig(placement=placement, budget=0.1, lookahead=lookahead)
        llm = LLM.from_params(WIDE, params, max_model_len=2048, max_num_seqs=2, cache=cache)
        outputs = llm.generate(prompts, sampling)
        texts[placement] = [output.outputs[0].token_ids for output in outputs]
        assert [len(text) for text in texts[placement]] == [150] * 3
    same = np.mean([a == b for a, b in zip(*map(sum_up, texts.values()), strict=True)])
    print(f"lookahead={lookahead}: {same:.3f} of the tokens are the same")
    assert same > 0.5


def sum_up(texts: list[list[int]]) -> list[int]:
    """All tokens, one text after the other."""
    return [token for text in texts for token in text]
