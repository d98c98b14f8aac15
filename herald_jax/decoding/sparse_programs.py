"""The device programs around a sparse cache, as plain functions for the runner to compile.

Each takes the cache first and returns it first, for donation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from herald_jax.cache.key_index import KeyIndex
from herald_jax.cache.sparse import LayerPool, SparseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rows import DecodeSlots, RowStarts, RowStates, SlotOutput
from herald_jax.decoding.sparse_slots import Lookahead, run_sparse_slots
from herald_jax.decoding.steps import DecodingOptions, commit, offer_from
from herald_jax.models.decoder import Params, bind
from herald_jax.retrieval import select
from herald_jax.retrieval.device import BudgetTable, Selector


def step(
    cache: SparseCache,
    states: RowStates,
    params: Params,
    tables: Int[Array, "R W"],
    starts: RowStarts,
    decode: DecodeSlots,
    ahead: Int[Array, " A"],
    options: DecodingOptions,
    *,
    model: ModelConfig,
    spec: ProposalSpec,
    budget: BudgetTable,
    lookahead: Lookahead,
) -> tuple[SparseCache, RowStates, SlotOutput, list[Any]]:
    """One step, with the lookahead queries (or drafts) of the rows in `ahead`."""
    return run_sparse_slots(
        bind(model, params),
        cache,
        states,
        tables,
        jnp.asarray(budget.pooled),
        starts,
        decode,
        ahead,
        options,
        spec,
        is_exact=False,
        lookahead=lookahead,
    )


def exact_step(
    cache: SparseCache,
    states: RowStates,
    params: Params,
    tables: Int[Array, "R W"],
    starts: RowStarts,
    decode: DecodeSlots,
    options: DecodingOptions,
    targets: Int[Array, " M"],
    first_mask: Int[Array, " M"],
    *,
    model: ModelConfig,
    spec: ProposalSpec,
    budget: BudgetTable,
    selector: Selector,
) -> tuple[SparseCache, RowStates]:
    """Step 0 of some rows over their whole prefix, which also selects for the steps after it.

    This is MAGE's first step (arXiv 2602.14209). `targets` are the blocks that the rows begin,
    `first_mask` where their masks begin.
    """
    nobody = jnp.zeros((0,), jnp.int32)
    cache, states, _, queries = run_sparse_slots(
        bind(model, params),
        cache,
        states,
        tables,
        jnp.asarray(budget.pooled),
        starts,
        decode,
        nobody,
        options,
        spec,
        is_exact=True,
        lookahead=Lookahead(),
    )
    cache = refill(
        cache, queries, decode.rows, targets, first_mask, budget=budget, selector=selector
    )
    return cache, states


def refill(
    cache: SparseCache,
    queries: Sequence[Float[Array, "M B H D"]],
    rows: Int[Array, " M"],
    targets: Int[Array, " M"],
    first_mask: Int[Array, " M"],
    *,
    budget: BudgetTable,
    selector: Selector,
) -> SparseCache:
    """The cache with the pools of blocks `targets` filled from the store on the device."""
    count = cache.store[0].k.shape[0]
    pool_rows = jnp.where(rows < count, targets % 2 * count + rows, 2 * count)
    selected = selector.refill(
        cache.selected, pool_rows, queries, first_mask, cache.store, rows, budget.at(targets)
    )
    return cache._replace(selected=selected)


def place_pages(
    pool: LayerPool,
    table: Int[Array, " W"],
    length: Int[Array, ""],
    k: Float[Array, "1 K S D"],
    v: Float[Array, "1 K S D"],
) -> LayerPool:
    """One dense layer's pages, [N, K, page, D], with a prompt of `length` tokens in them."""
    pages, kv_heads, page_tokens, dim = pool.k.shape
    count = k.shape[2] // page_tokens
    is_text = jnp.arange(count) * page_tokens < length
    places = jnp.where(is_text, table[:count], pages)

    def put(pool: jax.Array, values: jax.Array) -> jax.Array:
        new = values[0].reshape(kv_heads, count, page_tokens, dim).transpose(1, 0, 2, 3)
        return pool.at[places].set(new, mode="drop")

    return LayerPool(put(pool.k, k), put(pool.v, v))


def read_pages(pool: LayerPool, table: Int[Array, " W"]) -> LayerPool:
    """One row of a dense layer's pages as [1, K, S, D]."""

    def read(pages: jax.Array) -> jax.Array:
        picked = pages[table].transpose(1, 0, 2, 3)
        return picked.reshape(1, picked.shape[0], -1, picked.shape[3])

    return LayerPool(read(pool.k), read(pool.v))


