"""The runner against `generate`, and what it promises about compilation, memory and limits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_jax._checks import ConfigError
from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.generate import generate, pad_prompts
from herald_jax.decoding.options import decoding_options, proposal_spec, stop_ids
from herald_jax.engine import runner as runner_module
from herald_jax.engine.memory import capacity_bucket, row_bucket
from herald_jax.engine.runner import RowRequest, Runner
from herald_jax.models import abstract_params, random_params
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
    max_position_embeddings=160,
)
SAMPLED = SamplingParams(
    max_tokens=9, temperature=0.7, top_k=20, threshold=0.5, denoising_steps=3, ignore_eos=True
)


@functools.cache
def params() -> Any:
    return sharpen(random_params(CONFIG, seed=4))


@functools.cache
def shared_runner() -> Runner:
    """One runner for all tests that only decode, so that programs are compiled once."""
    return Runner(CONFIG, params(), max_num_seqs=4)


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    ids = np.random.default_rng([length, salt]).integers(0, 61, length)
    return tuple(int(i) for i in ids)


def request(length: int, sampling: SamplingParams = SAMPLED, seed: int = 0) -> RowRequest:
    return RowRequest(prompt_token_ids=prompt_of(length, seed), sampling=sampling, seed=seed)


@dataclasses.dataclass
class Row:
    tokens: list[int] = dataclasses.field(default_factory=list)
    unmask_steps: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    steps_per_block: list[int] = dataclasses.field(default_factory=list)


def drive(runner: Runner, requests: list[RowRequest]) -> list[Row]:
    """Decodes a batch to its end, with stop and length rules written out here."""
    batch = runner.start(requests)
    rows = [Row() for _ in requests]
    while batch.is_active.any():
        active, blocks = batch.is_active.copy(), batch.block_index
        result = runner.decode_block(batch)
        moved = batch.block_index - blocks
        assert moved[: len(requests)].tolist() == active.astype(int).tolist()
        assert not moved[len(requests) :].any()
        for index, (row, asked) in enumerate(zip(rows, requests, strict=True)):
            if not active[index]:
                assert not result.is_generated[index].any() and result.steps[index] == 0
                continue
            tail = len(asked.prompt_token_ids) % 4 if not row.steps_per_block else 0
            kept = asked.prompt_token_ids[len(asked.prompt_token_ids) - tail :]
            assert result.token_ids[index][:tail].tolist() == list(kept)
            assert result.is_generated[index].tolist() == [False] * tail + [True] * (4 - tail)
            row.steps_per_block.append(int(result.steps[index]))
            stops = stop_ids(asked.sampling, CONFIG)
            for place in range(tail, 4):
                row.tokens.append(int(result.token_ids[index, place]))
                row.unmask_steps.append(int(result.unmask_steps[index, place]))
                row.logprobs.append(float(result.logprobs[index, place]))
                if row.tokens[-1] in stops or len(row.tokens) == asked.sampling.max_tokens:
                    batch.finish(index)
                    break
    return rows


@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, SamplingParams(max_tokens=9, strategy="sequential", denoising_steps=2)],
    ids=["sampled", "greedy"],
)
def test_equals_generate(sampling: SamplingParams) -> None:
    requests = [request(length, sampling, seed=length) for length in (0, 3, 8, 17)]
    rows = drive(shared_runner(), requests)
    padded, lengths = pad_prompts([row.prompt_token_ids for row in requests], 4)
    seeds = np.array([row.seed for row in requests], np.uint32)
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


@settings(max_examples=20)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 13), st.sampled_from([0.0, 0.9])),
        min_size=1,
        max_size=4,
    ),
    salt=st.integers(0, 50),
)
def test_rows_equal_the_oracle_alone_and_together(
    rows: list[tuple[int, int, float]], salt: int
) -> None:
    """Rows of one batch that differ in length, limit and options do not touch each other."""
    requests = [
        RowRequest(
            prompt_token_ids=prompt_of(length, salt),
            sampling=SamplingParams(
                max_tokens=limit, temperature=heat, threshold=0.4, top_p=1 - heat / 4
            ),
            seed=salt + index,
        )
        for index, (length, limit, heat) in enumerate(rows)
    ]
    together = drive(shared_runner(), requests)
    alone = drive(shared_runner(), requests[-1:])[0]
    assert alone.tokens == together[-1].tokens
    assert alone.unmask_steps == together[-1].unmask_steps
    for asked, row in zip(requests, together, strict=True):
        expected = decode(
            CONFIG, oracle_params(), list(asked.prompt_token_ids), asked.seed, asked.sampling
        )
        if expected.margin > MARGIN:
            assert row.tokens == expected.tokens
            assert row.steps_per_block == expected.steps_per_block
            np.testing.assert_allclose(row.logprobs, expected.logprobs, atol=1e-4)


@functools.cache
def oracle_params() -> Any:
    return to_float64(params())


def test_prefill_in_several_chunks_equals_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk ends inside the cache, so blocks that were already there are run again."""
    sampling = SamplingParams(max_tokens=5)
    requests = [request(155, sampling, seed=1), request(70, sampling, seed=2)]
    whole = drive(Runner(CONFIG, params(), max_num_seqs=2), requests)
    monkeypatch.setattr("herald_jax.engine.memory.PREFILL_TOKENS", 2 * 36)
    chunked = drive(Runner(CONFIG, params(), max_num_seqs=2), requests)
    for first, second in zip(whole, chunked, strict=True):
        assert first.tokens == second.tokens
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    expected = decode(CONFIG, oracle_params(), list(requests[1].prompt_token_ids), 2, sampling)
    assert chunked[1].tokens == expected.tokens


