"""The trained full-attention model of the repository: its conversion, and its answers."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert import convert_checkpoint
from examples.train_tiny import tokenizer
from examples.train_tiny.llada_export import ASSETS
from examples.train_tiny.tasks import held_out_prose, prompt
from herald_jax import ModelConfig, SamplingParams, generate_bidirectional, load_params, pad_prompts


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "llada"
    convert_checkpoint(ASSETS, folder, progress=False)
    return folder


def test_conversion_keeps_every_value_and_the_model_is_small(converted):
    """Kinds of fault: a tensor left out, transposed or rounded; weights over 12 MB."""
    config = ModelConfig.load(converted)
    params = load_params(converted, config)
    theirs = load_file(ASSETS / "model.safetensors")
    assert sum(a.size for a in jax.tree.leaves(params)) == sum(a.size for a in theirs.values())
    block = "model.transformer.blocks.7."
    ours = params["layers"][7]
    pairs = (
        (ours["attention"]["q_proj"]["kernel"], theirs[block + "q_proj.weight"].T),
        (ours["mlp"]["gate_proj"]["kernel"], theirs[block + "ff_proj.weight"].T),
        (ours["mlp"]["down_proj"]["kernel"], theirs[block + "ff_out.weight"].T),
        (params["lm_head"]["kernel"], theirs["model.transformer.ff_out.weight"].T),
        (params["embed_tokens"]["embedding"], theirs["model.transformer.wte.weight"]),
    )
    for mine, given in pairs:
        assert mine.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(mine), given)
    assert (ASSETS / "model.safetensors").stat().st_size <= 12_000_000


def test_dual_cache_and_threshold_answer_in_few_passes(converted):
    """Kinds of fault: weights that learned nothing; a cache that hides the needle."""
    config = ModelConfig.load(converted)
    params = load_params(converted, config, dtype=jnp.float32)
    encoder = tokenizer.load()
    one = prompt("niah1-brief", 384, 0, encoder, held_out_prose(encoder))
    prompts, lengths = pad_prompts([one.ids], multiple=64)
    sampling = SamplingParams(max_tokens=64, strategy="threshold", threshold=0.9)
    out = generate_bidirectional(
        params, prompts, lengths, np.arange(1), model=config, sampling=sampling, cache="dual"
    )
    ids = np.asarray(out.tokens)[0, : int(out.lengths[0])].tolist()
    assert one.exact(encoder.decode(ids).strip())
    assert int(out.forwards[0]) <= 4
