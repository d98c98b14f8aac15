"""What of the blocks counts: stops, limits, discarded tokens, seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from herald_jax import SampleStats, SamplingParams
from herald_jax.engine.detokenizer import TextStream
from herald_jax.engine.request import RowBlock, RowProgress, sample_seeds

EOS = 1
STATS = SampleStats(
    steps_per_block=[3, 1],
    generated_tokens=6,
    queue_seconds=0.5,
    prefill_seconds=1.0,
    decode_seconds=2.0,
    ttft_seconds=1.75,
    reused_tokens=8,
    preemptions=1,
)


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i) for i in ids)


def block(ids: Sequence[int], *, tail: int = 0, steps: Sequence[int] | None = None) -> RowBlock:
    """A block whose first `tail` positions belong to the prompt."""
    size = tail + len(ids)
    return RowBlock(
        token_ids=np.array([EOS] * tail + list(ids), np.int32),
        is_generated=np.arange(size) >= tail,
        unmask_steps=np.array([-1] * tail + list(steps or range(len(ids))), np.int32),
        confidences=np.linspace(0.1, 0.9, size, dtype=np.float32),
        logprobs=np.full(size, -0.5, np.float32),
        steps=len(ids),
    )


def run(params: SamplingParams, *blocks: RowBlock, has_text: bool = True) -> RowProgress:
    text = TextStream(decode, params.stop or ()) if has_text else None
    progress = RowProgress(params, (EOS,), text)
    for one in blocks:
        progress.accept(one)
    return progress


def finished(progress: RowProgress):
    return progress.output(0, 5, STATS)


def test_the_length_limit_cuts_the_last_block_and_drops_nothing_before():
    progress = run(SamplingParams(max_tokens=6), block([2, 3, 4, 5]), block([6, 7, 8, 9]))
    output = finished(progress)
    assert output.token_ids == [2, 3, 4, 5, 6, 7]
    assert output.finish_reason == "length"
    assert output.text == "cdefgh"
    assert output.stats.forwards == 6
    assert output.cumulative_logprob == pytest.approx(-3.0)
    for values in (output.unmask_steps, output.confidences, output.token_logprobs):
        assert len(values) == 6


def test_a_block_longer_than_max_tokens_and_prompt():
    """Neither an empty answer nor one that is too long."""
    output = finished(run(SamplingParams(max_tokens=1), block([7] * 61, tail=3)))
    assert output.token_ids == [7]


def test_prompt_tail_positions_do_not_count_and_do_not_stop():
    progress = run(SamplingParams(max_tokens=3), block([4, 5], tail=2))
    assert progress.token_ids == [4, 5]
    assert progress.finish_reason is None


def test_a_stop_id_committed_before_its_left_neighbours():
    """Blocks are whole when they are looked at, so only the place of the stop id counts."""
    progress = run(SamplingParams(), block([4, 5, EOS, 9], steps=[3, 2, 0, 1]))
    output = finished(progress)
    assert output.token_ids == [4, 5, EOS]
    assert output.text == "ef"
    assert (output.finish_reason, output.stop_reason) == ("stop", EOS)
    assert output.unmask_steps == [3, 2, 0]
    assert progress.steps_per_block == [4]


def test_the_earliest_of_several_stop_ids_ends_the_text():
    progress = run(SamplingParams(stop_token_ids=[7]), block([4, 7, EOS, 5]))
    assert (progress.token_ids, progress.stop_reason) == ([4, 7], 7)
    assert finished(progress).text == "e"


@pytest.mark.parametrize(("max_tokens", "reason"), [(2, "length"), (3, "stop")])
def test_a_stop_id_counts_only_within_the_limit(max_tokens, reason):
    progress = run(SamplingParams(max_tokens=max_tokens), block([4, 5, EOS, 6]))
    assert progress.finish_reason == reason
    assert len(progress.token_ids) == max_tokens


def test_ignore_eos_keeps_the_callers_own_stop_ids():
    params = SamplingParams(ignore_eos=True, stop_token_ids=[9])
    progress = run(params, block([EOS, 4, EOS, 5]), block([EOS, 9, 4, 4]))
    assert progress.token_ids == [EOS, 4, EOS, 5, EOS, 9]


def test_a_first_token_that_stops_gives_an_empty_text():
    output = finished(run(SamplingParams(), block([EOS, 4, 5, 6])))
    assert (output.text, output.token_ids, output.finish_reason) == ("", [EOS], "stop")


def test_a_stop_string_across_blocks_keeps_ids_up_to_its_end():
    params = SamplingParams(stop="fgh")
    progress = run(params, block([4, 5, 6]), block([7, 8, EOS]))
    output = finished(progress)
    assert output.token_ids == [4, 5, 6, 7]
    assert output.text == "e"
    assert (output.finish_reason, output.stop_reason) == ("stop", "fgh")


def test_a_stop_string_at_the_limit_wins():
    output = finished(run(SamplingParams(max_tokens=2, stop="ef"), block([4, 5, 6, 7])))
    assert output.finish_reason == "stop"
    assert output.text == ""


def test_a_stop_id_in_front_of_a_stop_string_wins():
    output = finished(run(SamplingParams(stop="g"), block([4, EOS, 6, 7])))
    assert (output.text, output.stop_reason) == ("e", EOS)


def test_abort_keeps_what_there_is_and_is_idempotent():
    progress = run(SamplingParams(stop="xx"), block([4, 23]))
    assert progress.take_text() == "e"
    progress.abort()
    progress.abort()
    output = finished(progress)
    assert (output.text, output.finish_reason) == ("ex", "abort")
    assert progress.take_text() == "x"


def test_abort_does_not_touch_a_sample_that_ended():
    progress = run(SamplingParams(max_tokens=1), block([4]))
    progress.abort()
    assert progress.finish_reason == "length"


def test_without_a_tokenizer_there_are_ids_and_no_text():
    output = finished(run(SamplingParams(max_tokens=2), block([4, 5]), has_text=False))
    assert (output.text, output.token_ids) == ("", [4, 5])


def test_blocks_after_the_end_and_empty_blocks_are_faults_of_the_engine():
    progress = run(SamplingParams(max_tokens=1), block([4]))
    with pytest.raises(RuntimeError, match="ended"):
        progress.accept(block([4]))
    with pytest.raises(RuntimeError, match="without a generated token"):
        run(SamplingParams(), block([], tail=4))
    with pytest.raises(RuntimeError, match="running"):
        finished(run(SamplingParams(), block([4])))


def test_seeds():
    assert sample_seeds(SamplingParams(seed=7))[0] == 7
    seeds = sample_seeds(SamplingParams(seed=7, n=4))
    assert seeds == sample_seeds(SamplingParams(seed=7, n=4))
    assert seeds[:2] == sample_seeds(SamplingParams(seed=7, n=2)), "n does not change the first"
    assert len(set(seeds)) == 4
    assert set(seeds[1:]).isdisjoint(sample_seeds(SamplingParams(seed=8, n=4)))
    fresh = sample_seeds(SamplingParams(n=4)) + sample_seeds(SamplingParams(n=4))
    assert len(set(fresh)) == 8
    assert all(0 <= seed < 2**32 for seed in fresh + seeds)
