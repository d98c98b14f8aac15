"""What one request is and how far each of its samples has come, in plain Python.

The runner denoises whole blocks and never stops by itself. `RowProgress` takes the blocks of one
row and decides what of them counts: it ends at the earliest stop id, at `max_tokens`, or at a
stop string, whichever comes first, and drops everything behind that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from herald_jax.cache.budget import BlockAccount
from herald_jax.engine.detokenizer import TextStream
from herald_jax.outputs import CompletionOutput, FinishReason, SampleStats
from herald_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One checked prompt with its options.

    Attributes:
        prompt: The prompt's text, or `None` if it was given as ids.
        prompt_token_ids: The ids that are decoded from.
        sampling: The options.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


def sample_seeds(sampling: SamplingParams) -> list[int]:
    """The seed of each of the `n` samples; a fresh one each where no seed is set.

    Sample 0 uses the seed itself, so that `n` never changes the first sample.
    """
    if sampling.seed is None:
        return [secrets.randbits(32) for _ in range(sampling.n)]
    derived = [
        int(np.random.SeedSequence((sampling.seed, sample)).generate_state(1)[0])
        for sample in range(1, sampling.n)
    ]
    return [sampling.seed, *derived]


class RowBlock(NamedTuple):
    """One finished block of one row, as the runner returned it."""

    token_ids: Int[np.ndarray, " B"]
    is_generated: Bool[np.ndarray, " B"]
    unmask_steps: Int[np.ndarray, " B"]
    confidences: Float[np.ndarray, " B"]
    logprobs: Float[np.ndarray, " B"]
    steps: int
    account: BlockAccount | None = None


class RowProgress:
    """The tokens and the text that count for one sample.

    Attributes:
        token_ids: Tokens so far, a stop id included.
        steps_per_block: Denoising forwards of each block so far.
        accounts: What each block attended to so far; empty with a dense cache.
        finish_reason: `None` while the sample is running.
        stop_reason: The stop id or stop string that ended it, if one did.
    """

    def __init__(
        self, sampling: SamplingParams, stop_token_ids: Collection[int], text: TextStream | None
    ) -> None:
        """Starts an empty sample.

        Args:
            sampling: The request's options.
            stop_token_ids: The model's own stop ids.
            text: Where the text grows, made with the request's stop strings; `None` without a
                tokenizer.
        """
        own_stops = () if sampling.ignore_eos else stop_token_ids
        self._stops = frozenset(own_stops) | frozenset(sampling.stop_token_ids or ())
        self._max_tokens = sampling.max_tokens
        self._text = text
        self.token_ids: list[int] = []
        self._unmask_steps: list[int] = []
        self._confidences: list[float] = []
        self._logprobs: list[float] = []
        self.steps_per_block: list[int] = []
        self.accounts: list[BlockAccount] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def accept(self, block: RowBlock) -> None:
        """Takes the next finished block; sets `finish_reason` if the sample ends within it.

        Blocks arrive whole, so everything before a stop id is committed when it is seen.
        """
        if self.finish_reason is not None:
            raise RuntimeError(f"a block came for a sample that ended: {self.finish_reason}")
        new = np.flatnonzero(block.is_generated)
        if new.size == 0:
            raise RuntimeError("the runner returned a block without a generated token")
        self.steps_per_block.append(int(block.steps))
        if block.account is not None:
            self.accounts.append(block.account)
        ids = [int(token_id) for token_id in block.token_ids[new]]
        kept = self._max_tokens - len(self.token_ids)
        reason: FinishReason | None = "length" if len(ids) >= kept else None
        ids = ids[:kept]
        stop_at = next((at for at, token_id in enumerate(ids) if token_id in self._stops), None)
        text_ids = ids if stop_at is None else ids[:stop_at]
        completed_at = self._text.push(text_ids) if self._text is not None else None
        if completed_at is not None and self._text is not None:
            ids, reason = ids[: completed_at + 1], "stop"
            self.stop_reason = self._text.stop_string
        elif stop_at is not None:
            self.stop_reason = ids[stop_at]
            ids, reason = ids[: stop_at + 1], "stop"
        new = new[: len(ids)]
        self.token_ids += ids
        self._unmask_steps += [int(step) for step in block.unmask_steps[new]]
        self._confidences += [float(value) for value in block.confidences[new]]
        self._logprobs += [float(value) for value in block.logprobs[new]]
        if reason is not None:
            self._finish(reason)

    def abort(self) -> None:
        """Ends the sample where it stands; nothing happens if it has ended."""
        if self.finish_reason is None:
            # The tokenizer may be what failed: then the text stays as far as it came.
            with contextlib.suppress(Exception):
                self._finish("abort")

    def take_text(self) -> str:
        """The text that became final since the last call."""
        return "" if self._text is None else self._text.take()

    def output(self, index: int, seed: int, stats: SampleStats) -> CompletionOutput:
        """The result of a sample that has ended."""
        if self.finish_reason is None:
            raise RuntimeError("the sample is still running")
        return CompletionOutput(
            index=index,
            text="" if self._text is None else self._text.text,
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=float(sum(self._logprobs)),
            token_logprobs=list(self._logprobs),
            unmask_steps=list(self._unmask_steps),
            confidences=list(self._confidences),
            seed=seed,
            stats=stats,
        )

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._text is None:
            return
        try:
            self._text.close()
        except Exception:
            self.finish_reason = "abort"
            raise
        # Held-back text may complete a stop string only now, behind the last id.
        if self._text.stop_string is not None and self.stop_reason is None:
            self.finish_reason = "stop"
            self.stop_reason = self._text.stop_string
