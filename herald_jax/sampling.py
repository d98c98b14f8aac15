"""How one request is decoded: lengths, stops, temperature, and the unmask rule's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from herald_jax._checks import require, require_float, require_int, require_one_of
from herald_jax.decoding.propose import CONFIDENCE_SOURCES
from herald_jax.decoding.rules import RULES

MAX_SEED = 2**32 - 1


def _as_tuple(field: str, value: Any, kind: type) -> tuple:
    """A tuple from one item or a sequence of items of `kind`."""
    items = (value,) if isinstance(value, kind) else value
    is_sequence = isinstance(items, Sequence) and not isinstance(items, str)
    require(is_sequence, field, value, f"{kind.__name__} or a list of {kind.__name__}")
    for item in items:
        is_kind = isinstance(item, kind) and not isinstance(item, bool)
        require(is_kind, field, value, f"{kind.__name__} or a list of {kind.__name__}")
    return tuple(items)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request.

    Attributes:
        max_tokens: Most tokens to generate. The last block is denoised whole, then cut.
        n: Independent samples of the prompt.
        temperature: 0 is exact argmax (ties to the lower id); else logits are divided by it.
        top_k: Keep this many of the most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        seed: Start of the request's random stream; `None` draws a fresh one. Sample 0 uses the
            seed itself, further samples of `n` use seeds derived from it.
        stop: Strings that end the text; they are cut from it.
        stop_token_ids: Ids that end the text besides the model's own.
        ignore_eos: True if the model's own stop ids do not end the text.
        strategy: Name of the unmask rule.
        threshold: Confidence above which `low_confidence_dynamic` commits, or from which on
            `threshold` does, or above which `sub_blocks` does in one part of the block at a time;
            0.9 if unset.
        entropy_bound: Nats that `entropy_bounded` may commit a step; 0.35 if unset.
        factor: What (n + 1) (1 - confidence) of the n-th surest position has to stay below for
            `factor` to commit n; 1 if unset.
        denoising_steps: Most denoising steps a block may take, 1..block length; the block
            length if unset. Every rule commits at least the schedule's share each step.
        confidence: Distribution that confidences come from: `raw` (softmax of the logits),
            `scaled` (after temperature) or `filtered` (after top-k and top-p).
    """

    max_tokens: int = 256
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    strategy: str = "low_confidence_dynamic"
    threshold: float | None = None
    entropy_bound: float | None = None
    factor: float | None = None
    denoising_steps: int | None = None
    confidence: str = "raw"

    def __post_init__(self) -> None:
        """Checks every field; sequences become tuples, so that the object is hashable."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())
        require_int("max_tokens", self.max_tokens, 1)
        require_int("n", self.n, 1)
        require_float("temperature", self.temperature, 0.0, 1e4, "a number >= 0")
        require_int("top_k", self.top_k, 0, "Use 0 to keep all tokens.")
        require_float("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]")
        require(self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        if self.seed is not None:
            require_int("seed", self.seed, 0)
            require(self.seed <= MAX_SEED, "seed", self.seed, f"at most {MAX_SEED}")
        stops = () if self.stop is None else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stops, str))
        for text in self.stop or ():
            require(text != "", "stop", self.stop, "made of strings that are not empty")
        given = () if self.stop_token_ids is None else self.stop_token_ids
        ids = _as_tuple("stop_token_ids", given, int)
        object.__setattr__(self, "stop_token_ids", ids)
        for token_id in ids:
            require_int("stop_token_ids", token_id, 0)
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "a bool")
        require_one_of("strategy", self.strategy, RULES)
        require_one_of("confidence", self.confidence, CONFIDENCE_SOURCES)
        require(
            self.confidence == "raw" or self.temperature > 0,
            "confidence",
            self.confidence,
            "'raw' at temperature 0",
            "A greedy row has no temperature to scale by, and every filtered confidence would "
            "be 1, so a threshold would accept any token.",
        )
        if self.denoising_steps is not None:
            require_int("denoising_steps", self.denoising_steps, 1)
        for rule in RULES.values():
            if rule.option is not None and rule.option != RULES[self.strategy].option:
                require(
                    getattr(self, rule.option) is None,
                    rule.option,
                    getattr(self, rule.option),
                    f"unset with strategy={self.strategy!r}",
                    "That strategy does not use it.",
                )
        if self.threshold is not None:
            require_float("threshold", self.threshold, 0.0, 1.0, "a number in [0, 1]")
        if self.entropy_bound is not None:
            require_float("entropy_bound", self.entropy_bound, 0.0, 1e6, "nats, >= 0")
        if self.factor is not None:
            require_float("factor", self.factor, 0.0, 1e6, "a number >= 0")

    @property
    def rule_option(self) -> float:
        """The value of the rule's own option, its default where unset, 0 without one."""
        rule = RULES[self.strategy]
        if rule.option is None or rule.option_default is None:
            return 0.0
        value = getattr(self, rule.option)
        return rule.option_default if value is None else float(value)

    def check_against(self, block_length: int, vocab_size: int) -> None:
        """Checks what depends on the model.

        Raises:
            ConfigError: If `denoising_steps` or an id does not fit the model.
        """
        if self.denoising_steps is not None:
            require(
                self.denoising_steps <= block_length,
                "denoising_steps",
                self.denoising_steps,
                f"in 1..{block_length}, the model's block length",
            )
        for token_id in self.stop_token_ids or ():
            require(
                token_id < vocab_size,
                "stop_token_ids",
                token_id,
                f"below the model's vocabulary size {vocab_size}",
            )
