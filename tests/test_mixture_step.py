"""The benchmarks of mixtures' steps and of cached decoding count what they claim."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.bidirectional_table import Outcome, figures_of
from benchmarks.mixture_step import bound_costs, seen_routings
from benchmarks.shapes import MODELS
from herald_jax.models.decoder import abstract_params
from herald_jax.models.moe import Router


def test_a_step_of_llada2_mini_reads_the_experts_it_touches():
    """A touched expert is 3 x 2048 x 512 weights; with all of them, every weight counts once."""
    config = MODELS["llada2-mini"]
    params = abstract_params(config, jnp.bfloat16)
    layers = config.num_layers - config.first_dense_layers
    every = bound_costs(config, params, [config.num_experts] * layers, rows=1, context=0)
    assert every["bytes"] == every["bytes_with_all_experts"]
    some = bound_costs(config, params, [config.num_experts - 3] * layers, rows=1, context=0)
    assert every["bytes"] - some["bytes"] == 2 * layers * 3 * (3 * 2048 * 512)
    longer = bound_costs(config, params, [0] * layers, rows=2, context=1000)
    empty = bound_costs(config, params, [0] * layers, rows=2, context=0)
    assert longer["bytes"] - empty["bytes"] == 2 * 1000 * (20 * 2 * 4 * 128 * 2)
    one, two = (bound_costs(config, params, [0] * layers, rows=r, context=0) for r in (1, 2))
    assert two["flops"] == 2 * one["flops"]


def test_routings_are_seen_inside_and_only_there():
    config = dataclasses.replace(MODELS["llada2-mini"], hidden_size=24, num_experts=16)
    router = Router(config, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (5, 24))
    plain = Router.__call__
    with seen_routings() as seen:
        routing = router(x)
    router(x)
    assert len(seen) == 1 and Router.__call__ is plain
    np.testing.assert_array_equal(seen[0], routing.experts)


def test_a_row_of_the_table_is_paired_with_no_cache():
    base = {"kv": Outcome([True, True, False, True], [True] * 4, 40, 30.0, 2.0)}
    ours = {"kv": Outcome([True, False, False, True], [False] * 4, 40, 5.0, 0.5)}
    figures = figures_of(ours, base)
    assert figures["contained"] == 0.5 and figures["exact"] == 0.0
    assert figures["difference"][0] == -0.25
    assert figures["difference"][1] < -0.25 < figures["difference"][2]
    assert figures["tokens_per_second"] == 80 and figures["times_no_cache"] == 4
    assert figures["cells"]["kv"]["contained_by_prompt"] == "9"
    assert "difference" not in figures_of(base, None)
    assert figures_of(base, None)["passes"] == pytest.approx(30.0)
