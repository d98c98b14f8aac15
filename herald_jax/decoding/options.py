"""From `SamplingParams` to the arrays and static facts of the decoding programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from herald_jax.configs import ModelConfig
from herald_jax.decoding.propose import ProposalSpec, RowOptions
from herald_jax.decoding.rules import RULES
from herald_jax.decoding.steps import DecodingOptions
from herald_jax.sampling import SamplingParams


def proposal_spec(rows: Sequence[SamplingParams]) -> ProposalSpec:
    """The static facts of a batch; its rows share `confidence`."""
    sampled = [row for row in rows if row.temperature > 0]
    return ProposalSpec(
        confidence=rows[0].confidence,
        is_sampled=bool(sampled),
        is_filtered=any(row.top_k > 0 or row.top_p < 1 for row in sampled),
    )


def decoding_options(
    rows: Sequence[SamplingParams], seeds: Sequence[int], model: ModelConfig
) -> DecodingOptions:
    """Per-row arrays (numpy) of a batch; its rows share `strategy`."""

    def floats(values: Sequence[float]) -> Any:
        return np.asarray(values, np.float32)

    def ints(values: Sequence[int], dtype: Any = np.int32) -> Any:
        return np.asarray(values, dtype)

    steps = [row.denoising_steps or model.block_length for row in rows]
    return DecodingOptions(
        rule=RULES[rows[0].strategy].of_rows(floats([row.rule_option for row in rows])),
        rows=RowOptions(
            temperature=floats([row.temperature for row in rows]),
            # A row asks for at most the whole vocabulary, which is the same as no filter.
            top_k=ints([min(row.top_k, model.vocab_size) for row in rows]),
            top_p=floats([row.top_p for row in rows]),
            denoising_steps=ints(steps),
        ),
        seeds=ints(seeds, np.uint32),
    )


def stop_ids(sampling: SamplingParams, model: ModelConfig) -> tuple[int, ...]:
    """Ids that end a row: the model's own unless ignored, and the request's."""
    own = () if sampling.ignore_eos else model.stop_token_ids
    return tuple(sorted({*own, *(sampling.stop_token_ids or ())}))