def test_programs_are_bounded_by_buckets_and_none_after_warm_up() -> None:
    """A program compiled for every length or batch size."""
    rng = np.random.default_rng(0)
    runner = Runner(CONFIG, params(), max_num_seqs=3)
    batches = []
    for _ in range(25):
        count = int(rng.integers(1, 4))
        batches.append(
            [
                request(int(rng.integers(0, 148)), seed=int(rng.integers(0, 99)))
                for _ in range(count)
            ]
        )
    sizes = {row_bucket(len(rows), 3) for rows in batches}
    capacities = {
        capacity_bucket(max(row.total_tokens for row in rows), 4, 160) for rows in batches
    }
    assert sizes == {1, 2, 3} and capacities == {128, 160}
    for size in sizes:
        for capacity in capacities:
            runner.warmup([request(capacity - 9)] * size)
    with count_compilations() as compiled:
        for rows in batches:
            batch = runner.start(rows)
            for _ in range(2):
                runner.decode_block(batch)
    assert compiled == []
    # An empty cache, a prefill and a decoding program for each pair of buckets.
    assert len(runner._programs) <= 3 * len(sizes) * len(capacities)


def decode_arguments(size: int, capacity: int, sampling: SamplingParams) -> tuple:
    cache = jax.eval_shape(lambda: DenseCache.zeros(CONFIG, size, capacity, jnp.float32))
    block = (size, CONFIG.block_length)
    return (
        abstract_params(CONFIG, jnp.float32),
        cache,
        jax.ShapeDtypeStruct((size,), jnp.int32),
        jax.ShapeDtypeStruct(block, jnp.int32),
        jax.ShapeDtypeStruct(block, jnp.bool_),
        jax.ShapeDtypeStruct((size,), jnp.bool_),
        decoding_options([sampling] * size, [0] * size, CONFIG),
    )


def test_no_program_calls_back_to_the_host() -> None:
    """Callbacks fail with sharded inputs and stall a GPU."""
    for sampling in (SAMPLED, SamplingParams()):
        step = functools.partial(
            runner_module._decode, model=CONFIG, spec=proposal_spec([sampling])
        )
        text = str(jax.make_jaxpr(step)(*decode_arguments(2, 128, sampling)))
        assert "while" in text and "callback" not in text
    piece, start = jax.ShapeDtypeStruct((2, 8), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    fill = functools.partial(runner_module._prefill, model=CONFIG)
    arguments = decode_arguments(2, 128, SAMPLED)[:2]
    assert "callback" not in str(jax.make_jaxpr(fill)(*arguments, piece, start))


def test_the_donated_cache_is_not_copied() -> None:
    """A donated buffer that is copied all the same doubles the peak."""
    runner = shared_runner()
    drive(runner, [request(20)])
    kv_bytes = runner._memory.kv_bytes(1, 128)
    assert kv_bytes == 2 * 2 * 2 * 8 * 128 * 4
    programs = {key[0]: program for key, program in runner._programs.items() if key[1] == 1}
    assert {"prefill", "decode"} <= set(programs)
    for name in ("prefill", "decode"):
        memory = programs[name].memory_analysis()
        assert memory.alias_size_in_bytes >= kv_bytes


def test_the_batch_reports_its_cache() -> None:
    batch = shared_runner().start([request(3), request(9), request(4)])
    assert batch.kv_device_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(batch.cache))
    assert batch.kv_host_bytes == 0
    assert batch.cache.k[0].shape == (4, 2, 128, 8)
    assert batch.is_active.tolist() == [True] * 3


def test_new_parameters_are_used_by_the_next_block_without_compiling() -> None:
    runner = Runner(CONFIG, params(), max_num_seqs=1)
    before = drive(runner, [request(6)])
    other = sharpen(random_params(CONFIG, seed=9))
    with count_compilations() as compiled:
        runner.params = other
        after = drive(runner, [request(6)])
        runner.params = params()
        again = drive(runner, [request(6)])
    assert compiled == []
    assert before[0].tokens != after[0].tokens
    assert before == again


