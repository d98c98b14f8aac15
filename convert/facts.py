"""Facts that published configs leave out: where each came from, and which source wins.

A flag beats the checkpoint's files and is recorded with what it overrode; files beat the
family's table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from convert.families import Family
from convert.reader import HuggingFaceFolder
from convert.report import Findings
from herald_jax.configs import NO_MASK_TOKEN


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """A value with its source.

    Attributes:
        value: The value.
        source: The file and field, the flag or the family table that it came from.
        overrides: What another source said instead, if a flag overrode it.
    """

    value: Any
    source: str
    overrides: str | None = None

    def __str__(self) -> str:
        rest = f", overriding {self.overrides}" if self.overrides else ""
        return f"{self.value} (from {self.source}{rest})"


def mask_token(
    family: Family, hf: HuggingFaceFolder, flag: int | None, vocab_size: int | None, out: Findings
) -> Fact | None:
    """The mask id: flag, then config, then the tokenizer's mask token, then the family table."""
    in_config = hf.config.get("mask_token_id")
    in_tokenizer = _tokenizer_mask(family, hf)
    if flag is not None:
        others = [f"config.json: {in_config}"] if in_config not in (None, flag) else []
        if in_tokenizer not in (None, flag):
            others.append(f"{_tokenizer_name(hf)}: {in_tokenizer}")
        fact = Fact(flag, "--mask-token-id", "; ".join(others) or None)
    elif in_config is not None:
        fact = Fact(in_config, "config.json: mask_token_id")
        if in_tokenizer not in (None, in_config):
            out.fault(
                "tokenizer",
                "config.json: mask_token_id",
                expected=f"{in_tokenizer}, the id of the tokenizer's mask token",
                found=repr(in_config),
                fix="Say which one is right with --mask-token-id.",
            )
    elif in_tokenizer is not None:
        fact = Fact(in_tokenizer, f"{_tokenizer_name(hf)}: mask token")
    else:
        fact = Fact(family.mask_token_id, f"family table: {family.name}")
        text = hf.tokenizer.text_of(fact.value) if hf.tokenizer and fact.value else None
        if fact.value is None or (vocab_size is not None and fact.value >= vocab_size) or text:
            out.fault(
                "config",
                "mask_token_id",
                expected=f"in config.json, as {' or '.join(family.mask_tokens)} in the tokenizer, "
                f"or {fact.value} as in the family table",
                found=f"{fact.value} is the token {text!r} here" if text else "none that fits",
                fix="Give --mask-token-id.",
            )
            return None
    if isinstance(fact.value, bool) or not isinstance(fact.value, int) or fact.value < 0:
        return _no_fact(out, "mask_token_id", fact, "an id >= 0", "Give --mask-token-id.")
    if vocab_size is not None and fact.value >= vocab_size:
        allowed = f"an id below vocab_size={vocab_size}"
        return _no_fact(out, "mask_token_id", fact, allowed, "Give --mask-token-id.")
    text = hf.tokenizer.text_of(fact.value) if hf.tokenizer else None
    if hf.tokenizer and in_tokenizer is None:
        known = f"is its token {text!r}" if text else "is none of its tokens"
        out.remark(f"The tokenizer names no mask token; the mask id {fact.value} {known}.")
    return fact


def block_length(
    family: Family, hf: HuggingFaceFolder, flag: int | None, out: Findings
) -> Fact | None:
    """The block length: flag, then config, then the table of a family that has only one.

    Most tables have none, because variants with other lengths share a config.
    """
    names = ("block_size", "block_length", "bd_size", "canvas_length")
    given = {name: hf.config[name] for name in names if hf.config.get(name) is not None}
    values = list(given.values())
    if flag is not None:
        others = [f"config.json: {n} {v}" for n, v in given.items() if v != flag]
        fact = Fact(flag, "--block-length", "; ".join(others) or None)
    elif any(value != values[0] for value in values[1:]):
        fact = Fact(given, "config.json")
        return _no_fact(out, "block_length", fact, "one value", "Give --block-length.")
    elif given:
        name, value = next(iter(given.items()))
        fact = Fact(value, f"config.json: {name}")
    elif family.block_length is not None:
        fact = Fact(family.block_length, f"family table: {family.name}")
    else:
        out.fault(
            "config",
            "block_length",
            expected="block_size or block_length in config.json",
            found="neither",
            fix="Give --block-length with the length that the checkpoint was trained with; the "
            "name of the repository often ends in it (-b4, -b16).",
        )
        return None
    if isinstance(fact.value, bool) or not isinstance(fact.value, int) or fact.value < 1:
        return _no_fact(out, "block_length", fact, "an integer >= 1", "Give --block-length.")
    return fact


