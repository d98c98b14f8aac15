"""The decoding programs compiled for a GPU: the same tokens as the NumPy loop, caches in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.cache.paged import PagedCache
from herald_jax.decoding.generate import generate, pad_prompts
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.request import Request, RowProgress
from herald_jax.sampling import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 60, 7, 9, 2], [3], [4] * 13, list(range(2, 50)), list(range(40, 3, -1))]
KINDS = {
    "greedy": SamplingParams(max_tokens=21),
    "entropy": SamplingParams(max_tokens=15, strategy="entropy_bounded", entropy_bound=5.0),
    "sampled": SamplingParams(
        max_tokens=17, temperature=0.8, top_k=20, top_p=0.95, confidence="filtered"
    ),
}


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 matmuls without TF32, so that CPU and GPU decide alike."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def gpu_params(tiny_params):
    return jax.device_put(tiny_params, jax.devices("gpu")[0])


@functools.cache
def on_cpu(kind: str, config, seeds: tuple[int, ...]):
    from herald_jax.models import random_params

    with jax.default_device(jax.devices("cpu")[0]):
        padded, lengths = pad_prompts(PROMPTS, 16)
        params = random_params(config, seed=0, dtype=jnp.float32)
        out = generate(
            params, padded, lengths, np.asarray(seeds), model=config, sampling=KINDS[kind]
        )
        return jax.device_get(out)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_equals_the_cpu(kind, tiny_config, gpu_params):
    seeds = tuple(range(7, 7 + len(PROMPTS)))
    want = on_cpu(kind, tiny_config, seeds)
    padded, lengths = pad_prompts(PROMPTS, 16)
    got = generate(
        gpu_params, padded, lengths, np.asarray(seeds), model=tiny_config, sampling=KINDS[kind]
    )
    assert {device.platform for device in got.tokens.devices()} == {"gpu"}
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.steps_per_block, want.steps_per_block)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)


def test_engine_equals_generate(tiny_config, gpu_params):
    engine = LLMEngine(
        tiny_config, gpu_params, EngineConfig(max_model_len=128, max_num_seqs=3, run_ahead=3)
    )
    progresses = {}
    for kind, sampling in KINDS.items():
        for row, prompt in enumerate(PROMPTS):
            progress = RowProgress(sampling, tiny_config.stop_token_ids, None)
            request = Request(prompt=None, prompt_token_ids=tuple(prompt), sampling=sampling)
            engine.add_request(f"{kind}-{row}", request, [progress], [7 + row])
            progresses[kind, row] = progress
    while engine.has_unfinished:
        engine.step()
    engine.scheduler.check()
    seeds = tuple(range(7, 7 + len(PROMPTS)))
    for (kind, row), progress in progresses.items():
        want = on_cpu(kind, tiny_config, seeds)
        length = int(want.lengths[row])
        assert progress.token_ids == want.tokens[row, :length].tolist(), (kind, row)


def test_pages_are_written_in_place(tiny_config):
    cache = PagedCache.zeros(tiny_config, 10, 8, jnp.bfloat16)
    write = jax.jit(
        lambda pool, new: pool.at[jnp.asarray([3])].set(new, mode="drop"), donate_argnums=0
    )
    pool = cache.k[0]
    before = pool.unsafe_buffer_pointer()
    after = write(pool, jnp.ones((1, *pool.shape[1:]), jnp.bfloat16))
    assert after.unsafe_buffer_pointer() == before
