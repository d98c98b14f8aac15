"""From hidden states to proposals, without the logits of a whole batch in memory.

The fp32 logits of 32 rows of 32 positions over 152 thousand ids are 622 MB, and drawing from them
needs several arrays of that size. So the LM head and what follows it run over a few rows at a
time; a row's proposal depends on its own logits alone, whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from herald_jax.configs import ModelConfig
from herald_jax.decoding.propose import Proposal, ProposalSpec, RowOptions, propose, suppress
from pallas_kernels import greedy_head, has_greedy_head

MAX_POSITIONS = 256
"""Positions whose logits are held at a time: with these the matrix unit is as busy as with more,
so that reading the head's weights once for every part costs nothing."""


def propose_blocks(
    logits: Callable[[Float[Array, "r B E"]], Float[Array, "r B V"]],
    config: ModelConfig,
    hidden: Float[Array, "R B E"],
    options: RowOptions,
    spec: ProposalSpec,
    seeds: UInt32[Array, " R"],
    block: Int[Array, " R"],
    step: Int[Array, " R"],
    table: Float[Array, "E V"] | None = None,
) -> Proposal:
    """`propose` from a pass's outputs and the LM head; the mask id is not offered.

    With the head's `table`, greedy rows on a GPU have their logits reduced by the kernel that
    computes them, which writes none.
    """

    def of_rows(rows: tuple) -> Proposal:
        hidden, options, *numbers = rows
        lines = hidden.reshape(-1, hidden.shape[-1])
        if table is not None and not spec.is_sampled and has_greedy_head(lines, table):
            end = config.tokenizer_vocab_size or config.vocab_size
            best = greedy_head(lines, table, config.mask_token_id, end)
            token, log_p, entropy = (x.reshape(hidden.shape[:2]) for x in best)
            return Proposal(token, jnp.exp(log_p), entropy, log_p, token)
        return propose(suppress(logits(hidden), config), options, spec, *numbers)

    inputs = (hidden, options, seeds, block, step)
    count, block_length = hidden.shape[:2]
    parts = -(-count // max(MAX_POSITIONS // block_length, 1))
    if parts == 1:
        return of_rows(inputs)
    at_a_time = -(-count // parts)

    def split(x: jax.Array) -> jax.Array:
        """Equal parts, filled up with the last row."""
        padding = [(0, parts * at_a_time - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding, mode="edge").reshape(parts, at_a_time, *x.shape[1:])

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(parts * at_a_time, *x.shape[2:])[:count]

    return jax.tree.map(join, lax.map(of_rows, jax.tree.map(split, inputs)))
