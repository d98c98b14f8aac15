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
from herald_jax.model_source import find_checkpoint, resolve_dtype
from herald_jax.outputs import GenerationError, RequestOutput
from herald_jax.prompts import require_unicode
from herald_jax.sampling import SamplingParams

RECORD_START = b'{"index": 0, "id": '
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
    for field, value in record.items():
        # The tokenizer takes no lone surrogate, and the results could not be written.
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        require_unicode(field, text)
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

    Used as a context manager; while it is open no other process can write to the file. What the
    file holds stays as it is until the first result comes, so a run that fails before costs none.

    Args:
        path: The file; it is made if it does not exist.
        restart: True to replace the results that it holds.

    Attributes:
        records: The complete records that were there; none with `restart`.
    """

    def __init__(self, path: str | Path, *, restart: bool = False) -> None:
        self._path = Path(path)
        self._restart = restart
        self._descriptor = -1
        self._kept = 0
        self._is_cut = False
        self.records: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        """Opens and locks the file and reads its records; nothing in it is changed.

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
        self.cut()
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)

    def cut(self) -> None:
        """Drops what is to be replaced: a record that was not completed, or all at a restart.

        The first `append` does so by itself.
        """
        if self._is_cut:
            return
        os.ftruncate(self._descriptor, self._kept)
        os.lseek(self._descriptor, self._kept, os.SEEK_SET)
        os.fsync(self._descriptor)
        self._is_cut = True

    def _prepare(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another process is writing to {self._path}. Wait for it or choose another file."
            ) from error
        if self._restart:
            self._check_replaceable()
        else:
            self._kept = self._read_records(self._path.read_bytes())
        folder = os.open(self._path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some network file systems cannot sync folders
            os.fsync(folder)
        os.close(folder)

    def _check_replaceable(self) -> None:
        """Raises `ConfigError` if the file holds something else than results."""
        with self._path.open("rb") as file:
            line = file.readline()
        try:
            if line.endswith(b"\n"):
                _read_record(line)
            else:
                _check_torn(line)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._path} is not replaced, as its line 1 was not written by a batch run: "
                f"{error}. Choose another output file, or remove this one yourself."
            ) from error

    def _read_records(self, data: bytes) -> int:
        """Reads the complete records; the number of bytes that they take."""
        lines = data.split(b"\n")
        torn = lines.pop()  # what follows the last newline was not completed
        if not lines:
            try:
                _check_torn(torn)
            except ValueError as error:
                raise ConfigError(
                    f"{self._path}, line 1, was not written by a batch run: {error}. "
                    "Choose another output file."
                ) from error
        size = 0
        for number, line in enumerate(lines, start=1):
            try:
                record = _read_record(line)
            except (ValueError, TypeError) as error:
                # After a power cut a file may be longer than what was written to it.
                if number == len(lines) and self.records:
                    break
                fix = ", or --restart to replace this one" if self.records else ""
                raise ConfigError(
                    f"{self._path}, line {number}, was not written by a batch run: {error}. "
                    f"Choose another output file{fix}."
                ) from error
            self.records.append(record)
            size += len(line) + 1
        return size


def _read_record(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict) or not {"index", "sha256", "options_sha256"} <= set(record):
        raise ValueError("it is no result")
    return record


def _check_torn(line: bytes) -> None:
    """Raises `ValueError` if a first line without an end cannot be what a crash left of a record.

    After a power cut, zeros may stand for what was not written.
    """
    line = line.rstrip(b"\0")
    if not line.startswith(RECORD_START[: len(line)]):
        raise ValueError("it is no result")


def model_identity(
    model: str | Path,
    *,
    dtype: Any = "auto",
    tokenizer: str | Path | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
) -> dict[str, Any]:
    """What tells a model from others in the options of `run_file`.

    One folder has one identity however its path is spelled, and another one once its weights are
    replaced. The arguments are those of `LLM`.
    """
    name = resolve_dtype(dtype)
    folder, config = find_checkpoint(
        model, dtype=name, mask_token_id=mask_token_id, block_length=block_length
    )
    return {
        "model": _resolved(model),
        "weights": _weights_digest(folder),
        "dtype": name,
        "tokenizer": None if tokenizer is None else _resolved(tokenizer),
        "config": dataclasses.asdict(config),
    }


def _resolved(name: str | Path) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else str(name)


def _weights_digest(folder: Path) -> str:
    """A hash that changes when another checkpoint is written to the folder."""
    record = folder / "conversion.json"
    if record.is_file():  # it has a hash of every file that the weights came from
        return hashlib.sha256(record.read_bytes()).hexdigest()
    params = folder / "params"
    digest = hashlib.sha256((params / "index.json").read_bytes())
    # The index has no more than the sizes, but every write gives its data files fresh names.
    names = sorted(str(path.relative_to(params)) for path in params.rglob("*"))
    digest.update("\n".join(names).encode())
    return digest.hexdigest()


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
        options: What else the results depend on, such as `model_identity`. A file of results
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
    results.cut()  # also where nothing was left to do


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
