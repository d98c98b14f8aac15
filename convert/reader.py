"""A Hugging Face folder: its JSON files, its tokenizer's facts and its tensors.

Only JSON and safetensors files are read. Pickle files (`.bin`, `.pt`) are never opened, and
code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from convert.report import ConversionError, Fault, Findings
from convert.safetensors_file import BrokenFile, SafetensorsFile, TensorEntry, open_file

INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files that are copied as they are."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


def find_source(src: str | Path) -> tuple[Path, str | None]:
    """The local folder of `src`, and the commit if it was fetched from a hub.

    Raises:
        ConversionError: If there is no such folder and it cannot be fetched.
    """
    folder = Path(src)
    if folder.is_dir():
        return folder, None
    if folder.exists() or not _HUB_ID.fullmatch(str(src)):
        fault = Fault(
            "source",
            str(src),
            expected="a folder with config.json, safetensors and tokenizer files, or a hub id",
            found="a file" if folder.exists() else "no such folder",
            fix="Give the path of the folder, or ORGANISATION/NAME.",
        )
        raise ConversionError([fault], str(src))
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", *TOKENIZER_FILES]
        fetched = Path(snapshot_download(str(src), allow_patterns=patterns))
    except ImportError as error:
        found, fix = str(error), "Install the fetcher: pip install 'herald_jax[convert]'."
    except Exception as error:  # the hub's client raises many unrelated types
        found = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        fix = "Check the name and the network, or fetch the files yourself and give the folder."
    else:
        return fetched, fetched.name
    expected = "a local folder, or a hub repository that can be fetched"
    raise ConversionError([Fault("source", str(src), expected, found, fix)], str(src))


class HuggingFaceFolder:
    """What a folder holds, with faults noted in `findings` instead of raised.

    Attributes:
        folder: The folder.
        config: `config.json` as read.
        generation_config: `generation_config.json`, empty if absent.
        tokenizer: Facts of the tokenizer, or `None` if there is none.
        files: The whole safetensors files.
        tensors: All tensors by key, also those that only the header of a file cut short names.
        unreadable: Keys that the index places in files which are absent or broken.
        has_blind_spots: True if a file's keys are unknown, so that an absent key proves nothing.
    """

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.folder = folder
        self._findings = findings
        self.config = read_json(folder / "config.json", findings, required=True)
        self.generation_config = read_json(folder / "generation_config.json", findings)
        self.tokenizer = TokenizerFacts.read(folder, findings)
        self.files: list[SafetensorsFile] = []
        self.tensors: dict[str, TensorEntry] = {}
        self.unreadable: set[str] = set()
        self.has_blind_spots = False
        self._read_tensors()

    def tokenizer_files(self) -> list[Path]:
        """The files to copy."""
        return [p for name in TOKENIZER_FILES if (p := self.folder / name).is_file()]

    def _read_tensors(self) -> None:
        index = read_json(self.folder / INDEX_NAME, self._findings)
        weight_map = index.get("weight_map") if index else None
        if index and not isinstance(weight_map, dict):
            self._findings.fault(
                "config",
                INDEX_NAME,
                expected="a table weight_map",
                found=repr(weight_map)[:60],
                fix="Fetch the index again.",
            )
        names = self._shard_names(weight_map if isinstance(weight_map, dict) else None)
        for name in names:
            mapped = {k for k, v in weight_map.items() if v == name} if weight_map else set()
            self._read_shard(name, mapped)

    def _shard_names(self, weight_map: dict[str, Any] | None) -> list[str]:
        if weight_map:
            return sorted({str(name) for name in weight_map.values()})
        present = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if "model.safetensors" in present:
            return ["model.safetensors"]
        if not present:
            self._no_safetensors()
            return []
        for name in present:
            match = _NUMBERED.fullmatch(name)
            if match is None:
                continue
            count, width = int(match["count"]), len(match["number"])
            for number in range(1, count + 1):
                other = f"{match['stem']}-{number:0{width}d}-of-{match['count']}.safetensors"
                if other not in present:
                    present.append(other)
        return sorted(present)

    def _no_safetensors(self) -> None:
        self.has_blind_spots = True
        pickles = sorted(p.name for pattern in _PICKLES for p in self.folder.glob(pattern))
        if pickles:
            self._findings.fault(
                "pickle",
                ", ".join(pickles[:3]) + (" ..." if len(pickles) > 3 else ""),
                expected="safetensors files",
                found="only pickle files, which can run code and are never opened",
                fix="Use a revision with safetensors, or write one with safe_serialization=True "
                "where you trust the files.",
            )
        else:
            self._findings.fault(
                "missing",
                str(self.folder),
                expected=f"model.safetensors, or shards with {INDEX_NAME}",
                found="no safetensors file",
                fix="Fetch the weights; Git LFS pointers have to be pulled.",
            )

    def _read_shard(self, name: str, mapped: set[str]) -> None:
        path = self.folder / name
        if Path(name).name != name or not path.is_file():
            self.unreadable |= mapped
            self.has_blind_spots |= not mapped
            self._findings.fault(
                "absent-shard",
                name,
                expected=f"a file in this folder with {len(mapped) or 'its'} tensors",
                found="no such file",
                fix="Fetch this shard.",
            )
            return
        try:
            file = open_file(path)
        except BrokenFile as error:
            self.unreadable |= mapped
            self.has_blind_spots |= not (mapped or error.tensors)
            for entry in error.tensors:
                self._add(entry, mapped)
            self._findings.fault(
                error.kind,
                name,
                expected=error.expected,
                found=error.found,
                fix="Fetch this file again; an interrupted download leaves such files.",
            )
            return
        self.files.append(file)
        for entry in file.tensors:
            self._add(entry, mapped)
        for key in sorted(mapped - {entry.key for entry in file.tensors}):
            self.unreadable.add(key)
            self._findings.fault(
                "missing",
                key,
                expected=f"in {name}, as the index says",
                found="no such tensor in that file",
                fix="Fetch the index and this shard from the same revision.",
            )

    def _add(self, entry: TensorEntry, mapped: set[str]) -> None:
        other = self.tensors.get(entry.key)
        if other is not None:
            self._findings.fault(
                "unexpected",
                entry.key,
                expected="in one file",
                found=f"in {other.path.name} and {entry.path.name}",
                fix="Remove the file that does not belong to this checkpoint.",
            )
        elif mapped and entry.key not in mapped:
            self._findings.fault(
                "unexpected",
                entry.key,
                expected=f"only tensors that {INDEX_NAME} lists for {entry.path.name}",
                found="a tensor that it does not list",
                fix="Fetch the index and this shard from the same revision.",
            )
        self.tensors.setdefault(entry.key, entry)


class TokenizerFacts:
    """Token ids by text, of the tokens that matter here.

    Attributes:
        source: The file that the ids come from.
        size: The highest id plus one, added tokens included.
        ids: Id of every token by its text.
        special: Text of the special tokens by role, such as `mask_token`.
    """

    def __init__(self, source: str, ids: dict[str, int], special: dict[str, str]) -> None:
        self.source = source
        self.ids = ids
        self.special = special
        self.size = 1 + max(ids.values())

    def text_of(self, token_id: int) -> str | None:
        """The token with this id, or `None` if no token has it."""
        return next((text for text, number in self.ids.items() if number == token_id), None)

    @classmethod
    def read(cls, folder: Path, findings: Findings) -> TokenizerFacts | None:
        """The facts in `tokenizer.json`, else in `vocab.json`; `None` if there is neither."""
        settings = read_json(folder / "tokenizer_config.json", findings)
        main = read_json(folder / "tokenizer.json", findings)
        vocab = read_json(folder / "vocab.json", findings) if not main else {}
        source = "tokenizer.json" if main else "vocab.json"
        try:
            ids: dict[str, int] = _vocabulary(main) if main else dict(vocab)
            ids |= {token["content"]: token["id"] for token in main.get("added_tokens") or ()}
            ids |= read_json(folder / "added_tokens.json", findings)
            decoder = settings.get("added_tokens_decoder") or {}
            ids |= {token["content"]: int(number) for number, token in decoder.items()}
            special = {
                role: value if isinstance(value, str) else value["content"]
                for role, value in settings.items()
                if role in ("mask_token", "eos_token") and value
            }
            return cls(source, ids, special) if main or vocab else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            findings.fault(
                "tokenizer",
                source,
                expected="tables of tokens with ids",
                found=repr(error),
                fix="Fetch the tokenizer files again.",
            )
            return None


def _vocabulary(main: dict[str, Any]) -> dict[str, int]:
    vocab = main["model"]["vocab"]
    if isinstance(vocab, dict):
        return dict(vocab)
    return {piece[0]: number for number, piece in enumerate(vocab)}  # unigram: [text, score]


def read_json(path: Path, findings: Findings, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty if it is absent or (noted as a fault) unusable."""
    if not path.is_file():
        if required:
            findings.fault(
                "config",
                path.name,
                expected="a file",
                found="none",
                fix="Give the folder of a Hugging Face checkpoint.",
            )
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        found = f"a {type(value).__name__}"
    except (ValueError, RecursionError) as error:
        found = str(error)
    findings.fault(
        "config", path.name, expected="a JSON object", found=found, fix="Fetch this file again."
    )
    return {}