def select_pool(
    pools: LayerPool,
    row: Int[Array, ""],
    target: Int[Array, ""],
    first_mask: Int[Array, ""],
    q: Float[Array, "B H D"],
    k: Float[Array, "1 K S D"],
    v: Float[Array, "1 K S D"],
    *,
    budget: BudgetTable,
    selector: Selector,
) -> LayerPool:
    """One layer's pools with that of a row's block `target` filled from its text."""
    pool_row = target % 2 * (pools.k.shape[0] // 2) + row
    text, alone = LayerPool(k, v), jnp.zeros((1,), jnp.int32)
    numbers = budget.at(target[None])
    filled = selector.refill(
        [pools], pool_row[None], [q[None]], first_mask[None], [text], alone, numbers
    )
    return filled[0]


def first_step(
    states: RowStates,
    params: Params,
    starts: RowStarts,
    rows: Int[Array, " M"],
    hidden: Float[Array, "M B E"],
    options: DecodingOptions,
    *,
    model: ModelConfig,
    spec: ProposalSpec,
) -> RowStates:
    """The states after step 0 of some rows, from the hidden states after the last layer."""
    decoder = bind(model, params)
    states = states.begin(starts)
    own = states.take(rows)
    proposal = offer_from(decoder, decoder.norm(hidden), own.block, options, spec)
    after = commit(model, proposal, own.block, options)
    return states.put(rows, own._replace(block=after, draft=proposal.likeliest))


def place_recent(
    ring: LayerPool, row: Int[Array, ""], blocks: Int[Array, ""], prompt: LayerPool, block: int
) -> LayerPool:
    """The ring with the last of a prompt's `blocks` whole blocks, each in its slot."""
    count = ring.k.shape[2] // block

    def put(pool: jax.Array, values: jax.Array) -> jax.Array:
        for slot in range(count):
            index = jnp.maximum(blocks - 1 - (blocks - 1 - slot) % count, 0)
            new = jax.lax.dynamic_slice_in_dim(values, index * block, block, axis=2)
            pool = jax.lax.dynamic_update_slice(pool, new, (row, 0, slot * block, 0))
        return pool

    return LayerPool(put(ring.k, prompt.k), put(ring.v, prompt.v))


def place_prompt(
    pools: LayerPool,
    ring: LayerPool,
    store: LayerPool | None,
    keys: KeyIndex | None,
    row: Int[Array, ""],
    blocks: Int[Array, ""],
    first_mask: Int[Array, ""],
    q: Float[Array, "B H D"] | None,
    k: Float[Array, "1 K S D"],
    v: Float[Array, "1 K S D"],
    *,
    budget: BudgetTable,
    selector: Selector,
) -> tuple[LayerPool, LayerPool, LayerPool | None, KeyIndex | None]:
    """One sparse layer's part of the cache after a prompt of `blocks` whole blocks.

    The pool of the first decoded block is selected with its own queries, which have seen the
    whole prompt; without queries it stays as it is.
    """
    prompt = LayerPool(k, v)
    ring = place_recent(ring, row, blocks, prompt, selector.block_length)
    if q is not None:
        pools = select_pool(
            pools, row, blocks, first_mask, q, k, v, budget=budget, selector=selector
        )
    if store is not None:
        store = LayerPool(store.k.at[row].set(k[0]), store.v.at[row].set(v[0]))
    if keys is not None:
        new = KeyIndex.of(k)
        keys = jax.tree.map(lambda old, x: old.at[row].set(x[0]), keys, new)
    return pools, ring, store, keys


def columns(
    queries: Sequence[Float[Array, "A B H D"]], *, kv_heads: int, selector: Selector
) -> list[Float[Array, "L K c D"]]:
    """What the host scores with: of each slot, the columns of all sparse layers."""
    nothing_known = jnp.zeros((queries[0].shape[0],), jnp.int32)
    layers = [
        select.columns(selector.queries(q, nothing_known), kv_heads, selector.spec.heads)
        for q in queries
    ]
    return list(jnp.stack(layers, axis=1))


def choose(
    keys: Sequence[KeyIndex],
    queries: Sequence[Float[Array, "A B H D"]],
    slot: Int[Array, ""],
    row: Int[Array, ""],
    target: Int[Array, ""],
    *,
    budget: BudgetTable,
    selector: Selector,
) -> Int[Array, "L K C"]:
    """Positions of the entries for a row's block `target`, from 8-bit keys on the device.

    The queries are those of lookahead slot `slot`.
    """
    nothing_known = jnp.zeros((1,), jnp.int32)
    numbers = budget.at(target[None])

    def scores(q: jax.Array, index: KeyIndex) -> jax.Array:
        own = jax.lax.dynamic_slice_in_dim(q, slot, 1)
        picked = selector.queries(own, nothing_known)
        return selector.scores(picked, index, row[None], numbers)

    chosen = selector.choose(list(map(scores, queries, keys)), numbers)
    return jnp.concatenate(chosen)


def install(
    pools: tuple[LayerPool, ...],
    pool_row: Int[Array, ""],
    k: Float[Array, "L K C D"],
    v: Float[Array, "L K C D"],
) -> tuple[LayerPool, ...]:
    """The pools of some layers with one row's entries, which came from the host, in them."""
    return tuple(
        LayerPool(pool.k.at[pool_row].set(k[at]), pool.v.at[pool_row].set(v[at]))
        for at, pool in enumerate(pools)
    )


def read_row(
    store: LayerPool, row: Int[Array, ""]
) -> tuple[Float[Array, "1 K S D"], Float[Array, "1 K S D"]]:
    """Keys and values of a row of one layer's store, in arrays of their own."""
    k, v = (jax.lax.dynamic_slice_in_dim(pool, row, 1) for pool in store)
    return k, v


def read_block(
    rings: tuple[LayerPool, ...], row: Int[Array, ""], start: Int[Array, ""], *, block: int
) -> LayerPool:
    """Keys and values [Ls, K, B, D] of the block that starts at `start` of a row's rings."""

    def read(ring: jax.Array) -> jax.Array:
        size = (1, ring.shape[1], block, ring.shape[3])
        return jax.lax.dynamic_slice(ring, (row, 0, start, 0), size)[0]

    return LayerPool(
        jnp.stack([read(ring.k) for ring in rings]), jnp.stack([read(ring.v) for ring in rings])
    )
