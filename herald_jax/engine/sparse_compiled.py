"""The compiled programs of a sparse runner: each once for its shapes, ahead of its first call.

Every method that takes the cache takes it by donation and gives it back.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from herald_jax.cache.paged import PagedCache
from herald_jax.cache.shape import SparseShape
from herald_jax.cache.sparse import LayerPool, SparseCache
from herald_jax.cache_config import CacheConfig
from herald_jax.configs import ModelConfig
from herald_jax.decoding import layer_walk, sparse_programs
from herald_jax.decoding.layer_prefill import CHUNK_TOKENS, KnownKeys, LayerOutput, LayerPrefill
from herald_jax.decoding.layer_walk import Walk
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rows import RowStarts, RowStates
from herald_jax.decoding.sparse_slots import Lookahead
from herald_jax.models.attention import FreshKV
from herald_jax.models.decoder import Params
from herald_jax.retrieval.device import BudgetTable, Selector
from herald_jax.retrieval.queries import query_positions


def _lookahead(cache: CacheConfig, block_length: int) -> Lookahead:
    if cache.retrieval != "layerwise":
        return Lookahead()
    walkers = query_positions(cache.selection_query, block_length)
    return Lookahead(walkers, is_on_host=cache.placement == "host")


class SparsePrograms:
    """Programs over the cache of one engine.

    Args:
        config: The model.
        cache: What is selected, and when.
        shape: Sizes of the cache.

    Attributes:
        model: The model.
        shape: Sizes of the cache.
        prefill: Takes prompts through the layers.
        lookahead: What looks ahead in a step.
        compile_seconds: Time that programs took to compile so far.
    """

    def __init__(self, config: ModelConfig, cache: CacheConfig, shape: SparseShape) -> None:
        self.compile_seconds = 0.0
        self.model, self.shape = config, shape
        self.lookahead = _lookahead(cache, config.block_length)
        block = config.block_length
        table = BudgetTable.of(cache.budget_of(block), shape.row_tokens // block + 2)
        # A pool has room for all candidates of a text that is shorter than its sinks.
        sinks = min(cache.sink_tokens, shape.pool_tokens)
        selector = Selector(cache.selection, block, sinks, shape.pool_tokens)
        self._static: dict[str, Any] = dict(budget=table, selector=selector)
        self.prefill = LayerPrefill(
            config,
            capacity=shape.row_tokens,
            chunk_tokens=max(CHUNK_TOKENS // block, 1) * block,
        )
        self._is_prefill_warm = False
        self._programs: dict[Any, Callable[..., Any]] = {}

    def _compiled(
        self, key: Any, function: Callable[..., Any], *args: Any, donate: Sequence[int] = (0,)
    ) -> Any:
        if key not in self._programs:
            begin = time.perf_counter()
            jitted = jax.jit(function, donate_argnums=donate)
            self._programs[key] = jitted.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - begin
        return self._programs[key]

    def step(self, spec: ProposalSpec, *args: Any) -> Any:
        """The program of `sparse_programs.step` for such arguments."""
        step = functools.partial(
            sparse_programs.step,
            model=self.model,
            spec=spec,
            budget=self._static["budget"],
            lookahead=self.lookahead,
        )
        decode, ahead = args[5], args[6]
        key = ("step", decode.rows.shape[0], ahead.shape[0], spec)
        return self._compiled(key, step, *args, donate=(0, 1))

    def exact(self, spec: ProposalSpec, *args: Any) -> Any:
        """The program of `sparse_programs.exact_step` for such arguments."""
        step = functools.partial(
            sparse_programs.exact_step, model=self.model, spec=spec, **self._static
        )
        key = ("exact", args[5].rows.shape[0], spec)
        return self._compiled(key, step, *args, donate=(0, 1))

    def refill(self, cache: SparseCache, *args: Any) -> SparseCache:
        """Pools filled from the store on the device; `args` as of `sparse_programs.refill`."""
        refill = functools.partial(sparse_programs.refill, **self._static)
        return self._compiled(("refill", len(args[1])), refill, cache, *args)(cache, *args)

    def begin_walk(
        self,
        cache: SparseCache,
        params: Params,
        table: np.ndarray,
        blocks: int,
        drafts: Sequence[FreshKV],
        slot: int,
    ) -> tuple[Walk, list[FreshKV]]:
        """A row's walk up to its first sparse layer, as `layer_walk.begin` gives it."""
        args = (cache.dense, params, table, np.int32(blocks), list(drafts), np.int32(slot))
        return self._begin_walk(*args)(*args)

    def _begin_walk(self, *args: Any) -> Any:
        begin = functools.partial(layer_walk.begin, **self._walking())
        return self._compiled(("walk", args[4][0].k.shape[0]), begin, *args, donate=())

    def advance_walk(
        self,
        params: Params,
        at: int,
        walk: Walk,
        draft: FreshKV,
        blocks: int,
        far: np.ndarray,
        log_sum: np.ndarray,
    ) -> Walk:
        """A walk that stands in sparse layer `at`, one layer on."""
        layer = self.shape.dense_layers + at
        args = (walk, draft, np.int32(blocks), far, log_sum, *self._two_layers(params, layer))
        return self._advance_walk(layer, *args)(*args)

    def _two_layers(self, params: Params, layer: int) -> tuple[Params, Params]:
        return params["layers"][layer], params["layers"][layer + 1]

    def _advance_walk(self, layer: int, *args: Any) -> Any:
        layers = (self.prefill.example(layer), self.prefill.example(layer + 1))
        advance = functools.partial(layer_walk.advance, **self._walking(), layers=layers)
        return self._compiled(("advance", layers), advance, *args, donate=())

    def warm_walks(
        self, cache: SparseCache, params: Params, table: np.ndarray, sizes: Sequence[int]
    ) -> None:
        """Compiles what walks need, for drafts of so many rows."""
        model, dtype = self.model, cache.selected[0].k.dtype
        block, dense = model.block_length, self.shape.dense_layers
        here = (model.num_heads, model.head_dim)

        def draft(rows: int) -> FreshKV:
            shape = (rows, block, model.num_kv_heads, model.head_dim)
            return FreshKV(*[jax.ShapeDtypeStruct(shape, dtype)] * 2)  # type: ignore[arg-type]

        zero = np.int32(0)
        args: tuple[Any, ...] = ()
        for size in sizes:
            args = (cache.dense, params, table, zero, [draft(size)] * model.num_layers, zero)
            self._begin_walk(*args)
        begin = functools.partial(layer_walk.begin, **self._walking())
        walk, _ = jax.eval_shape(begin, *args)
        count = len(self.lookahead.walkers)
        far, log_sum = (np.zeros((count, *tail), np.float32) for tail in (here, here[:1]))
        for layer in range(dense, model.num_layers - 1):
            near = self._two_layers(params, layer)
            self._advance_walk(layer, walk, draft(1), zero, far, log_sum, *near)

    def _walking(self) -> dict[str, Any]:
        heads = self._static["selector"].spec.heads
        return dict(model=self.model, lookahead=self.lookahead, heads=heads)

    def install(
        self,
        cache: SparseCache,
        first: int,
        count: int,
        pool_row: int,
        k: jax.Array,
        v: jax.Array,
    ) -> SparseCache:
        """One pool of `count` sparse layers, from `first` on, with entries from the host in it."""
        pools = cache.selected[first : first + count]
        args = (pools, np.int32(pool_row), k, v)
        new = self._compiled(("install", count), sparse_programs.install, *args)(*args)
        selected = (*cache.selected[:first], *new, *cache.selected[first + len(new) :])
        return cache._replace(selected=selected)

    def columns(self, queries: Sequence[jax.Array]) -> list[jax.Array]:
        """Score columns [Ls, K, c, D] of each slot of lookahead queries."""
        columns = functools.partial(
            sparse_programs.columns,
            kv_heads=self.model.num_kv_heads,
            selector=self._static["selector"],
        )
        key = ("columns", queries[0].shape[0])
        return self._compiled(key, columns, list(queries), donate=())(list(queries))

    def choose(
        self, cache: SparseCache, queries: Sequence[jax.Array], slot: int, row: int, target: int
    ) -> jax.Array:
        """Positions [Ls, K, C] for a row's block `target`, chosen with the key index."""
        choose = functools.partial(sparse_programs.choose, **self._static)
        numbers = (np.int32(slot), np.int32(row), np.int32(target))
        args = (cache.index, list(queries), *numbers)
        key = ("choose", queries[0].shape[0])
        return self._compiled(key, choose, *args, donate=())(*args)

    def read_block(self, cache: SparseCache, row: int, index: int) -> LayerPool:
        """Keys and values [Ls, K, B, D] of a finished block that is in its row's ring."""
        slot = index % self.shape.recent_blocks
        block = self.model.block_length
        read = functools.partial(sparse_programs.read_block, block=block)
        args = (cache.recent, np.int32(row), np.int32(slot * block))
        return self._compiled("read", read, *args, donate=())(*args)

    def prompt_layers(
        self,
        params: Params,
        tokens: np.ndarray,
        tail: np.ndarray | None,
        known: KnownKeys | None = None,
    ) -> Iterable[LayerOutput]:
        """The prompt's layers, as `LayerPrefill.layers` gives them."""
        if len(tokens):
            self._warm_prefill(params)
        return self.prefill.layers(params, tokens, tail, known)

    def read_store(self, cache: SparseCache, at: int, row: int) -> tuple[jax.Array, jax.Array]:
        """A copy of a row's keys and values [1, K, S, D] of sparse layer `at`, from the device."""
        return self._read_store(cache.store[at], np.int32(row))(cache.store[at], np.int32(row))

    def _read_store(self, *args: Any) -> Any:
        return self._compiled("store", sparse_programs.read_row, *args, donate=())

    def place_pages(
        self, cache: SparseCache, layer: int, table: np.ndarray, length: int, k: Any, v: Any
    ) -> SparseCache:
        """The cache with one dense layer of a prompt in its row's pages."""
        dense = cache.dense
        args = (LayerPool(dense.k[layer], dense.v[layer]), table, np.int32(length), k, v)
        pool = self._compiled("pages", sparse_programs.place_pages, *args)(*args)
        keys, values = list(dense.k), list(dense.v)
        keys[layer], values[layer] = pool.k, pool.v
        return cache._replace(dense=PagedCache(tuple(keys), tuple(values)))

    def place_prompt(
        self, cache: SparseCache, at: int, row: int, blocks: int, tail: int, q: Any, k: Any, v: Any
    ) -> SparseCache:
        """The cache with sparse layer `at` of a prompt in its row's pool, ring and store."""
        args = self._placing(cache, at, row, blocks, tail, q, k, v)
        pools, ring, store, keys = self._place(*args)(*args)

        def replaced(pools: tuple[Any, ...], new: Any) -> Any:
            return pools if new is None else (*pools[:at], new, *pools[at + 1 :])

        return cache._replace(
            selected=replaced(cache.selected, pools),
            recent=replaced(cache.recent, ring),
            store=replaced(cache.store, store),
            index=replaced(cache.index, keys),
        )

    def read_pages(
        self, cache: SparseCache, layer: int, table: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values [1, K, S, D] of one dense layer of a row."""
        args = (LayerPool(cache.dense.k[layer], cache.dense.v[layer]), table)
        return self._read_pages(*args)(*args)

    def _read_pages(self, *args: Any) -> Any:
        return self._compiled("gather", sparse_programs.read_pages, *args, donate=())

    def select(
        self, cache: SparseCache, at: int, row: int, index: int, tail: int, q: Any, k: Any, v: Any
    ) -> SparseCache:
        """The cache with the pool of sparse layer `at` filled for a row's block `index`."""
        numbers = (np.int32(row), np.int32(index), np.int32(tail))
        args = (cache.selected[at], *numbers, q, k, v)
        pool = self._select(*args)(*args)
        return cache._replace(selected=(*cache.selected[:at], pool, *cache.selected[at + 1 :]))

    def _select(self, *args: Any) -> Any:
        select = functools.partial(sparse_programs.select_pool, **self._static)
        return self._compiled("select", select, *args)

    def first_step(
        self,
        spec: ProposalSpec,
        states: RowStates,
        params: Params,
        starts: RowStarts,
        row: int,
        hidden: jax.Array,
        options: Any,
    ) -> RowStates:
        """The states after a row's step 0, whose hidden states are given."""
        args = (states, params, starts, np.asarray([row], np.int32), hidden, options)
        return self._first_step(spec, *args)(*args)

    def _first_step(self, spec: ProposalSpec, *args: Any) -> Any:
        step = functools.partial(sparse_programs.first_step, model=self.model, spec=spec)
        return self._compiled(("first", spec), step, *args)

    def warm_first_step(
        self,
        spec: ProposalSpec,
        states: RowStates,
        params: Params,
        starts: RowStarts,
        options: Any,
    ) -> None:
        """Compiles `first_step`."""
        embedding = params["embed_tokens"]["embedding"]
        shape = (1, self.model.block_length, self.model.hidden_size)
        hidden = jax.ShapeDtypeStruct(shape, embedding.dtype)
        self._first_step(spec, states, params, starts, np.zeros(1, np.int32), hidden, options)

    def _placing(
        self, cache: SparseCache, at: int, row: int, blocks: int, tail: int, q: Any, k: Any, v: Any
    ) -> tuple[Any, ...]:
        store = cache.store[at] if cache.store else None
        keys = cache.index[at] if cache.index else None
        numbers = (np.int32(row), np.int32(blocks), np.int32(tail))
        return (cache.selected[at], cache.recent[at], store, keys, *numbers, q, k, v)

    def _place(self, *args: Any) -> Any:
        place = functools.partial(sparse_programs.place_prompt, **self._static)
        return self._compiled(("prompt", args[7] is None), place, *args, donate=(0, 1, 2, 3))

    def warm_prompts(self, params: Params, cache: SparseCache, table: np.ndarray) -> None:
        """Compiles what a prompt needs, with and without its first block's queries."""
        self._warm_prefill(params)
        model, dtype = self.model, cache.selected[0].k.dtype
        size = (1, model.num_kv_heads, self.shape.row_tokens, model.head_dim)
        k = jax.ShapeDtypeStruct(size, dtype)
        block = (model.block_length, model.num_heads, model.head_dim)
        q_shape = jax.ShapeDtypeStruct(block, dtype)
        for q in (q_shape, None):
            self._place(*self._placing(cache, 0, 0, 0, 0, q, k, k))
        self._select(cache.selected[0], *[np.int32(0)] * 3, q_shape, k, k)
        if cache.store:
            self._read_store(cache.store[0], np.int32(0))
        for pool in zip(cache.dense.k[:1], cache.dense.v[:1], strict=True):
            args = (LayerPool(*pool), table, np.int32(0), k, k)
            self._compiled("pages", sparse_programs.place_pages, *args)
            self._read_pages(*args[:2])

    def _warm_prefill(self, params: Params) -> None:
        if not self._is_prefill_warm:
            begin = time.perf_counter()
            self.prefill.warmup(params)
            self.compile_seconds += time.perf_counter() - begin
            self._is_prefill_warm = True
