"""Live comparison with transformers on configs and weights drawn anew from each seed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.golden.hf_names import params_from_hf
from tests.models.passes import block_logits, prefill_logits, whole_logits

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", ["qwen3_untied", "qwen3_tied", "qwen2_bias"])
@pytest.mark.parametrize("seed", [11, 12])
def test_logits_equal_those_of_transformers(name: str, seed: int) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.golden.make_qwen3 import CONFIGS, reference_logits, reference_model, tensors_of

    rng = np.random.default_rng(seed)
    config = dataclasses.replace(
        CONFIGS[name],
        block_length=int(rng.integers(2, 8)),
        num_layers=int(rng.integers(1, 4)),
        rope_theta=float(rng.uniform(500, 5000)),
        intermediate_size=int(rng.integers(21, 40)),
    )
    model = reference_model(config, seed)
    params = params_from_hf(tensors_of(model), config)
    tokens = rng.integers(0, config.vocab_size, (2, 5 * config.block_length - 1))
    expected = reference_logits(model, tokens, config.block_length)
    np.testing.assert_allclose(whole_logits(config, params, tokens), expected, atol=1e-5)
    np.testing.assert_allclose(block_logits(config, params, tokens), expected, atol=1e-5)
    whole = 4 * config.block_length
    found = prefill_logits(config, params, tokens[:, :whole], chunk_blocks=3)
    np.testing.assert_allclose(found, expected[:, :whole], atol=1e-5)
