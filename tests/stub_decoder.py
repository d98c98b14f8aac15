"""A decoder without a network: logits come from a table, keys and values spell the tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import decoding_options, proposal_spec
from herald_jax.decoding.steps import BlockState, decode_block
from herald_jax.models import Decoder
from herald_jax.models.attention import FreshKV
from herald_jax.sampling import SamplingParams

STUB = ModelConfig(
    family="stub",
    vocab_size=9,
    hidden_size=4,
    intermediate_size=4,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    block_length=4,
    mask_token_id=8,
    stop_token_ids=(1,),
)
"""Ids 0..7 are tokens, 1 is the stop id, 8 the mask."""


def stub_config(**changes: Any) -> ModelConfig:
    """`STUB` with other values."""
    return dataclasses.replace(STUB, **changes)


class StubDecoder(Decoder):
    """Logits `table[settled, position]`, `settled` being the tokens of the block that stand.

    A table [positions, V] is the same in all steps. Keys and values hold the ids of the tokens
    that the pass saw, so a cache shows what it was written from.
    """

    def __init__(self, config: ModelConfig, table: Any) -> None:
        self.config = config
        self.table = table

    def __call__(self, tokens: Any, positions: Any, attend: Any) -> Any:
        settled = (tokens != self.config.mask_token_id).sum(-1)
        logits = self.table[positions]
        if self.table.ndim == 3:
            logits = self.table[settled[:, None], positions]
        seen = jnp.broadcast_to(
            tokens[..., None, None].astype(jnp.float32), (*tokens.shape, 1, self.config.head_dim)
        )
        return logits, [FreshKV(seen, -seen)] * self.config.num_layers

    head_table = None

    def logits(self, hidden: Any) -> Any:
        return hidden


def stub_params(table: Any) -> Any:
    """Parameters with which `stub_bind` makes a stub."""
    return {"embed_tokens": {"embedding": jnp.zeros((1, 1), jnp.float32)}, "table": table}


def stub_bind(config: ModelConfig, params: Any) -> StubDecoder:
    """Stands in for `bind` in programs that make their decoder from parameters."""
    return StubDecoder(config, params["table"])


def logits_for(
    tokens: list[int], margins: list[float] | None = None, config: ModelConfig = STUB
) -> np.ndarray:
    """Logits [positions, V] that prefer `tokens` by `margins` over all other ids."""
    table = np.zeros((len(tokens), config.vocab_size), np.float32)
    table[np.arange(len(tokens)), tokens] = 3.0 if margins is None else margins
    return table


@dataclasses.dataclass
class Block:
    """One decoded block of one row, and the cache behind it."""

    state: BlockState
    cache: DenseCache
    tokens: list[int]
    steps: list[int]
    confidences: list[float]


@functools.partial(jax.jit, static_argnames=("config", "spec"))
def _decode(table: Any, cache: Any, state: Any, options: Any, *, config: Any, spec: Any) -> Any:
    decoder = StubDecoder(config, table)
    return decode_block(decoder, cache, state, jnp.ones(1, bool), options, spec)


def run_block(
    table: np.ndarray,
    sampling: SamplingParams,
    *,
    config: ModelConfig = STUB,
    index: int = 0,
    prompt: tuple[int, ...] = (),
    seed: int = 0,
) -> Block:
    """Decodes block `index` of one row whose first tokens are `prompt`."""
    size = config.block_length
    masked = np.arange(size) >= len(prompt)
    tokens = np.zeros(size, np.int32)
    tokens[: len(prompt)] = prompt
    options = jax.tree.map(jnp.asarray, decoding_options([sampling], [seed], config))
    state = BlockState.start(
        jnp.array([index], jnp.int32), jnp.asarray(tokens)[None], jnp.asarray(masked)[None]
    )
    cache = DenseCache.zeros(config, 1, (index + 1) * size, jnp.float32)
    cache, state = _decode(
        jnp.asarray(table), cache, state, options, config=config, spec=proposal_spec([sampling])
    )
    return Block(
        state,
        cache,
        np.asarray(state.tokens)[0].tolist(),
        np.asarray(state.unmask_steps)[0].tolist(),
        np.asarray(state.confidences)[0].tolist(),
    )
