"""Small engines that share their compiled programs, and what requests to them must give."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from herald_jax.configs import ModelConfig
from herald_jax.decoding.generate import generate, pad_prompts
from herald_jax.decoding.propose import CONFIDENCE_SOURCES
from herald_jax.decoding.rules import RULES
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.live import LiveSample, SampleEvent
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.request import Request, RowProgress
from herald_jax.models import random_params
from herald_jax.outputs import CompletionOutput
from herald_jax.sampling import SamplingParams
from tests.oracle import sharpen

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
PAGE_BYTES = 8 * CONFIG.kv_values_per_token * 4
NUM_PAGES = 10
"""Too few for four long samples, which need up to seven pages each."""

MAX_TOKENS = 11
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 40)
"""Around the borders of blocks and pages. An empty prompt is not compared: its first block's
masks are symmetric, so that its confidences tie up to rounding."""

BASE = tuple(int(i) for i in np.random.default_rng(7).integers(2, 60, 64))
PROGRAMS: dict[Any, Any] = {}


@functools.cache
def params(seed: int = 4) -> Any:
    return sharpen(random_params(CONFIG, seed=seed))


def _kinds() -> list[SamplingParams]:
    """Every unmask rule, greedy or sampled, and every source of confidence."""
    kinds = [
        SamplingParams(max_tokens=MAX_TOKENS),
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, threshold=0.4, ignore_eos=True),
    ]
    for at, strategy in enumerate(RULES):
        heat = dict(temperature=0.8, top_p=0.9, top_k=(0, 20)[at // 2 % 2]) if at % 2 else {}
        kinds.append(
            SamplingParams(
                max_tokens=MAX_TOKENS,
                strategy=strategy,
                confidence=CONFIDENCE_SOURCES[1 + at // 2 % 2] if heat else "raw",
                denoising_steps=3,
                **heat,
            )
        )
    assert {kind.confidence for kind in kinds} == set(CONFIDENCE_SOURCES)
    return kinds


KINDS = _kinds()


@functools.cache
def reference(kind: int) -> dict[int, dict[str, Any]]:
    """What `generate` makes of the prompts of all lengths, by length."""
    prompts, lengths = pad_prompts([BASE[:length] for length in LENGTHS], max(LENGTHS))
    seeds = np.array(LENGTHS, np.uint32)
    sampling = KINDS[kind]
    out = jax.device_get(
        generate(params(), prompts, lengths, seeds, model=CONFIG, sampling=sampling)
    )
    return {
        length: dict(
            token_ids=out.tokens[row, : out.lengths[row]].tolist(),
            unmask_steps=out.unmask_steps[row, : out.lengths[row]].tolist(),
            logprobs=out.logprobs[row, : out.lengths[row]],
            steps_per_block=[int(count) for count in out.steps_per_block[row] if count],
        )
        for row, length in enumerate(LENGTHS)
    }


def check_output(output: CompletionOutput, kind: int, length: int) -> None:
    """A complete output must be what `generate` makes."""
    expected = reference(kind)[length]
    assert output.token_ids == expected["token_ids"]
    assert output.unmask_steps == expected["unmask_steps"]
    assert output.stats.steps_per_block == expected["steps_per_block"]
    np.testing.assert_allclose(output.token_logprobs, expected["logprobs"], atol=1e-4)
    assert output.finish_reason in ("stop", "length")


def make_engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLMEngine:
    """An engine with four rows and pages of two blocks; all of them run the same programs."""
    monkeypatch.setattr("herald_jax.engine.config.PAGE_TOKENS", 8)
    options = dict(
        max_model_len=52,
        max_num_seqs=4,
        max_prefill_tokens=16,
        kv_cache_bytes=NUM_PAGES * PAGE_BYTES,
    )
    engine = LLMEngine(CONFIG, params(), EngineConfig(**(options | settings)))  # type: ignore[arg-type]
    assert engine.sizes.num_pages == NUM_PAGES
    engine._runner._programs = PROGRAMS  # type: ignore[attr-defined]
    return engine


class Driver:
    """Adds requests to an engine and gathers what becomes of them."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.live: dict[str, LiveSample] = {}
        self.asked: dict[str, tuple[int, int]] = {}
        self.errors: dict[str, Exception] = {}

    def add(self, kind: int, length: int, name: str = "", **options: Any) -> str:
        name = name or str(len(self.live))
        request = Request(prompt=None, prompt_token_ids=BASE[:length], sampling=KINDS[kind])
        progress = options.pop("progress", None)
        if progress is None:
            progress = RowProgress(KINDS[kind], CONFIG.stop_token_ids, None)
        (self.live[name],) = self.engine.add_request(name, request, [progress], [length], **options)
        self.asked[name] = kind, length
        return name

    def step(self) -> list[SampleEvent]:
        events = self.engine.step()
        for event in events:
            if event.error is not None:
                self.errors[event.sample.request_id] = event.error
        self.engine.scheduler.check()
        return events

    def drain(self) -> None:
        for _ in range(5000):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert self.engine.scheduler.is_idle
        pool = self.engine.scheduler._pool
        assert pool.available == pool.num_pages, "pages were lost"

    def check(self, *, but: set[str] | frozenset[str] = frozenset()) -> None:
        """All requests but these must have come to their proper ends."""
        for name, live in self.live.items():
            if name not in but:
                assert name not in self.errors
                check_output(live.output(), *self.asked[name])

    def check_partial(self, name: str) -> None:
        """An aborted request must have the beginning of its text."""
        output = self.live[name].output()
        expected = reference(self.asked[name][0])[self.asked[name][1]]
        assert output.finish_reason == "abort"
        assert output.token_ids == expected["token_ids"][: len(output.token_ids)]
