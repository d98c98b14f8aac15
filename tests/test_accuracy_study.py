"""The accuracy study: its decoding against the package's, its comparators and its intervals."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy.arms import CENTRE, MAGE, Arm, study_arms
from benchmarks.accuracy.decode import Batch, Quality, pool_tokens_for, query_count
from benchmarks.accuracy.paired import (
    pack_bits,
    paired_mean_difference,
    paired_share_difference,
    unpack_bits,
)
from benchmarks.accuracy.passes import Layout, Pools, first_step
from benchmarks.accuracy.prompts import Job, Texts, made_ahead
from benchmarks.accuracy.report import write_report
from benchmarks.accuracy.selecting import PAGE_TOKENS, page_importance, select
from benchmarks.accuracy.study import CellResults, Outcomes, jobs_of
from benchmarks.accuracy.warm import warm_up
from benchmarks.record import write_record
from examples.train_tiny.tokenizer import ASSETS
from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.generate import generate, pad_prompts
from herald_jax.models import random_params
from herald_jax.retrieval import SelectionConfig, columns
from herald_jax.sampling import SamplingParams
from tests.oracle import count_compilations, sharpen

BLOCK, TOKENS, BLOCKS = 16, 512, 3
CONFIG = ModelConfig(
    family="test",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    block_length=BLOCK,
    mask_token_id=60,
    stop_token_ids=(1,),
    rope_theta=1234.5,
    rms_norm_eps=3e-5,
)
LAYOUT = Layout(dense_layers=1, sink_tokens=3, threshold=0.4)
ARMS = [
    Arm(name="dense", source="none"),
    Arm(name="single pass", selection=SelectionConfig(queries="log8")),
    Arm(name="exact", source="exact", prefix="final", budget=0.1),
    Arm(name="own", source="own", selection=MAGE, first_block="block", exact_first_step="every"),
    Arm(name="lone", source="lone", selection=CENTRE, first_block="all"),
    Arm(name="masks", first_block="masks", exact_first_step="every", is_commit_exact=True),
    Arm(name="pages", scores="pages", exact_first_step="none"),
    Arm(name="random", scores="random", exact_first_step="none"),
    Arm(name="recent", scores="recent", exact_first_step="none"),
]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def params() -> Any:
    return sharpen(random_params(CONFIG, seed=3))


@functools.cache
def prompts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(2, 60, length).tolist() for length in (211, 176, 9, 198)]


@functools.cache
def batch() -> Batch:
    return Batch(
        params(),
        CONFIG,
        LAYOUT,
        prompts(),
        tokens=TOKENS,
        pool_tokens=256,
        max_blocks=BLOCKS,
    )


def test_the_dense_arm_is_what_the_package_generates() -> None:
    answers = batch().decode(ARMS[0])
    padded, lengths = pad_prompts(prompts(), BLOCK)
    sampling = SamplingParams(max_tokens=BLOCKS * BLOCK, threshold=LAYOUT.threshold)
    seeds = np.zeros(len(lengths), np.uint32)
    output = generate(params(), padded, lengths, seeds, model=CONFIG, sampling=sampling)
    for row, answer in enumerate(answers):
        expected = [token for token in np.asarray(output.tokens)[row].tolist() if token >= 0]
        expected = expected[: expected.index(1)] if 1 in expected else expected
        number = min(len(expected), len(answer.ids))
        assert answer.ids[:number] == expected[:number]
        steps = np.asarray(output.steps_per_block)[row][: len(answer.steps)]
        assert answer.steps == steps.tolist()
    assert sum(len(answer.ids) for answer in answers) > 3 * BLOCK


@pytest.mark.parametrize("arm", ARMS[1:], ids=lambda arm: arm.name)
def test_a_budget_that_covers_the_text_is_dense(arm: Arm) -> None:
    """Keys seen twice, a forgotten recent block, or a pool of another block."""
    dense, ours = (batch().decode(one) for one in (ARMS[0], dataclasses.replace(arm, budget=1.0)))
    assert [answer.ids for answer in ours] == [answer.ids for answer in dense]
    assert [answer.steps for answer in ours] == [answer.steps for answer in dense]


def test_arms_differ_where_the_budget_is_small() -> None:
    """The test above says nothing if a selection changes nothing."""
    texts = {
        arm.name: tuple(map(tuple, (answer.ids for answer in batch().decode(arm)))) for arm in ARMS
    }
    assert len(set(texts.values())) >= 6
    again = tuple(map(tuple, (answer.ids for answer in batch().decode(ARMS[1]))))
    assert again == texts["single pass"]


def test_step_0_is_exact_in_the_blocks_that_the_arm_names() -> None:
    """A first step that stays sparse, or an exact one in every block, looks like the arm beside."""
    first = Arm(name="first", budget=0.02)
    steps = {
        kind: [answer.steps for answer in batch().decode(
            dataclasses.replace(first, exact_first_step=kind))]
        for kind in ("none", "first", "every")
    }  # fmt: skip
    texts = {}
    for kind in steps:
        batch().decode(dataclasses.replace(first, exact_first_step=kind))
        texts[kind] = batch().decoded.text.copy()
    assert len({text.tobytes() for text in texts.values()}) == 3
    end = batch().lengths // BLOCK * BLOCK + BLOCK
    for row, stop in enumerate(end):
        assert (texts["first"][row, :stop] == texts["every"][row, :stop]).all()
        assert steps["first"][row][0] == steps["every"][row][0]
    assert any((texts["first"][row, :stop] != texts["none"][row, :stop]).any()
               for row, stop in enumerate(end))  # fmt: skip


def test_a_sparse_pass_reads_nothing_but_what_it_may() -> None:
    cache = batch().cache
    index = np.asarray([13, 11, 0, 12], np.int32)
    state = batch().state(0, batch().text, np.ones(4, bool))
    np.testing.assert_array_equal(state.index, index)
    candidates = np.maximum(index - 1, 0) * BLOCK
    draw = np.random.default_rng(0)
    q = draw.normal(size=(4, BLOCK, 6, 8)).astype(np.float32)
    positions = np.broadcast_to(np.arange(BLOCK, dtype=np.int32), (4, BLOCK))
    wanted = np.asarray([11, 9, 5, 10], np.int32)
    shape: dict[str, Any] = {"span": 256, "sinks": 3, "capacity": 64, "kv_heads": 2}
    parts, is_read = [], np.zeros((3, 4, 2, TOKENS), bool)
    is_read[0] = np.arange(TOKENS) < (index * BLOCK)[:, None, None]
    for layer in (1, 2):
        one = select(
            cache.k[layer], cache.v[layer], q, positions, candidates, wanted, np.uint32(0),
            scores="attention", spec=SelectionConfig(), **shape,
        )  # fmt: skip
        parts.append(one)
        chosen, counts = np.asarray(one[2]), np.asarray(one[3])
        assert counts.tolist() == [14, 12, 0, 13]
        for row in range(4):
            for head in range(2):
                mine = chosen[row, head, : counts[row]]
                assert (np.diff(mine) > 0).all() and (mine < candidates[row]).all()
                is_read[layer, row, head, mine] = True
        recent = (np.arange(TOKENS) >= candidates[:, None]) & (
            np.arange(TOKENS) < (index * BLOCK)[:, None]
        )
        is_read[layer] |= recent[:, None]
    pools = Pools(tuple(p[0] for p in parts), tuple(p[1] for p in parts), parts[0][3])

    def poisoned(x: jax.Array, layer: int) -> jax.Array:
        return jnp.where(is_read[layer][..., None], x, jnp.nan)

    dirty = DenseCache(
        tuple(poisoned(k, layer) for layer, k in enumerate(cache.k)),
        tuple(poisoned(v, layer) for layer, v in enumerate(cache.v)),
    )
    run = functools.partial(first_step, params(), config=CONFIG, layout=LAYOUT)
    arguments = (pools, state, jnp.asarray(False), batch().options)
    clean, other = run(cache, *arguments), run(dirty, *arguments)
    np.testing.assert_array_equal(clean.queries[-1], other.queries[-1])
    np.testing.assert_array_equal(clean.draft, other.draft)
    dense = run(cache, pools, state, jnp.asarray(True), batch().options)
    assert np.abs(np.asarray(dense.queries[-1]) - np.asarray(clean.queries[-1]))[0].max() > 1e-3


def test_recall_and_mass_of_the_best_selection_are_the_best() -> None:
    measured = {}
    for arm in (ARMS[3], ARMS[1], ARMS[7]):
        quality = Quality.empty(2)
        batch().decode(arm, quality)
        assert quality.counts[0] == 3  # the short prompt has nothing to choose from
        measured[arm.name] = quality
    best = measured["own"]
    for sums, count in ((best.first, best.counts[0]), (best.later, best.counts[1])):
        np.testing.assert_allclose(sums[0], count, rtol=1e-5)
        np.testing.assert_allclose(sums[1], sums[2], rtol=1e-5)
    for name, low, high in (("single pass", 0.2, 0.95), ("random", 0.0, 0.2)):
        recall = measured[name].first[0] / 3
        assert (recall >= low).all() and (recall <= high).all(), (name, recall)
        assert (measured[name].first[1] < best.first[1]).all()


def test_committed_keys_of_dense_decoding_have_no_error() -> None:
    batch().decode(ARMS[0])
    sums, rows = batch().committed_error()
    assert rows.tolist() == [sum(n > nth for n in batch().decoded.blocks) for nth in range(BLOCKS)]
    np.testing.assert_allclose(sums, 0, atol=1e-5)
    batch().decode(ARMS[7])
    found = batch().committed_error()[0] / np.maximum(rows, 1)
    assert (found > 0.01).all() and (found < 1.5).all()
    assert batch().committed_error()[0].max() < 1e-5  # the exact ones are in the cache now


@pytest.mark.parametrize("candidates", [45, 64, 5, 0])
def test_a_page_scores_by_the_bound_of_its_candidates(candidates: int) -> None:
    draw = np.random.default_rng(2)
    k = draw.normal(size=(1, 2, 80, 8)).astype(np.float32)
    q = draw.normal(size=(1, 3, 6, 8)).astype(np.float32)
    cols = np.asarray(columns(jnp.asarray(q), 2, "mean"))
    spec = SelectionConfig(dilation=0)
    limit = jnp.asarray([candidates])
    score = np.asarray(page_importance(jnp.asarray(cols), jnp.asarray(k), limit, spec))
    assert np.isneginf(score[:, :, candidates:]).all()
    if not candidates:
        return
    for head in range(2):
        pages = [k[0, head, at : min(at + PAGE_TOKENS, candidates)]
                 for at in range(0, candidates, PAGE_TOKENS)]  # fmt: skip
        bounds = np.asarray([
            [np.maximum(c * page.min(0), c * page.max(0)).sum() for page in pages]
            for c in cols[0, head]
        ])  # fmt: skip
        weights = np.exp(bounds - bounds.max(1, keepdims=True))
        expected = (weights / weights.sum(1, keepdims=True)).max(0)
        found = score[0, head, :candidates]
        np.testing.assert_allclose(found, np.repeat(expected, PAGE_TOKENS)[:candidates], rtol=1e-4)


def test_after_the_warm_up_only_the_last_steps_are_compiled() -> None:
    """A study whose programs compile one by one spends its time on that."""
    layout = dataclasses.replace(LAYOUT, sink_tokens=2)  # programs of its own
    cache = DenseCache.zeros(CONFIG, 4, TOKENS, jnp.float32)
    warm_up(params(), CONFIG, layout, ARMS, cache, [TOKENS], 64, is_measured=True)
    shape = {"tokens": TOKENS, "pool_tokens": 64, "max_blocks": BLOCKS, "cache": cache}
    ours = Batch(params(), CONFIG, layout, prompts(), **shape)
    ours.decode(ARMS[0])
    with count_compilations() as compiled:
        for arm in ARMS:
            ours.decode(arm, Quality.empty(2))
    assert compiled == []


def test_the_arms_of_the_study_are_sound() -> None:
    arms = study_arms()
    assert len({arm.name for arm in arms}) == len(arms)
    assert len({dataclasses.replace(arm, name="", is_main=False) for arm in arms}) == len(arms)
    assert arms[0].source == "none" and all(arm.source != "none" for arm in arms[1:])
    assert pool_tokens_for(arms, Layout(), 8192) == 1664
    assert query_count(ARMS[4], 0, 32) == 32 and query_count(ARMS[4], 1, 32) == 1


def test_paired_shares_by_hand() -> None:
    ours = [True] * 6 + [False] * 4
    theirs = [True] * 4 + [False] * 2 + [True] * 3 + [False]
    mean, low, high = paired_share_difference(ours, theirs)
    assert mean == pytest.approx(-0.1)
    up, down = 3 / 12, 4 / 12
    half = 1.959964 * math.sqrt((up + down - (up - down) ** 2) / 12)
    assert (low, high) == pytest.approx((up - down - half, up - down + half))


def test_the_interval_of_paired_shares_covers_the_truth() -> None:
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        both = draw.random((2, 120)) < np.asarray([[0.95], [0.97]])
        _, low, high = paired_share_difference(both[0].tolist(), both[1].tolist())
        hits += low <= -0.02 <= high
    assert 0.92 <= hits / 400 <= 0.99
    _, low, high = paired_share_difference([True] * 800, [True] * 800)
    assert -0.02 < low < 0 < high


def test_paired_means_and_bits() -> None:
    mean, low, high = paired_mean_difference([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert mean == pytest.approx(4 / 3)
    assert high - mean == pytest.approx(1.959964 * math.sqrt(7 / 3 / 3)) == mean - low
    flags = (np.random.default_rng(1).random(37) < 0.5).tolist()
    assert unpack_bits(pack_bits(flags), 37) == flags
    with pytest.raises(ValueError, match="no pairs"):
        paired_share_difference([], [])


def test_outcomes_pair_prompt_by_prompt() -> None:
    dense = Outcomes([True, True, False], [True, False, False], [2, 4, 6], [1, 2, 2])
    ours = Outcomes([True, False], [True, False], [3, 6], [1, 2])
    figures = ours.figures(dense.first(2), with_bits=True)
    assert figures["contained"] == 0.5 and figures["contained_difference"][0] == -0.5
    assert figures["exact_difference"][0] == 0 and figures["contained_bits"] == "8"
    assert figures["steps_per_block"] == 3.0 and figures["steps_per_block_difference"][0] == 1.0


def test_batches_of_all_tasks_grow_together_and_prompts_repeat() -> None:
    jobs = list(jobs_of(["a", "b"], [1, 2], 5, 3))
    assert [number for number, _ in jobs] == [0] * 4 + [1] * 4
    assert jobs[4][1] == Job("a", 1, 3, 2)
    made = list(made_ahead([Job("niah1", 1024, 0, 2), Job("niah1", 1024, 1, 1)], 0))
    assert made[0][1][1] == made[1][1][0] != made[0][1][0]
    assert json.dumps([job.cell for job, _ in made])


def test_another_tokenizer_gets_its_own_chat_template(tmp_path: Path) -> None:
    (_, made), *_ = made_ahead([Job("kv-brief", 1024, 3, 1)], 0)
    assert Texts(ASSETS).ids(made[0]) == made[0].ids
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((ASSETS / name).read_text() + " ")
    template = "{% for m in messages %}<|user|>{{ m['content'] }}<|assistant|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    texts = Texts(tmp_path)
    ids = texts.ids(made[0])
    assert ids[0] == 3 and ids[-1] == 4 and ids.count(3) == 1
    text = texts.text(ids)
    assert text.endswith("Answer briefly.") and made[0].contained(text)
    assert "\n\nWhat is the entry for" in text


def test_the_page_keeps_its_findings_and_says_who_passes(tmp_path: Path) -> None:
    """A page that is rendered again loses what was written by hand, or hides a failure."""
    draw = np.random.default_rng(0)
    arms = [
        arm
        for arm in study_arms()
        if arm.name in ("dense", "default, dilation 0.1 5%", "random 5%")
    ]
    results = CellResults(arms, [1024, 2048], 2)
    for length in (1024, 2048):
        dense = (draw.random(900) < 0.97).tolist()
        for arm in arms:
            good = dense if arm.name != "random 5%" else [False] * 900
            results.outcomes[length][arm.name].add(Outcomes(good, good, [3] * 900, [2] * 900))
    sums, rows = np.asarray([1.0, 0.5, 0.25]), np.asarray([4, 4, 1])
    results.add_drift(1024, "default, dilation 0.1 5%", sums[:2], rows[:2])
    results.add_drift(1024, "default, dilation 0.1 5%", sums, rows)
    results.add_drift(2048, "default, dilation 0.1 5%", 2 * sums[:1], rows[:1])
    results.quality[1024]["default, dilation 0.1 5%"].add(
        Quality(np.arange(6.0).reshape(3, 2), np.ones((3, 2)), np.asarray([10, 8]))
    )
    write_record(
        "accuracy_x_kv",
        commit="c" * 40,
        shapes={"num_layers": 4},
        settings={
            "model": "x",
            "dtype": "float32",
            "cell": "kv",
            "interval": "95 %",
            "layout": dataclasses.asdict(Layout()),
            "arms": {arm.name: dataclasses.asdict(arm) for arm in arms},
        },
        figures=results.figures(),
        folder=tmp_path,
    )
    page = tmp_path / "page.md"
    write_report(tmp_path, page)
    text = page.read_text()
    assert "| kv | default, dilation 0.1 5% | 1800 | +0.00 [-0.15, +0.15] | passes |" in text
    assert re.search(r"\| random 5% \| -9[67]\.", text)
    assert "| default, dilation 0.1 | the first block | single_pass | even16, " in text
    assert "## Run `ccccccc`" in text
    assert "| kv | default, dilation 0.1 5% | 0.333 0.125 0.250 | 1 |" in text
    assert "| first block | 0.00 0.10 | 0.20 0.30 | 0.40 0.50 |" in text
    assert "| later blocks | 0.12 0.12 | 0.12 0.12 | 0.12 0.12 |" in text
    page.write_text(text.replace("<!-- findings -->", "<!-- findings -->\nSo it is."))
    write_report(tmp_path, page)
    assert page.read_text() == text.replace("<!-- findings -->", "<!-- findings -->\nSo it is.")
