"""Prefill that takes the whole prompt through one layer at a time.

The ordinary prefill keeps the keys and values of every layer on the device while the prompt
goes by in chunks. Here a chunk's hidden states wait on the device instead, and each layer runs
over all chunks before the next one begins: the device holds one layer's keys and values and
one hidden vector a token, whatever the number of layers, and a finished layer can travel to
the host while the next one computes. The first decoded block (the prompt's tail and masks)
walks along with attention over the whole prompt; its queries choose the first selected pool.

Ownership: the hidden states belong to the running prefill and are donated from layer to layer.
A layer's buffers are made for it, donated to its chunks, and handed over to the caller of
`LayerPrefill.layers` or `run` once the layer's programs are dispatched; the prefill keeps no
reference, so they are freed when the caller drops them. At most two layers are dispatched
before the older one has to be finished. A caller whose copies are slower than that waits for
them before it asks for another layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from herald_jax._checks import require, require_int
from herald_jax.cache.layout import check_index_range, round_up
from herald_jax.configs import ModelConfig
from herald_jax.models.attention import FreshKV
from herald_jax.models.decoder import DecoderLayer, Params
from herald_jax.models.rope import rotary_phases
from pallas_kernels import Segment, prefill_attention, segment_attention

CHUNK_TOKENS = 1024
"""Default size of a chunk: large enough that reading a layer's weights costs little."""

BUCKET_STEP = 4
BUCKETS = 3
"""A last chunk runs in the smallest of a whole chunk, a quarter and a sixteenth that holds it."""

LAYERS_IN_FLIGHT = 2

OnLayer = Callable[[int, jax.Array, jax.Array, jax.Array | None], None]
"""(layer, keys [1, K, S, D], values, queries of the first decoded block [B, H, D] or None)."""


class LayerOutput(NamedTuple):
    """What one layer leaves: the prompt's keys (rotated) and values, and the block's queries.

    Token slots past the prompt's whole blocks are zero. `q` is None where no queries were
    asked for. `hidden` is the first decoded block after the last layer, and else None: as the
    block has seen the whole prompt, it is the block's first denoising step as well.
    """

    layer: int
    k: Float[Array, "1 K S D"]
    v: Float[Array, "1 K S D"]
    q: Float[Array, "B H D"] | None
    hidden: Float[Array, "1 B E"] | None = None


class KnownKeys(NamedTuple):
    """The beginning of a prompt whose keys and values are there already.

    Attributes:
        tokens: How many tokens, in whole chunks.
        first_layer: The first layer of which they are there; in layers below all chunks run.
        fetch: Gives a layer's keys and values [1, K, S, D], in arrays of their own; what they
            hold behind these tokens does not matter.
    """

    tokens: int
    first_layer: int
    fetch: Callable[[int], tuple[jax.Array, jax.Array]]


class QueryOutput(NamedTuple):
    """One layer's pass over the first decoded block."""

    hidden: Float[Array, "1 B E"]
    q: Float[Array, "B H D"]
    k: Float[Array, "B K D"]
    v: Float[Array, "B K D"]


@dataclasses.dataclass(slots=True)
class _Walk:
    """A prompt on its way through the layers.

    Attributes:
        places: First position and token count of every chunk.
        chunks: Hidden states of every chunk, padded to a bucket.
        block: Hidden states of the first decoded block.
        in_flight: A scalar of each layer that was dispatched and not yet waited for.
        known: What need not be computed.
    """

    places: list[tuple[np.int32, np.int32]]
    chunks: list[jax.Array]
    block: jax.Array | None
    in_flight: list[jax.Array]
    known: KnownKeys | None = None


@functools.lru_cache(maxsize=32)
def _layer_structure(config: ModelConfig, layer: int, dtype: str) -> tuple[Any, Any]:
    make = functools.partial(DecoderLayer, config, layer, jnp.dtype(dtype))
    return nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))


