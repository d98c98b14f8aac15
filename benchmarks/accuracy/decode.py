"""Decodes a batch of prompts with one arm after another over one resident cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from benchmarks.accuracy.arms import Arm
from benchmarks.accuracy.passes import (
    FirstStep,
    Layout,
    Pools,
    blocks_at,
    finish,
    first_step,
    look_ahead,
    options_of,
    prefill,
)
from benchmarks.accuracy.selecting import measure, select
from herald_jax.cache.budget import POOL_TOKENS, Budget
from herald_jax.cache.dense import DenseCache
from herald_jax.cache.layout import round_up
from herald_jax.configs import ModelConfig
from herald_jax.decoding.steps import BlockState
from herald_jax.models.decoder import Params
from herald_jax.retrieval import query_positions

PREFILL_TOKENS = 128
SPAN_STEP = 1024
"""Selections look at multiples of this many keys, so that few programs are needed."""


@dataclasses.dataclass(slots=True)
class Answer:
    """What a row generated, up to its first stop id, and the steps of each of its blocks."""

    ids: list[int]
    steps: list[int]


@dataclasses.dataclass(slots=True)
class Decoded:
    """The texts of a batch, prompts included, and the blocks that each row decoded."""

    text: np.ndarray
    blocks: list[int]


@dataclasses.dataclass(slots=True)
class Quality:
    """Sums over rows of recall, captured mass and best mass, by layer, and the rows counted.

    Apart for a prompt's first block, whose keys its own exact pass chooses in all lookahead
    arms, and for later blocks.
    """

    first: np.ndarray
    later: np.ndarray
    counts: np.ndarray

    @classmethod
    def empty(cls, layers: int) -> Quality:
        """Nothing measured."""
        return cls(np.zeros((3, layers)), np.zeros((3, layers)), np.zeros(2, int))

    def add(self, other: Quality) -> None:
        """Adds another batch's sums."""
        self.first += other.first
        self.later += other.later
        self.counts += other.counts


