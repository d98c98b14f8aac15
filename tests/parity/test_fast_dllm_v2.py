"""Fast-dLLM v2 against Qwen2 under the block-causal mask; the shift is a matter of decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.family_check import SEEDS, check_family

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("seed", SEEDS)
def test_fast_dllm_v2(seed: int, tmp_path: Path) -> None:
    check_family("fast_dllm_v2", seed, tmp_path)


def test_tied(tmp_path: Path) -> None:
    check_family("fast_dllm_v2", 23, tmp_path, tie_word_embeddings=True)
