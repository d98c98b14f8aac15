"""Faults of a conversion, gathered first and raised together."""

from __future__ import annotations

import dataclasses

_SHOWN = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that keeps a checkpoint from being converted.

    Attributes:
        kind: Short name: `missing`, `unexpected`, `shape`, `dtype`, `tied`, `truncated`, `header`,
            `absent-shard`, `pickle`, `config`, `tokenizer`, `source`, `target` or `check`.
        where: The tensor, file or config field concerned.
        expected: What a good checkpoint has there.
        found: What this one has.
        fix: What the user can do.
    """

    kind: str
    where: str
    expected: str
    found: str
    fix: str

    def __str__(self) -> str:
        return (
            f"[{self.kind}] {self.where}: expected {self.expected}; found {self.found}. {self.fix}"
        )


class ConversionError(ValueError):
    """Raised with all faults of a conversion; nothing was written.

    Attributes:
        faults: All of them, also those that the message leaves out.
    """

    def __init__(self, faults: list[Fault], source: str = "") -> None:
        self.faults = tuple(faults)
        count = f"{len(faults)} fault{'s' if len(faults) != 1 else ''}"
        lines = [f"{count} in {source or 'the conversion'}; nothing was written."]
        lines += [f"  {number}. {fault}" for number, fault in enumerate(faults[:_SHOWN], 1)]
        if len(faults) > _SHOWN:
            lines.append(f"  ... and {len(faults) - _SHOWN} more.")
        super().__init__("\n".join(lines))


class Findings:
    """Collects faults and remarks while a checkpoint is examined."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.faults: list[Fault] = []
        self.remarks: list[str] = []

    def fault(self, kind: str, where: str, *, expected: str, found: str, fix: str) -> None:
        """Notes one fault; the conversion goes on looking for others."""
        self.faults.append(Fault(kind, where, expected, found, fix))

    def remark(self, text: str) -> None:
        """Notes something that the user should know but that stops nothing."""
        self.remarks.append(text)

    def raise_if_any(self) -> None:
        """Raises `ConversionError` with everything noted so far, if anything was."""
        if self.faults:
            raise ConversionError(self.faults, self.source)
