"""Decodes a few blocks on every row of a filled engine, and says where the time went."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.filled import Arena, FilledEngine, filled_engines
from herald_jax.cache_config import CacheConfig
from herald_jax.configs import ModelConfig
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.request import Request, RowProgress
from herald_jax.engine.trace import Trace
from herald_jax.models.decoder import Params
from herald_jax.retrieval.recall import RecallNotes
from herald_jax.sampling import SamplingParams

WARM_BLOCKS = 1
"""Blocks of every row before the measured ones."""

MOST_ALONE_STEPS = 12
"""Denoising passes by which the device's own time is found, with nothing beside it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine and what it decodes.

    Attributes:
        name: What it is called.
        cache: Its cache; `None` for the dense one.
        rows: Rows.
        context: Tokens that a row has room for, generation included.
        steps: Denoising passes of a block.
        blocks: Blocks that are measured.
        seconds: Most seconds of decoding.
        is_serial: True to let the device wait for every retrieval.
        trace: File for a trace of the measured blocks.
    """

    name: str
    cache: CacheConfig | None
    rows: int
    context: int
    steps: int = 20
    blocks: int = 3
    seconds: float = 60.0
    is_serial: bool = False
    trace: Path | None = None


class Timeline:
    """When steps ended and rows got blocks."""

    def __init__(self, rows: int) -> None:
        self.step_ends: list[float] = []
        self.commits: list[list[float]] = [[] for _ in range(rows)]

    def window(self, blocks: int) -> tuple[float, float]:
        """From the last row's last warm block until the first row has all measured ones.

        If rows are so far apart that there is no such time, or the clock ended it: from the
        first row's warm block until the last commit.
        """
        last = WARM_BLOCKS + blocks
        begin = max(
            row[WARM_BLOCKS - 1] if len(row) >= WARM_BLOCKS else 1e30 for row in self.commits
        )
        ends = [row[last - 1] for row in self.commits if len(row) >= last]
        end = min(ends, default=max(max(row, default=0.0) for row in self.commits))
        if end <= begin:
            begin = min(row[WARM_BLOCKS - 1] for row in self.commits if len(row) >= WARM_BLOCKS)
        return begin, end


def _request(case: Case, config: ModelConfig, prompt_blocks: int, blocks: int) -> Request:
    length = config.block_length
    return Request(
        prompt=None,
        prompt_token_ids=(config.vocab_size // 3,) * (prompt_blocks * length),
        sampling=SamplingParams(
            max_tokens=blocks * length,
            ignore_eos=True,
            strategy="low_confidence_static",
            denoising_steps=case.steps,
        ),
    )


def _decode(
    engine: FilledEngine, case: Case, request: Request, stop_at: int
) -> tuple[Timeline, list]:
    """Runs until a row has `stop_at` blocks, or all are done, or the time is over."""
    progresses, names = [], [str(row) for row in range(case.rows)]
    for name in names:
        progress = RowProgress(request.sampling, (), None)
        engine.add_request(name, request, [progress], [int(name)])
        progresses.append(progress)
    timeline, deadline = Timeline(case.rows), time.perf_counter() + case.seconds
    while engine.has_unfinished and time.perf_counter() < deadline:
        events = engine.step()
        now = time.perf_counter()
        timeline.step_ends.append(now)
        for event in events:
            if event.error is not None:
                raise event.error
            timeline.commits[int(event.sample.request_id)].append(now)
        if any(len(row) >= stop_at for row in timeline.commits):
            break
    for name in names:
        engine.abort(name)
    while engine.has_unfinished:  # steps that are unread
        engine.step()
    return timeline, progresses


def _interval(times: list[float], begin: float = 0.0, end: float = 1e30) -> float:
    inside = [t for t in times if begin <= t <= end]
    return statistics.median(np.diff(inside)) if len(inside) > 2 else 0.0


def run_case(
    config: ModelConfig, params: Params, case: Case, arena: Arena, arena_bytes: int
) -> dict[str, Any]:
    """Figures of a case."""
    blocks = WARM_BLOCKS + case.blocks + 1  # the last one would look no further ahead
    prompt_blocks = case.context // config.block_length - blocks
    begin = time.perf_counter()
    with filled_engines(arena, arena_bytes):
        settings = EngineConfig(
            max_model_len=case.context,
            max_num_seqs=case.rows,
            share_prefixes=False,
            max_prefill_tokens=config.block_length,
            cache=case.cache,
        )
        engine = FilledEngine(config, params, settings)
        try:
            jax.block_until_ready(engine.runner._states)
            setup = time.perf_counter() - begin
            figures = _figures(engine, case, config, prompt_blocks, blocks)
        finally:
            if case.cache is not None:
                engine.runner.close()
            del engine
            gc.collect()
    return {**figures, "setup_seconds": setup}


def _figures(
    engine: FilledEngine, case: Case, config: ModelConfig, prompt_blocks: int, blocks: int
) -> dict[str, Any]:
    runner = engine.runner
    # One block each, which looks at nothing behind it: the device's time with nothing beside it.
    alone, _ = _decode(engine, case, _request(case, config, prompt_blocks, 1), 1)
    ends = alone.step_ends
    alone_pass = _interval(ends[3 : min(len(ends), 3 + MOST_ALONE_STEPS)])
    runner.is_serial = case.is_serial
    compiled = engine.compile_seconds
    before = dataclasses.replace(runner.retrieval.counts) if case.cache is not None else None
    notes = None
    if case.cache is not None and case.cache.placement == "host":
        runner.notes = notes = RecallNotes()
    request = _request(case, config, prompt_blocks, blocks)
    if case.trace is not None:
        engine.trace = Trace()
    timeline, progresses = _decode(engine, case, request, WARM_BLOCKS + case.blocks)
    if case.trace is not None and engine.trace is not None:
        case.trace.parent.mkdir(parents=True, exist_ok=True)
        engine.trace.save(case.trace)
    first, last = timeline.window(case.blocks)
    committed = sum(first < t <= last for row in timeline.commits for t in row)
    spans = [np.diff([t for t in row if first <= t <= last]) for row in timeline.commits]
    spans = [float(span) for row in spans for span in row]
    steps = sum(first < t <= last for t in timeline.step_ends)
    seconds = last - first
    per_block = seconds * case.rows / committed if committed else float("nan")
    figures: dict[str, Any] = {
        "tokens_per_second": committed * config.block_length / seconds if committed else 0.0,
        "ms_per_block": 1e3 * per_block,
        "ms_per_block_of_a_row": 1e3 * statistics.median(spans) if spans else None,
        "ms_per_pass": 1e3 * _interval(timeline.step_ends, first, last),
        "ms_per_pass_alone": 1e3 * alone_pass,
        "passes_per_block": steps * case.rows / committed if committed else None,
        "blocks_measured": committed,
        "window_seconds": seconds,
        "device_bytes": runner.kv_bytes,
        "device_bytes_of_engine": engine.sizes.kv_bytes,
        "host_bytes": engine.sizes.host_bytes,
        "compile_seconds": compiled,
        "compile_seconds_while_measured": engine.compile_seconds - compiled,
    }
    if case.cache is None or before is None:
        return figures
    figures["exposed_ms_per_block"] = 1e3 * (per_block - (case.steps + 1) * alone_pass)
    counts = runner.retrieval.counts
    recalls = counts.recalls - before.recalls
    accounts = [a for progress in progresses for a in progress.accounts[WARM_BLOCKS:]]
    known = [account.recall for account in accounts if account.recall is not None]
    if known and notes is not None and recalls:
        figures |= {
            "lane_ms_per_row": 1e3 * (notes.scan_seconds + notes.gather_seconds) / recalls,
            "scan_ms_per_row": 1e3 * notes.scan_seconds / recalls,
            "gather_ms_per_row": 1e3 * notes.gather_seconds / recalls,
            "recall_ms": 1e3 * statistics.median(r.seconds for r in known),
            "hit_share": statistics.mean(r.hit_share for r in known),
            "mb_scanned_per_row": statistics.mean(r.bytes_scanned for r in known) / 1e6,
            "mb_gathered_per_row": statistics.mean(r.bytes_gathered for r in known) / 1e6,
            "mb_sent_per_row": statistics.mean(r.bytes_sent for r in known) / 1e6,
        }
    figures |= {
        "recalls": recalls,
        "waits": counts.waits - before.waits,
        "wait_seconds": counts.wait_seconds - before.wait_seconds,
        "counts": dataclasses.asdict(accounts[-1].counts) if accounts else None,
    }
    return figures
