"""Stable-DiffCoder against Llama."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.family_check import SEEDS, check_family

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("seed", SEEDS)
def test_stable_diffcoder(seed: int, tmp_path: Path) -> None:
    check_family("stable_diffcoder", seed, tmp_path)
