"""From `SamplingParams` to the arrays and static facts of the decoding programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from herald_jax._checks import require
from herald_jax.configs import ModelConfig
from herald_jax.decoding.propose import CONFIDENCE_SOURCES, ProposalSpec, RowOptions
from herald_jax.decoding.rules import RULES, MixedRules
from herald_jax.decoding.steps import DecodingOptions
from herald_jax.sampling import SamplingParams


def require_block_decoding(model: ModelConfig, *, may_shift: bool = False) -> None:
    """Checks that a model's texts are made of blocks that stay as they are once finished.

    Args:
        model: The model.
        may_shift: True if the caller can predict a position from the one before it.

    Raises:
        ConfigError: With what to use instead.
    """
    require(
        not model.is_canvas,
        "attention",
        model.attention,
        "'block_causal' here",
        "The blocks of this model begin as random ids and not as masks. Use "
        "herald_jax.generate_canvas.",
    )
    require(
        not model.is_bidirectional,
        "attention",
        model.attention,
        "'block_causal' here",
        "Where every token sees the whole text, the keys and values of a token change with each "
        "later one. None are ever final, so there is no block to stream, to share or to keep on "
        "the host, and no selection of entries that stays valid for a block. Use "
        "herald_jax.generate_bidirectional.",
    )
    require(
        may_shift or not model.shifts_predictions,
        "shifts_predictions",
        model.shifts_predictions,
        "False here",
        "The first token of a block comes from the pass that commits the block before it, which "
        "is not passed on here. Use herald_jax.generate, or LLM without a sparse cache.",
    )


def proposal_spec(rows: Sequence[SamplingParams]) -> ProposalSpec:
    """The static facts of a batch of such rows."""
    sampled = [row for row in rows if row.temperature > 0]
    used = {row.confidence for row in rows}
    return ProposalSpec(
        sources=tuple(name for name in CONFIDENCE_SOURCES if name in used),
        is_sampled=bool(sampled),
        is_filtered=any(row.top_k > 0 or row.top_p < 1 for row in sampled),
    )


def decoding_options(
    rows: Sequence[SamplingParams],
    seeds: Sequence[int],
    model: ModelConfig,
    strategies: Sequence[str] = (),
) -> DecodingOptions:
    """Per-row arrays (numpy) of a batch.

    Args:
        rows: Options of each row.
        seeds: Random seed of each row.
        model: The model.
        strategies: Names of rules that the program shall know besides those that occur.
    """

    def floats(values: Sequence[float]) -> Any:
        return np.asarray(values, np.float32)

    def ints(values: Sequence[int], dtype: Any = np.int32) -> Any:
        return np.asarray(values, dtype)

    own = floats([row.rule_option for row in rows])
    known = {row.strategy for row in rows}.union(strategies)
    names = [name for name in RULES if name in known]
    rules = [RULES[name].of_rows(own) for name in names]
    choice = ints([names.index(row.strategy) for row in rows])
    return DecodingOptions(
        rule=rules[0] if len(rules) == 1 else MixedRules(choice, tuple(rules)),
        rows=RowOptions(
            temperature=floats([row.temperature for row in rows]),
            # A row asks for at most the whole vocabulary, which is the same as no filter.
            top_k=ints([min(row.top_k, model.vocab_size) for row in rows]),
            top_p=floats([row.top_p for row in rows]),
            denoising_steps=ints([row.denoising_steps or model.block_length for row in rows]),
            confidence=ints([CONFIDENCE_SOURCES.index(row.confidence) for row in rows]),
        ),
        seeds=ints(seeds, np.uint32),
    )


def stop_ids(sampling: SamplingParams, model: ModelConfig) -> tuple[int, ...]:
    """Ids that end a row: the model's own unless ignored, and the request's."""
    own = () if sampling.ignore_eos else model.stop_token_ids
    return tuple(sorted({*own, *(sampling.stop_token_ids or ())}))
