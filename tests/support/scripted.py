"""A runner without a model: every row gets the tokens that a script says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from herald_jax.engine.runner import BlockResult, RowRequest

Script = Callable[[RowRequest], Iterable[int]]


class ScriptedBatch:
    """Rows with the tokens that are left for them."""

    def __init__(self, rows: Sequence[RowRequest], tokens: list[list[int]]) -> None:
        self.rows = rows
        self.tokens = tokens
        self.lengths = [len(row.prompt_token_ids) for row in rows]
        self.is_active = np.ones(len(rows), bool)
        self.kv_device_bytes = 100 * len(rows)
        self.kv_host_bytes = 7
        self.prefill_seconds = 0.25

    def finish(self, row: int) -> None:
        self.is_active[row] = False


class ScriptedRunner:
    """Has the methods of `Runner`; keeps what it was asked to do.

    Args:
        script: The endless or long enough tokens of a row.
        block_length: Positions of a block, on an absolute grid as in the real runner.
        fail_at: Number of the call of `decode_block`, from 0, that raises `failure`.
    """

    def __init__(
        self,
        script: Script,
        *,
        block_length: int = 4,
        max_num_seqs: int = 4,
        max_model_len: int = 512,
        fail_at: int | None = None,
        failure: BaseException | None = None,
    ) -> None:
        self.script = script
        self.block_length = block_length
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.fail_at = fail_at
        self.failure = failure or ValueError("device is on fire")
        self.params: Any = {}
        self.batches: list[ScriptedBatch] = []
        self.blocks = 0

    def warmup(self, rows: Sequence[RowRequest]) -> None:
        pass

    def fit(self, rows: Sequence[RowRequest]) -> int:
        return min(len(rows), self.max_num_seqs)

    def start(self, rows: Sequence[RowRequest]) -> ScriptedBatch:
        assert len(rows) <= self.max_num_seqs
        assert len({(row.sampling.strategy, row.sampling.confidence) for row in rows}) == 1
        tokens = []
        for row in rows:
            tokens.append([token for token, _ in zip(self.script(row), range(400), strict=False)])
        self.batches.append(ScriptedBatch(rows, tokens))
        return self.batches[-1]

    def decode_block(self, batch: ScriptedBatch) -> BlockResult:
        if self.blocks == self.fail_at:
            raise self.failure
        self.blocks += 1
        shape = (len(batch.rows), self.block_length)
        result = SimpleNamespace(
            token_ids=np.zeros(shape, np.int32),
            is_generated=np.zeros(shape, bool),
            unmask_steps=np.full(shape, -1, np.int32),
            confidences=np.zeros(shape, np.float32),
            logprobs=np.zeros(shape, np.float32),
            steps=np.zeros(shape[:1], np.int32),
        )
        for row in np.flatnonzero(batch.is_active):
            tail = batch.lengths[row] % self.block_length
            count = self.block_length - tail
            new, batch.tokens[row] = batch.tokens[row][:count], batch.tokens[row][count:]
            assert len(new) == count, "the script is too short"
            result.token_ids[row, tail:] = new
            result.is_generated[row, tail:] = True
            result.unmask_steps[row, tail:] = np.arange(count)[::-1]
            result.confidences[row, tail:] = 0.5
            result.logprobs[row, tail:] = -0.25
            result.steps[row] = count
            batch.lengths[row] += count
        return BlockResult(**vars(result))
