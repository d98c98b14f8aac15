"""What every family has to pass: references on new sizes and weights, through the converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.golden.families import (
    PUBLISHED,
    published_tensors,
    reference_model,
    saved_tensors,
    write_folder,
)
from tests.golden.hf_names import params_from_hf
from tests.models.passes import block_logits, prefill_logits, whole_logits

SEEDS = (21, 22)


def check_family(name: str, seed: int, tmp_path: Path, **changes: Any) -> None:
    """Converts what transformers saved and compares all logits with the model that saved it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from convert import convert_checkpoint
    from convert.references import block_causal_logits
    from herald_jax.checkpoint import load_params

    rng = np.random.default_rng(seed)
    block = int(rng.integers(3, 8))
    inner = "mlp_hidden_size" if "mlp_hidden_size" in PUBLISHED[name] else "intermediate_size"
    published = {
        **PUBLISHED[name],
        "block_size": block,
        "rope_theta": float(rng.uniform(500, 5000)),
        inner: int(rng.integers(21, 40)),
        **changes,
    }
    model = reference_model(name, published, seed)
    tensors = published_tensors(name, model)
    source = write_folder(tmp_path / "src", published, tensors, shards=3)
    report = convert_checkpoint(
        source, tmp_path / "dst", dtype="float32", check=True, progress=False
    )
    assert report.config.family == name and report.config.block_length == block
    assert report.check is not None and report.check.largest < 1e-4
    params = load_params(tmp_path / "dst")
    if not report.config.num_experts:
        same = jax.tree.map(
            np.array_equal, params, params_from_hf(saved_tensors(model), report.config)
        )
        assert all(jax.tree.leaves(same))
    tokens = rng.integers(0, published["vocab_size"], (2, 4 * block - 1))
    is_full = report.config.is_bidirectional
    expected = block_causal_logits(model, tokens, tokens.shape[1] if is_full else block)
    tolerance = 1e-5 * max(1.0, float(np.abs(expected).max()))
    found = whole_logits(report.config, params, tokens)
    print(f"{name}: largest difference {np.abs(found - expected).max():.2e}, {tolerance:.1e}")
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
    if is_full:
        return
    found = block_logits(report.config, params, tokens)
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
    found = prefill_logits(report.config, params, tokens[:, : 3 * block], chunk_blocks=2)
    np.testing.assert_allclose(found, expected[:, : 3 * block], atol=tolerance, rtol=0)
