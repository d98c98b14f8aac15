"""Models that predict the next position, in the engine: texts are those of `generate`."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from herald_jax import LLM, CacheConfig, ConfigError, SamplingParams, generate, pad_prompts
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LLMEngine
from tests.engine.engines import BASE, CONFIG, LENGTHS, PAGE_BYTES, params

MODEL = dataclasses.replace(CONFIG, family="shifted", shifts_predictions=True, qkv_bias=False)
SAMPLING = SamplingParams(max_tokens=11, strategy="sub_blocks", threshold=0.3, ignore_eos=True)


def test_texts_are_those_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts around the borders of blocks; few pages, so that some rows are preempted."""
    monkeypatch.setattr("herald_jax.engine.config.PAGE_TOKENS", 8)
    llm = LLM.from_params(
        MODEL,
        params(),
        max_model_len=52,
        max_num_seqs=2,
        max_prefill_tokens=16,
        kv_cache_bytes=8 * PAGE_BYTES,
    )
    prompts = [list(BASE[:length]) for length in LENGTHS] + [list(BASE[:16])] * 2
    seeds = list(range(len(prompts)))
    options = [dataclasses.replace(SAMPLING, seed=seed) for seed in seeds]
    found = llm.generate(prompts, options)
    padded, lengths = pad_prompts(prompts, max(LENGTHS))
    wanted = jax.device_get(
        generate(params(), padded, lengths, np.array(seeds), model=MODEL, sampling=SAMPLING)
    )
    preempted = 0
    for row, request in enumerate(found):
        output, length = request.outputs[0], wanted.lengths[row]
        assert list(output.token_ids) == wanted.tokens[row, :length].tolist(), len(prompts[row])
        assert list(output.unmask_steps) == wanted.unmask_steps[row, :length].tolist()
        np.testing.assert_allclose(output.token_logprobs, wanted.logprobs[row, :length], atol=1e-4)
        steps = [int(count) for count in wanted.steps_per_block[row] if count]
        assert list(output.stats.steps_per_block) == steps
        preempted += output.stats.preemptions
    assert preempted > 0


def test_a_sparse_cache_refuses_them() -> None:
    with pytest.raises(ConfigError, match="LLM without a sparse cache"):
        LLMEngine(MODEL, params(), EngineConfig(cache=CacheConfig(placement="device")))
