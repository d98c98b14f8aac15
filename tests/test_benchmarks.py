"""Committed records say what is needed to repeat them, and the bounds count what they claim."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bounds import Ceilings, bound_seconds, prefill_flops, step_parts
from benchmarks.record import FIELDS, RESULTS, write_record
from benchmarks.replay import MOST_STEPS, Replay, Work, geometric, simulate
from benchmarks.shapes import MODELS
from benchmarks.trace import summarise
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
        figures = record["figures"]
        names = ("copy_bytes_per_second", "matmul_flops_per_second")
        bytes_rate, flops_rate = (figures[name] for name in names)
        bound = sum(
            part["count"] * max(part["bytes"] / bytes_rate, part["flops"] / flops_rate)
            for part in figures["bound_parts"]
        )
        assert figures["bound_ms"] == pytest.approx(1e3 * bound)
        assert figures["ratio_to_bound"] == pytest.approx(figures["ms_per_step"] / (1e3 * bound))
        assert figures["ratio_to_bound"] >= 1


def test_write_record_holds_every_field(tmp_path):
    path = write_record("x", commit="c", shapes={}, settings={}, figures={}, folder=tmp_path)
    assert set(json.loads(path.read_text(encoding="utf-8"))) == set(FIELDS)


def test_parts_of_a_step_of_sdar_8b():
    """Every weight but embeddings and gains once, and 144 KiB a token of keys and values."""
    config, context = MODELS["sdar-8b"], 1024
    parts = step_parts(config, 2, rows=2, context=context)
    matmuls = [part for part in parts if part.name != "attention"]
    leaves = jax.tree.leaves(abstract_params(config, jnp.bfloat16))
    weights = sum(leaf.size for leaf in leaves if len(leaf.shape) == 2)
    weights -= config.vocab_size * config.hidden_size  # of the embedding only some rows are read
    assert sum(part.count * part.bytes for part in matmuls) == 2 * weights
    assert sum(part.count * part.flops for part in matmuls) == 2 * 64 * weights
    (attention,) = (part for part in parts if part.name == "attention")
    assert attention.count * attention.bytes == 2 * (context + 32) * 144 * 1024
    assert attention.count * attention.flops == 4 * 36 * 64 * 32 * 128 * (context + 32)
    # The slower of both rates holds for each part by itself.
    rates = Ceilings(1e12, 1e15)
    by_bytes = sum(part.count * part.bytes for part in parts) / 1e12
    assert bound_seconds(parts, rates) == pytest.approx(by_bytes)
    assert bound_seconds(parts, Ceilings(1e12, 1e12)) > by_bytes


def test_prefill_counts_visible_pairs_only():
    """Of the four pairs of two blocks, three are visible."""
    config = MODELS["toy"]
    block = config.block_length
    one, two = (prefill_flops(config, n * block) for n in (1, 2))
    pairs = 4 * config.num_layers * config.num_heads * config.head_dim * block**2
    assert two - 2 * one == pairs  # the second block sees the first as well


TRACE = """
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #13(compute)" timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 1000000 }
    events { metadata_id: 3 offset_ps: 9000000 duration_ps: 2000000 }
  }
  lines { name: "XLA Ops" timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_12_0" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion_3" } }
  event_metadata { key: 3 value { id: 3 name: "gemm_fusion_dot_7" } }
}
planes { name: "/host:CPU" lines { name: "Stream" } }
"""


def test_a_trace_adds_up_kernels_by_name_and_group():
    data = jax.profiler.ProfileData
    profile = data.from_serialized_xspace(data.text_proto_to_serialized_xspace(TRACE))
    times = summarise(profile, calls=2)
    assert times is not None
    assert times.kernels == {"gemm_fusion_dot": (1.0, 3.0), "loop_add_fusion": (0.5, 0.5)}
    assert times.groups == pytest.approx({"matmul": 3e-3, "other": 0.5e-3})
    assert times.busy_ms == pytest.approx(3.5e-3) and times.span_ms == pytest.approx(5.5e-3)


def test_geometric_numbers_have_the_mean_and_the_bounds():
    drawn = geometric(np.random.default_rng(0).random(100_000), 8.0, 10**6)
    assert drawn.min() == 1 and abs(drawn.mean() - 8) < 0.1
    assert (geometric(np.random.default_rng(0).random(100), 1.0, 9) == 1).all()


def test_replay_takes_the_drawn_number_of_steps_whatever_the_row():
    rule = Replay.of_rows(jnp.full(3, 4.0))  # the fourth distribution
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


def test_the_shortest_schedule_bounds_every_policy():
    work = Work.draw("two", [3, 1, 2, 1, 4], first_block=2, rows=2)
    sizes = {"block_length": 32, "prompt_blocks": 2, "prefill_slots": 4}
    shares = [simulate(work, batch, **sizes)["useful_share"] for batch in (5, 2)]
    assert 1 >= work.bound() > shares[0] > shares[1]
    # Alone a row's steps are its passes, and the one that was sent before its end was read.
    alone = Work(work.passes[:1], rows=1)
    assert simulate(alone, 1, **sizes)["steps"] == alone.total + 1 == alone.lockstep_steps() + 1
