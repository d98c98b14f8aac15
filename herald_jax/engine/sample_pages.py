"""The pages of samples: what each needs, what it shares, and how far it may run."""

from __future__ import annotations

from collections.abc import Sequence

from herald_jax.engine.pages import PageAllocator
from herald_jax.engine.sample import Sample


class SamplePages:
    """Keeps the page lists of samples in step with the pool.

    Args:
        pool: The pool.
        block_length: B; divides the page size.
        root: Stands in the prefix hash for whatever else decides keys and values.
    """

    def __init__(self, pool: PageAllocator, block_length: int, root: bytes) -> None:
        self.pool = pool
        self._block_length = block_length
        self._page_tokens = pool.page_tokens
        self._root = root

    def pages_for(self, blocks: int) -> int:
        """Pages that cover so many blocks."""
        return -(-blocks * self._block_length // self._page_tokens)

    def missing(self, sample: Sample, blocks: int) -> int:
        """Pages that the next `blocks` blocks of a sample still need; negative if more are there.

        At most 1 for one block, as a page is not smaller than a block.
        """
        end = min(sample.next_block + blocks, sample.end_block)
        return self.pages_for(end) - len(sample.pages)

    def block_limit(self, sample: Sample, blocks_ahead: int) -> int:
        """Index of the first block that the device must not run yet."""
        covered = len(sample.pages) * self._page_tokens // self._block_length
        return min(sample.next_block + blocks_ahead, sample.end_block, covered)

    def take(self, sample: Sample, reserve: int) -> tuple[list[int], int] | None:
        """Pages for a waiting sample's text and its next block; how many of them are shared.

        `None`, and nothing taken, unless `reserve` pages are left.
        """
        digests: Sequence[bytes] = ()
        if self.pool.share_prefixes:
            digests = sample.page_digests(self._root, self._page_tokens)
        shared = self.pool.match(digests)
        need = self.pages_for(sample.next_block + 1) - len(shared)
        if need + reserve > self.pool.available:
            self.pool.release(shared)
            return None
        return shared + self.pool.allocate(need), len(shared)

    def extend(self, sample: Sample, count: int) -> None:
        """Appends `count` new pages."""
        sample.pages += self.pool.allocate(count)

    def reuse(self, sample: Sample) -> int:
        """Takes over pages that others filled since the sample got its own; tokens gained.

        Samples that were admitted together thus prefill a common prefix once.
        """
        if not sample.is_publishable:
            return 0
        before = sample.prefilled_tokens
        full_pages = min(sample.prefill_tokens // self._page_tokens, len(sample.digests))
        for at in range(before // self._page_tokens, full_pages):
            page = self.pool.acquire(sample.digests[at])
            if page is None:
                break
            self.pool.release([sample.pages[at]])
            sample.pages[at] = page
            sample.prefilled_tokens = (at + 1) * self._page_tokens
            sample.published_pages = at + 1
        gained = sample.prefilled_tokens - before
        sample.reused_tokens += gained
        return gained

    def publish(self, sample: Sample) -> None:
        """Offers the sample's full pages to others, those whose last pass is planned or read."""
        if not (self.pool.share_prefixes and sample.is_publishable):
            return
        full_pages = sample.prefilled_tokens // self._page_tokens
        if full_pages > sample.published_pages:
            digests = sample.page_digests(self._root, self._page_tokens)
            for at in range(sample.published_pages, full_pages):
                self.pool.publish(sample.pages[at], digests[at])
            sample.published_pages = full_pages

    def set_root(self, root: bytes, samples: Sequence[Sample]) -> None:
        """Forgets what was published; these live samples share nothing in their present stay."""
        self._root = root
        self.pool.clear()
        for sample in samples:
            sample.digests.clear()
            sample.is_publishable = False

    def check(self, running: Sequence[Sample]) -> None:
        """Recounts pages and references against the samples that have pages.

        Raises:
            RuntimeError: If the account does not add up.
        """
        owners = [0] * self.pool.num_pages
        for sample in running:
            if len(set(sample.pages)) != len(sample.pages):
                raise RuntimeError(f"{sample.request_id!r} has a page twice: {sample.pages}")
            for page in sample.pages:
                owners[page] += 1
        self.pool.check(owners)
        for sample in running:
            # Pages from here on are still written.
            for page in sample.pages[sample.prefilled_tokens // self._page_tokens :]:
                if owners[page] != 1:
                    raise RuntimeError(f"page {page} has {owners[page]} owners but is not final")
