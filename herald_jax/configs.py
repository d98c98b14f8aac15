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

from herald_jax._checks import ConfigError, require, require_float, require_int

CONFIG_FORMAT = 1
"""Version of the `config.json` that `ModelConfig.to_json` writes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes, options and token facts of one block-diffusion model.

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
        block_length: Positions that are denoised together, on an absolute grid.
        mask_token_id: Id whose embedding stands at a masked position; never emitted.
        stop_token_ids: Ids that end a text.
        tokenizer_vocab_size: Ids at or above this one are padding of the table and never
            emitted; `None` if every row is a real token.
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
    stop_token_ids: tuple[int, ...] = ()
    rope_theta: float = 1e6
    rotary_fraction: float = 1.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    qk_norm: bool = True
    qkv_bias: bool = False
    tie_word_embeddings: bool = False
    tokenizer_vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Checks every field on its own and against the others."""
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
        require(
            isinstance(self.mask_token_id, int) and 0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"an id in [0, vocab_size={self.vocab_size})",
            "Give the id of the checkpoint's mask token (--mask-token-id when converting).",
        )
        for token_id in self.stop_token_ids:
            require(
                0 <= token_id < self.vocab_size and token_id != self.mask_token_id,
                "stop_token_ids",
                self.stop_token_ids,
                f"ids in [0, vocab_size={self.vocab_size}) other than the mask id",
            )
        if self.tokenizer_vocab_size is not None:
            require(
                1 <= self.tokenizer_vocab_size <= self.vocab_size,
                "tokenizer_vocab_size",
                self.tokenizer_vocab_size,
                f"in [1, vocab_size={self.vocab_size}]",
            )
        tokens = self.tokenizer_vocab_size or self.vocab_size
        require(
            tokens > (self.mask_token_id < tokens),
            "tokenizer_vocab_size" if self.tokenizer_vocab_size else "vocab_size",
            tokens,
            "large enough for one id besides the mask id",
        )

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
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

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
