"""The programs of the study: first step, the other steps with the commit pass, the lookahead.

What an arm attends is data here (lengths of segments, and a branch for layers that see all of
the text), so that all arms share these programs; only a lookahead of lone masks has another
shape. Keys and values of the whole text stay on the
device. Rows of a batch go from block to block together, each from its own first block on.

Ownership: the cache of a batch is donated to `finish` and comes back. Decoding an arm writes
only past the prompt's whole blocks, so the next arm starts from the same cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import decoding_options
from herald_jax.decoding.propose import ProposalSpec, suppress
from herald_jax.decoding.steps import BlockState, DecodingOptions, prefill_chunk, unmask
from herald_jax.models.attention import FreshKV
from herald_jax.models.decoder import Decoder, Params, bind
from herald_jax.sampling import SamplingParams
from pallas_kernels import Segment, segment_attention

GREEDY = ProposalSpec(("raw",), is_sampled=False, is_filtered=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What all arms have in common.

    Attributes:
        dense_layers: First layers, which always attend everything.
        recent_blocks: Newest finished blocks that are always attended.
        sink_tokens: First tokens that are always attended.
        threshold: Confidence above which a token is committed.
    """

    dense_layers: int = 2
    recent_blocks: int = 1
    sink_tokens: int = 4
    threshold: float = 0.9


class Pools(NamedTuple):
    """Selected keys and values of every sparse layer; a row has the same number in each."""

    k: tuple[Float[Array, "R K C D"], ...]
    v: tuple[Float[Array, "R K C D"], ...]
    lengths: Int[Array, " R"]

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, entries: int, dtype: Any, layers: int) -> Pools:
        """Pools in which nothing is selected."""
        shape = (rows, config.num_kv_heads, entries, config.head_dim)
        zeros = tuple(jnp.zeros(shape, dtype) for _ in range(layers))
        return cls(zeros, zeros, jnp.zeros((rows,), jnp.int32))


class Prefix:
    """What blocks see of the finished text before block `index` of each row, in a trace.

    Args:
        cache: All keys and values.
        pools: The selected ones.
        index: Block of each row; the text before it is finished.
        is_exact: True if all layers see all of the text.
        layout: The common settings.
        block_length: B.
    """

    def __init__(
        self,
        cache: DenseCache,
        pools: Pools,
        index: Int[Array, " R"],
        is_exact: Bool[Array, ""],
        layout: Layout,
        block_length: int,
    ) -> None:
        self._cache, self._pools, self._dense = cache, pools, layout.dense_layers
        first = jnp.maximum(index - layout.recent_blocks, 0) * block_length
        self._lengths = index * block_length
        self._is_exact = is_exact
        self._recent_lengths = self._lengths - first
        window = first[:, None] + jnp.arange(layout.recent_blocks * block_length)

        def newest(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, window[:, None, :, None], axis=2, mode="clip")

        self._recent = [
            (newest(k), newest(v))
            for k, v in zip(cache.k[self._dense :], cache.v[self._dense :], strict=True)
        ]

    def attend(
        self,
        layer: int,
        q: Float[Array, "M Q H D"],
        rows: Int[Array, " M"],
        own: list[Segment],
    ) -> Float[Array, "M Q H D"]:
        """Attention of slots of these rows to what a layer sees of the text, and to `own`."""
        whole = Segment(self._cache.k[layer], self._cache.v[layer], rows, self._lengths[rows])
        if layer < self._dense:
            return segment_attention(q, [whole, *own])
        at = layer - self._dense
        parts = [
            Segment(self._pools.k[at], self._pools.v[at], rows, self._pools.lengths[rows]),
            Segment(*self._recent[at], rows, self._recent_lengths[rows]),
        ]
        # A branch, and not segments of no length, which a plain form would still compute.
        return lax.cond(
            self._is_exact,
            lambda: segment_attention(q, [whole, *own]),
            lambda: segment_attention(q, [*parts, *own]),
        )


def _head_major(fresh: FreshKV) -> tuple[jax.Array, jax.Array]:
    return fresh.k.transpose(0, 2, 1, 3), fresh.v.transpose(0, 2, 1, 3)


def _forward(
    decoder: Decoder,
    prefix: Prefix,
    tokens: Int[Array, "M Q"],
    positions: Int[Array, "M Q"],
    rows: Int[Array, " M"],
    before: list[FreshKV] | None = None,
) -> tuple[jax.Array, list[FreshKV], list[jax.Array]]:
    """Hidden states, fresh keys and values, and the queries of every layer.

    A slot sees its row's prefix, `before` (a block a row that is in no cache) and itself.
    """
    queries: list[jax.Array] = []
    slots = jnp.arange(tokens.shape[0])

    def attend(layer: int, q: jax.Array, fresh: FreshKV) -> jax.Array:
        queries.append(q)
        own = [Segment(*_head_major(fresh), slots, jnp.full_like(slots, tokens.shape[1]))]
        if before is not None:
            size = jnp.full_like(slots, before[layer].k.shape[1])
            own.insert(0, Segment(*_head_major(before[layer]), rows, size))
        return prefix.attend(layer, q, rows, own)

    hidden, fresh = decoder(tokens, positions, attend)
    return hidden, fresh, queries


