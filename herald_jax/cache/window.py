"""Keys and values of whole texts under full attention, of which a window is run again.

Where every token sees the whole text, no keys and values are final: each later token changes
them. Fast-dLLM (arXiv 2505.22618) keeps them all the same and runs only a window of the text
through the network, which sees what is kept outside the window and its own fresh ones inside.
How good the approximation is depends on how often a pass over the whole text renews the rest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from herald_jax.cache.dense import DenseCache
from herald_jax.models.attention import FreshKV
from pallas_kernels import Segment, segment_attention


class TextPass:
    """One pass over whole texts, or over a window of each, for use inside a trace.

    Every query sees the first `lengths[r]` positions of its row. `cache` is what the next pass
    may keep, once the decoder has run.
    """

    def __init__(
        self,
        lengths: Int[Array, " R"],
        kept: DenseCache | None = None,
        starts: Int[Array, " R"] | None = None,
    ) -> None:
        """Prepares a pass over a window of each row that begins at `starts`.

        Without `kept` and `starts` the pass covers whole texts, from position 0 to the capacity.
        """
        self._lengths = lengths
        self._kept = kept
        self._starts = starts
        self._k: list[jax.Array] = []
        self._v: list[jax.Array] = []

    def attend(self, layer: int, q: Float[Array, "R W H D"], fresh: FreshKV) -> jax.Array:
        """Attention over the kept keys and values, the window's fresh ones in their place."""
        k, v = (new.transpose(0, 2, 1, 3) for new in fresh)
        if self._kept is not None:
            k = self._place(self._kept.k[layer], k)
            v = self._place(self._kept.v[layer], v)
        self._k.append(k)
        self._v.append(v)
        rows = jnp.arange(q.shape[0])
        return segment_attention(q, [Segment(k, v, rows, self._lengths)])

    def _place(self, old: Float[Array, "R K S D"], new: Float[Array, "R K W D"]) -> jax.Array:
        assert self._starts is not None, "a window has a start"
        rows = jnp.arange(old.shape[0])[:, None]
        slots = self._starts[:, None] + jnp.arange(new.shape[2])
        # A window may reach past the capacity; a scatter in this mode drops what lies there.
        return old.at[rows, :, slots].set(new.transpose(0, 2, 1, 3), mode="drop")

    @property
    def cache(self) -> DenseCache:
        """Keys and values of the whole text, the window's renewed."""
        return DenseCache(tuple(self._k), tuple(self._v))
