"""`CacheConfig`: where keys and values live, and how much of them a block attends to. No JAX."""

from __future__ import annotations

import dataclasses

from herald_jax._checks import require, require_float, require_int, require_one_of
from herald_jax.cache.budget import Budget
from herald_jax.configs import ModelConfig
from herald_jax.retrieval.queries import check_query_set
from herald_jax.retrieval.settings import HEADS, POOLINGS, SelectionConfig

PLACEMENTS = ("device", "host")
RETRIEVALS = ("single_pass", "layerwise")
KEY_INDEXES = ("none", "int8")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """A sparse KV cache: each block attends to a selected part of its prefix.

    The four pairs of `placement` and `lookahead`: on the host with lookahead is HERALD; on the
    device without is MAGE; on the device with lookahead selects as HERALD does but over keys
    that stay there; on the host without brings every layer's keys to the device at each block's
    first step.

    Attributes:
        placement: Where the finished blocks of the sparse layers live, `host` or `device`.
        budget: Tokens of the prefix that are selected for a block, per KV head of a sparse
            layer: a float in (0, 1] is a share of the prefix at the block's start, rounded up;
            an int is a number of tokens. Sinks and recent blocks come on top.
        dense_layers: First layers that attend to everything and keep it on the device.
        recent_blocks: Newest finished blocks that are always attended.
        sink_tokens: First tokens of the prefix that are always attended.
        lookahead: True to select for the next block while a block still runs; False to select
            at the block's own first step.
        retrieval: What the lookahead's masks attend to: `single_pass`, what the running block
            does; `layerwise`, everything. Then only the masks of `selection_query` look ahead,
            and see one another; with `centre` that is HERALD's lone mask. On the host they go
            through the layers one at a time, each of which reads all keys and values of the row.
        selection_query: Positions of the block whose queries select: `all` (MAGE), `centre`
            (HERALD), `first`, `log8` or `even<n>`.
        selection_heads: `mean` averages the queries that read one KV head, `apart` does not.
        selection_pooling: Importance over positions by `max` or `mean`.
        dilation: Keys within this many tokens lift each other; 0 switches it off.
        dilation_weight: Share of its score that a key lends to its neighbours.
        key_index: `int8` keeps the sparse layers' keys on the device in 8 bits, a quarter of a
            row's bytes there, and chooses with them, so that the host only copies what was
            chosen; `none` leaves the choice to the host. For `placement="host"` with lookahead.
        host_bytes: Most bytes of pinned host memory; `None` takes what the machine leaves.
    """

    placement: str = "host"
    budget: float | int = 0.1
    dense_layers: int = 2
    recent_blocks: int = 1
    sink_tokens: int = 4
    lookahead: bool = True
    retrieval: str = "single_pass"
    selection_query: str = "even16"
    selection_heads: str = "mean"
    selection_pooling: str = "max"
    dilation: int = 8
    dilation_weight: float = 0.1
    key_index: str = "none"
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        require_one_of("placement", self.placement, PLACEMENTS)
        require_one_of("retrieval", self.retrieval, RETRIEVALS)
        if isinstance(self.budget, float):
            require_float("budget", self.budget, 1e-6, 1.0, "a share in (0, 1]")
        else:
            require_int("budget", self.budget, 1, "A float in (0, 1] is a share of the prefix.")
        require_int("dense_layers", self.dense_layers, 0)
        require_int("recent_blocks", self.recent_blocks, 1, "The newest one is under way.")
        require_int("sink_tokens", self.sink_tokens, 0)
        require(isinstance(self.lookahead, bool), "lookahead", self.lookahead, "a bool")
        if self.host_bytes is not None:
            require_int("host_bytes", self.host_bytes, 1)
        if self.retrieval == "layerwise":
            require(
                self.lookahead,
                "retrieval",
                self.retrieval,
                "single_pass without lookahead",
                "Take lookahead=True for the paper's retrieval pass.",
            )
        require_one_of("key_index", self.key_index, KEY_INDEXES)
        if self.key_index != "none":
            is_sound = self.placement == "host" and self.lookahead
            require(
                is_sound and self.retrieval == "single_pass",
                "key_index",
                self.key_index,
                "none, unless keys are on the host and a single pass looks ahead",
                "Take placement='host', lookahead=True and retrieval='single_pass' with it.",
            )
        check_query_set(self.selection_query, "selection_query")
        require_one_of("selection_heads", self.selection_heads, HEADS)
        require_one_of("selection_pooling", self.selection_pooling, POOLINGS)
        _ = self.selection  # checks the rest

    @property
    def selection(self) -> SelectionConfig:
        """How keys are scored."""
        return SelectionConfig(
            queries=self.selection_query,
            heads=self.selection_heads,
            pooling=self.selection_pooling,
            dilation=self.dilation,
            dilation_weight=self.dilation_weight,
        )

    def budget_of(self, block_length: int) -> Budget:
        """The counts of blocks of this length."""
        return Budget(self.budget, self.sink_tokens, self.recent_blocks, block_length)

    def check(self, model: ModelConfig) -> None:
        """Checks that a model can be run like this.

        Raises:
            ConfigError: If it cannot.
        """
        require(
            self.dense_layers < model.num_layers,
            "dense_layers",
            self.dense_layers,
            f"less than the model's {model.num_layers} layers",
            "Leave `cache` out to keep all layers dense.",
        )