def test_parameters_that_do_not_fit_are_all_named() -> None:
    runner = Runner(CONFIG, params(), max_num_seqs=1)
    wrong = {**params(), "norm": {"scale": jnp.zeros(3)}}
    del wrong["lm_head"]
    with pytest.raises(ConfigError, match=r"(?s)lm_head.*got nothing.*norm.*\(24,\).*\(3,\)"):
        runner.params = wrong
    assert runner.params is not wrong
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params())
    with pytest.raises(ConfigError, match="bfloat16"):
        runner.params = half


def test_the_context_limit_holds_after_rounding_to_blocks() -> None:
    """A request near the limit that is rounded up to a whole block and overruns the context."""
    config = dataclasses.replace(CONFIG, block_length=8, max_position_embeddings=16)
    runner = Runner(config, random_params(config), max_num_seqs=1)
    assert runner.max_model_len == 16
    fits = RowRequest(prompt_token_ids=prompt_of(13), sampling=SamplingParams(max_tokens=3), seed=0)
    batch = runner.start([fits])
    assert batch.cache.capacity == 16
    assert runner.decode_block(batch).is_generated[0].tolist() == [False] * 5 + [True] * 3
    over = dataclasses.replace(fits, sampling=SamplingParams(max_tokens=4))
    with pytest.raises(ConfigError, match=r"prompt tokens \+ max_tokens=17.*max_model_len=16"):
        runner.start([over])


def test_batches_that_cannot_share_a_program_are_refused() -> None:
    runner = shared_runner()
    with pytest.raises(ConfigError, match="strategy, confidence"):
        runner.start([request(3), request(3, SamplingParams(max_tokens=4, strategy="sequential"))])
    with pytest.raises(ConfigError, match="strategy, confidence"):
        runner.start([request(3), request(3, dataclasses.replace(SAMPLED, confidence="scaled"))])
    with pytest.raises(ConfigError, match="rows=5"):
        runner.start([request(3)] * 5)
    with pytest.raises(ConfigError, match="rows=0"):
        runner.start([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 161}, "max_model_len=161.*at most 160"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"device_memory_fraction": 0.0}, "device_memory_fraction=0.0"),
        ({"device_memory_fraction": 1.5}, "device_memory_fraction=1.5"),
        ({"max_num_seqs": 10**9}, "(?s)max_num_seqs=1000000000.*max_model_len.*fraction"),
    ],
)
def test_limits_that_cannot_be_used_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner(CONFIG, params(), **arguments)


def with_memory(monkeypatch: pytest.MonkeyPatch, size: int, **arguments: Any) -> Runner:
    """A runner on a device that has `size` bytes besides the weights."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params()))
    monkeypatch.setattr(runner_module, "device_bytes_limit", lambda device: weights + size)
    return Runner(CONFIG, params(), device_memory_fraction=1.0, **arguments)


def test_a_batch_takes_as_many_rows_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shared_runner()._memory
    runner = with_memory(monkeypatch, plan.batch_bytes(4, 160), max_num_seqs=4)
    long, short = request(150), request(5)
    assert runner.fit([long] * 9) == 4
    assert runner.fit([short]) == 1
    tight = with_memory(monkeypatch, plan.batch_bytes(2, 160))
    assert tight.max_num_seqs >= 2
    count = tight.fit([long] * 9)
    assert 1 <= count < 9
    shape = row_bucket(count, tight.max_num_seqs), 160
    assert plan.batch_bytes(*shape) <= plan.batch_bytes(2, 160)
    # A long request behind short ones does not join if the larger cache would not fit.
    assert tight.fit([short] * 2 + [long] * 9) <= max(count, 2)


def test_the_context_shrinks_to_what_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shared_runner()._memory
    runner = with_memory(monkeypatch, plan.batch_bytes(1, 80))
    assert runner.max_model_len == 80
    assert with_memory(monkeypatch, plan.batch_bytes(1, 160)).max_model_len == 160
    with pytest.raises(ConfigError, match="Lower max_num_seqs or max_model_len"):
        with_memory(monkeypatch, plan.batch_bytes(1, 80), max_model_len=160)
    with pytest.raises(ConfigError, match="device_memory_fraction"):
        with_memory(monkeypatch, 0)


@pytest.mark.parametrize("length", [150, 152, 153, 157])
def test_a_length_that_was_derived_can_be_used(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    config = dataclasses.replace(CONFIG, max_position_embeddings=length)
    plan = shared_runner()._memory
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params()))
    for size in range(plan.batch_bytes(1, 64), plan.batch_bytes(1, 160), 4001):
        monkeypatch.setattr(runner_module, "device_bytes_limit", lambda device, s=size: weights + s)
        runner = Runner(config, params(), device_memory_fraction=1.0)
        assert runner.max_model_len >= 4
