"""Text that grows as blocks are finished, and that never takes back a character.

Two things make the end of a text provisional: bytes of a character whose other bytes belong to a
later token, and letters that may still become a stop string. Both are held back until they are
settled, so the released pieces join to exactly the final text.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out, no clean-up of spaces."""

REPLACEMENT = "\ufffd"
KEPT_IDS = 16
"""Ids that stay in the decoding window when it is shortened."""


class Detokenizer:
    """Settled text of a growing list of ids; each piece costs one decode of a short window.

    The window moves forward only where the text of its tail is provably the tail of the text, so
    the pieces join to `decode` of all ids.
    """

    def __init__(self, decode: Decode, byte_pieces: Container[int] = ()) -> None:
        """Starts with no text.

        Args:
            decode: Turns ids into text.
            byte_pieces: Ids that stand for one raw byte each in a tokenizer with byte fallback.
                One bad byte changes the text of the whole run of them, so such a run is held
                back until it has ended.
        """
        self._decode = decode
        self._byte_pieces = byte_pieces
        self._window: list[int] = []
        self._seen = 0  # characters of the window's text that were returned
        self._limit = 2 * KEPT_IDS

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these further ids have settled."""
        self._window.extend(token_ids)
        settled = len(self._window)
        while settled and self._window[settled - 1] in self._byte_pieces:
            settled -= 1
        text = self._decode(self._window[:settled]).rstrip(REPLACEMENT)
        fresh, self._seen = text[self._seen :], max(self._seen, len(text))
        if len(self._window) >= self._limit:
            self._shorten(text, settled)
        return fresh

    def flush(self) -> str:
        """The text that was held back, as it stands now that no id follows."""
        fresh = self._decode(self._window)[self._seen :]
        self._window, self._seen = [], 0
        return fresh

    def _shorten(self, text: str, settled: int) -> None:
        """Drops ids from the front of the window if the rest decodes on its own."""
        start = settled - KEPT_IDS
        tail = self._decode(self._window[max(start, 0) : settled]).rstrip(REPLACEMENT)
        # A tail that opens within a character shows the replacement mark; one of blanks only
        # might lose them to a decoder that strips the start of a text.
        is_whole = tail.strip() != "" and not tail.startswith(REPLACEMENT)
        if start > 0 and is_whole and text.endswith(tail):
            self._window = self._window[start:]
            self._seen, self._limit = len(tail), len(self._window) + KEPT_IDS
        else:
            self._limit *= 2


class TextStream:
    """The visible text of one sample: detokenized, ended by stop strings, released in pieces.

    Attributes:
        text: Everything decoded so far, cut before the stop string once one was found.
        stop_string: The stop string that ended the text, or `None`.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), byte_pieces: Container[int] = ()
    ) -> None:
        """Starts with no text; `stop` are strings that are not empty."""
        self.text = ""
        self.stop_string: str | None = None
        self._detokenizer = Detokenizer(decode, byte_pieces)
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._pending: list[int] = []
        self._taken = 0
        self._is_closed = False

    def push(self, token_ids: Sequence[int]) -> int | None:
        """The index of the id whose text completed a stop string, or `None`.

        Ids after that one are not looked at. Of several stop strings the one that is complete
        first wins, then the longest; the choice does not depend on where tokens or blocks end.
        """
        if not self._stop:
            self._pending.extend(token_ids)  # decoded when somebody wants the text
            return None
        for index, token_id in enumerate(token_ids):
            if self._extend(self._detokenizer.push([token_id])):
                return index
        return None

    def close(self) -> None:
        """Settles all text that was held back; a stop string in it still cuts the text."""
        if not self._is_closed:
            self._decode_pending()
            self._extend(self._detokenizer.flush())
            self._is_closed = True

    def take(self) -> str:
        """The text that became final since the last call."""
        self._decode_pending()
        end = len(self.text) - (0 if self._is_closed else self._held_back())
        piece, self._taken = self.text[self._taken : end], end
        return piece

    def _decode_pending(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            self._extend(self._detokenizer.push(pending))

    def _extend(self, piece: str) -> bool:
        """Adds text; true if it completed a stop string, at which the text is then cut."""
        if self.stop_string is not None or not piece:
            return False
        start = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [(self.text.find(stop, start), stop) for stop in self._stop]
        ends = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if not ends:
            return False
        _, at, self.stop_string = min(ends)
        self.text, self._is_closed = self.text[:at], True
        return True

    def _held_back(self) -> int:
        """Length of the longest end of the text that opens a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
