"""One sample of one request as the scheduler sees it: its place in the queue, row and pages."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Protocol, runtime_checkable

from herald_jax.engine.pages import extend_digests


class SampleState(enum.Enum):
    """Where a sample is; `PREFILL` and `DECODE` have a row and pages, the others have not."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@runtime_checkable
class Progress(Protocol):
    """What of `engine.request.RowProgress` the scheduler uses: it knows when a sample ends."""

    finish_reason: Any

    def accept(self, block: Any) -> None:
        """Takes the next finished block; sets `finish_reason` if the sample ends within it."""
        ...

    def abort(self) -> None:
        """Ends the sample where it stands."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One sample of one request.

    Attributes:
        request_id: The request's name.
        sample_index: Number of the sample within the request.
        progress: What of the finished blocks counts.
        block_length: B.
        prompt_tokens: Length of the prompt.
        end_block: Index of the first block that `max_tokens` rules out.
        priority: As the request asked; lower goes first.
        key: Place in every order of the scheduler; fixed when the request arrives.
        token_ids: The prompt and all committed blocks. Once a block is committed, this is a
            whole number of blocks; what a preempted sample resumes from.
        state: Where the sample is.
        row: Its row while it has one, else -1.
        epoch: Number of its stay in a row, never used twice; -1 without a row.
        pages: Its pages in the order of its text.
        prefilled_tokens: Tokens whose prefill is planned or was taken from shared pages.
        digests: Digests of its full pages, as far as they were needed.
        published_pages: How many of its pages have been published or were shared already.
        is_publishable: False if its pages may hold keys and values of other parameters.
        preemptions: How often it lost its row.
        reused_tokens: Prompt tokens that shared pages spared it to prefill, over all stays.
        peak_pages: Most pages that it had at a time.
    """

    request_id: str
    sample_index: int
    progress: Progress
    block_length: int
    prompt_tokens: int
    end_block: int
    priority: int
    key: tuple[int, int]
    token_ids: list[int]
    state: SampleState = SampleState.WAITING
    row: int = -1
    epoch: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled_tokens: int = 0
    digests: list[bytes] = dataclasses.field(default_factory=list)
    published_pages: int = 0
    is_publishable: bool = True
    preemptions: int = 0
    reused_tokens: int = 0
    peak_pages: int = 0

    @property
    def next_block(self) -> int:
        """Index of the first block that is not committed; the blocks before it are prefilled."""
        return len(self.token_ids) // self.block_length

    @property
    def prefill_tokens(self) -> int:
        """Tokens that must be in the cache before the next block can run."""
        return self.next_block * self.block_length

    @property
    def tail(self) -> tuple[int, ...]:
        """Prompt tokens at the beginning of the next block."""
        return tuple(self.token_ids[self.prefill_tokens :])

    def block_tokens(self, index: int) -> tuple[int, ...]:
        """The ids of one whole block."""
        return tuple(self.token_ids[index * self.block_length : (index + 1) * self.block_length])

    def require_block(self, token_ids: list[int]) -> None:
        """Checks that a block can be the next one: it begins with the prompt's tail, if any."""
        tail = self.token_ids[self.prefill_tokens :]
        if len(token_ids) != self.block_length or token_ids[: len(tail)] != tail:
            raise RuntimeError(
                f"block {self.next_block} of {self.request_id!r} has ids {token_ids}, but "
                f"{self.block_length} ids that begin with {tail} were expected"
            )

    def commit(self, token_ids: list[int]) -> None:
        """Appends the next block."""
        self.token_ids[self.prefill_tokens :] = token_ids

    def page_digests(self, root: bytes, page_tokens: int) -> list[bytes]:
        """Digests of all full pages of the text so far."""
        extend_digests(self.digests, root, self.token_ids, page_tokens)
        return self.digests

    def enter(self, row: int, epoch: int, pages: list[int], shared: int, page_tokens: int) -> None:
        """Takes a row and pages, the first `shared` of which hold the text's beginning."""
        self.state = SampleState.PREFILL
        self.row, self.epoch, self.pages = row, epoch, pages
        self.prefilled_tokens = shared * page_tokens
        self.published_pages = shared
        self.reused_tokens += self.prefilled_tokens
        # Whatever is not shared is computed now, with the parameters of now.
        self.is_publishable = True

    def leave(self, state: SampleState) -> list[int]:
        """Gives row and pages up and returns the pages, which are the caller's to release."""
        self.peak_pages = max(self.peak_pages, len(self.pages))  # within a stay they only grow
        pages, self.pages = self.pages, []
        self.row = self.epoch = -1
        self.prefilled_tokens = self.published_pages = 0
        self.state = state
        return pages