def stop_tokens(
    family: Family, hf: HuggingFaceFolder, vocab_size: int | None, out: Findings
) -> Fact:
    """The stop ids: all that the config, the generation config and the tokenizer name.

    The family's table is asked if they name none, and only if its ids exist in the vocabulary.
    """
    found: dict[int, None] = {}
    sources: list[str] = []

    def add(ids: list[Any], source: str) -> None:
        bad = [i for i in ids if isinstance(i, bool) or not isinstance(i, int)]
        if bad:
            out.fault("config", source, expected="token ids", found=repr(bad), fix="Correct it.")
        elif ids:
            found.update(dict.fromkeys(ids))
            sources.append(source)

    files = ((hf.config, "config.json"), (hf.generation_config, "generation_config.json"))
    for table, name in files:
        ids = table.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        add(ids, f"{name}: eos_token_id")
    if hf.tokenizer:
        texts = [hf.tokenizer.special.get("eos_token"), *family.turn_end_tokens]
        known = [hf.tokenizer.ids[text] for text in texts if text in hf.tokenizer.ids]
        add(list(dict.fromkeys(known)), f"{_tokenizer_name(hf)}: end tokens")
    if not found and max(family.stop_token_ids, default=0) < (vocab_size or 0):
        add(list(family.stop_token_ids), f"family table: {family.name}")
    if not found:
        out.remark("No file names a stop id: texts will end at their token limit only.")
        sources.append("no source")
    return Fact(tuple(sorted(found)), " + ".join(sources))


def tokenizer_size(hf: HuggingFaceFolder) -> Fact:
    """How many rows of the embedding table are tokens; `None` without a tokenizer."""
    if hf.tokenizer is None:
        return Fact(None, "no tokenizer in the folder")
    return Fact(hf.tokenizer.size, f"{_tokenizer_name(hf)}: highest id + 1")


def no_mask_token(flag: int | None, out: Findings) -> Fact:
    """What stands for the mask id of a model that has none."""
    if flag is not None:
        out.fault(
            "config",
            "--mask-token-id",
            expected="left out, as canvases begin as random ids",
            found=str(flag),
            fix="Leave it out.",
        )
    return Fact(NO_MASK_TOKEN, "the family, which knows no mask")


def tied_embeddings(family: Family, hf: HuggingFaceFolder, head_key: str, out: Findings) -> Fact:
    """The tie flag, checked against the file: the two have to tell the same story."""
    flag = hf.config.get("tie_word_embeddings")
    if family.always_tied and flag is None:
        return Fact(True, f"family table: {family.name}")
    if family.always_tied and flag is False:
        out.fault(
            "config",
            "config.json: tie_word_embeddings",
            expected="true or absent",
            found="false",
            fix="An untied head is not supported in this family.",
        )
        return Fact(True, f"family table: {family.name}")
    if flag is not None and not isinstance(flag, bool):
        out.fault(
            "config",
            "config.json: tie_word_embeddings",
            expected="true or false",
            found=repr(flag),
            fix="Correct the field.",
        )
    has_head = head_key in hf.tensors or head_key in hf.unreadable or hf.has_blind_spots
    if flag is not True and not has_head:
        out.fault(
            "tied",
            head_key,
            expected="a tensor, because tie_word_embeddings is "
            + ("not set" if flag is None else "false"),
            found="none",
            fix="Fetch the missing tensor. Set tie_word_embeddings to true only if the checkpoint "
            "was trained so; the base model's flag proves nothing.",
        )
    if flag is None:
        return Fact(False, f"tensors: {head_key} is there")
    return Fact(flag is True, "config.json: tie_word_embeddings")


def _tokenizer_mask(family: Family, hf: HuggingFaceFolder) -> int | None:
    if hf.tokenizer is None:
        return None
    texts = [hf.tokenizer.special.get("mask_token"), *family.mask_tokens]
    known = (hf.tokenizer.ids[text] for text in texts if text in hf.tokenizer.ids)
    return next(known, None)


def _tokenizer_name(hf: HuggingFaceFolder) -> str:
    return hf.tokenizer.source if hf.tokenizer else "tokenizer"


def _no_fact(out: Findings, name: str, fact: Fact, expected: str, fix: str) -> None:
    out.fault(
        "config", f"{name} ({fact.source})", expected=expected, found=repr(fact.value), fix=fix
    )
