"""Masks that walk through the layers while the keys that they see are somewhere else.

This is the paper's retrieval pass (HERALD 2.3, steps 8-9) as programs of one layer each. The
masks of a row's next block, one for the centre query, see the row's finished blocks, the draft of
its running block, and one another. Dense layers have it all on the device. In a sparse layer the
finished blocks are on the host: the masks' queries go there, attention over them comes back with
its log-sum-exp, and is merged with that over what is here. Nothing is written to any cache.

Tensors are B tokens wide, of which the first n are the masks; the others are seen by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from herald_jax.cache.paged import PagedCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.layer_prefill import bind_layer
from herald_jax.decoding.sparse_slots import Lookahead
from herald_jax.models.attention import FreshKV
from herald_jax.models.decoder import Params, bind
from herald_jax.models.rope import Phases, rotary_phases
from herald_jax.retrieval import select
from pallas_kernels import PagedSegment, Segment, segment_attention


class Walk(NamedTuple):
    """Where masks stand: before a layer's attention.

    Attributes:
        hidden: Their hidden states before the layer.
        queries: Rotated queries of the masks in it.
        columns: What their choice scores keys with.
    """

    hidden: Float[Array, "1 B E"]
    queries: Float[Array, "n H D"]
    columns: Float[Array, "K c D"]


def _segment(kv: FreshKV, length: int) -> Segment:
    """The first tokens of `[1, B, K, D]`."""
    k, v = kv.k.transpose(0, 2, 1, 3), kv.v.transpose(0, 2, 1, 3)
    return Segment(k, v, jnp.zeros((1,), jnp.int32), jnp.full((1,), length, jnp.int32))


def _phases(model: ModelConfig, lookahead: Lookahead, blocks: Int[Array, ""]) -> Phases:
    """Rotation of the masks of the block after the one that runs behind so many blocks."""
    packed = jnp.asarray(lookahead.packed(model.block_length))
    positions = (blocks + 1) * model.block_length + packed
    return rotary_phases(positions[None], model.rotary_dim, model.rope_theta)


def _arrive(
    model: ModelConfig, lookahead: Lookahead, heads: str, hidden: jax.Array, q: jax.Array
) -> Walk:
    own = q[:, : len(lookahead.walkers)]
    return Walk(hidden, own[0], select.columns(own, model.num_kv_heads, heads)[0])


def begin(
    dense: PagedCache,
    params: Params,
    table: Int[Array, " W"],
    blocks: Int[Array, ""],
    drafts: Sequence[FreshKV],
    slot: Int[Array, ""],
    *,
    model: ModelConfig,
    lookahead: Lookahead,
    heads: str,
) -> tuple[Walk, list[FreshKV]]:
    """A walk up to its first sparse layer, and the row's draft in the sparse layers.

    Args:
        dense: The dense layers' pages.
        params: The model's parameters.
        table: The row's page ids.
        blocks: Finished blocks before the block that the row runs.
        drafts: Every layer's keys and values of the drafts of some rows, [A, B, K, D].
        slot: Which of them is the row's.
        model: The model.
        lookahead: Which masks walk.
        heads: What becomes of the queries that read one KV head.
    """
    decoder = bind(model, params)
    phases = _phases(model, lookahead, blocks)
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), list(drafts))
    masks = jnp.full((1, model.block_length), model.mask_token_id, jnp.int32)
    hidden = decoder.embed_tokens(masks)
    queries: list[jax.Array] = []

    def attend(layer: int, q: jax.Array, fresh: FreshKV) -> jax.Array:
        if layer == len(dense.k):
            queries.append(q)
            return jnp.zeros_like(q)
        length = (blocks * model.block_length)[None]
        pages = PagedSegment(dense.k[layer], dense.v[layer], table[None], length)
        masks = _segment(fresh, len(lookahead.walkers))
        draft = _segment(own[layer], model.block_length)
        return segment_attention(q, [pages, masks, draft])

    for layer in range(len(dense.k)):
        hidden, _ = decoder.layers[layer](layer, hidden, phases, attend)
    decoder.layers[len(dense.k)](len(dense.k), hidden, phases, attend)
    return _arrive(model, lookahead, heads, hidden, queries[0]), own[len(dense.k) :]


def advance(
    walk: Walk,
    draft: FreshKV,
    blocks: Int[Array, ""],
    far: Float[Array, "n H D"],
    log_sum: Float[Array, "n H"],
    here: Params,
    there: Params,
    *,
    model: ModelConfig,
    layers: tuple[int, int],
    lookahead: Lookahead,
    heads: str,
) -> Walk:
    """A walk one layer on.

    Args:
        walk: Where it stands.
        draft: The row's draft in this layer, [1, B, K, D].
        blocks: Finished blocks before the block that the row runs.
        far: Attention over them, fp32.
        log_sum: Its log-sum-exp.
        here: Parameters of this layer.
        there: Parameters of the next one.
        model: The model.
        layers: Numbers of two layers of the same structure.
        lookahead: Which masks walk.
        heads: What becomes of the queries that read one KV head.
    """
    phases = _phases(model, lookahead, blocks)
    count, queries = len(lookahead.walkers), []
    rest = ((0, model.block_length - count), (0, 0))

    def merge(_: int, q: jax.Array, fresh: FreshKV) -> jax.Array:
        near_segments = [_segment(draft, model.block_length), _segment(fresh, count)]
        near, near_sum = segment_attention(q, near_segments, with_lse=True)
        far_sum = jnp.pad(log_sum, rest, constant_values=-jnp.inf)[None]
        share = jax.nn.sigmoid(far_sum - near_sum)[..., None]
        out = share * jnp.pad(far, (*rest, (0, 0)))[None] + (1 - share) * near.astype(jnp.float32)
        return out.astype(q.dtype)

    def ask(_: int, q: jax.Array, fresh: FreshKV) -> jax.Array:
        queries.append(q)
        return jnp.zeros_like(q)

    hidden, _ = bind_layer(model, layers[0], here)(layers[0], walk.hidden, phases, merge)
    bind_layer(model, layers[1], there)(layers[1], hidden, phases, ask)
    return _arrive(model, lookahead, heads, hidden, queries[0])
