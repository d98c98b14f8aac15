"""Keys scored on the device in 8 bits, entries copied by the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from herald_jax import CacheConfig, ConfigError
from tests.engine.sparse_engines import CONFIG, dense, live_bytes, make_llm, prompts, run, sampling

CACHE = CacheConfig(placement="host", budget=0.1, key_index="int8")


def test_a_row_alone_is_the_row_in_the_batch() -> None:
    """Also in rows that longer texts had before, whose index entries are still there."""
    llm = make_llm(CACHE)
    texts = run(llm)
    for at in (5, 0, 4):
        assert run(llm, slice(at, at + 1)) == texts[at : at + 1]
    assert texts != dense()


def test_a_budget_over_the_prefix_is_dense() -> None:
    assert run(make_llm(dataclasses.replace(CACHE, budget=1.0))) == dense()


def test_every_byte_is_accounted() -> None:
    llm = make_llm(CACHE)
    runner: Any = llm.engine._runner
    outputs = llm.generate(prompts(), sampling())
    recalls = [
        account.recall
        for output in outputs
        for account in output.outputs[0].stats.accounts
        if account.recall is not None
    ]
    assert len(recalls) > 20 and all(recall.bytes_scanned == 0 for recall in recalls)
    assert any(recall.bytes_gathered for recall in recalls)
    assert any(recall.hit_share for recall in recalls)
    shape = runner._shape
    parts = shape.device_parts(CONFIG, 4)
    # Codes of one byte and a scale of four for each of two KV heads with 8 numbers.
    assert parts["key index"] == 2 * shape.rows * shape.row_tokens * 2 * (8 + 4)
    held = live_bytes(runner._cache)
    assert held == sum(parts.values()) - parts["arriving entries"]


@pytest.mark.parametrize(
    "fields",
    [{"placement": "device"}, {"lookahead": False}, {"key_index": "int4"}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_has_no_key_index_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="key_index"):
        CacheConfig(**({"placement": "host", "key_index": "int8"} | fields))