def options_of(layout: Layout, rows: int, config: ModelConfig) -> DecodingOptions:
    """Greedy decoding by the threshold; no more steps than a block has positions."""
    sampling = SamplingParams(strategy="low_confidence_dynamic", threshold=layout.threshold)
    return decoding_options([sampling] * rows, [0] * rows, config)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def prefill(
    params: Params,
    cache: DenseCache,
    tokens: Int[Array, "R C"],
    start: Int[Array, ""],
    *,
    config: ModelConfig,
) -> DenseCache:
    """The cache with a chunk of all prompts."""
    return prefill_chunk(bind(config, params), cache, tokens, start)


class FirstStep(NamedTuple):
    """A block after step 0, its draft, and the queries of every sparse layer."""

    state: BlockState
    draft: Int[Array, "R B"]
    queries: tuple[Float[Array, "R B H D"], ...]


@functools.partial(jax.jit, static_argnames=("config", "layout"))
def first_step(
    params: Params,
    cache: DenseCache,
    pools: Pools,
    state: BlockState,
    is_exact: Bool[Array, ""],
    options: DecodingOptions,
    *,
    config: ModelConfig,
    layout: Layout,
) -> FirstStep:
    """Step 0 of a block in every row."""
    decoder = bind(config, params)
    prefix = Prefix(cache, pools, state.index, is_exact, layout, config.block_length)
    rows = jnp.arange(state.index.shape[0])
    tokens = state.inputs(config.mask_token_id)
    hidden, _, queries = _forward(decoder, prefix, tokens, state.positions, rows)
    logits = decoder.logits(hidden)
    after = unmask(config, logits, state, options, GREEDY)
    guess = jnp.argmax(suppress(logits, config), axis=-1).astype(after.tokens.dtype)
    draft = jnp.where(after.is_masked, guess, after.tokens)
    return FirstStep(after, draft, tuple(queries[layout.dense_layers :]))


@functools.partial(jax.jit, static_argnames=("config", "layout"), donate_argnames="cache")
def finish(
    params: Params,
    cache: DenseCache,
    pools: Pools,
    state: BlockState,
    is_active: Bool[Array, " R"],
    is_exact: Bool[Array, ""],
    is_commit_exact: Bool[Array, ""],
    options: DecodingOptions,
    *,
    config: ModelConfig,
    layout: Layout,
) -> tuple[DenseCache, BlockState]:
    """The remaining steps of a block in every row, and its commit pass."""
    decoder = bind(config, params)
    rows = jnp.arange(state.index.shape[0])
    prefix = Prefix(cache, pools, state.index, is_exact, layout, config.block_length)

    def step(state: BlockState) -> BlockState:
        tokens = state.inputs(config.mask_token_id)
        hidden, _, _ = _forward(decoder, prefix, tokens, state.positions, rows)
        return unmask(config, decoder.logits(hidden), state, options, GREEDY)

    state = lax.while_loop(lambda state: state.is_masked.any(), step, state)
    last = Prefix(cache, pools, state.index, is_commit_exact, layout, config.block_length)
    _, fresh, _ = _forward(decoder, last, state.tokens, state.positions, rows)
    return cache.append_blocks(fresh, state.starts, is_active), state


@functools.partial(jax.jit, static_argnames=("config", "layout", "lone"))
def look_ahead(
    params: Params,
    cache: DenseCache,
    pools: Pools,
    index: Int[Array, " R"],
    block: Int[Array, "R B"],
    is_exact: Bool[Array, ""],
    *,
    config: ModelConfig,
    layout: Layout,
    lone: tuple[int, ...] = (),
) -> tuple[Float[Array, "R n H D"], ...]:
    """Queries of the masks of block `index + 1` in every sparse layer.

    Args:
        params: The model's parameters.
        cache: The text before block `index`.
        pools: What block `index` attends.
        index: The running block.
        block: Tokens that stand for it. Their keys and values are computed with the pools, as
            an engine's fused pass does, whatever the masks attend.
        is_exact: True if the masks see all of the text.
        config: The model.
        layout: The common settings.
        lone: Positions of masks that see themselves and no other mask; all masks of the block
            together if empty.
    """
    decoder = bind(config, params)
    rows, size = index.shape[0], config.block_length
    starts = (index * size)[:, None]
    each = jnp.arange(rows)
    sparse = Prefix(cache, pools, index, jnp.asarray(False), layout, size)
    _, before, _ = _forward(decoder, sparse, block, starts + jnp.arange(size), each)
    seen = Prefix(cache, pools, index, is_exact, layout, size)
    positions = starts + size + jnp.asarray(lone or range(size))
    if lone:
        each, positions = jnp.repeat(each, len(lone)), positions.reshape(-1, 1)
    masks = jnp.full(positions.shape, config.mask_token_id, jnp.int32)
    _, _, queries = _forward(decoder, seen, masks, positions, each, before)
    shape = (rows, -1, config.num_heads, config.head_dim)
    return tuple(q.reshape(shape) for q in queries[layout.dense_layers :])


def blocks_at(index: np.ndarray, tokens: np.ndarray, is_masked: np.ndarray) -> BlockState:
    """The state of blocks before their first step."""
    return BlockState.start(jnp.asarray(index), jnp.asarray(tokens), jnp.asarray(is_masked))
