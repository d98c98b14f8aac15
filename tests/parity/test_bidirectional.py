"""LLaDA against Llama, renamed, and Dream against Qwen2, both without a mask."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert import convert_checkpoint
from tests.convert.family_folders import Golden
from tests.parity.family_check import SEEDS, check_family

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["llada", "dream"])
def test_bidirectional(name: str, seed: int, tmp_path: Path) -> None:
    check_family(name, seed, tmp_path)


def test_check_in_bf16(tmp_path: Path) -> None:
    """`--check` compares under the model's own attention: a causal mask would show."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    source = Golden("llada").write(tmp_path / "src")
    report = convert_checkpoint(source, tmp_path / "dst", check=True, progress=False)
    assert report.check is not None and report.check.largest < 1e-4