def bind_layer(config: ModelConfig, layer: int, params: Params) -> DecoderLayer:
    """A decoder layer over `params`, to be called inside a trace."""
    dtype = params["input_layernorm"]["scale"].dtype
    graph, abstract = _layer_structure(config, layer, jnp.dtype(dtype).name)
    state = jax.tree.map(lambda leaf: leaf, abstract)  # replaced in place below
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _zeros(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.zeros(shape, dtype)


@jax.jit
def _embed(table: Float[Array, "V E"], tokens: Int[Array, "1 Q"]) -> Float[Array, "1 Q E"]:
    return jnp.take(table, tokens, axis=0)


@functools.partial(
    jax.jit, static_argnames=("config", "layer"), donate_argnames=("hidden", "k", "v")
)
def _chunk(
    params: Params,
    hidden: Float[Array, "1 Q E"],
    k: Float[Array, "1 K S D"],
    v: Float[Array, "1 K S D"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    *,
    config: ModelConfig,
    layer: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One chunk through one layer; only its first `count` tokens are written.

    Tokens of padding stand in blocks after those of the text, which therefore never see them.
    Returns the hidden states, the buffers, and a scalar to wait for.
    """
    size, capacity = hidden.shape[1], k.shape[2]
    offsets = jnp.arange(size)
    phases = rotary_phases((start + offsets)[None], config.rotary_dim, config.rope_theta)

    def attend(_: int, q: jax.Array, fresh: FreshKV) -> jax.Array:
        return prefill_attention(q, k, v, start, fresh.k, fresh.v, config.block_length)

    hidden, fresh = bind_layer(config, layer, params)(layer, hidden, phases, attend)
    # Padding points past the capacity, where the scatter writes nothing.
    slots = jnp.where(offsets < count, start + offsets, capacity + offsets)

    def write(old: jax.Array, new: Float[Array, "1 Q K D"]) -> jax.Array:
        return old.at[0, :, slots].set(new[0], mode="drop", unique_indices=True)

    k = write(k, fresh.k)
    return hidden, k, write(v, fresh.v), k[0, 0, 0, 0]


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _first_tokens(
    k: Float[Array, "1 K S D"], v: Float[Array, "1 K S D"], count: Int[Array, ""]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values of the first `count` tokens, zeros behind them, and a scalar to wait for."""
    is_kept = (jnp.arange(k.shape[2]) < count)[:, None]
    k, v = (jnp.where(is_kept, one, jnp.zeros((), one.dtype)) for one in (k, v))
    return k, v, k[0, 0, 0, 0]


@functools.partial(jax.jit, static_argnames=("config", "layer"), donate_argnames=("hidden",))
def _query(
    params: Params,
    hidden: Float[Array, "1 B E"],
    k: Float[Array, "1 K S D"],
    v: Float[Array, "1 K S D"],
    prefix_length: Int[Array, ""],
    *,
    config: ModelConfig,
    layer: int,
) -> QueryOutput:
    """The first decoded block through one layer, with attention over the whole prompt."""
    block = hidden.shape[1]
    positions = (prefix_length + jnp.arange(block))[None]
    phases = rotary_phases(positions, config.rotary_dim, config.rope_theta)
    row = jnp.zeros((1,), jnp.int32)
    queries: list[jax.Array] = []

    def attend(_: int, q: jax.Array, fresh: FreshKV) -> jax.Array:
        queries.append(q)
        own_k, own_v = fresh.k.transpose(0, 2, 1, 3), fresh.v.transpose(0, 2, 1, 3)
        prompt = Segment(k, v, row, prefix_length[None])
        return segment_attention(q, [prompt, Segment(own_k, own_v, row, jnp.full((1,), block))])

    hidden, fresh = bind_layer(config, layer, params)(layer, hidden, phases, attend)
    return QueryOutput(hidden, queries[0][0], fresh.k[0], fresh.v[0])


class LayerPrefill:
    """Programs and driver of the layer-segmented prefill of one row.

    All layers of one structure share their programs, because the layer's parameters are an
    argument. `program_count` says how many there are; after `warmup` no prompt compiles one.

    Args:
        config: The model.
        capacity: Token slots of a layer's buffers, in whole blocks.
        chunk_tokens: Tokens that go through a layer at a time, in whole blocks.

    Raises:
        ConfigError: If a size is not in whole blocks, or the buffers are too large to index.
    """

    def __init__(
        self, config: ModelConfig, *, capacity: int, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        block = config.block_length
        for name, value in (("capacity", capacity), ("chunk_tokens", chunk_tokens)):
            require_int(name, value, block, f"Use a multiple of block_length={block}.")
            require(value % block == 0, name, value, f"a multiple of block_length={block}")
        self.config, self.capacity = config, capacity
        self._shape = (1, config.num_kv_heads, capacity, config.head_dim)
        check_index_range("one layer's prefill buffer", self._shape)
        self.chunk_tokens = min(chunk_tokens, capacity)
        sizes = {round_up(-(-self.chunk_tokens // BUCKET_STEP**n), block) for n in range(BUCKETS)}
        self.buckets: tuple[int, ...] = tuple(sorted(sizes))
        first_of = {
            config.has_experts(layer): layer for layer in reversed(range(config.num_layers))
        }
        self._example = [first_of[config.has_experts(n)] for n in range(config.num_layers)]

    def example(self, layer: int) -> int:
        """The first layer of the structure of this one."""
        return self._example[layer]

    @property
    def program_count(self) -> int:
        """Programs that exist after `warmup`.

        For each structure of layers one a bucket and one for the first decoded block; an
        embedding look-up for each of these widths; one that makes empty buffers, and one that
        clears what follows known keys.
        """
        widths = len({*self.buckets, self.config.block_length})
        return len(set(self._example)) * (len(self.buckets) + 1) + widths + 2

    def warmup(self, params: Params) -> None:
        """Compiles every program, by running each once on zeros."""
        zero = np.int32(0)
        _first_tokens(*self._buffers(params), zero)
        for layer in sorted(set(self._example)):
            k, v = self._buffers(params)
            for size in self.buckets:
                hidden = self.embed(params, np.zeros(size, np.int32))
                _, k, v, _ = self.chunk(params, layer, hidden, k, v, zero, zero)
            hidden = self.embed(params, np.zeros(self.config.block_length, np.int32))
            jax.block_until_ready(self.query(params, layer, hidden, k, v, zero))

    def embed(self, params: Params, tokens: Integer[np.ndarray, " Q"]) -> jax.Array:
        """Hidden states [1, Q, E] before the first layer."""
        return _embed(params["embed_tokens"]["embedding"], tokens.astype(np.int32)[None])

    def chunk(
        self,
        params: Params,
        layer: int,
        hidden: jax.Array,
        k: jax.Array,
        v: jax.Array,
        start: np.int32,
        count: np.int32,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Dispatches one chunk through one layer; `hidden`, `k` and `v` are donated.

        Args:
            params: The model's parameters.
            layer: Number of the layer.
            hidden: Hidden states of a bucket [1, Q, E].
            k: The layer's keys so far [1, K, S, D].
            v: Its values.
            start: Position of the chunk's first token.
            count: Tokens of the chunk, in whole blocks; what follows in the bucket is padding.

        Returns:
            The new hidden states and buffers, and a scalar that is ready when they are.
        """
        weights, example = params["layers"][layer], self._example[layer]
        return _chunk(weights, hidden, k, v, start, count, config=self.config, layer=example)

    def query(
        self,
        params: Params,
        layer: int,
        hidden: jax.Array,
        k: jax.Array,
        v: jax.Array,
        prefix_length: np.int32,
    ) -> QueryOutput:
        """Dispatches the first decoded block through one layer; `hidden` is donated."""
        weights, example = params["layers"][layer], self._example[layer]
        return _query(weights, hidden, k, v, prefix_length, config=self.config, layer=example)

    def layers(
        self,
        params: Params,
        tokens: Integer[np.ndarray, " P"],
        tail: Integer[np.ndarray, " T"] | None = None,
        known: KnownKeys | None = None,
    ) -> Iterator[LayerOutput]:
        """Yields each layer once its programs are dispatched; the next one starts on resumption.

        Nothing is computed, and nothing yielded, for a prompt without a whole block.

        Args:
            params: The model's parameters.
            tokens: The prompt's whole blocks.
            tail: What is left of the prompt, fewer tokens than a block; may be empty. With
                None the first decoded block does not walk along and there are no queries.
            known: Keys and values of the first chunks, which then do not run.

        Raises:
            ConfigError: If `tokens` are not whole blocks or do not fit, or the tail is a block.
        """
        block = self.config.block_length
        length = len(tokens)
        allowed = f"whole blocks of {block} tokens, at most capacity={self.capacity}"
        require(length % block == 0 and length <= self.capacity, "prompt tokens", length, allowed)
        if not length:
            return
        walk = self._start(params, tokens, tail)
        walk.known = known
        for layer in range(self.config.num_layers):
            # No name may hold the output: a suspended generator would keep its buffers alive.
            yield self._advance(params, layer, walk)

    def run(
        self,
        params: Params,
        tokens: Integer[np.ndarray, " P"],
        tail: Integer[np.ndarray, " T"] | None,
        on_layer: OnLayer,
    ) -> None:
        """Calls `on_layer` for every layer of `layers`, which has the arguments' meaning."""
        for layer, k, v, q, _ in self.layers(params, tokens, tail):
            on_layer(layer, k, v, q)
            del k, v, q

    def _start(self, params: Params, tokens: np.ndarray, tail: np.ndarray | None) -> _Walk:
        starts = range(0, len(tokens), self.chunk_tokens)
        pieces = [tokens[start : start + self.chunk_tokens] for start in starts]
        return _Walk(
            places=[(np.int32(s), np.int32(len(p))) for s, p in zip(starts, pieces, strict=True)],
            chunks=[self._embed_padded(params, piece) for piece in pieces],
            block=None if tail is None else self.embed(params, self.first_block(tail)),
            in_flight=[],
        )

    def _advance(self, params: Params, layer: int, walk: _Walk) -> LayerOutput:
        """Dispatches one layer, once the layer before the last one has been computed."""
        if len(walk.in_flight) == LAYERS_IN_FLIGHT:
            walk.in_flight.pop(0).block_until_ready()
        known, first = walk.known, 0
        if known is not None and layer >= known.first_layer:
            first = sum(start < known.tokens for start, _ in walk.places)
            k, v, done = _first_tokens(*known.fetch(layer), np.int32(known.tokens))
        else:
            k, v = self._buffers(params)
            done = k
        for index, place in enumerate(walk.places):
            if index < first:
                continue
            out = self.chunk(params, layer, walk.chunks[index], k, v, *place)
            walk.chunks[index], k, v, done = out
        walk.in_flight.append(done)
        if walk.block is None:
            return LayerOutput(layer, k, v, None)
        length = np.int32(sum(walk.places[-1]))
        block = self.query(params, layer, walk.block, k, v, length)
        walk.block = block.hidden
        is_last = layer == self.config.num_layers - 1
        return LayerOutput(layer, k, v, block.q, block.hidden if is_last else None)

    def _buffers(self, params: Params) -> tuple[jax.Array, jax.Array]:
        dtype = params["embed_tokens"]["embedding"].dtype.name
        return _zeros(self._shape, dtype), _zeros(self._shape, dtype)

    def _embed_padded(self, params: Params, tokens: Integer[np.ndarray, " Q"]) -> jax.Array:
        size = next(size for size in self.buckets if size >= len(tokens))
        return self.embed(params, np.pad(tokens, (0, size - len(tokens))))

    def first_block(self, tail: Integer[np.ndarray, " T"]) -> Integer[np.ndarray, " B"]:
        """Inputs of the block that begins with a prompt's tail and is masked behind it."""
        block = self.config.block_length
        require(len(tail) < block, "tail tokens", len(tail), f"fewer than block_length={block}")
        first = np.full(block, self.config.mask_token_id, np.int32)
        first[: len(tail)] = tail
        return first
