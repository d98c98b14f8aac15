"""A runner without a model: every row gets the tokens that a script says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from herald_jax import LLM
from herald_jax.configs import ModelConfig
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.plan import StepPlan
from herald_jax.engine.request import RowBlock
from herald_jax.engine.slot_arrays import RowSampling
from herald_jax.engine.slot_runner import CommittedBlock
from herald_jax.models import random_params
from herald_jax.sampling import SamplingParams
from herald_jax.tokenizer import Tokenizer


@dataclasses.dataclass
class ScriptedRow:
    """A sample that was started: its prompt and options, and where it is."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    epoch: int
    index: int
    tail: tuple[int, ...]
    tokens: Any = None
    steps_left: int = 0


Script = Callable[[ScriptedRow], Iterable[int]]


@dataclasses.dataclass
class ScriptedStep:
    """A step in flight."""

    blocks: list[CommittedBlock]
    decodes: bool
    failure: BaseException | None = None

    def read(self) -> list[CommittedBlock]:
        if self.failure is not None:
            raise self.failure
        return self.blocks


class ScriptedRunner:
    """Has the methods of `SlotRunner`; keeps what it was asked to do.

    A block takes as many denoising steps as it has generated tokens, and a commit pass.

    Args:
        script: The endless or long enough tokens of a row.
        block_length: Positions of a block.
        fail_at: Number of the dispatch, from 0, that raises `failure`.
        read_fails_at: Number of the dispatch whose read raises it.

    Attributes:
        rows: All rows that were started, in order.
        passes: Row passes that did something.
        dispatched: Number of dispatches.
        resets: How often the state was made anew.
    """

    def __init__(
        self,
        script: Script,
        *,
        block_length: int = 4,
        fail_at: int | None = None,
        read_fails_at: int | None = None,
        failure: BaseException | None = None,
    ) -> None:
        self.script = script
        self.block_length = block_length
        self.fail_at = fail_at
        self.read_fails_at = read_fails_at
        self.failure = failure or ValueError("device is on fire")
        self.params: Any = {}
        self.compile_seconds = 0.0
        self.rows: list[ScriptedRow] = []
        self.passes = 0
        self.dispatched = 0
        self.resets = 0
        self.reset()

    def stats(self) -> dict[str, float]:
        return {}

    def reset(self) -> None:
        self.resets += 1
        self._rows: dict[int, ScriptedRow] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}

    def warmup(self, specs: Sequence[Any] = ()) -> None:
        self.compile_seconds += 1.0

    def dispatch(self, plan: StepPlan, options: dict[int, RowSampling]) -> list[ScriptedStep]:
        number, self.dispatched = self.dispatched, self.dispatched + 1
        if number == self.fail_at:
            raise self.failure
        for slot in plan.prefill:
            self._prompts[slot.epoch] = self._prompts.get(slot.epoch, ()) + slot.token_ids
        for start in plan.starts:
            prompt = self._prompts.pop(start.epoch, ()) + start.tail
            asked = options[start.row]
            row = ScriptedRow(
                prompt, asked.sampling, asked.seed, start.epoch, start.index, start.tail
            )
            row.tokens = iter(self.script(row))
            row.steps_left = self.block_length - len(row.tail)
            self._rows[start.row] = row
            self.rows.append(row)
        blocks = []
        for slot in plan.decode:
            row = self._rows[slot.row]
            assert row.epoch == slot.epoch
            if row.index >= slot.block_limit:
                continue
            self.passes += 1
            if row.steps_left > 0:
                row.steps_left -= 1
                continue
            block = self._block(row)
            blocks.append(CommittedBlock(slot.row, slot.epoch, row.index, block))
            row.index, row.tail, row.steps_left = row.index + 1, (), self.block_length
        failure = self.failure if number == self.read_fails_at else None
        return [ScriptedStep(blocks, bool(plan.decode), failure)]

    def _block(self, row: ScriptedRow) -> RowBlock:
        tail = len(row.tail)
        count = self.block_length - tail
        new = list(itertools.islice(row.tokens, count))
        assert len(new) == count, "the script is too short"
        is_generated = np.arange(self.block_length) >= tail
        values = is_generated.astype(np.float32)
        return RowBlock(
            token_ids=np.asarray([*row.tail, *new], np.int32),
            is_generated=is_generated,
            unmask_steps=np.asarray([-1] * tail + list(range(count))[::-1], np.int32),
            confidences=0.5 * values,
            logprobs=-0.25 * values,
            steps=count,
        )


def scripted_llm(
    config: ModelConfig,
    script: Script,
    tokenizer: Tokenizer | None = None,
    *,
    max_num_seqs: int = 4,
    max_model_len: int = 512,
    max_waiting: int = 64,
    max_prefill_tokens: int = 64,
    run_ahead: int = 2,
    **options: Any,
) -> tuple[LLM, ScriptedRunner]:
    """An `LLM` whose rows get what a script says; `options` are those of the runner."""
    runner = ScriptedRunner(script, block_length=config.block_length, **options)
    settings = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
        max_prefill_tokens=max_prefill_tokens,
        run_ahead=run_ahead,
        share_prefixes=False,  # a script sees the prompts that are prefilled
    )
    params = random_params(config)
    return LLM.from_engine(LLMEngine(config, params, settings, runner), tokenizer), runner
