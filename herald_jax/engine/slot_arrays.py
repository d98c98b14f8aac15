"""The host arrays of a step: which rows run, how they sample, what begins.

Both runners, over the paged and over the sparse cache, send these to their programs. Arrays
that depend only on who holds which row are kept while the same samples run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import decoding_options, proposal_spec, stop_ids
from herald_jax.decoding.propose import CONFIDENCE_SOURCES, ProposalSpec
from herald_jax.decoding.rules import RULES
from herald_jax.decoding.slots import RowStarts
from herald_jax.decoding.steps import DecodingOptions
from herald_jax.engine.plan import BlockStart, DecodeSlot
from herald_jax.sampling import SamplingParams

STOP_ID_SLOTS = 16
"""Stop ids of a row that the device looks at; the host looks at all of them.

A row with more runs on until the host has read its block, as a row with stop strings does.
"""

GREEDY = ProposalSpec(("raw",), is_sampled=False, is_filtered=False)
SAMPLED = ProposalSpec(("raw",), is_sampled=True, is_filtered=False)
FILTERED = ProposalSpec(CONFIDENCE_SOURCES, is_sampled=True, is_filtered=True)


@dataclasses.dataclass(frozen=True, slots=True)
class RowSampling:
    """What decides the tokens of the sample that holds a row."""

    sampling: SamplingParams
    seed: int


def row_bucket(rows: int, limit: int) -> int:
    """Decode slots that a step with so many rows is compiled for: a power of 4, or `limit`."""
    bucket = 1
    while bucket < rows:
        bucket *= 4
    return min(bucket, limit)


class SlotArrays:
    """The options of the rows, and the arrays of a step made from them."""

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        self._config, self._max_rows = config, max_rows
        self.no_starts = self.starts(())
        self.reset()

    def reset(self) -> None:
        """Forgets who holds which row."""
        self._rows: list[RowSampling | None] = [None] * self._max_rows
        self._gathered_for: Any = None
        self._gathered: Any = None

    def set_row(self, row: int, sampling: RowSampling) -> None:
        """Notes the sample that begins in a row."""
        self._rows[row] = sampling

    def options(
        self, decode: Sequence[DecodeSlot], size: int
    ) -> tuple[DecodingOptions, ProposalSpec, np.ndarray]:
        """Options and stop ids of the decode slots, padded to `size`, and their static facts."""
        key = (size, tuple((slot.row, slot.epoch) for slot in decode))
        if self._gathered_for != key:
            self._gathered_for, self._gathered = key, self.gather(decode, size)
        return self._gathered

    def gather(
        self, decode: Sequence[DecodeSlot | BlockStart], size: int
    ) -> tuple[DecodingOptions, ProposalSpec, np.ndarray]:
        """The same, made anew."""
        rows = [row for slot in decode if (row := self._rows[slot.row]) is not None]
        if len(rows) != len(decode):
            raise RuntimeError("a plan decodes a row that no plan has started")
        padding = size - len(rows)
        sampling = [row.sampling for row in rows] + [SamplingParams()] * padding
        seeds = [row.seed for row in rows] + [0] * padding
        options = decoding_options(sampling, seeds, self._config, strategies=tuple(RULES))
        return options, _covering(proposal_spec(sampling)), self.stop_ids(decode, size)

    def stop_ids(self, decode: Sequence[DecodeSlot | BlockStart], size: int) -> np.ndarray:
        """Stop ids of the decode slots [size, I], padded with -1."""
        stops = np.full((size, STOP_ID_SLOTS), -1, np.int32)
        for at, slot in enumerate(decode):
            row = self._rows[slot.row]
            ids = () if row is None else stop_ids(row.sampling, self._config)[:STOP_ID_SLOTS]
            stops[at, : len(ids)] = ids
        return stops

    def starts(self, starts: Sequence[BlockStart]) -> RowStarts:
        """The blocks that begin, one entry a row."""
        shape = (self._max_rows, self._config.block_length)
        is_started = np.zeros(self._max_rows, bool)
        index = np.zeros(self._max_rows, np.int32)
        tokens, is_masked = np.zeros(shape, np.int32), np.ones(shape, bool)
        for start in starts:
            is_started[start.row], index[start.row] = True, start.index
            tokens[start.row, : len(start.tail)] = start.tail
            is_masked[start.row, : len(start.tail)] = False
        return RowStarts(is_started, index, tokens, is_masked)  # type: ignore[arg-type]


def _covering(spec: ProposalSpec) -> ProposalSpec:
    """The cheapest of the three compiled kinds of step that can run such rows."""
    if not spec.is_sampled:
        return GREEDY
    return SAMPLED if spec.sources == ("raw",) and not spec.is_filtered else FILTERED
