"""Settings of the selection: which queries choose the keys that a block attends. No JAX."""

from __future__ import annotations

import dataclasses

from herald_jax._checks import require, require_float, require_int, require_one_of
from herald_jax.retrieval.queries import check_query_set

HEADS = ("mean", "apart")
POOLINGS = ("max", "mean")

MAX_DILATION = 1024
"""Widest window of `SelectionConfig.dilation`; a wider one would choose whole pages of text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """How the keys of a block's prefix are scored.

    The defaults are what the project's own study favours (docs/accuracy.md): sixteen positions
    spread over the block, the queries of a KV head averaged into one column, and a key lifted by
    its neighbours. `queries="centre"` is HERALD's own query and `queries="all"` MAGE's.

    Attributes:
        queries: Positions of the block whose queries score: `all`, `centre`, `first`, `log8`
            (front-weighted) or `even<n>` (n of them, evenly spaced from the first).
        heads: What becomes of the G queries that read one KV head: `mean` averages them into
            one column before the scan, `apart` scores each and averages their importance.
        pooling: How the importance of the positions is joined: `max` or `mean`.
        dilation: Keys within this many tokens lift each other; 0 switches it off.
        dilation_weight: Share of its own score that a key lends to its neighbours, in [0, 1];
            1.0 is the hard form, which chooses whole windows.
    """

    queries: str = "even16"
    heads: str = "mean"
    pooling: str = "max"
    dilation: int = 8
    dilation_weight: float = 0.1

    def __post_init__(self) -> None:
        """Checks every field."""
        check_query_set(self.queries)
        require_one_of("heads", self.heads, HEADS)
        require_one_of("pooling", self.pooling, POOLINGS)
        require_int("dilation", self.dilation, 0, "0 switches it off.")
        require(self.dilation <= MAX_DILATION, "dilation", self.dilation, f"<= {MAX_DILATION}")
        require_float("dilation_weight", self.dilation_weight, 0.0, 1.0, "a number in [0, 1]")
