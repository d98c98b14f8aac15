"""Sizes of a sparse cache, and the bytes that they come to. Plain Python: no JAX."""

from __future__ import annotations

import dataclasses

from herald_jax.cache.layout import index_bytes_per_token
from herald_jax.configs import ModelConfig

STAGING_SLOTS = 4
"""Least pinned buffers through which selected entries travel to the device."""

STAGING_PASSES = 12
"""Passes within which the entries of all rows should have travelled; blocks mostly take more."""

PASSES_UNDER_WAY = 2
"""Passes that a copy waits for: it begins behind those that were dispatched before it."""

STAGING_BYTES = 16 << 20
"""Least bytes of such a buffer's keys, and of its values; smaller copies run at less than half the
link's rate."""


def staged_layers(layer_bytes: int, layers: int) -> int:
    """Layers whose entries travel together: their keys make a large copy, or they are all.

    Args:
        layer_bytes: Bytes of the keys of a layer's pool.
        layers: Layers that have a pool.
    """
    return min(-(-STAGING_BYTES // layer_bytes), layers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SparseShape:
    """Sizes of a sparse cache.

    Attributes:
        rows: Rows that decode at the same time, R.
        dense_layers: Layers that keep everything on the device.
        num_pages: Pages of the dense layers' pool.
        page_tokens: Tokens of a page.
        pool_tokens: Entries of a row's pool of one layer, C.
        recent_blocks: Finished blocks of a row's ring.
        row_tokens: Tokens of the longest text, in whole blocks, S.
        has_device_store: True if all finished blocks of the sparse layers stay on the device.
        has_key_index: True if their keys stay there in 8 bits.
    """

    rows: int
    dense_layers: int
    num_pages: int
    page_tokens: int
    pool_tokens: int
    recent_blocks: int
    row_tokens: int
    has_device_store: bool
    has_key_index: bool = False

    def device_parts(self, model: ModelConfig, itemsize: int) -> dict[str, int]:
        """Device bytes, by what they hold: the arrays of `SparseCache.zeros` and arrivals.

        Entries that come from the host wait in arrays of their own until a pool has them.
        """
        token = 2 * model.num_kv_heads * model.head_dim * itemsize
        sparse_rows = (model.num_layers - self.dense_layers) * self.rows
        rows = sparse_rows * token
        indexed = sparse_rows * self.row_tokens if self.has_key_index else 0
        return {
            "dense layers": self.dense_layers * self.num_pages * self.page_tokens * token,
            "selected entries": rows * 2 * self.pool_tokens,
            "recent blocks": rows * self.recent_blocks * model.block_length,
            "finished blocks": rows * self.row_tokens if self.has_device_store else 0,
            "key index": indexed * index_bytes_per_token(model, itemsize),
            "arriving entries": token * self.staged_tokens(model, itemsize),
        }

    def device_bytes(self, model: ModelConfig, itemsize: int) -> int:
        """Bytes of all of them."""
        return sum(self.device_parts(model, itemsize).values())

    def staging_layers(self, model: ModelConfig, itemsize: int) -> int:
        """Layers whose entries travel together."""
        layer_bytes = self.pool_tokens * model.num_kv_heads * model.head_dim * itemsize
        return staged_layers(layer_bytes, model.num_layers - self.dense_layers)

    def staging_slots(self, model: ModelConfig, itemsize: int) -> int:
        """Buffers in which entries travel: enough that waiting for them holds nobody up.

        A buffer is free again only when the passes before its copy are over, so that few of
        them pass few entries on, however fast the host and the link are.
        """
        together = self.staging_layers(model, itemsize)
        chunks = self.rows * -(-(model.num_layers - self.dense_layers) // together)
        return max(-(-chunks * PASSES_UNDER_WAY // STAGING_PASSES), STAGING_SLOTS)

    def host_bytes(self, model: ModelConfig, itemsize: int) -> int:
        """Pinned bytes: finished blocks and staging buffers; 0 with the store on the device."""
        if self.has_device_store:
            return 0
        token = 2 * model.num_kv_heads * model.head_dim * itemsize
        layers = model.num_layers - self.dense_layers
        staged = self.staged_tokens(model, itemsize)
        return token * (layers * self.rows * self.row_tokens + staged)

    def staged_tokens(self, model: ModelConfig, itemsize: int) -> int:
        """Entries, over layers, that may be on their way at once; 0 with the store on a device."""
        if self.has_device_store:
            return 0
        layers = self.staging_slots(model, itemsize) * self.staging_layers(model, itemsize)
        return layers * self.pool_tokens
