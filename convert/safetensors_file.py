"""One safetensors file, validated from its header and read a slice at a time.

The format is a length, a JSON header and raw tensor bytes, so a header and the file size tell
whether the file is whole. Tensors are read with plain reads rather than through a memory map:
mapped pages would count as resident memory, and a map of a file that shrinks kills the process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

READ_BYTES = 8 * 2**20
"""Bytes that one read asks for."""

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ITEM_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32},
    **{"U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


class BrokenFile(ValueError):
    """Raised when a file is no whole safetensors file.

    Attributes:
        kind: `truncated`, or `header` if the header itself makes no sense.
        expected: What a whole file has.
        found: What this one has.
        tensors: What the header names, if it could be read.
    """

    def __init__(
        self, kind: str, expected: str, found: str, tensors: tuple[TensorEntry, ...] = ()
    ) -> None:
        super().__init__(f"{kind}: expected {expected}; found {found}")
        self.kind, self.expected, self.found, self.tensors = kind, expected, found, tensors


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        key: Name of the tensor.
        path: The file.
        dtype_name: Dtype as the format spells it, such as `BF16`.
        shape: Its shape.
        begin: First byte, from the start of the file.
        nbytes: Its length.
    """

    key: str
    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The NumPy dtype, or `None` if it is not one of the floats that weights come in."""
        return _DTYPES.get(self.dtype_name)

    def rows(self, start: int, stop: int) -> TensorEntry:
        """A part of the tensor along its first axis; its bytes lie together."""
        row_bytes = self.nbytes // self.shape[0] if self.shape[0] else 0
        return dataclasses.replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            begin=self.begin + start * row_bytes,
            nbytes=(stop - start) * row_bytes,
        )

    def matrices(self) -> list[TensorEntry]:
        """The matrices that a tensor of three axes is made of, one for each of its first axis."""
        first = (self.rows(index, index + 1) for index in range(self.shape[0]))
        return [dataclasses.replace(entry, shape=entry.shape[1:]) for entry in first]


@dataclasses.dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A whole file: its path, size and tensors in the order of their bytes."""

    path: Path
    nbytes: int
    data_begin: int
    tensors: tuple[TensorEntry, ...]


