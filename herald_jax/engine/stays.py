"""What a sparse runner knows of the row it runs: which block, since when, and what is ready.

A row may run block n only once the pool of block n has been filled. With lookahead it asks for
the pool of block n + 1 in the step after step 0 of block n. The host learns of a commit up to
`run_ahead` steps late; as the device begins the next block by itself when it may, the step that
was its step 0 follows from when it was allowed and when the block before was committed.
"""

from __future__ import annotations

import dataclasses

from herald_jax.cache.budget import RecallAccount


@dataclasses.dataclass(slots=True, kw_only=True)
class Stay:
    """One sample's stay in a row, by the numbers of the runner's steps.

    Attributes:
        epoch: Number of the stay.
        block: Block that runs or runs next, as far as is known.
        ready: Last block whose pool is filled.
        began: Step that was step 0 of `block`; `None` if it has not begun.
        has_looked: True once the pool of the block after `block` has been asked for.
        tail: Known tokens at the beginning of `block`.
        recall: What filled the pool of `block`, if it was read from the host.
    """

    epoch: int
    block: int
    ready: int
    began: int | None = None
    has_looked: bool = False
    tail: tuple[int, ...] = ()
    recall: RecallAccount | None = None
    _next_recall: RecallAccount | None = None
    _sent: int = -1
    _sent_at: int = 0

    def allow(self, step: int) -> int:
        """The limit to run this step with; the block may begin in it."""
        if self._sent != self.ready:
            self._sent, self._sent_at = self.ready, step
        if self.began is None and self.ready >= self.block:
            self.began = step
        return self.ready + 1

    def looks_ahead(self, step: int) -> bool:
        """True if the row should look ahead in this step, which is not its block's first."""
        return self.began is not None and step > self.began and not self.has_looked

    def fill(self, target: int, recall: RecallAccount | None) -> None:
        """Notes that the pool of a block is full."""
        self.ready = target
        if target == self.block:  # the block before was committed meanwhile
            self.recall = recall
        else:
            self._next_recall = recall

    def on_commit(self, index: int, step: int) -> RecallAccount | None:
        """Notes that this step was the commit pass of a block; what filled the block's pool."""
        if index != self.block:
            raise RuntimeError(f"block {index} was committed, but block {self.block} was running")
        recall, self.recall, self._next_recall = self.recall, self._next_recall, None
        self.block, self.tail, self.has_looked = index + 1, (), False
        # A step that was sent since then may have begun the next block already.
        self.began = max(step + 1, self._sent_at) if self._sent > index else None
        return recall
