"""The pages of the KV pool: who holds them, which are shared, and which may be handed out.

A page is room for `page_tokens` tokens in every memory that keeps the KV cache. It is in one of
four states: *referenced* by one or more samples; *held*, when nobody references it any more but
a copy from or to it is under way; *cached*, when it is unreferenced but its content may be
reused by a prompt with the same prefix; or *free*. Cached pages are handed out like free ones,
the least recently used first.

Ownership: whoever allocates or matches a page has one reference and gives it back exactly once.
Only a page whose tokens all have their final keys and values may be published, and a published
page is never written again, so sharing needs no copies. Device programs run in the order of
their dispatch; therefore a page may be handed out as soon as the last program that uses it has
been dispatched, and only copies outside that order need `hold`.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from herald_jax._checks import ConfigError, require_int


class OutOfPages(RuntimeError):
    """Raised when more pages are needed than there are; says which setting gives more."""


@runtime_checkable
class Handle(Protocol):
    """A copy that was started."""

    def done(self) -> bool:
        """True once the copy has ended, well or badly."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageBudget:
    """What one memory gives to the KV cache.

    Attributes:
        name: The memory, `device` or `host`.
        available_bytes: Bytes that pages may take there.
        bytes_per_page: Bytes of one page there, all layers together.
        setting: The setting that raises `available_bytes`.
    """

    name: str
    available_bytes: int
    bytes_per_page: int
    setting: str