def open_file(path: Path) -> SafetensorsFile:
    """Reads and checks the header of `path`.

    Raises:
        BrokenFile: If the file is cut short, too long or not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise BrokenFile("truncated", "a header length of 8 bytes", f"{size} bytes")
        length = int.from_bytes(prefix, "little")
        if length > _MAX_HEADER_BYTES:
            raise BrokenFile("header", f"at most {_MAX_HEADER_BYTES} header bytes", f"{length}")
        if 8 + length > size:
            raise BrokenFile("truncated", f"a header of {length} bytes", f"{size} bytes in all")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [_entry(path, 8 + length, key, value) for key, value in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenFile("header", "a JSON table of tensors", repr(error)) from error
    entries.sort(key=lambda entry: (entry.begin, entry.nbytes))
    end = 8 + length
    for entry in entries:
        bits = math.prod(entry.shape) * _ITEM_BITS.get(entry.dtype_name, 0)
        if entry.begin != end or (bits and entry.nbytes * 8 != bits):
            raise BrokenFile(
                "header",
                f"{entry.key} {entry.dtype_name}{list(entry.shape)} right after the tensor before",
                f"bytes {entry.begin} to {entry.begin + entry.nbytes}",
            )
        end += entry.nbytes
    if size != end:
        kind = "truncated" if size < end else "header"
        expected = f"{end} bytes, as its header says"
        raise BrokenFile(kind, expected, f"{size} bytes", tuple(entries))
    return SafetensorsFile(path, size, 8 + length, tuple(entries))


def _entry(path: Path, data_begin: int, key: str, value: dict[str, Any]) -> TensorEntry:
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end - begin)):
        raise ValueError(f"{key} has shape {shape} and offsets {begin}, {end}")
    return TensorEntry(key, path, str(value["dtype"]), shape, data_begin + begin, end - begin)


class FileStream:
    """Reads the tensors of one file and hashes the file on the way.

    Tensors asked for in the order of their bytes cost one pass over the file, and the digest
    is then that of the whole file, comparable with what a hub lists. With `digest=False`
    nothing is hashed, and tensors can be asked for in any order at no further cost.
    """

    def __init__(self, file: SafetensorsFile, *, digest: bool = True) -> None:
        self._file = file
        self._hash = hashlib.sha256() if digest else None
        self._stream = file.path.open("rb", buffering=0)
        if self._hash is not None:
            self._hash.update(self._read(memoryview(bytearray(file.data_begin))))

    def __enter__(self) -> FileStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    @property
    def sha256(self) -> str:
        """Digest of everything read, in hexadecimal digits."""
        assert self._hash is not None, "opened without a digest"
        return self._hash.hexdigest()

    def read(
        self,
        entry: TensorEntry,
        dtype: np.dtype[Any],
        *,
        transpose: bool,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """The tensor, cast to `dtype`, and with its last two axes swapped if `transpose`.

        Args:
            entry: The tensor.
            dtype: Dtype of a new result.
            transpose: True to swap the last two axes.
            out: Where to put it instead, in the shape and dtype of the result.
        """
        shape = (*entry.shape[:-2], *entry.shape[:-3:-1]) if transpose else entry.shape
        out = np.empty(shape, dtype) if out is None else out
        rows = out.swapaxes(-1, -2) if transpose else out
        for first, part in self.parts(entry):
            if transpose and out.ndim == 3:
                for index, matrix in enumerate(part, first):
                    _copy_in_tiles(rows[index], matrix)
            elif transpose:
                _copy_in_tiles(rows[first : first + len(part)], part)
            elif out.ndim:
                rows[first : first + len(part)] = part
            else:
                out[...] = part
        return out

    def parts(self, entry: TensorEntry) -> Iterator[tuple[int, np.ndarray]]:
        """Pieces of the tensor along its first axis, each with the index of its first row.

        A piece is only valid until the next one is asked for.
        """
        if entry.dtype is None:
            raise ValueError(f"{entry.key} has dtype {entry.dtype_name}")
        if entry.nbytes == 0:
            return
        row_shape = entry.shape[1:]
        row_bytes = math.prod(row_shape) * entry.dtype.itemsize
        total = entry.nbytes // row_bytes
        step = max(1, READ_BYTES // row_bytes)
        self._stream.seek(entry.begin)
        buffer = bytearray(min(step, total) * row_bytes)
        for first in range(0, total, step):
            count = min(step, total - first)
            raw = self._read(memoryview(buffer)[: count * row_bytes])
            if self._hash is not None:
                self._hash.update(raw)
            values = np.frombuffer(raw, entry.dtype)
            yield first, values.reshape((count, *row_shape) if entry.shape else ())

    def skip(self, entry: TensorEntry) -> None:
        """Passes over a tensor that is not converted, for the digest."""
        self._stream.seek(entry.begin)
        left = entry.nbytes
        while left:
            left -= self._hash_next(min(left, READ_BYTES))

    def _hash_next(self, count: int) -> int:
        raw = self._read(memoryview(bytearray(count)))
        if self._hash is not None:
            self._hash.update(raw)
        return count

    def _read(self, target: memoryview) -> memoryview:
        done = 0
        while done < len(target):
            count = self._stream.readinto(target[done:])
            if not count:
                raise OSError(f"{self._file.path} became shorter while it was read")
            done += count
        return target


def _copy_in_tiles(target: np.ndarray, source: np.ndarray, tile: int = 512) -> None:
    """Copies between arrays of opposite memory order; tiles keep both sides in the cache."""
    for first in range(0, source.shape[1], tile):
        target[:, first : first + tile] = source[:, first : first + tile]
