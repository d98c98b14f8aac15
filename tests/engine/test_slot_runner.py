"""The slot runner against `generate` and the plain loop; its programs and its buffers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_jax.configs import ModelConfig
from herald_jax.decoding.generate import generate, pad_prompts
from herald_jax.decoding.options import stop_ids
from herald_jax.engine.plan import BlockStart, DecodeSlot, PrefillSlot, RowTable, StepPlan
from herald_jax.engine.slot_arrays import FILTERED, GREEDY, RowSampling, row_bucket
from herald_jax.engine.slot_runner import SlotRunner
from herald_jax.models import random_params
from herald_jax.sampling import SamplingParams
from tests.oracle import MARGIN, count_compilations, decode, sharpen, to_float64

CONFIG = ModelConfig(
    family="test",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    block_length=4,
    mask_token_id=60,
    stop_token_ids=(1,),
    rope_theta=1234.5,
    rms_norm_eps=3e-5,
)
EPOCHS = itertools.count()
"""A number for every stay of samples in their rows."""

ROWS, PAGE_TOKENS, TABLE_PAGES = 4, 8, 5
SAMPLED = SamplingParams(
    max_tokens=9, temperature=0.7, top_k=20, threshold=0.5, denoising_steps=3, ignore_eos=True
)


@functools.cache
def params() -> Any:
    return sharpen(random_params(CONFIG, seed=4))


@functools.cache
def oracle_params() -> Any:
    return to_float64(params())


def new_runner() -> SlotRunner:
    return SlotRunner(
        CONFIG,
        params(),
        max_rows=ROWS,
        num_pages=ROWS * TABLE_PAGES + 1,
        page_tokens=PAGE_TOKENS,
        table_pages=TABLE_PAGES,
        prefill_slots=3,
    )


shared_runner = functools.cache(new_runner)


@dataclasses.dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int


def asked(length: int, sampling: SamplingParams = SAMPLED, seed: int = 0) -> Asked:
    ids = np.random.default_rng([length, seed]).integers(0, 61, length)
    return Asked(tuple(int(i) for i in ids), sampling, seed)


@dataclasses.dataclass
class Row:
    tokens: list[int] = dataclasses.field(default_factory=list)
    unmask_steps: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    steps_per_block: list[int] = dataclasses.field(default_factory=list)
    done: bool = False


class Driver:
    """Decodes samples with plans written by hand; stop and length rules are written out here."""

    def __init__(self, runner: SlotRunner, requests: list[Asked], salt: int = 0) -> None:
        self.runner, self.requests = runner, requests
        self.epoch = next(EPOCHS)
        self.rows = [Row() for _ in requests]
        order = np.random.default_rng(salt).permutation(ROWS * TABLE_PAGES + 1)
        self.pages = order[: ROWS * TABLE_PAGES].reshape(ROWS, TABLE_PAGES)

    def plan(self, first: bool) -> StepPlan:
        tables, starts, prefill = [], [], []
        if first:
            for row, request in enumerate(self.requests):
                whole = len(request.prompt) // 4
                pages = tuple(int(page) for page in self.pages[row])
                tables.append(RowTable(row, self.epoch, pages))
                starts.append(BlockStart(row, self.epoch, whole, request.prompt[whole * 4 :]))
                prefill += [
                    PrefillSlot(row, self.epoch, index, request.prompt[index * 4 : index * 4 + 4])
                    for index in range(whole)
                ]
        decode = [
            DecodeSlot(
                row,
                self.epoch,
                block_limit=-(-(len(request.prompt) + request.sampling.max_tokens) // 4),
                end_block=-(-(len(request.prompt) + request.sampling.max_tokens) // 4),
            )
            for row, request in enumerate(self.requests)
            if not self.rows[row].done
        ]
        return StepPlan(0, tuple(tables), tuple(starts), tuple(decode), tuple(prefill), ())

    def run(self, ahead: int = 0) -> list[Row]:
        """Decodes to the end, with `ahead` steps dispatched before the oldest is read."""
        options = {
            row: RowSampling(request.sampling, request.seed)
            for row, request in enumerate(self.requests)
        }
        pending = self.runner.dispatch(self.plan(True), options)
        for _ in range(200):
            if all(row.done for row in self.rows):
                break
            while len(pending) <= ahead:
                pending += self.runner.dispatch(self.plan(False), {})
            self.accept(pending.pop(0))
        for step in pending:
            self.accept(step)
        assert all(row.done for row in self.rows), "a row did not end"
        return self.rows

    def accept(self, step: Any) -> None:
        for done in step.read():
            request, row = self.requests[done.row], self.rows[done.row]
            assert done.epoch == self.epoch
            assert not row.done, "a row went on after its end"
            block = done.block
            tail = 0 if row.steps_per_block else len(request.prompt) % 4
            assert done.index == len(request.prompt) // 4 + len(row.steps_per_block)
            kept = request.prompt[len(request.prompt) - tail :]
            assert block.token_ids[:tail].tolist() == list(kept)
            assert block.is_generated.tolist() == [False] * tail + [True] * (4 - tail)
            row.steps_per_block.append(block.steps)
            for place in range(tail, 4):
                row.tokens.append(int(block.token_ids[place]))
                row.unmask_steps.append(int(block.unmask_steps[place]))
                row.logprobs.append(float(block.logprobs[place]))
                is_stop = row.tokens[-1] in stop_ids(request.sampling, CONFIG)
                if is_stop or len(row.tokens) == request.sampling.max_tokens:
                    row.done = True
                    break


@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, SamplingParams(max_tokens=9, strategy="sequential", denoising_steps=2)],
    ids=["sampled", "greedy"],
)
def test_equals_generate(sampling: SamplingParams) -> None:
    requests = [asked(length, sampling, seed=length) for length in (0, 3, 8, 17)]
    rows = Driver(shared_runner(), requests).run()
    padded, lengths = pad_prompts([request.prompt for request in requests], 4)
    seeds = np.array([request.seed for request in requests], np.uint32)
    out = jax.device_get(
        generate(params(), padded, lengths, seeds, model=CONFIG, sampling=sampling)
    )
    for index, row in enumerate(rows):
        length = int(out.lengths[index])
        assert row.tokens == out.tokens[index, :length].tolist()
        assert row.unmask_steps == out.unmask_steps[index, :length].tolist()
        blocks = len(row.steps_per_block)
        assert row.steps_per_block == out.steps_per_block[index, :blocks].tolist()
        np.testing.assert_allclose(row.logprobs, out.logprobs[index, :length], atol=1e-4)


OPTIONS = st.sampled_from(
    [
        SamplingParams(threshold=0.4),
        SamplingParams(strategy="sequential", denoising_steps=3),
        SamplingParams(temperature=0.9, top_p=0.8, strategy="low_confidence_static"),
        SamplingParams(temperature=0.5, strategy="entropy_bounded", confidence="scaled"),
        SamplingParams(temperature=1.2, top_k=7, threshold=0.6, confidence="filtered"),
    ]
)


@settings(max_examples=20)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 13), OPTIONS), min_size=1, max_size=ROWS
    ),
    salt=st.integers(0, 50),
    ahead=st.integers(0, 2),
)
def test_rows_equal_the_plain_loop_whatever_runs_beside_them(
    rows: list[tuple[int, int, SamplingParams]], salt: int, ahead: int
) -> None:
    """Rows that differ in length, limit, rule and confidence; pages in any order, used again."""
    requests = [
        asked(length, dataclasses.replace(options, max_tokens=limit), seed=salt + index)
        for index, (length, limit, options) in enumerate(rows)
    ]
    together = Driver(shared_runner(), requests, salt).run(ahead)
    alone = Driver(shared_runner(), requests[-1:], salt + 1).run()[0]
    for request, row in zip([*requests, requests[-1]], [*together, alone], strict=True):
        expected = decode(
            CONFIG, oracle_params(), list(request.prompt), request.seed, request.sampling
        )
        # An empty prompt's first block is the same at all positions: a tie, broken by rounding.
        if expected.margin > MARGIN:
            assert row.tokens == expected.tokens
            assert row.unmask_steps == expected.unmask_steps
            assert row.steps_per_block == expected.steps_per_block
            np.testing.assert_allclose(row.logprobs, expected.logprobs, atol=1e-4)


def test_a_stop_or_mask_id_in_the_prompts_tail_is_text() -> None:
    """A stop id of the prompt that stops the row on the device, or a mask id that is filled in."""
    for prompt in ((5, 1, 60), (60, 1, 7, 9, 60, 1)):
        sampling = SamplingParams(max_tokens=9, threshold=0.5)
        row = Driver(shared_runner(), [Asked(prompt, sampling, 0)]).run()[0]
        expected = decode(CONFIG, oracle_params(), list(prompt), 0, sampling)
        assert expected.margin > MARGIN and len(expected.steps_per_block) > 1
        assert row.tokens == expected.tokens
        assert row.steps_per_block == expected.steps_per_block


def test_programs_are_bounded_and_none_is_compiled_after_warm_up() -> None:
    """A program compiled for every length or batch size."""
    runner = new_runner()
    runner.warmup()
    # Decode slots 1 and 4, with and without prefill, for three kinds of sampling.
    assert len(runner._programs) == 2 * 2 * 3
    rng = np.random.default_rng(0)
    kinds = [SAMPLED, SamplingParams(), SamplingParams(temperature=1.0)]
    with count_compilations() as compiled:
        for number in range(50):
            sampling = dataclasses.replace(kinds[number % 3], max_tokens=int(rng.integers(1, 8)))
            lengths = rng.integers(0, 30, rng.integers(1, ROWS + 1))
            Driver(runner, [asked(int(n), sampling, number) for n in lengths], number).run()
    assert compiled == []
    assert len(runner._programs) == 12


def test_the_pool_is_donated_and_not_copied() -> None:
    """A donated buffer that is copied all the same doubles the peak."""
    runner = shared_runner()
    pool = runner.kv_bytes
    assert pool == 2 * 2 * 21 * 2 * 8 * 8 * 4
    for spec in (GREEDY, FILTERED):
        memory = runner._program(4, 3, spec).memory_analysis()
        assert memory.alias_size_in_bytes >= pool


def test_no_program_calls_back_to_the_host() -> None:
    """Callbacks fail with sharded inputs and stall a GPU."""
    for spec in (GREEDY, FILTERED):
        text = shared_runner()._program(4, 3, spec).as_text()
        assert "ENTRY" in text and "callback" not in text


def test_new_parameters_are_used_by_the_next_step_without_compiling() -> None:
    runner = shared_runner()
    before = Driver(runner, [asked(6)]).run()
    other = sharpen(random_params(CONFIG, seed=9))
    with count_compilations() as compiled:
        runner.params = other
        after = Driver(runner, [asked(6)]).run()
        runner.params = params()
        again = Driver(runner, [asked(6)]).run()
    assert compiled == []
    assert before[0].tokens != after[0].tokens
    assert before == again


def test_what_a_broken_request_leaves_behind_does_no_harm() -> None:
    """Keys and values that are not numbers in a page that goes to another request."""
    runner = new_runner()
    good = Driver(runner, [asked(6), asked(13)]).run()
    poison = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params())
    runner.params = poison
    Driver(runner, [asked(16, SamplingParams(max_tokens=20))] * ROWS, salt=3).run()
    runner.params = params()
    again = Driver(runner, [asked(6), asked(13)], salt=5).run()
    assert good == again


def test_row_buckets_are_few() -> None:
    assert [row_bucket(rows, 32) for rows in (1, 2, 4, 5, 16, 17, 32)] == [1, 4, 4, 16, 16, 32, 32]