def pages_that_fit(budgets: Sequence[PageBudget]) -> int:
    """How many pages all memories have room for.

    Example:
        >>> device = PageBudget(
        ...     name="device", available_bytes=100, bytes_per_page=8, setting="memory_fraction"
        ... )
        >>> host = PageBudget(
        ...     name="host", available_bytes=100, bytes_per_page=9, setting="host_kv_bytes"
        ... )
        >>> pages_that_fit([device, host])
        11
    """
    tightest = min(budgets, key=lambda budget: budget.available_bytes // budget.bytes_per_page)
    pages = tightest.available_bytes // tightest.bytes_per_page
    if pages < 1:
        raise ConfigError(
            f"One page of the KV cache takes {tightest.bytes_per_page} bytes of {tightest.name} "
            f"memory, but {max(tightest.available_bytes, 0)} are left for it. "
            f"Raise {tightest.setting}."
        )
    return pages


def extend_digests(
    digests: list[bytes], root: bytes, tokens: Sequence[int], page_tokens: int
) -> None:
    """Appends the digests of the full pages of `tokens` that `digests` lacks.

    A page's digest covers its own tokens and, through its parent's digest, all before them.
    `root` stands for what else decides keys and values: the model, its parameters, the grid.
    """
    for page in range(len(digests), len(tokens) // page_tokens):
        parent = digests[-1] if digests else hashlib.blake2b(root, digest_size=32).digest()
        own = array.array("q", tokens[page * page_tokens : (page + 1) * page_tokens])
        digests.append(hashlib.blake2b(parent + own.tobytes(), digest_size=32).digest())


class PageAllocator:
    """The account of a pool of pages.

    Args:
        num_pages: Pages of the pool.
        page_tokens: Tokens of a page.
        share_prefixes: False if no page is ever reused by content.
        setting: The setting that makes the pool larger, named in errors.

    Example:
        >>> pool = PageAllocator(num_pages=4, page_tokens=8)
        >>> pages = pool.allocate(3)
        >>> pool.available
        1
        >>> pool.release(pages)
        >>> pool.available
        4
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        *,
        share_prefixes: bool = True,
        setting: str = "device_memory_fraction",
    ) -> None:
        require_int("num_pages", num_pages, 1)
        require_int("page_tokens", page_tokens, 1)
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.share_prefixes = share_prefixes
        self._setting = setting
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        # Unreferenced published pages, the least recently used first.
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()
        # Copies under way by page, whether it is still referenced or not.
        self._copies: dict[int, list[Handle]] = {}

    @property
    def available(self) -> int:
        """Pages that could be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        """Pages that become available once copies end."""
        return sum(self._references[page] == 0 for page in self._copies)

    def references(self, page: int) -> int:
        """How many references a page has."""
        return self._references[page]

    def out_of_pages(self, need: int) -> OutOfPages:
        """The error for a need that cannot be met."""
        return OutOfPages(
            f"{need} pages of {self.page_tokens} tokens are needed, but {self.available} of "
            f"{self.num_pages} are available ({self.held} wait for copies to end). "
            f"Raise {self._setting}, or ask for fewer tokens at once."
        )

    def allocate(self, count: int) -> list[int]:
        """New pages with one reference each, their content undefined.

        Raises:
            OutOfPages: If there are fewer; nothing is allocated then.
        """
        require_int("count", count, 0)
        if count > self.available:
            self.collect()
        if count > self.available:
            raise self.out_of_pages(count)
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._digest_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference to each page.

        Raises:
            RuntimeError: If a page has no reference, or is not of this pool.
        """
        for page in pages:
            self._require_referenced(page)
        # Backwards, so that of one text the end is evicted before the beginning, without
        # which the end could not be found.
        for page in reversed(pages):
            self._require_referenced(page)  # again: the list may name a page twice
            self._references[page] -= 1
            if self._references[page] == 0 and page not in self._copies:
                self._retire(page)

    def hold(self, pages: Iterable[int], handle: Handle) -> None:
        """Keeps referenced pages from being handed out until a copy has ended.

        They may be released before that.
        """
        for page in pages:
            self._require_referenced(page)
            self._copies.setdefault(page, []).append(handle)

    def collect(self) -> None:
        """Makes pages available whose copies have ended."""
        for page in list(self._copies):
            pending = [handle for handle in self._copies[page] if not handle.done()]
            if pending:
                self._copies[page] = pending
                continue
            del self._copies[page]
            if self._references[page] == 0:
                self._retire(page)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The longest run of published pages with these digests, one reference taken to each."""
        pages = []
        for digest in digests:
            page = self.acquire(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, digest: bytes) -> int | None:
        """The published page with this digest, one reference taken, or `None`."""
        page = self._page_of.get(digest)
        if page is None:
            return None
        self._cached.pop(page, None)
        self._references[page] += 1
        return page

    def publish(self, page: int, digest: bytes) -> None:
        """Lets others match a referenced page; all of its tokens must be final.

        Of two pages with one digest the first stays published and the other stays private.
        """
        if not self.share_prefixes:
            return
        self._require_referenced(page)
        if self._digest_of.get(page, digest) != digest:
            raise RuntimeError(f"page {page} is published already, with other tokens")
        if self._page_of.setdefault(digest, page) == page:
            self._digest_of[page] = digest

    def clear(self) -> None:
        """Forgets what was published, as new parameters require; references stay."""
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        self._digest_of.clear()
        self._page_of.clear()

    def check(self, owners: Sequence[int] | None = None) -> None:
        """Recounts everything.

        Args:
            owners: How many references each page should have, where the caller knows.

        Raises:
            RuntimeError: If the account does not add up.
        """
        seen = [0] * self.num_pages
        for page in [*self._free, *self._cached]:
            seen[page] += 1
        for page, references in enumerate(self._references):
            is_used = references > 0 or page in self._copies
            if references < 0 or seen[page] + is_used != 1:
                raise RuntimeError(
                    f"page {page} is {seen[page]} times available and has {references} "
                    f"references, copies {'' if page in self._copies else 'not '}under way"
                )
        for page, count in enumerate(owners or ()):
            if count != self._references[page]:
                raise RuntimeError(
                    f"page {page} has {self._references[page]} references, {count} owners"
                )
        published = {page: digest for digest, page in self._page_of.items()}
        if published != self._digest_of or len(published) != len(self._page_of):
            raise RuntimeError("published pages and their digests disagree")
        for page in self._cached:
            if page not in published:
                raise RuntimeError(f"page {page} is cached but was not published")
        for page in self._free:
            if page in published:
                raise RuntimeError(f"page {page} is free but still published")

    def _require_referenced(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise RuntimeError(f"page {page} is not of this pool of {self.num_pages} pages")
        if self._references[page] == 0:
            raise RuntimeError(f"page {page} has no reference: it was released before")

    def _retire(self, page: int) -> None:
        if page in self._digest_of:
            self._cached[page] = None
        else:
            self._free.append(page)
