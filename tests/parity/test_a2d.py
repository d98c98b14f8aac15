"""The A2D conversions against Qwen3, Qwen2 and Llama."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.family_check import SEEDS, check_family

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["a2d_qwen3", "a2d_qwen2", "a2d_llama"])
def test_a2d(name: str, seed: int, tmp_path: Path) -> None:
    check_family(name, seed, tmp_path)


@pytest.mark.parametrize("name", ["a2d_qwen3", "a2d_qwen2", "a2d_llama"])
def test_other_tie(name: str, tmp_path: Path) -> None:
    check_family(name, 23, tmp_path, tie_word_embeddings=name != "a2d_qwen3")
