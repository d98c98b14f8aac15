"""Proposals from hidden states: the same in parts as at once, and in little memory."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from herald_jax.decoding import head
from herald_jax.decoding.options import decoding_options, proposal_spec
from herald_jax.decoding.propose import Proposal
from herald_jax.sampling import SamplingParams
from tests.stub_decoder import stub_config


def proposals(
    hidden: np.ndarray, table: np.ndarray, rows: list[SamplingParams], **sizes: int
) -> tuple[Proposal, int]:
    """What all rows are offered, and the bytes that the program needs beside its operands."""
    config = stub_config(vocab_size=table.shape[1], block_length=hidden.shape[1], **sizes)
    options = decoding_options(rows, range(len(rows)), config)
    numbers = np.arange(3, 3 + len(rows)), np.arange(len(rows)) % 4

    def program(hidden: Any, table: Any, options: Any, *numbers: Any) -> Proposal:
        inputs = (hidden, options.rows, proposal_spec(rows), options.seeds, *numbers)
        return head.propose_blocks(lambda x: x @ table, config, *inputs, table)

    compiled = jax.jit(program).lower(hidden, table, options, *numbers).compile()
    memory: Any = compiled.memory_analysis()
    return jax.device_get(compiled(hidden, table, options, *numbers)), memory.temp_size_in_bytes


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "top_p": 0.7}, {"temperature": 1.2}], ids=str
)
def test_rows_in_parts_get_what_they_get_at_once(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows two at a time: the last part is filled up, and no row sees the filling."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((5, 6, 7)).astype(np.float32)
    table = rng.standard_normal((7, 23)).astype(np.float32)
    rows = [SamplingParams(**options), *[SamplingParams(seed=seed) for seed in range(4)]]
    whole, _ = proposals(hidden, table, rows, mask_token_id=4)
    monkeypatch.setattr(head, "MAX_POSITIONS", 13)
    parts, _ = proposals(hidden, table, rows, mask_token_id=4)
    for got, want in zip(parts, whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    logits = hidden @ table
    logits[..., 4] = -np.inf
    np.testing.assert_array_equal(whole.likeliest, logits.argmax(-1))


def test_greedy_head_offers_what_logits_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the kernel, whose plain form runs here: hidden ids, a tie, several parts."""
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((5, 6, 7)).astype(np.float32)
    table = rng.standard_normal((7, 23)).astype(np.float32)
    table[:, 15] = table[:, 9] = 3 * table[:, 9]
    rows = [SamplingParams()] * 5
    want, _ = proposals(hidden, table, rows, mask_token_id=4, tokenizer_vocab_size=21)
    monkeypatch.setattr(head, "has_greedy_head", lambda *_: True)
    monkeypatch.setattr(head, "MAX_POSITIONS", 13)
    got, _ = proposals(hidden, table, rows, mask_token_id=4, tokenizer_vocab_size=21)
    for name in ("tokens", "likeliest"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert (want.tokens == 9).any()
    for name in ("confidence", "entropy", "logprob"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-6)


def test_logits_of_a_whole_batch_are_never_in_memory() -> None:
    rows, block, vocab = 32, 32, 4096
    hidden, table = np.ones((rows, block, 4), np.float32), np.ones((4, vocab), np.float32)
    _, temporary = proposals(hidden, table, [SamplingParams()] * rows, mask_token_id=4)
    assert temporary < 4 * rows * block * vocab
