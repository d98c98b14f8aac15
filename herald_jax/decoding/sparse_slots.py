"""One step over a sparse cache: blocks that run, and the lookahead for the blocks after them.

A row in its fused step (HERALD 2.3, its draft and lookahead) takes three slots: group A is its
running block n, which goes on as in any step; group B is the draft of block n, committed tokens
where there are any and the argmax of step 0 elsewhere; group C is block n + 1 as nothing but
masks. A and B see the same prefix and not each other; C sees that prefix, the draft's keys and
values, and its own masks. What C asks for in every sparse layer is what block n + 1 will need:
its queries leave the step, and selection runs while block n goes on. Keys and values of B and C
are used within the pass and never written anywhere. `Lookahead` says where the paper's own
retrieval pass differs.

The fused step may also be the commit pass of a block that was done at step 0; the draft is then
the block's final tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from herald_jax.cache.key_index import KeyIndex
from herald_jax.cache.paged import PageBlocks, PagedCache
from herald_jax.cache.sparse import LayerPool, SparseCache
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.rows import DecodeSlots, RowStarts, RowStates, RunningSlots, SlotOutput
from herald_jax.decoding.steps import DecodingOptions, commit, offer_from
from herald_jax.models.attention import FreshKV
from herald_jax.models.decoder import Decoder
from pallas_kernels import PagedSegment, Segment, segment_attention


@dataclasses.dataclass(frozen=True, slots=True)
class Lookahead:
    """What looks ahead: in the paper's retrieval pass a few masks, which see everything.

    Attributes:
        walkers: Positions of the next block's masks that look ahead and see the whole prefix, the
            draft and one another; if there are none, all masks do, and see what the running
            block sees.
        is_on_host: True if the walkers go through the layers after the step, since it is the
            host that has the prefix: the step has no group C then, and gives the draft's keys
            and values.
    """

    walkers: tuple[int, ...] = ()
    is_on_host: bool = False

    def packed(self, block_length: int) -> tuple[int, ...]:
        """Positions of the tokens of group C: the walkers come first, then whatever."""
        if not self.walkers:
            return tuple(range(block_length))
        return self.walkers + (0,) * (block_length - len(self.walkers))


class SlotPlaces(NamedTuple):
    """Where the slots of a pass stand, and what each sees.

    Attributes:
        rows: Row of each slot.
        prefix: Finished blocks before the block that the slot's row is running.
        is_live: False for padding, which sees nothing.
        is_written: True where the dense layers' pages take the slot's keys and values.
        is_committing: True where the pass is the block's commit pass.
        partner: Another slot whose fresh keys and values this one sees as well, or -1.
        is_exact: True where the sparse layers' whole prefix is seen instead of the pools.
        own: First tokens of itself that a slot sees.
    """

    rows: Int[Array, " M"]
    prefix: Int[Array, " M"]
    is_live: Bool[Array, " M"]
    is_written: Bool[Array, " M"]
    is_committing: Bool[Array, " M"]
    partner: Int[Array, " M"]
    is_exact: Bool[Array, " M"]
    own: Int[Array, " M"]


class SparsePass:
    """One pass over a sparse cache, for use inside a trace; `cache` is the result.

    Args:
        cache: The cache before the pass.
        tables: Page ids of every row, for the dense layers.
        pooled: Entries of a row's pool by the index of the block that reads it.
        places: The slots.
        block_length: B.
        reads_store: True if some slot may be exact; then the store is on the device.

    Attributes:
        queries: Rotated queries of every sparse layer that has run, [M, B, H, D].
    """

    def __init__(
        self,
        cache: SparseCache,
        tables: Int[Array, "R W"],
        pooled: Int[Array, " N"],
        places: SlotPlaces,
        block_length: int,
        *,
        reads_store: bool,
    ) -> None:
        self._places, self._block, self._reads_store = places, block_length, reads_store
        self._k, self._v = list(cache.dense.k), list(cache.dense.v)
        self._selected, self._recent = cache.selected, list(cache.recent)
        self._store, self._index = list(cache.store), list(cache.index)
        self._tables = jnp.take(tables, places.rows, axis=0, mode="clip")
        rows = tables.shape[0]
        live = places.is_live
        self._all_rows = jnp.minimum(places.rows, rows - 1)
        self._pool_rows = (places.prefix % 2) * rows + self._all_rows
        self._written_rows = jnp.where(places.is_committing, places.rows, rows)

        def where(condition: jax.Array, value: jax.Array | int) -> jax.Array:
            return jnp.where(condition & live, value, 0).astype(jnp.int32)

        prefix_tokens = places.prefix * block_length
        in_pages = prefix_tokens + jnp.where(places.is_written, block_length, 0)
        is_sparse = ~places.is_exact
        pooled = jnp.take(pooled, places.prefix, mode="clip")
        self._page_lengths = where(live, in_pages)
        self._pool_lengths = where(is_sparse, pooled)
        self._recent_lengths = where(is_sparse, prefix_tokens)
        self._store_lengths = where(places.is_exact, prefix_tokens)
        self._own_lengths = where(live, places.own)
        self._own_beside_pages = where(~places.is_written, places.own)
        self._partner_lengths = where(places.partner >= 0, block_length)
        if self._k:
            is_written = places.is_written & live
            self._blocks = PageBlocks.of(
                self._k[0].shape, self._tables, places.prefix, is_written, block_length
            )
        self.queries: list[jax.Array] = []

    def attend(self, layer: int, q: Float[Array, "M B H D"], fresh: FreshKV) -> jax.Array:
        """Attention of one layer; a committing slot's keys and values enter the cache."""
        own = LayerPool(fresh.k.transpose(0, 2, 1, 3), fresh.v.transpose(0, 2, 1, 3))
        slots = jnp.arange(q.shape[0])
        partner = Segment(*own, jnp.maximum(self._places.partner, 0), self._partner_lengths)
        if layer < len(self._k):
            self._k[layer] = self._blocks.write(self._k[layer], fresh.k)
            self._v[layer] = self._blocks.write(self._v[layer], fresh.v)
            pages = PagedSegment(self._k[layer], self._v[layer], self._tables, self._page_lengths)
            beside = Segment(*own, slots, self._own_beside_pages)
            return segment_attention(q, [pages, beside, partner])
        self.queries.append(q)
        at = layer - len(self._k)
        ring = self._recent[at]
        ring_lengths = jnp.minimum(self._recent_lengths, ring.k.shape[2])
        segments = [
            Segment(*self._selected[at], self._pool_rows, self._pool_lengths),
            Segment(*ring, self._all_rows, ring_lengths),
            Segment(*own, slots, self._own_lengths),
            partner,
        ]
        if self._reads_store:
            segments.append(Segment(*self._store[at], self._all_rows, self._store_lengths))
        out = segment_attention(q, segments)
        # The ring's oldest block was attended just now and may be overwritten.
        start = self._places.prefix * self._block
        self._recent[at] = ring.write(self._written_rows, start % ring.k.shape[2], own)
        if self._store:
            self._store[at] = self._store[at].write(self._written_rows, start, own)
        if self._index:
            keys = KeyIndex.of(own.k)
            self._index[at] = self._index[at].write(self._written_rows, start, keys)
        return out

    @property
    def cache(self) -> SparseCache:
        """The cache after the layers that have run."""
        dense = PagedCache(tuple(self._k), tuple(self._v))
        recent, store = tuple(self._recent), tuple(self._store)
        return SparseCache(dense, self._selected, recent, store, tuple(self._index))


