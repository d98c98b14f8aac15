"""SDAR with experts against Qwen3-MoE."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.family_check import SEEDS, check_family

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("seed", SEEDS)
def test_sdar_moe(seed: int, tmp_path: Path) -> None:
    check_family("sdar_moe", seed, tmp_path)


def test_weights_that_are_not_normalised(tmp_path: Path) -> None:
    check_family("sdar_moe", 23, tmp_path, norm_topk_prob=False)
