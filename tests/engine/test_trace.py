"""What a trace says of steps, blocks and the host's jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from herald_jax import CacheConfig, SamplingParams
from herald_jax.engine.trace import DEVICE, LANE, Trace
from tests.engine.sparse_engines import make_llm, prompts

GREEDY = SamplingParams(max_tokens=21, threshold=0.5, ignore_eos=True)
CACHE = CacheConfig(placement="host", budget=0.1)


def test_blocks_jobs_and_steps_are_all_there(tmp_path: Path) -> None:
    llm = make_llm(CACHE, max_num_seqs=2)
    llm.engine.trace = trace = Trace()
    outputs = llm.generate(prompts()[3:6], GREEDY)
    spans = list(trace.spans)
    stats = [output.outputs[0].stats for output in outputs]
    blocks = [span for span in spans if span.track.startswith("row ")]
    assert len(blocks) == sum(len(each.steps_per_block) for each in stats)
    assert sorted(span.facts["steps"] for span in blocks) == sorted(
        steps for each in stats for steps in each.steps_per_block
    )
    attended = [account.counts.attended for each in stats for account in each.accounts]
    assert sorted(span.facts["attended"] for span in blocks) == sorted(attended)
    recalled = [span for span in blocks if "bytes_sent" in span.facts]
    recalls = [a.recall for each in stats for a in each.accounts if a.recall is not None]
    assert sum(span.facts["bytes_sent"] for span in recalled) == sum(r.bytes_sent for r in recalls)
    assert all(span.facts["exposed_wait_ms"] >= 0 for span in recalled)
    assert all(0 < r.scan_seconds + r.gather_seconds <= r.seconds for r in recalls)

    jobs = [span for span in spans if span.track == LANE]
    took = [span for span in jobs if span.name == "Recall"]
    assert sum(span.facts["bytes_scanned"] for span in took) >= sum(
        r.bytes_scanned for r in recalls
    )
    assert any(span.name == "Append" for span in jobs)
    assert all(before.end <= after.begin for before, after in zip(jobs, jobs[1:], strict=False))
    steps = [span for span in spans if span.track == DEVICE]
    assert all(before.end <= after.begin for before, after in zip(steps, steps[1:], strict=False))
    assert sum(span.facts["rows"] for span in steps) == llm.engine.scheduler.counts.row_steps
    waited = sum(span.facts["exposed_wait_ms"] for span in steps) / 1e3
    runner: Any = llm.engine.runner
    assert abs(waited - runner.retrieval.counts.wait_seconds) < 1e-6

    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(spans) and min(event["ts"] for event in drawn) == 0
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {DEVICE, LANE, "row 0", "row 1"}

    llm.engine.trace = None
    llm.generate(prompts()[3], GREEDY)
    assert len(trace.spans) == len(spans)


def test_a_dense_engine_has_steps_and_blocks() -> None:
    llm = make_llm(None, max_num_seqs=1)
    llm.engine.trace = trace = Trace()
    output = llm.generate(prompts()[2], GREEDY)[0].outputs[0]
    tracks = {span.track for span in trace.spans}
    assert tracks == {DEVICE, "row 0"}
    assert len(output.stats.steps_per_block) == sum(s.track == "row 0" for s in trace.spans)
