"""`herald models`."""

from __future__ import annotations

import json

import pytest

from convert.families import families
from herald_jax.cli import main


def test_every_family_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [facts["family"] for facts in found] == sorted(families())
    assert all(facts["status"] == "checked on random weights" for facts in found)
    assert all(facts["checked"] for facts in found)
    attention = {facts["family"]: facts["attention"] for facts in found}
    assert attention["llada"] == attention["dream"] == "full"
    assert attention["llada2"] == "block_causal"


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "llada2 (checked on random weights)" in out and "block length: 32" in out
    assert "logits equal Qwen3MoeForCausalLM of transformers on tiny random weights" in out
    assert "differs: LLaDA2.1's editing of committed tokens is in herald_jax.generate" in out
    assert "attention: full, decoded by herald_jax.generate_bidirectional; a position is" in out
    assert all(len(line) <= 100 for line in out.splitlines())
