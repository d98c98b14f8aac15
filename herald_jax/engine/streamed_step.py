"""A block's first step over keys that are on the host, brought to the device layer by layer.

This is host placement without lookahead, the papers' rung in which the device fetches
everything: exact, and exposed. It is what the lookahead is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from herald_jax.cache.sparse import SparseCache
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rows import RowStarts, RowStates
from herald_jax.engine.sparse_compiled import SparsePrograms
from herald_jax.models.decoder import Params

FetchLayer = Callable[[int], tuple[jax.Array, jax.Array]]
"""Keys and values [1, K, S, D], on the device, of one row's text in a sparse layer."""


def streamed_step(
    programs: SparsePrograms,
    cache: SparseCache,
    states: RowStates,
    params: Params,
    *,
    row: int,
    index: int,
    tail: Sequence[int],
    table: np.ndarray,
    starts: RowStarts,
    fetch: FetchLayer,
    options: Any,
    spec: ProposalSpec,
) -> tuple[SparseCache, RowStates]:
    """Step 0 of one row's block over its whole prefix, which also fills the block's pool.

    Args:
        programs: The programs of the engine.
        cache: The device's cache.
        states: Running blocks of all rows.
        params: The model's parameters.
        row: The row.
        index: Its block.
        tail: Known tokens at the block's beginning.
        table: The row's page ids.
        starts: Blocks that begin now.
        fetch: Brings a layer to the device.
        options: Options of the row.
        spec: Static facts of the row.
    """
    layers, dense = programs.model.num_layers, programs.shape.dense_layers
    prefill = programs.prefill
    hidden = prefill.embed(params, prefill.first_block(np.asarray(tail, np.int32)))
    length = np.int32(index * programs.model.block_length)
    for layer in range(layers):
        if layer < dense:
            k, v = programs.read_pages(cache, layer, table)
        else:
            k, v = fetch(layer - dense)
        hidden, q, _, _ = prefill.query(params, layer, hidden, k, v, length)
        if layer >= dense:
            cache = programs.select(cache, layer - dense, row, index, len(tail), q, k, v)
    return cache, programs.first_step(spec, states, params, starts, row, hidden, options)
