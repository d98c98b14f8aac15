"""Text grows without ever taking back a character, and joins to exactly the final text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from herald_jax.engine.detokenizer import KEPT_IDS, Detokenizer, TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: every id is a byte, 256 a special token that is left out."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def expected(ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int | None]:
    """The final text and the index of the id that completes a stop string, by brute force."""
    text = decode_bytes(ids)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    if not ends:
        return text, None
    end, at = min(ends)
    for index in range(len(ids)):
        settled = decode_bytes(ids[: index + 1]).rstrip("\ufffd")
        if len(settled) >= end:
            return text[:at], index
    return text[:at], None


def feed(
    stream: TextStream, ids: Sequence[int], cuts: Sequence[int]
) -> tuple[list[str], int | None]:
    """Pushes ids in pieces of the given sizes; the released texts and the stopping index."""
    pieces, position = [], 0
    sizes = [*cuts, len(ids)]
    for size in sizes:
        at = stream.push(ids[position : position + size])
        if at is not None:
            pieces.append(stream.take())
            return pieces, position + at
        position += len(ids[position : position + size])
        pieces.append(stream.take())
    stream.close()
    pieces.append(stream.take())
    return pieces, None


WORDS = st.text(alphabet="ab\n é中🦜", max_size=60)
BYTES = st.one_of(
    WORDS.map(lambda text: list(text.encode())),
    st.lists(st.sampled_from([97, 98, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0xFF, 256]), max_size=90),
)
STOPS = st.lists(st.text(alphabet="ab é中🦜", min_size=1, max_size=4), max_size=3)


@given(BYTES, STOPS, st.lists(st.integers(1, 7), max_size=30))
def test_pieces_join_to_the_final_text(ids, stop, cuts):
    stream = TextStream(decode_bytes, stop)
    pieces, index = feed(stream, ids, cuts)
    text, expected_index = expected(ids, stop)
    assert "".join(pieces) == stream.text == text
    assert index == expected_index
    assert (stream.stop_string is not None) == any(s in decode_bytes(ids) for s in stop)


@given(WORDS, STOPS)
def test_released_text_never_holds_the_start_of_a_stop_string(text, stop):
    """What one id at a time releases is a prefix of the final text at every moment."""
    stream = TextStream(decode_bytes, stop)
    final, _ = expected(list(text.encode()), stop)
    released = ""
    for token_id in text.encode():
        if stream.push([token_id]) is not None:
            break
        released += stream.take()
        assert final.startswith(released)


def test_a_character_cut_by_a_block_is_held_back():
    stream = TextStream(decode_bytes)
    ids = list("a🦜b".encode())
    stream.push(ids[:3])
    assert stream.take() == "a"
    stream.push(ids[3:5])
    assert stream.take() == "🦜"
    stream.push(ids[5:])
    assert stream.take() == "b"


def test_an_incomplete_character_at_the_end_is_shown_as_such():
    stream = TextStream(decode_bytes)
    stream.push(list(b"ok\xf0\x9f"))
    assert stream.take() == "ok"
    stream.close()
    assert stream.take() == "\ufffd"
    assert stream.text == "ok\ufffd"


def test_a_stop_string_that_overlaps_itself():
    stream = TextStream(decode_bytes, ("aab",))
    assert stream.push(list(b"aa")) is None
    assert stream.take() == ""
    assert stream.push(list(b"a")) is None
    assert stream.take() == "a"
    assert stream.push(list(b"bxx")) == 0
    assert stream.take() == ""
    assert stream.text == "a"


def test_an_open_stop_string_is_released_at_the_end():
    stream = TextStream(decode_bytes, ("STOP",))
    stream.push(list(b"no STO"))
    assert stream.take() == "no "
    stream.close()
    assert stream.take() == "STO"


@pytest.mark.parametrize(("stop", "text"), [(("b", "abc"), "xa"), (("bc", "abc"), "x")])
def test_the_stop_string_that_is_complete_first_wins_then_the_longest(stop, text):
    def decode(ids: Sequence[int]) -> str:
        return "".join(["xabcd"] * len(ids))

    stream = TextStream(decode, stop)
    assert stream.push([0]) == 0
    assert stream.text == text


def test_nothing_changes_after_the_stop():
    stream = TextStream(decode_bytes, ("b",))
    assert stream.push(list(b"abab")) == 1
    stream.close()
    assert stream.take() == "a"
    assert stream.take() == ""


PIECES = ["<unk>", "▁Hello", "▁wor", "ld", "<0xE4>", "<0xB8>", "<0xAD>", "<0xFF>", "▁"]
FALLBACK = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


@given(st.lists(st.integers(1, 8), max_size=120), st.integers(1, 5))
def test_byte_fallback_rewrites_nothing(ids, size):
    """One bad byte turns the whole run of byte pieces into replacement marks."""

    def decode(window: Sequence[int]) -> str:
        return FALLBACK.decode([PIECES[i] for i in window])

    detokenizer = Detokenizer(decode, byte_pieces=frozenset(range(4, 8)))
    pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.flush() == decode(ids)


def test_the_window_stays_short():
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode_bytes(ids)

    detokenizer = Detokenizer(decode)
    ids = list(("中文 text " * 200).encode())
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert text == decode_bytes(ids)
    assert max(lengths) <= 4 * KEPT_IDS