class Batch:
    """Prompts whose keys and values are in one cache.

    Args:
        params: The model's parameters.
        config: The model.
        layout: What all arms have in common.
        prompts: Token ids; all batches of a study have the same number.
        tokens: Token slots of a row: room for the longest prompt and `max_blocks` blocks.
        pool_tokens: Entries of a selected pool, at least what the largest budget asks for.
        max_blocks: Most blocks that a row decodes.
        cache: That of an earlier batch, which is used again.

    Attributes:
        rows: Number of prompts.
        lengths: Their tokens.
        text: The prompts, padded.
        cache: Keys and values; every call of `decode` replaces it.
        options: What decides the tokens besides the logits.
        decoded: What the last call of `decode` left.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        layout: Layout,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int,
        pool_tokens: int,
        max_blocks: int,
        cache: DenseCache | None = None,
    ) -> None:
        self._params, self._config, self._layout = params, config, layout
        self._pool_tokens, self._max_blocks = pool_tokens, max_blocks
        self.rows = len(prompts)
        self.decoded = Decoded(np.zeros((0, 0), np.int32), [0] * self.rows)
        self.lengths = np.asarray([len(ids) for ids in prompts], np.int32)
        self._first = self.lengths // config.block_length
        last = int(self._first.max()) + max_blocks
        if last * config.block_length > tokens:
            raise ValueError(
                f"a prompt of {self.lengths.max()} tokens and {max_blocks} blocks do not fit "
                f"into {tokens} tokens a row"
            )
        self._span = span_of(last * config.block_length, tokens)
        self.text = np.zeros((self.rows, tokens), np.int32)
        for row, ids in zip(self.text, prompts, strict=True):
            row[: len(ids)] = ids
        dtype = params["embed_tokens"]["embedding"].dtype
        self._sparse = range(min(layout.dense_layers, config.num_layers), config.num_layers)
        self._flags = jnp.asarray(False), jnp.asarray(True)
        self.options = jax.tree.map(jnp.asarray, options_of(layout, self.rows, config))
        self._nothing = Pools.empty(config, self.rows, pool_tokens, dtype, len(self._sparse))
        self.cache = cache or DenseCache.zeros(config, self.rows, tokens, dtype)
        whole = int(self._first.max()) * config.block_length
        for start in range(0, whole, PREFILL_TOKENS):
            piece = self.text[:, start : start + PREFILL_TOKENS]
            self.cache = prefill(params, self.cache, piece, np.int32(start), config=config)
        everyone = np.ones(self.rows, bool)
        self._bootstrap = self._step(self._nothing, self.state(0, self.text, everyone), True)

    def decode(self, arm: Arm, quality: Quality | None = None) -> list[Answer]:
        """The answers of all rows; `quality` takes the measures of this arm's selections."""
        config, block = self._config, self._config.block_length
        text, is_active = self.text.copy(), np.ones(self.rows, bool)
        steps: list[list[int]] = [[] for _ in range(self.rows)]
        stops = np.asarray(config.stop_token_ids, np.int32)
        is_dense = arm.source == "none"
        pools = self._nothing
        if not is_dense and arm.source != "own":
            pools = self._select(arm, 0, self._bootstrap.queries, is_active, quality)
        for nth in range(self._max_blocks):
            state = self.state(nth, text, is_active)
            is_first_exact = is_dense or arm.exact_first_step == "every"
            is_first_exact |= arm.exact_first_step == "first" and nth == 0
            step = self._step(pools, state, is_first_exact)
            if arm.source == "own":
                pools = self._select(arm, nth, step.queries, is_active, quality)
            self.cache, state = finish(
                self._params,
                self.cache,
                pools,
                step.state,
                is_active,
                self._flags[is_dense],
                self._flags[is_dense or arm.is_commit_exact],
                self.options,
                config=config,
                layout=self._layout,
            )
            out, used = jax.device_get((state.tokens, state.steps))
            at = (self._first + nth)[:, None] * block + np.arange(block)
            is_new = (at >= self.lengths[:, None]) & is_active[:, None]
            np.put_along_axis(text, at, np.where(is_new, out, np.take_along_axis(text, at, 1)), 1)
            for row in np.flatnonzero(is_active):
                steps[row].append(int(used[row]))
            self.decoded = Decoded(text, [len(used) for used in steps])
            is_active = is_active & ~(np.isin(out, stops) & is_new).any(1)
            if not is_active.any() or nth + 1 == self._max_blocks:
                break
            if not is_dense and arm.source != "own":
                standing = state.tokens if arm.prefix == "final" else step.draft
                queries = self._look(arm, pools, nth, standing)
                pools = self._select(arm, nth + 1, queries, is_active, quality)
        return [self._answer(row, text[row], steps[row]) for row in range(self.rows)]

    def committed_error(self) -> tuple[np.ndarray, np.ndarray]:
        """How far the decoded blocks' keys and values are from exact ones, by number of block.

        The blocks are run again with full attention, each after exact blocks, and replace those
        of the last `decode`. The error of a layer is the norm of the difference over that of
        the exact keys and values; sums over rows of the mean over sparse layers, and the rows.
        """
        block, most = self._config.block_length, max(self.decoded.blocks)
        blocks = np.asarray(self.decoded.blocks)
        window = (self._first * block)[:, None] + np.arange(most * block)

        def committed() -> list[jax.Array]:
            return [
                jnp.take_along_axis(x, window[:, None, :, None], axis=2)
                for layer in self._sparse
                for x in (self.cache.k[layer], self.cache.v[layer])
            ]

        ours = committed()
        for nth in range(most):
            nobody = np.zeros(self.rows, bool)
            state = self.state(nth, self.decoded.text, nobody)
            yes = self._flags[True]
            self.cache, _ = finish(
                self._params, self.cache, self._nothing, state, blocks > nth, yes, yes,
                self.options, config=self._config, layout=self._layout,
            )  # fmt: skip
        errors = np.zeros((self.rows, most))
        for mine, exact in zip(ours, committed(), strict=True):
            gap, size = (
                np.square(np.asarray(x, np.float32))
                .reshape(self.rows, -1, most, block, self._config.head_dim)
                .sum((1, 3, 4))
                for x in (mine - exact, exact)
            )
            errors += np.sqrt(gap / np.maximum(size, 1e-30)) / (2 * len(self._sparse))
        is_there = blocks[:, None] > np.arange(most)
        return (errors * is_there).sum(0), is_there.sum(0)

    def _answer(self, row: int, text: np.ndarray, steps: list[int]) -> Answer:
        first = int(self._first[row])
        end = (first + len(steps)) * self._config.block_length
        ids = text[self.lengths[row] : end].tolist()
        stops = [at for at, token in enumerate(ids) if token in self._config.stop_token_ids]
        return Answer(ids[: stops[0]] if stops else ids, steps)

    def state(self, nth: int, text: np.ndarray, is_active: np.ndarray) -> BlockState:
        """The `nth` block of every answer before its first step."""
        block = self._config.block_length
        index = self._first + nth
        at = index[:, None] * block + np.arange(block)
        is_masked = (at >= self.lengths[:, None]) & is_active[:, None]
        return blocks_at(index, np.take_along_axis(text, at, 1), is_masked)

    def _step(self, pools: Pools, state: BlockState, is_exact: bool) -> FirstStep:
        return first_step(
            self._params,
            self.cache,
            pools,
            state,
            self._flags[is_exact],
            self.options,
            config=self._config,
            layout=self._layout,
        )

    def _look(self, arm: Arm, pools: Pools, nth: int, block: jax.Array) -> tuple[jax.Array, ...]:
        size = self._config.block_length
        names = arm.selection.queries
        return look_ahead(
            self._params,
            self.cache,
            pools,
            self._first + nth,
            block,
            self._flags[arm.source != "single_pass"],
            config=self._config,
            layout=self._layout,
            lone=query_positions(names, size) if arm.source == "lone" else (),
        )

    def _positions(self, arm: Arm, nth: int) -> Int[np.ndarray, "R n"]:
        """Positions of the queries within what the queries' pass gave for block `nth`."""
        size = self._config.block_length
        named = np.asarray(query_positions(arm.selection.queries, size), np.int32)
        if nth == 0 and arm.first_block == "all":
            named = np.arange(size, dtype=np.int32)
        elif nth == 0 and arm.first_block == "masks":
            tail = (self.lengths % size)[:, None]
            return (tail + named * (size - tail) // size).astype(np.int32)
        elif nth > 0 and arm.source == "lone":
            named = np.arange(len(named), dtype=np.int32)  # the pass ran these positions alone
        return np.broadcast_to(named, (self.rows, len(named)))

    def _select(
        self,
        arm: Arm,
        nth: int,
        queries: Sequence[jax.Array],
        is_active: np.ndarray,
        quality: Quality | None,
    ) -> Pools:
        """The pools of block `nth`."""
        layout, block = self._layout, self._config.block_length
        index = self._first + nth
        candidates = np.maximum(index - layout.recent_blocks, 0) * block
        budget = Budget(arm.budget, layout.sink_tokens, layout.recent_blocks, block)
        wanted = np.asarray([budget.wanted(int(own)) for own in index], np.int32)
        need = int(min(wanted.max(), candidates.max())) + layout.sink_tokens
        if need > self._pool_tokens:
            raise ValueError(f"{arm.name} selects {need} tokens, pools have {self._pool_tokens}")
        positions = self._positions(arm, nth)
        shape: dict[str, Any] = {
            "span": self._span,
            "sinks": layout.sink_tokens,
            "kv_heads": self._config.num_kv_heads,
        }
        chosen = [
            select(
                self.cache.k[layer],
                self.cache.v[layer],
                q,
                positions,
                candidates,
                wanted,
                np.uint32(nth * self._config.num_layers + layer),
                scores=arm.scores,
                spec=arm.selection,
                capacity=self._pool_tokens,
                **shape,
            )
            for layer, q in zip(self._sparse, queries, strict=True)
        ]
        if quality is not None and chosen:
            exact = self._exact_queries(arm, nth, queries, is_active)
            measured = [
                measure(self.cache.k[layer], q, index, counts, candidates, wanted, **shape)
                for layer, q, (_, _, index, counts) in zip(self._sparse, exact, chosen, strict=True)
            ]
            # [layers, 3, rows] -> [3, layers]; rows that are done or have no choice do not count.
            is_counted = is_active & (wanted < candidates - layout.sink_tokens)
            sums = (np.asarray(jax.device_get(measured)) * is_counted).sum(-1).T
            into = quality.first if nth == 0 else quality.later
            into += sums
            quality.counts[min(nth, 1)] += int(is_counted.sum())
        keys, values, _, counts = zip(*chosen, strict=True) if chosen else ((), (), (), ())
        lengths = counts[0] if counts else self._nothing.lengths
        return Pools(tuple(keys), tuple(values), lengths)

    def _exact_queries(
        self, arm: Arm, nth: int, queries: Sequence[jax.Array], is_active: np.ndarray
    ) -> Sequence[jax.Array]:
        """Queries of block `nth` at its step 0 if it attended the whole final text."""
        if nth == 0 or arm.source == "own":
            return queries
        masked = np.zeros((self.rows, self.cache.capacity), np.int32)
        # Every token of a later block is masked, whatever stands here.
        return self._step(self._nothing, self.state(nth, masked, is_active), True).queries


def query_count(arm: Arm, nth: int, block: int) -> int:
    """Number of queries that choose for the `nth` block of an answer."""
    if nth == 0 and arm.first_block == "all":
        return block
    return len(query_positions(arm.selection.queries, block))


def span_of(text_tokens: int, capacity: int) -> int:
    """Keys that selections look at in a batch whose texts become no longer."""
    return min(round_up(text_tokens, SPAN_STEP), capacity)


def pool_tokens_for(arms: Sequence[Arm], layout: Layout, longest: int) -> int:
    """Entries that the pools of these arms need for prompts and answers of `longest` tokens."""
    most = max((arm.budget for arm in arms if arm.source != "none"), default=0.0)
    wanted = Budget(most, 0, 0, block_length=1).wanted(longest) if most else 0
    return round_up(wanted + layout.sink_tokens, POOL_TOKENS)


@functools.cache
def row_tokens_for(longest: int, max_blocks: int, block: int) -> int:
    """Token slots of a row whose prompt has at most `longest` tokens."""
    return round_up(longest + (max_blocks + 1) * block, PREFILL_TOKENS)
