"""Committed records say what is needed to repeat them, and the bounds count what they claim."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.continuous import MOST_STEPS, Replay, geometric
from benchmarks.record import FIELDS, RESULTS, write_record
from benchmarks.shapes import MODELS
from benchmarks.step import pass_costs
from herald_jax.decoding.rules import BlockView
from herald_jax.models.decoder import abstract_params

RECORDS = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_figure_names_device_versions_commit_and_settings(path):
    """Kind of fault: published figures that nobody can repeat."""
    record = json.loads(path.read_text(encoding="utf-8"))
    assert set(FIELDS) <= set(record)
    assert record["name"] == path.stem
    assert len(record["commit"].removesuffix("-dirty")) == 40
    assert {"kind", "platform", "driver"} <= set(record["device"])
    assert {"python", "jax", "jaxlib", "flax", "numpy"} <= set(record["versions"])
    assert record["shapes"] and record["settings"] and record["figures"]
    if path.stem.startswith("step_"):
        assert {"dtype", "rows", "context_tokens", "block_length"} <= set(record["shapes"])
        assert {"strategy", "threshold", "denoising_steps"} <= set(record["settings"])
        figures = record["figures"]
        bound = max(
            figures["bytes_per_step"] / figures["copy_bytes_per_second"],
            figures["flops_per_step"] / figures["matmul_flops_per_second"],
        )
        assert figures["bound_ms_per_step"] == pytest.approx(1e3 * bound)
        assert figures["ratio_to_bound"] >= 1


def test_write_record_holds_every_field(tmp_path):
    path = write_record("x", commit="c", shapes={}, settings={}, figures={}, folder=tmp_path)
    assert set(json.loads(path.read_text(encoding="utf-8"))) == set(FIELDS)


def test_pass_costs_of_sdar_8b():
    """36 layers of 144 KiB per token in all, and every weight but the embedding table once."""
    config = MODELS["sdar-8b"]
    params = jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape),
        abstract_params(config, jnp.bfloat16),
    )
    one = pass_costs(config, params, rows=1, context=0)
    assert one["bytes"] == 2 * (8_190_735_360 - 151_936 * 4096)
    longer = pass_costs(config, params, rows=2, context=1000)
    assert longer["bytes"] - one["bytes"] == 2 * 1000 * 144 * 1024


def test_geometric_numbers_have_the_mean_and_the_bounds():
    drawn = geometric(np.random.default_rng(0).random(100_000), 8.0, 10**6)
    assert drawn.min() == 1 and abs(drawn.mean() - 8) < 0.1
    assert (geometric(np.random.default_rng(0).random(100), 1.0, 9) == 1).all()


def test_replay_takes_the_drawn_number_of_steps_whatever_the_row():
    rule = Replay.of_rows(jnp.full(3, 4.0))
    seed, block = jnp.asarray([5, 6, 5], jnp.uint32), jnp.asarray([2, 2, 2])
    is_masked, steps = jnp.ones((3, 8), bool), np.zeros(3, int)
    for step in range(MOST_STEPS):
        zeros = jnp.zeros((3, 8))
        at = jnp.full(3, step)
        chosen = rule(BlockView(is_masked, zeros, zeros, jnp.ones(3, int), seed, block, at))
        steps += np.asarray(is_masked.any(-1))
        is_masked = is_masked & ~chosen
    assert not is_masked.any()
    assert steps[0] == steps[2] and (steps >= 1).all() and (steps <= MOST_STEPS).all()
