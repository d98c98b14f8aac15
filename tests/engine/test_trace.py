"""What a trace says of an engine; `tests/test_throughput_benchmark.py` has one with a host lane."""

from __future__ import annotations

from herald_jax import SamplingParams
from herald_jax.engine.trace import DEVICE, Trace
from tests.engine.sparse_engines import make_llm, prompts

GREEDY = SamplingParams(max_tokens=21, threshold=0.5, ignore_eos=True)


def test_a_dense_engine_has_steps_and_blocks_as_long_as_it_is_traced() -> None:
    llm = make_llm(None, max_num_seqs=1)
    llm.engine.trace = trace = Trace()
    output = llm.generate(prompts()[2], GREEDY)[0].outputs[0]
    assert {span.track for span in trace.spans} == {DEVICE, "row 0"}
    blocks = [span.facts for span in trace.spans if span.track == "row 0"]
    assert [block["steps"] for block in blocks] == output.stats.steps_per_block
    steps = [span for span in trace.spans if span.track == DEVICE]
    # Row-steps of prefill alone are none; the rest is passes, and what ran on behind the end.
    assert sum(span.facts["rows"] for span in steps) >= output.stats.forwards
    count = len(trace.spans)
    llm.engine.trace = None
    llm.generate(prompts()[2], GREEDY)
    assert len(trace.spans) == count
