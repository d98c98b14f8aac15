"""Files of prompts in, files of results out, and a restart that loses and repeats nothing.

Input: one JSON object a line with `prompt` (text) or `prompt_token_ids` (list of ids), and
optionally `id` (text or number, copied to the result) and `sampling_params` (fields that replace
those given for all lines). Blank lines are skipped.

Output: one JSON object a line, in the order of the input: that of `RequestOutput.to_dict`, with
`id` and two hashes in front. A line is appended in one write and synced before the next one. The
hashes tell a restart whether the results there belong to the same input and options. A line that
a crash cut short is dropped, as its prompt is simply done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from herald_jax._checks import ConfigError
from herald_jax.llm import LLM
from herald_jax.outputs import GenerationError, RequestOutput
from herald_jax.sampling import SamplingParams

KNOWN_FIELDS = ("id", "prompt", "prompt_token_ids", "sampling_params")
SHOWN_FAULTS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """One line of an input file.

    Attributes:
        line: Its number, from 1.
        id: What the line calls itself, or `None`.
        prompt: A text or a list of ids.
        sampling: The options for all lines with those of this line in their place.
        digest: Hash of the line and of the options that it is run with.
    """

    line: int
    id: str | int | None
    prompt: str | list[int]
    sampling: SamplingParams
    digest: str


def read_items(path: str | Path, defaults: SamplingParams) -> list[BatchItem]:
    """The prompts of an input file.

    Raises:
        ConfigError: With the line numbers and faults of all lines that cannot be used.
    """
    items: list[BatchItem] = []
    faults: list[str] = []
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The input file {path} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                items.append(_read_item(number, line, defaults))
            except (ValueError, TypeError) as error:
                faults.append(f"line {number}: {error}")
    _raise_faults(path, faults)
    return items


def _read_item(number: int, line: str, defaults: SamplingParams) -> BatchItem:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ConfigError("it is not a JSON object")
    unknown = sorted(set(record) - set(KNOWN_FIELDS))
    if unknown:
        raise ConfigError(f"unknown fields {unknown}; known are {', '.join(KNOWN_FIELDS)}")
    if ("prompt" in record) == ("prompt_token_ids" in record):
        raise ConfigError("give either prompt or prompt_token_ids")
    prompt = record.get("prompt", record.get("prompt_token_ids"))
    if not isinstance(prompt, str if "prompt" in record else list):
        raise ConfigError("prompt is a text and prompt_token_ids a list of ids")
    name = record.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise ConfigError(f"id={name!r} must be a text or an integer")
    options = record.get("sampling_params", {})
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    if not isinstance(options, dict) or set(options) - fields:
        raise ConfigError(f"sampling_params must be an object with fields among {sorted(fields)}")
    sampling = dataclasses.replace(defaults, **options) if options else defaults
    identity = json.dumps([line.strip(), dataclasses.asdict(sampling)], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return BatchItem(line=number, id=name, prompt=prompt, sampling=sampling, digest=digest)


class ResultFile:
    """An output file that is appended to, one synced line for each finished prompt.

    Used as a context manager; while it is open no other process can write to the file.

    Args:
        path: The file; it is made if it does not exist.
        restart: True to drop what it holds.

    Attributes:
        records: The complete records that were there.
    """

    def __init__(self, path: str | Path, *, restart: bool = False) -> None:
        self._path = Path(path)
        self._restart = restart
        self._descriptor = -1
        self.records: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        """Opens and locks the file, and cuts off a record that was not completed.

        Raises:
            ConfigError: If the file cannot be opened, is in use, or is no file of results.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"The output file {self._path} cannot be opened: {error}") from error
        try:
            self._prepare()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the file; what was appended is on disk already."""
        os.close(self._descriptor)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record and returns when it would survive a crash."""
        data = memoryview(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)

    def _prepare(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another process is writing to {self._path}. Wait for it or choose another file."
            ) from error
        size = 0
        if not self._restart:
            size = self._read_records(self._path.read_bytes())
        os.ftruncate(self._descriptor, size)
        os.lseek(self._descriptor, size, os.SEEK_SET)
        os.fsync(self._descriptor)
        folder = os.open(self._path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some network file systems cannot sync folders
            os.fsync(folder)
        os.close(folder)

    def _read_records(self, data: bytes) -> int:
        """Reads the complete records; the number of bytes that they take."""
        lines = data.split(b"\n")
        lines.pop()  # what follows the last newline was not completed
        size = 0
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                if not {"index", "sha256", "options_sha256"} <= set(record):
                    raise ValueError("it is no result")
            except (ValueError, TypeError) as error:
                # After a power cut a file may be longer than what was written to it.
                if number == len(lines) and self.records:
                    break
                raise ConfigError(
                    f"{self._path}, line {number}, was not written by a batch run: {error}. "
                    "Choose another output file, or --restart to replace this one."
                ) from error
            self.records.append(record)
            size += len(line) + 1
        return size


def run_file(
    llm: LLM,
    items: Sequence[BatchItem],
    results: ResultFile,
    options: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Generates for the prompts that are not in the output file yet, and appends them to it.

    Args:
        llm: The model.
        items: Lines of the input file.
        results: The output file, open.
        options: What else the results depend on, such as the model's name. A file of results
            made with other options is not continued.

    Yields:
        Each new record, once it is safely in the file.

    Raises:
        ConfigError: If the file's results belong to another input or other options, or a prompt
            does not fit the model; nothing has run then.
        GenerationError: If a prompt failed, once all results before it are in the file.
    """
    options_digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    _check_resumed(items, results.records, options_digest)
    start = len(results.records)
    prompts, faults = [], []
    for item in items[start:]:
        try:
            prompts.append(llm.check(item.prompt, item.sampling))
        except ConfigError as error:
            faults.append(f"line {item.line}: {error}")
    _raise_faults("The input file", faults)
    return _run(llm, items[start:], prompts, results, start, options_digest)


def _run(
    llm: LLM,
    items: Sequence[BatchItem],
    prompts: Sequence[list[int]],
    results: ResultFile,
    start: int,
    options_digest: str,
) -> Iterator[dict[str, Any]]:
    waiting: dict[int, RequestOutput] = {}
    written = 0
    outputs = llm.iter_generate(prompts, [item.sampling for item in items])
    for output in outputs:
        waiting[output.index] = output
        while written in waiting:
            item, ready = items[written], waiting.pop(written)
            if ready.error is not None:
                # Nothing behind it can be written, so nothing more is worth decoding.
                outputs.close()
                message = f"line {item.line} of the input failed: {ready.error}"
                raise GenerationError(message, [ready])
            result = ready.to_dict()
            del result["index"], result["prompt"], result["error"]
            record = {
                "index": start + written,
                "id": item.id,
                "sha256": item.digest,
                "options_sha256": options_digest,
                "prompt": item.prompt if isinstance(item.prompt, str) else None,
                **result,
            }
            results.append(record)
            written += 1
            yield record


def _check_resumed(
    items: Sequence[BatchItem], records: Sequence[Mapping[str, Any]], options_digest: str
) -> None:
    fix = "Choose another output file, or --restart to replace the results."
    if len(records) > len(items):
        raise ConfigError(
            f"The output file has {len(records)} results, the input {len(items)} prompts. {fix}"
        )
    for index, (item, record) in enumerate(zip(items, records, strict=False)):
        if record["options_sha256"] != options_digest:
            raise ConfigError(
                "The results in the output file were made with another model or other options. "
                + fix
            )
        if record["index"] != index or record["sha256"] != item.digest:
            raise ConfigError(
                f"Result {index} in the output file belongs to another prompt or other sampling "
                f"options than line {item.line} of the input. {fix}"
            )


def _raise_faults(where: str | Path, faults: Sequence[str]) -> None:
    if faults:
        shown = "\n  ".join(faults[:SHOWN_FAULTS])
        more = f"\n  and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
        raise ConfigError(f"{where} has {len(faults)} faulty lines:\n  {shown}{more}")
