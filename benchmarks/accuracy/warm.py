"""Compiles the programs of a study side by side, before its first batch.

A study has a few dozen small programs. Compiled one after another on the way they would take
minutes of the device's time; XLA compiles outside the interpreter lock, so threads help.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accuracy.arms import Arm
from benchmarks.accuracy.decode import query_count
from benchmarks.accuracy.passes import Layout, Pools, blocks_at, first_step, look_ahead, options_of
from benchmarks.accuracy.selecting import measure, select
from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.models.decoder import Params
from herald_jax.retrieval import query_positions

THREADS = 8


def warm_up(
    params: Params,
    config: ModelConfig,
    layout: Layout,
    arms: Iterable[Arm],
    cache: DenseCache,
    spans: Iterable[int],
    pool_tokens: int,
    *,
    is_measured: bool,
) -> int:
    """Runs every program once on an empty cache, and returns their number.

    The prefill and the last steps of a block, which take the cache over, are left to the first
    batch.
    """
    arms = [arm for arm in arms if arm.source != "none"]
    rows, block = cache.k[0].shape[0], config.block_length
    layers = max(config.num_layers - layout.dense_layers, 0)
    zeros = np.zeros(rows, np.int32)
    pools = Pools.empty(config, rows, pool_tokens, cache.k[0].dtype, layers)
    q = jnp.zeros((rows, block, config.num_heads, config.head_dim), cache.k[0].dtype)
    no = jnp.asarray(False)
    calls: dict[Any, Callable[[], Any]] = {}

    def plan_looks(arm: Arm) -> None:
        lone = query_positions(arm.selection.queries, block) if arm.source == "lone" else ()
        tokens = jnp.zeros((rows, block), jnp.int32)
        shared = {"config": config, "layout": layout, "lone": lone}
        calls["look", lone] = lambda: look_ahead(params, cache, pools, zeros, tokens, no, **shared)

    def plan_select(arm: Arm, nth: int, span: int) -> None:
        count = query_count(arm, nth, block)
        queries = q[:, :count] if nth and arm.source == "lone" else q
        settings: dict[str, Any] = {
            "scores": arm.scores,
            "spec": arm.selection,
            "span": span,
            "sinks": layout.sink_tokens,
            "kv_heads": config.num_kv_heads,
            "capacity": pool_tokens,
        }
        positions = np.zeros((rows, count), np.int32)
        key = (*settings.values(), count, queries.shape[1])
        operands = (cache.k[-1], cache.v[-1], queries, positions, zeros, zeros, np.uint32(0))
        calls[key] = lambda: select(*operands, **settings)

    def plan_measure(span: int) -> None:
        index = jnp.zeros((rows, config.num_kv_heads, pool_tokens), jnp.int32)
        shape = {"span": span, "sinks": layout.sink_tokens, "kv_heads": config.num_kv_heads}
        calls["measure", span] = lambda: measure(
            cache.k[-1], q, index, jnp.asarray(zeros), zeros, zeros, **shape
        )

    for arm in arms:
        if arm.source not in ("own",):
            plan_looks(arm)
        for span in spans:
            for nth in (0, 1):
                plan_select(arm, nth, span)
    for span in spans if is_measured else ():
        plan_measure(span)
    options = jax.tree.map(jnp.asarray, options_of(layout, rows, config))
    tokens = np.zeros((rows, block), np.int32)
    state = blocks_at(zeros, tokens, tokens == 0)
    shared = {"config": config, "layout": layout}
    calls["step"] = lambda: first_step(params, cache, pools, state, no, options, **shared)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        # The largest programs first; the many small ones fill the gaps.
        for done in [threads.submit(call) for call in reversed(calls.values())]:
            jax.block_until_ready(done.result())
    return len(calls)
