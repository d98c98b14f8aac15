"""The paged cache: fixed pages of tokens in one pool per layer, shared by all requests.

A request owns pages through its page table, a list of page ids in the order of its text.
Every pass of a block writes the block's keys and values into the request's own page before
it attends, so a prompt block, a denoising step and a commit pass are the same program; what a
denoising step leaves there is provisional and is overwritten by the commit pass, and only
pages whose tokens are all committed may be shared (`engine.pages` sees to that).

Ownership: the engine owns the cache and donates it to every step; programs run in the order
of their dispatch, so a page may be handed to another request as soon as the step that no
longer uses it has been dispatched.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from herald_jax.cache.layout import check_index_range
from herald_jax.configs import ModelConfig
from herald_jax.models.attention import FreshKV
from pallas_kernels import paged_attention


class PagedCache(NamedTuple):
    """Keys (rotated) and values by page, head-major within the page."""

    k: tuple[Float[Array, "N K page D"], ...]
    v: tuple[Float[Array, "N K page D"], ...]

    @classmethod
    def zeros(
        cls,
        config: ModelConfig,
        pages: int,
        page_tokens: int,
        dtype: Any,
        layers: int | None = None,
    ) -> Self:
        """An empty pool of `pages` pages, for the first `layers` layers or for all."""
        shape = (pages, config.num_kv_heads, page_tokens, config.head_dim)
        check_index_range("one layer's page pool", shape)
        each = range(config.num_layers if layers is None else layers)
        return cls(
            tuple(jnp.zeros(shape, dtype) for _ in each),
            tuple(jnp.zeros(shape, dtype) for _ in each),
        )


class PageBlocks(NamedTuple):
    """Where blocks of B tokens lie in a page pool; those that are not written, nowhere."""

    page: Int[Array, "M 1"]
    offsets: Int[Array, "M B"]

    @classmethod
    def of(
        cls,
        pool_shape: tuple[int, ...],
        tables: Int[Array, "M W"],
        block_index: Int[Array, " M"],
        is_written: Bool[Array, " M"],
        block_length: int,
    ) -> Self:
        """The places of blocks on the absolute grid, by the page tables of their requests."""
        pages, _, page_tokens, _ = pool_shape
        start = block_index * block_length
        page = jnp.take_along_axis(tables, (start // page_tokens)[:, None], axis=1)
        # Out-of-range pages are dropped by the scatter.
        page = jnp.where(is_written[:, None], page, pages)
        return cls(page, (start % page_tokens)[:, None] + jnp.arange(block_length))

    def write(
        self, pool: Float[Array, "N K page D"], new: Float[Array, "M B K D"]
    ) -> Float[Array, "N K page D"]:
        """The pool with these blocks in it."""
        return pool.at[self.page, :, self.offsets].set(new, mode="drop")


class PagedPass:
    """One pass over the cache, for use inside a trace.

    Slots are blocks of B tokens; each has the page table of its request and the place of its
    block on the absolute grid. `cache` is the result once the decoder has run.
    """

    def __init__(
        self,
        cache: PagedCache,
        tables: Int[Array, "M W"],
        block_index: Int[Array, " M"],
        is_written: Bool[Array, " M"],
        block_length: int,
    ) -> None:
        """Works out where each slot's block lies.

        Args:
            cache: The pool before the pass.
            tables: Page ids of each slot's request; entries past its text may be anything
                in range.
            block_index: Index of the slot's block.
            is_written: False for slots of padding, which leave the pool unchanged.
            block_length: B; divides the page size.
        """
        self._k, self._v = list(cache.k), list(cache.v)
        shape = cache.k[0].shape
        self._blocks = PageBlocks.of(shape, tables, block_index, is_written, block_length)
        self._tables = tables
        self._lengths = jnp.where(is_written, (block_index + 1) * block_length, 0)

    def attend(self, layer: int, q: Float[Array, "M B H D"], fresh: FreshKV) -> jax.Array:
        """Writes the blocks' keys and values, then attends to all tokens up to their ends."""
        self._k[layer] = self._blocks.write(self._k[layer], fresh.k)
        self._v[layer] = self._blocks.write(self._v[layer], fresh.v)
        return paged_attention(q, self._k[layer], self._v[layer], self._tables, self._lengths)

    @property
    def cache(self) -> PagedCache:
        """The pool after the layers that have run."""
        return PagedCache(tuple(self._k), tuple(self._v))
