"""The page account: leaks, double frees, wrong sharing, pages handed out under a copy."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_jax._checks import ConfigError
from herald_jax.engine.pages import (
    OutOfPages,
    PageAllocator,
    PageBudget,
    extend_digests,
    pages_that_fit,
)


@dataclasses.dataclass
class Copy:
    is_done: bool = False

    def done(self) -> bool:
        return self.is_done


def digests_of(tokens: list[int], page_tokens: int = 2, root: bytes = b"") -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, root, tokens, page_tokens)
    return digests


def publish_text(pool: PageAllocator, tokens: list[int]) -> list[int]:
    digests = digests_of(tokens, pool.page_tokens)
    pages = pool.allocate(len(digests))
    for page, digest in zip(pages, digests, strict=True):
        pool.publish(page, digest)
    return pages


def test_exhaustion_is_a_named_error_that_tells_need_have_and_setting() -> None:
    pool = PageAllocator(3, 8, setting="kv_bytes")
    pool.allocate(1)
    with pytest.raises(OutOfPages, match=r"4 pages of 8 tokens.* 2 of 3 are available.*kv_bytes"):
        pool.allocate(4)
    assert pool.available == 2
    pool.check()


def test_double_release_and_foreign_pages_raise_at_once() -> None:
    pool = PageAllocator(4, 8)
    pages = pool.allocate(2)
    pool.release(pages[:1])
    for wrong in (pages[:1], [pages[1], pages[1]], [4], [-1]):
        with pytest.raises(RuntimeError, match="page"):
            pool.release(wrong)
    with pytest.raises(RuntimeError, match="no reference"):
        pool.hold(pages[:1], Copy())
    with pytest.raises(RuntimeError, match="no reference"):
        pool.publish(pages[0], b"digest")


def test_match_takes_the_longest_run_and_a_reference_to_each_page() -> None:
    pool = PageAllocator(8, 2)
    pages = publish_text(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match(digests_of([1, 2, 3, 4, 9, 9, 5, 6])) == pages[:2]
    assert [pool.references(page) for page in pages] == [2, 2, 1]
    pool.release(pages)
    pool.release(pages[:2])
    assert pool.available == 8
    assert pool.match(digests_of([1, 2, 3, 4, 5, 6])) == pages
    pool.check()


def test_digest_depends_on_everything_before_the_page_and_on_the_root() -> None:
    assert digests_of([1, 2, 3, 4])[1] != digests_of([9, 2, 3, 4])[1]
    assert digests_of([1, 2])[0] != digests_of([1, 2], root=b"other parameters")[0]
    assert digests_of([1, 2, 1, 2])[0] != digests_of([1, 2, 1, 2])[1]
    assert len(digests_of([1, 2, 3])) == 1  # a page that is not full has none
    grown = digests_of([1, 2])
    extend_digests(grown, b"", [1, 2, 3, 4, 5], 2)
    assert grown == digests_of([1, 2, 3, 4])


def test_cached_pages_are_evicted_least_recently_used_first_and_ends_before_beginnings() -> None:
    pool = PageAllocator(4, 2)
    old, new = publish_text(pool, [1, 2, 3, 4]), publish_text(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.match(digests_of([1, 2, 3, 4])) == [old[0]]
    assert pool.match(digests_of([5, 6, 7, 8])) == new
    pool.check()


def test_of_two_pages_with_the_same_text_one_stays_published() -> None:
    pool = PageAllocator(4, 2)
    first, second = publish_text(pool, [1, 2]), publish_text(pool, [1, 2])
    pool.release(second)
    assert pool.match(digests_of([1, 2])) == first
    pool.release([*first])
    pool.release([*first])
    pool.check()
    assert pool.available == 4


def test_a_page_is_published_with_one_text_only() -> None:
    pool = PageAllocator(4, 2)
    pages = publish_text(pool, [1, 2])
    with pytest.raises(RuntimeError, match="published already"):
        pool.publish(pages[0], b"other")


def test_new_parameters_forget_what_was_published() -> None:
    pool = PageAllocator(4, 2)
    pages = publish_text(pool, [1, 2, 3, 4])
    pool.release(pages[1:])
    pool.clear()
    pool.check()
    assert pool.match(digests_of([1, 2, 3, 4])) == []
    pool.release(pages[:1])
    assert pool.match(digests_of([1, 2])) == []
    assert pool.available == 4
    pool.check()


def test_nothing_is_shared_with_the_flag_off() -> None:
    pool = PageAllocator(4, 2, share_prefixes=False)
    pages = publish_text(pool, [1, 2])
    assert pool.match(digests_of([1, 2])) == []
    pool.release(pages)
    pool.check()


@pytest.mark.parametrize("is_published", [False, True])
def test_page_is_not_handed_out_before_its_copy_has_ended(is_published: bool) -> None:
    pool, copies = PageAllocator(2, 2), [Copy(), Copy()]
    pages = publish_text(pool, [1, 2]) if is_published else pool.allocate(1)
    for copy in copies:
        pool.hold(pages, copy)
    pool.release(pages)
    for copy in copies:
        assert (pool.available, pool.held) == (1, 1)
        with pytest.raises(OutOfPages, match="1 wait for copies"):
            pool.allocate(2)
        pool.check()
        copy.is_done = True
    assert sorted(pool.allocate(2)) == [0, 1]
    pool.check()


def test_a_held_page_can_be_matched_and_is_held_again_when_released() -> None:
    pool, copy = PageAllocator(2, 2), Copy()
    pages = publish_text(pool, [1, 2])
    pool.hold(pages, copy)
    pool.release(pages)
    assert pool.match(digests_of([1, 2])) == pages
    assert pool.held == 0
    pool.release(pages)
    assert pool.held == 1
    copy.is_done = True
    pool.collect()
    assert (pool.available, pool.held) == (2, 0)
    assert pool.match(digests_of([1, 2])) == pages


def test_bytes_of_the_tightest_memory_bound_the_pool() -> None:
    def budget(name: str, available: int) -> PageBudget:
        return PageBudget(
            name=name, available_bytes=available, bytes_per_page=10, setting=f"{name}_kv_bytes"
        )

    assert pages_that_fit([budget("device", 99), budget("host", 35)]) == 3
    with pytest.raises(ConfigError, match=r"10 bytes of host.* 0 are left.*host_kv_bytes"):
        pages_that_fit([budget("device", 99), budget("host", -5)])


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        PageAllocator(0, 2)
    with pytest.raises(ConfigError, match="page_tokens"):
        PageAllocator(2, 0)
    with pytest.raises(ConfigError, match="count"):
        PageAllocator(2, 2).allocate(-1)


@given(st.data())
def test_free_and_owned_and_cached_and_held_pages_are_all_there_are(data: st.DataObject) -> None:
    pool = PageAllocator(6, 2)
    owned: list[list[int]] = []  # every reference that somebody has
    final: dict[int, bytes] = {}  # what a page holds, while it may be matched
    copies: list[tuple[list[int], Copy]] = []
    texts = st.lists(st.integers(0, 1), min_size=2, max_size=6)
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["text", "release", "hold", "end", "clear"])):
            case "text":
                digests = digests_of(data.draw(texts))
                pages = pool.match(digests)
                assert [final[page] for page in pages] == digests[: len(pages)]
                missing = len(digests) - len(pages)
                if missing > pool.available:
                    with pytest.raises(OutOfPages):
                        pool.allocate(missing + 6)
                    pool.release(pages)
                else:
                    new = pool.allocate(missing)
                    used = [page for held in owned for page in held]
                    used += [page for held, copy in copies if not copy.is_done for page in held]
                    assert not set(new) & set(used), "a page was handed out twice"
                    for page, digest in zip(new, digests[len(pages) :], strict=True):
                        final[page] = digest
                        pool.publish(page, digest)
                    owned.append(pages + new)
            case "release" if owned:
                pool.release(owned.pop(data.draw(st.integers(0, len(owned) - 1))))
            case "hold" if owned:
                copy = Copy()
                copies.append((list(owned[-1]), copy))
                pool.hold(owned[-1], copy)
            case "end" if copies:
                copies.pop(data.draw(st.integers(0, len(copies) - 1)))[1].is_done = True
                pool.collect()
            case "clear":
                pool.clear()
        pool.check()
        for page in range(6):
            assert pool.references(page) == sum(held.count(page) for held in owned)
    for held in owned:
        pool.release(held)
    for _, copy in copies:
        copy.is_done = True
    pool.collect()
    pool.check()
    assert (pool.available, pool.held) == (6, 0)
