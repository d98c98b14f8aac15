"""The comparison with the torch reference."""

import importlib.util

import numpy as np
import pytest

from convert import ConversionError, convert_checkpoint
from convert.families import KeyRule, sdar


def test_without_torch(make_source, tmp_path, monkeypatch):
    original = importlib.util.find_spec
    monkeypatch.setattr(
        "convert.check.importlib.util.find_spec",
        lambda name, *rest: None if name == "torch" else original(name, *rest),
    )
    with pytest.raises(ConversionError, match=r"herald_jax\[parity\]"):
        convert_checkpoint(make_source().write(), tmp_path / "dst", check=True, progress=False)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parity
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float32", {}),
        ("bfloat16", {"tie_word_embeddings": True}),
        ("float32", {"attention_bias": True, "block_size": 3}),
    ],
)
def test_logits_agree(make_source, tmp_path, dtype, changes):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    source = make_source(dtype=np.float32, shards=2, **changes).write()
    report = convert_checkpoint(source, tmp_path / "dst", dtype=dtype, check=True, progress=False)
    assert report.check is not None and report.check.agrees
    assert report.check.largest < 1e-4
    assert report.check.tokens % report.config.block_length
    assert "largest logit difference" in report.summary()


@pytest.mark.parity
def test_wrong_key_table_is_found(make_source, tmp_path, monkeypatch):
    """Two projections of one shape swapped: only numbers can tell; nothing is left behind."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def swap(rule):
        for old, new in names.items():
            if f"mlp.{old}" in rule.source:
                return KeyRule(rule.source.replace(old, new), rule.target, rule.transform)
        return rule

    import dataclasses

    wrong = dataclasses.replace(sdar.FAMILY, keys=tuple(map(swap, sdar.KEYS)))
    monkeypatch.setattr(sdar, "FAMILY", wrong)
    source = make_source(dtype=np.float32).write()
    with pytest.raises(ConversionError, match=r"\[check\] logits"):
        convert_checkpoint(source, tmp_path / "dst", check=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
