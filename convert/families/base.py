"""What a family is made of: a key table, a config parser and facts its checkpoints may lack."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from convert.fields import FieldReader
from herald_jax.configs import ModelConfig

Rows = Callable[[ModelConfig], tuple[int, int, int]]
"""First row, row after the last, and rows of the whole fused tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRule:
    """One line of a key table; `{n}` stands for a layer number, `{e}` for an expert's.

    A target may have several lines, for tensors that are published under several names: the
    first whose tensors are there counts.

    Attributes:
        source: Key in the Hugging Face checkpoint. With `{e}`, the tensors of all experts are
            stacked along a new first axis.
        target: Dotted path of our parameter.
        transform: `transpose` for torch's [out, in] projections, where the last two axes change
            places; `keep` for the rest.
        rows: Which rows of a fused tensor this parameter is made from; all if left out. Of a
            tensor that holds all experts, rows of each of them.
    """

    source: str
    target: str
    transform: Literal["keep", "transpose"] = "keep"
    rows: Rows | None = None

    def source_of(self, target: str) -> str | None:
        """The key that fills `target`, or `None` if the rule is about other parameters."""
        match = re.fullmatch(re.escape(self.target).replace(r"\{n\}", r"(\d+)"), target)
        return self.source.replace("{n}", match[1] if match.groups() else "") if match else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints.

    Attributes:
        name: What `--family` takes and `ModelConfig.family` holds.
        architectures: Names in the config's `architectures`.
        model_types: Names in `model_type`, used if `architectures` is absent.
        keys: The key table.
        ignored_keys: Regular expressions of keys that hold nothing learned.
        left_out: Regular expressions of keys that are not converted, with the reason, which is
            noted in the report.
        parse_config: Reads the fields of `ModelConfig` that describe the network.
        mask_token_id: Mask id where no file tells it.
        mask_tokens: Texts that the tokenizers of this family give the mask token.
        turn_end_tokens: Texts of tokens that end a turn.
        stop_token_ids: Stop ids where no file tells any.
        block_length: Block length where no file tells it, if all checkpoints of the family have
            the same one, or if attention is full and any length will do.
        attention: What a token sees, as in `ModelConfig`. With `canvas` there is no mask id.
        shifts_predictions: True if the output at position i - 1 predicts the token at i.
        always_tied: True if the head of every checkpoint is its embedding table, so that a config
            need not say it.
        reference: transformers class that computes the same logits, for `--check`.
        models: Published checkpoints, for people.
        checked: How the family was checked, for people.
        limits: Where decoding here differs from the published scripts, for people.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    keys: tuple[KeyRule, ...]
    ignored_keys: tuple[str, ...] = ()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parse_config: Callable[[FieldReader], dict[str, Any]]
    mask_token_id: int | None = None
    mask_tokens: tuple[str, ...] = ()
    turn_end_tokens: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    block_length: int | None = None
    attention: Literal["block_causal", "full", "canvas"] = "block_causal"
    shifts_predictions: bool = False
    always_tied: bool = False
    reference: str | None = None
    models: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    def rules_for(self, target: str) -> list[tuple[str, KeyRule]]:
        """The source keys and rules that can fill one of our parameters.

        Raises:
            LookupError: If the table does not cover the parameter (a fault of the table).
        """
        found = [(rule.source_of(target), rule) for rule in self.keys]
        usable = [(source, rule) for source, rule in found if source is not None]
        if not usable:
            raise LookupError(f"The key table of {self.name} has no line for {target}.")
        return usable

    def rule_for(self, target: str) -> tuple[str, KeyRule]:
        """The first of `rules_for`."""
        return self.rules_for(target)[0]

    def ignores(self, key: str) -> bool:
        """True if a tensor of this name may be left out."""
        return any(re.fullmatch(pattern, key) for pattern in self.ignored_keys)
