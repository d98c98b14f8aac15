"""LLaDA2 against GLM-4-MoE, renamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert import convert_checkpoint
from tests.convert.family_folders import Golden
from tests.parity.family_check import SEEDS, check_family

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("seed", SEEDS)
def test_llada2(seed: int, tmp_path: Path) -> None:
    check_family("llada2", seed, tmp_path)


def test_other_routers(tmp_path: Path) -> None:
    check_family(
        "llada2",
        23,
        tmp_path,
        n_group=3,
        topk_group=1,
        norm_topk_prob=False,
        first_k_dense_replace=2,
        num_shared_experts=1,
        partial_rotary_factor=0.25,
    )


@pytest.mark.parametrize("name", ["llada2", "sdar_moe"])
def test_check_in_bf16(name: str, tmp_path: Path) -> None:
    """Weights are rounded on both sides, routers on neither."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    source = Golden(name).write(tmp_path / "src")
    report = convert_checkpoint(source, tmp_path / "dst", check=True, progress=False)
    assert report.dtype == "bfloat16"
    assert report.check is not None and report.check.largest < 1e-4
