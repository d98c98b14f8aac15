"""What a model is: the frozen description that a converted checkpoint carries.

A `ModelConfig` holds everything that the network and the decoding loop read. Facts of one
checkpoint (mask id, block length, stop ids) come from that checkpoint's files or from the
caller, through `convert`; nothing here knows a model by name.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from herald_jax._checks import (
    ConfigError,
    require,
    require_float,
    require_int,
    require_one_of,
)

CONFIG_FORMAT = 1
"""Version of the `config.json` that `ModelConfig.to_json` writes."""

ATTENTION_KINDS = ("block_causal", "full", "canvas")
"""What a token may see; see `ModelConfig.attention`."""

NO_MASK_TOKEN = -1
"""Mask id of a model that knows none, because its canvases begin as random ids."""

_EXPERT_FIELDS = (
    "experts_per_token",
    "expert_intermediate_size",
    "num_shared_experts",
    "first_dense_layers",
    "router_score",
    "router_bias",
    "router_groups",
    "router_top_groups",
    "normalise_expert_weights",
    "routed_scale",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanvasBody:
    """What sets the network of a canvas model apart, DiffusionGemma's.

    Its head sizes, rotary base and rotary fraction in `ModelConfig` are those of the layers that
    see a window.

    Attributes:
        window: Positions that a token sees in a layer with a window, its own included.
        full_layers: Layers without a window. Their values are their keys before norm and rotation.
        full_num_kv_heads: Key/value heads of those layers.
        full_head_dim: Size of one head there.
        full_rope_theta: Rotary base there.
        full_rotary_fraction: Share of the frequencies there that are not zero.
        logit_cap: Logits are bent to stay within plus and minus this.
    """

    window: int
    full_layers: tuple[int, ...]
    full_num_kv_heads: int
    full_head_dim: int
    full_rope_theta: float
    full_rotary_fraction: float
    logit_cap: float

    def __post_init__(self) -> None:
        """Checks every field on its own."""
        object.__setattr__(self, "full_layers", tuple(self.full_layers))
        for field in ("full_num_kv_heads", "full_head_dim"):
            require_int(field, getattr(self, field), 1)
        require_int("window", self.window, 2)
        require_float("full_rope_theta", self.full_rope_theta, 1.0, 1e12, "a number >= 1")
        fraction = self.full_rotary_fraction
        require_float("full_rotary_fraction", fraction, 0.0, 1.0, "a number in [0, 1]")
        require_float("logit_cap", self.logit_cap, 1e-6, 1e6, "a positive number")
        even = self.full_head_dim % 2 == 0
        require(even, "full_head_dim", self.full_head_dim, "an even number")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes, options and token facts of one diffusion language model.

    Attributes:
        family: Name of the family whose key map converted the checkpoint, for messages.
        vocab_size: Rows of the embedding table and width of the logits.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the SwiGLU MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides `num_heads`.
        head_dim: Size of one head.
        rope_theta: Base of the rotary embedding.
        rotary_fraction: Share of each head that is rotated, in (0, 1].
        rms_norm_eps: Epsilon of every RMSNorm.
        max_position_embeddings: Longest context that the checkpoint claims, in tokens.
        qk_norm: True if queries and keys get a per-head RMSNorm before rotation.
        qkv_bias: True if the query, key and value projections have biases.
        tie_word_embeddings: True if the LM head is the transposed embedding table.
        block_length: Positions that are denoised together; on an absolute grid if attention is
            block-causal.
        mask_token_id: Id whose embedding stands at a masked position; never emitted.
            `NO_MASK_TOKEN` if attention is `canvas`.
        attention: `block_causal`, where a token sees its own and all earlier blocks, or `full`,
            where every token sees the whole text, or `canvas`, where finished text is causal and
            a block (a canvas) sees itself and the text before it. The blocks of the last two are
            no grid: they begin at the end of the prompt. Those of a full-attention model are
            only an order of decoding and may have any length.
        shifts_predictions: True if the output at position i - 1 predicts the token at i.
        stop_token_ids: Ids that end a text.
        tokenizer_vocab_size: Ids at or above this one are padding of the table and never
            emitted; `None` if every row is a real token.
        num_experts: Routed experts of a mixture layer; 0 for a dense model, in which the other
            fields about experts and routers keep their defaults.
        experts_per_token: Routed experts that each token visits.
        expert_intermediate_size: Width of one expert's SwiGLU.
        num_shared_experts: Experts that every token visits, stored as one SwiGLU of this many
            times `expert_intermediate_size`.
        first_dense_layers: Layers before the first mixture layer; they have a dense MLP.
        router_score: `softmax` over all experts, or `sigmoid` of each.
        router_bias: True if a learned bias is added to the scores to choose experts; the
            weights of the chosen ones come from the scores without it.
        router_groups: Equal groups of neighbouring experts; a group is as good as its two best.
        router_top_groups: Groups that experts are chosen from.
        normalise_expert_weights: True if the weights of a token's experts are divided by their
            sum.
        routed_scale: Factor on the weights after that.
        canvas: The rest of the network if attention is `canvas`, else `None`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_length: int
    mask_token_id: int
    attention: str = "block_causal"
    shifts_predictions: bool = False
    stop_token_ids: tuple[int, ...] = ()
    rope_theta: float = 1e6
    rotary_fraction: float = 1.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    qk_norm: bool = True
    qkv_bias: bool = False
    tie_word_embeddings: bool = False
    tokenizer_vocab_size: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    num_shared_experts: int = 0
    first_dense_layers: int = 0
    router_score: str = "softmax"
    router_bias: bool = False
    router_groups: int = 1
    router_top_groups: int = 1
    normalise_expert_weights: bool = True
    routed_scale: float = 1.0
    canvas: CanvasBody | None = None

    def __post_init__(self) -> None:
        """Checks every field on its own and against the others."""
        if isinstance(self.canvas, dict):
            object.__setattr__(self, "canvas", CanvasBody(**self.canvas))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "block_length",
            "max_position_embeddings",
        ):
            require_int(field, getattr(self, field), 1)
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads={self.num_heads}",
        )
        require_float("rope_theta", self.rope_theta, 1.0, 1e12, "a number >= 1")
        require_float("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0, "a number in [0, 1]")
        require_float("rotary_fraction", self.rotary_fraction, 0.0, 1.0, "a number in (0, 1]")
        require(
            self.rotary_dim >= 2 and self.rotary_dim % 2 == 0,
            "rotary_fraction",
            self.rotary_fraction,
            f"such that head_dim={self.head_dim} times it is an even number >= 2",
        )
        is_id = isinstance(self.mask_token_id, int) and 0 <= self.mask_token_id < self.vocab_size
        require(
            self.mask_token_id == NO_MASK_TOKEN if self.is_canvas else is_id,
            "mask_token_id",
            self.mask_token_id,
            f"{NO_MASK_TOKEN} for a canvas model"
            if self.is_canvas
            else f"an id in [0, vocab_size={self.vocab_size})",
            "Give the id of the checkpoint's mask token (--mask-token-id when converting).",
        )
        for token_id in self.stop_token_ids:
            require(
                0 <= token_id < self.vocab_size and token_id != self.mask_token_id,
                "stop_token_ids",
                self.stop_token_ids,
                f"ids in [0, vocab_size={self.vocab_size}) other than the mask id",
            )
        require_one_of("attention", self.attention, ATTENTION_KINDS)
        for flag in ("qk_norm", "qkv_bias", "tie_word_embeddings", "shifts_predictions"):
            require(isinstance(getattr(self, flag), bool), flag, getattr(self, flag), "a bool")
        if self.tokenizer_vocab_size is not None:
            require_int("tokenizer_vocab_size", self.tokenizer_vocab_size, 1)
            require(
                1 <= self.tokenizer_vocab_size <= self.vocab_size,
                "tokenizer_vocab_size",
                self.tokenizer_vocab_size,
                f"in [1, vocab_size={self.vocab_size}]",
            )
        tokens = self.tokenizer_vocab_size or self.vocab_size
        require(
            tokens > (0 <= self.mask_token_id < tokens),
            "tokenizer_vocab_size" if self.tokenizer_vocab_size else "vocab_size",
            tokens,
            "large enough for one id besides the mask id",
        )
        self._check_experts()
        self._check_canvas()

    def _check_canvas(self) -> None:
        body = self.canvas
        require(
            (body is not None) == self.is_canvas,
            "canvas",
            body,
            f"{'given' if self.is_canvas else 'None'} with attention={self.attention!r}",
        )
        if body is None:
            return
        require(
            all(0 <= layer < self.num_layers for layer in body.full_layers),
            "canvas.full_layers",
            body.full_layers,
            f"layers below num_layers={self.num_layers}",
        )
        require(
            self.num_heads % body.full_num_kv_heads == 0,
            "canvas.full_num_kv_heads",
            body.full_num_kv_heads,
            f"a divisor of num_heads={self.num_heads}",
        )
        require(
            self.num_experts > 0 and self.tie_word_embeddings and self.qk_norm,
            "canvas",
            body,
            "with experts, a tied head and qk_norm, which its network always has",
        )

    def _check_experts(self) -> None:
        require_int("num_experts", self.num_experts, 0)
        if not self.num_experts:
            for name in _EXPERT_FIELDS:
                default = type(self).__dataclass_fields__[name].default
                require(
                    getattr(self, name) == default,
                    name,
                    getattr(self, name),
                    f"{default!r} in a dense model",
                    "Set num_experts as well, or leave this out.",
                )
            return
        for name in ("experts_per_token", "expert_intermediate_size"):
            require_int(name, getattr(self, name), 1)
        for name in ("num_shared_experts", "first_dense_layers"):
            require_int(name, getattr(self, name), 0)
        for name in ("router_groups", "router_top_groups"):
            require_int(name, getattr(self, name), 1)
        require_one_of("router_score", self.router_score, ("softmax", "sigmoid"))
        require_float("routed_scale", self.routed_scale, 0.0, 1e6, "a number >= 0")
        groups = self.router_groups
        require(
            groups == 1 or (self.num_experts % groups == 0 and self.num_experts >= 2 * groups),
            "router_groups",
            groups,
            f"a divisor of num_experts={self.num_experts} that leaves two or more in a group",
        )
        require(
            self.router_top_groups <= groups,
            "router_top_groups",
            self.router_top_groups,
            f"at most router_groups={groups}",
        )
        choice = self.num_experts // groups * self.router_top_groups
        require(
            self.experts_per_token <= choice,
            "experts_per_token",
            self.experts_per_token,
            f"at most the {choice} experts that router_top_groups={self.router_top_groups} of "
            f"router_groups={groups} groups leave",
        )

    def has_experts(self, layer: int) -> bool:
        """True if this layer is a mixture layer."""
        return self.num_experts > 0 and layer >= self.first_dense_layers

    @property
    def is_bidirectional(self) -> bool:
        """True if every token sees the whole text, later blocks included."""
        return self.attention == "full"

    @property
    def is_canvas(self) -> bool:
        """True if text is made on canvases of random ids, by a network of its own."""
        return self.attention == "canvas"

    @property
    def rotary_dim(self) -> int:
        """Rotated features of each head."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def heads_per_kv_head(self) -> int:
        """G: query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_values_per_token(self) -> int:
        """Numbers (not bytes) that one token leaves in the KV cache, over all layers."""
        full = len(self.canvas.full_layers) if self.canvas else 0
        total = 2 * (self.num_layers - full) * self.num_kv_heads * self.head_dim
        if self.canvas:
            total += 2 * full * self.canvas.full_num_kv_heads * self.canvas.full_head_dim
        return total

    def to_json(self) -> str:
        """The text of a converted checkpoint's `config.json`."""
        return json.dumps({"format": CONFIG_FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: If a field is unknown, missing or out of range, or the format is newer.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"config.json is not JSON: {error}") from error
        found = fields.pop("format", None) if isinstance(fields, dict) else None
        require(
            found == CONFIG_FORMAT,
            "format",
            found,
            f"{CONFIG_FORMAT}",
            "Convert the checkpoint again with this version of herald_jax.",
        )
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        require(not unknown, "config.json fields", unknown, "fields of ModelConfig")
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        missing = sorted(required - set(fields))
        require(not missing, "config.json", missing, "complete", "These fields are missing.")
        return cls(**fields)

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Reads `config.json` of a converted checkpoint folder."""
        return cls.from_json((Path(folder) / "config.json").read_text(encoding="utf-8"))
