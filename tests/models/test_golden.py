"""Our passes against logits that the reference models wrote (`tests/golden/make_qwen3.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herald_jax.configs import ModelConfig
from tests.golden.hf_names import params_from_hf
from tests.models.passes import block_logits, prefill_logits, whole_logits
from tests.oracle import forward, to_float64

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ["qwen3_untied", "qwen3_tied", "qwen2_bias"]


def load(name: str) -> tuple[ModelConfig, Any, np.ndarray, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        config = ModelConfig.from_json(str(file["config"]))
        tensors = {key[6:]: file[key] for key in file.files if key.startswith("param:")}
        return config, params_from_hf(tensors, config), file["tokens"], file["logits"]


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_without_a_cache(name: str) -> None:
    config, params, tokens, logits = load(name)
    np.testing.assert_allclose(whole_logits(config, params, tokens), logits, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_chunks(name: str) -> None:
    config, params, tokens, logits = load(name)
    whole = tokens.shape[1] // config.block_length * config.block_length
    found = prefill_logits(config, params, tokens[:, :whole], chunk_blocks=2)
    np.testing.assert_allclose(found, logits[:, :whole], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_block_by_block_over_the_cache(name: str) -> None:
    """Block structure that is lost in a mask shows as other logits than block by block."""
    config, params, tokens, logits = load(name)
    np.testing.assert_allclose(block_logits(config, params, tokens), logits, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_of_these_tests_agrees(name: str) -> None:
    config, params, tokens, logits = load(name)
    for row in range(2):
        found = forward(config, to_float64(params), tokens[row].tolist())
        np.testing.assert_allclose(found, logits[row], atol=1e-5)
