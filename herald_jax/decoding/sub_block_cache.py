"""Fast-dLLM v2's cache within the running block: a pass may cover one sub-block only.

With the rule `sub_blocks` the masks of a block are filled a sub-block at a time. A pass covers the
whole block while the first position of the current sub-block is masked, which renews the block's
keys and values; once that position is written, passes cover the sub-block alone and see the rest of
the block as the last whole pass left it (arXiv 2509.26328). This is an approximation, as the tokens
of a sub-block change what the others would compute. The finished block is committed exactly.

Rows may ask for different passes in the same step: both are run then, each for its rows, so that
a row's text does not depend on its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from herald_jax._checks import require
from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rules.sub_blocks import sub_block_length
from herald_jax.decoding.shifted import FirstToken, commit_shifted_block, shift_right
from herald_jax.decoding.steps import BlockState, DecodingOptions, unmask
from herald_jax.models.attention import FreshKV
from herald_jax.models.decoder import Decoder
from herald_jax.sampling import SamplingParams
from pallas_kernels import Segment, segment_attention


def check_sub_block_cache(model: ModelConfig, sampling: SamplingParams) -> None:
    """Checks that the steps of a block keep to one sub-block.

    Raises:
        ConfigError: If the model or an option does not fit.
    """
    require(
        model.shifts_predictions,
        "sub_block_cache",
        True,
        "False for a model that predicts in place",
        "It is Fast-dLLM v2's. Leave it out.",
    )
    field, fix = "strategy", "The cache needs it; or set sub_block_cache=False."
    require(sampling.strategy == "sub_blocks", field, sampling.strategy, "'sub_blocks'", fix)
    steps = sampling.denoising_steps
    require(
        steps in (None, model.block_length),
        "denoising_steps",
        steps,
        "unset with sub_block_cache",
        "Fewer steps could ask for tokens of a sub-block that a pass does not cover.",
    )


class _Block(NamedTuple):
    """A running block, with the keys and values of its last whole pass, head-major."""

    state: BlockState
    k: tuple[Float[Array, "R K B D"], ...]
    v: tuple[Float[Array, "R K B D"], ...]
    is_kept: Bool[Array, " R"]


def decode_cached_block(
    decoder: Decoder,
    cache: DenseCache,
    state: BlockState,
    ahead: FirstToken,
    is_active: Bool[Array, " R"],
    options: DecodingOptions,
    spec: ProposalSpec,
) -> tuple[DenseCache, BlockState, FirstToken]:
    """One whole block of every active row, and what comes after it."""
    state = ahead.begin(state)
    state = state._replace(is_masked=state.is_masked & is_active[:, None])
    config, (rows, block_length) = decoder.config, state.tokens.shape
    size = sub_block_length(block_length)
    row = jnp.arange(rows)

    def whole(block: _Block, is_asked: Bool[Array, " R"]) -> tuple[jax.Array, _Block]:
        state = block.state
        inputs = state.inputs(config.mask_token_id)
        hidden, fresh = decoder(inputs, state.positions, cache.block_attend(state.starts))

        def keep(old: jax.Array, new: Float[Array, "R B K D"]) -> jax.Array:
            return jnp.where(is_asked[:, None, None, None], new.transpose(0, 2, 1, 3), old)

        kept = block._replace(
            k=tuple(keep(old, new.k) for old, new in zip(block.k, fresh, strict=True)),
            v=tuple(keep(old, new.v) for old, new in zip(block.v, fresh, strict=True)),
            is_kept=block.is_kept | is_asked,
        )
        return decoder.logits(shift_right(hidden)), kept

    def part(block: _Block, start: Int[Array, " R"]) -> tuple[jax.Array, _Block]:
        state = block.state
        # The last sub-block may be shorter: it is begun earlier, and its own masks alone count.
        start = jnp.minimum(start, block_length - size)
        places = start[:, None] + jnp.arange(size)
        inputs = jnp.take_along_axis(state.inputs(config.mask_token_id), places, axis=1)
        keys, values = list(block.k), list(block.v)

        def attend(layer: int, q: Float[Array, "R b H D"], fresh: FreshKV) -> jax.Array:
            at = row[:, None]
            keys[layer] = keys[layer].at[at, :, places].set(fresh.k)
            values[layer] = values[layer].at[at, :, places].set(fresh.v)
            prefix = Segment(cache.k[layer], cache.v[layer], row, state.starts)
            whole_block = jnp.full((rows,), block_length)
            own = Segment(keys[layer], values[layer], row, whole_block)
            return segment_attention(q, [prefix, own])

        hidden, _ = decoder(inputs, state.starts[:, None] + places, attend)
        logits = decoder.logits(shift_right(hidden))
        placed = jnp.zeros((rows, block_length, logits.shape[-1]), logits.dtype)
        placed = placed.at[row[:, None], places].set(logits)
        return placed, block._replace(k=tuple(keys), v=tuple(values))

    def step(block: _Block) -> _Block:
        is_masked = block.state.is_masked
        first = jnp.argmax(is_masked, axis=-1) // size * size
        is_first_masked = jnp.take_along_axis(is_masked, first[:, None], axis=1)[:, 0]
        is_open = is_masked.any(-1)
        asks_whole = is_open & (is_first_masked | ~block.is_kept)
        asks_part = is_open & ~asks_whole
        nothing = jnp.zeros((rows, block_length, config.vocab_size), jnp.float32)
        whole_logits, after_whole = lax.cond(
            asks_whole.any(), lambda: whole(block, asks_whole), lambda: (nothing, block)
        )
        part_logits, after = lax.cond(
            asks_part.any(), lambda: part(after_whole, first), lambda: (nothing, after_whole)
        )
        logits = jnp.where(asks_whole[:, None, None], whole_logits, part_logits)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(asks_part[:, None, None, None], new, old)

        return _Block(
            state=unmask(config, logits, block.state, options, spec),
            k=jax.tree.map(choose, after.k, after_whole.k),
            v=jax.tree.map(choose, after.v, after_whole.v),
            is_kept=after.is_kept,
        )

    shape = rows, config.num_kv_heads, block_length, config.head_dim
    empty = tuple(jnp.zeros(shape, layer.dtype) for layer in cache.k)
    begun = _Block(state, empty, empty, jnp.zeros((rows,), bool))
    state = lax.while_loop(lambda block: block.state.is_masked.any(), step, begun).state
    return commit_shifted_block(decoder, cache, state, is_active)