def run_sparse_slots(
    decoder: Decoder,
    cache: SparseCache,
    states: RowStates,
    tables: Int[Array, "R W"],
    pooled: Int[Array, " N"],
    starts: RowStarts,
    decode: DecodeSlots,
    ahead: Int[Array, " A"],
    options: DecodingOptions,
    spec: ProposalSpec,
    *,
    is_exact: bool,
    lookahead: Lookahead,
) -> tuple[SparseCache, RowStates, SlotOutput, list[Any]]:
    """One pass over the decode slots and the lookahead slots.

    Args:
        decoder: The model.
        cache: The cache, written in place when donated.
        states: Running blocks of all rows.
        tables: Page ids of every row.
        pooled: Entries of a row's pool by the index of the block that reads it.
        starts: Blocks that begin now.
        decode: Rows to run.
        ahead: Rows that look ahead, padded with the number of rows; each runs in this pass.
        options: Options of the decode slots' rows, in their order.
        spec: Static facts of the decode slots.
        is_exact: True if the decode slots see their whole prefix, as in MAGE's step 0.
        lookahead: What group C is.

    Returns:
        The cache, the states, the decode slots' blocks, and for every sparse layer the queries
        of group C, [A, B, H, D], or of the decode slots if the pass is exact; or, for every
        layer, the draft's `FreshKV`, [A, B, K, D], if the lookahead is on the host.
    """
    config = decoder.config
    block_length, rows = config.block_length, tables.shape[0]
    states = states.begin(starts)
    running = RunningSlots.of(states, decode)
    block, is_running = running.states.block, running.is_running
    before = states.take(ahead)
    assert before.draft is not None  # states of a sparse cache have them
    drafted = jnp.where(before.block.is_masked, before.draft, before.block.tokens)
    masks = jnp.full_like(drafted, config.mask_token_id)

    count, extra = decode.rows.shape[0], ahead.shape[0]
    groups = 1 if lookahead.is_on_host else 2
    slots = jnp.arange(count + groups * extra)
    is_decode, is_query = slots < count, slots >= count + extra
    is_walking = is_query & bool(lookahead.walkers)
    nothing = jnp.zeros((groups * extra,), bool)
    prefix = jnp.concatenate([block.index, *[before.block.index] * groups])
    places = SlotPlaces(
        rows=jnp.concatenate([decode.rows, *[ahead] * groups]),
        prefix=prefix,
        is_live=jnp.concatenate([is_running, *[ahead < rows] * groups]),
        is_written=is_decode,
        is_committing=jnp.concatenate([running.is_committing, nothing]),
        partner=jnp.where(is_query, slots - extra, -1),
        is_exact=(is_decode & is_exact) | is_walking,
        own=jnp.where(is_walking, len(lookahead.walkers), block_length),
    )
    asked = [drafted, masks][:groups]
    tokens = jnp.concatenate([block.inputs(config.mask_token_id), *asked])
    first = (prefix + is_query.astype(jnp.int32)) * block_length
    packed = jnp.asarray(lookahead.packed(block_length))
    positions = first[:, None] + jnp.where(is_query[:, None], packed, jnp.arange(block_length))
    reads_store = is_exact or (bool(lookahead.walkers) and extra > 0 and groups == 2)
    sparse = SparsePass(cache, tables, pooled, places, block_length, reads_store=reads_store)
    hidden, fresh = decoder(tokens, positions, sparse.attend)

    proposal = offer_from(decoder, hidden[:count], running.block, options, spec)
    after = commit(config, proposal, running.block, options)
    states, output = running.finish(states, after, proposal.likeliest)
    if is_exact:
        return sparse.cache, states, output, [q[:count] for q in sparse.queries]
    if lookahead.is_on_host:
        return sparse.cache, states, output, [FreshKV(k[count:], v[count:]) for k, v in fresh]
    queries = [q[count + extra :] for q in sparse.queries]
    if lookahead.walkers:
        at = jnp.asarray(lookahead.walkers)
        queries = [jnp.zeros_like(q).at[:, at].set(q[:, : len(at)]) for q in queries]
    return sparse.cache, states, output, queries
