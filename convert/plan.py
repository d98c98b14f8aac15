"""The examination: which family, what model, which tensor goes where, and all that is wrong."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert import facts as facts_of
from convert.facts import Fact
from convert.families import Family, KeyRule, detect, families
from convert.fields import FieldReader
from convert.reader import HuggingFaceFolder
from convert.report import Findings
from convert.safetensors_file import FileStream, TensorEntry
from herald_jax._checks import ConfigError
from herald_jax.checkpoint import dotted_leaves
from herald_jax.configs import ModelConfig
from herald_jax.models import abstract_params

_NAMING_FIELDS = (
    *("qk_norm", "qkv_bias"),
    *("num_experts", "num_shared_experts", "first_dense_layers", "router_bias"),
)
"""Fields that decide which parameters there are."""

_PLAUSIBLE = 1000
"""Layers or experts that are believed although no tensor proves them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """One parameter to write.

    Attributes:
        parts: The tensor, or the rows of a fused one, that it is made from; with `is_stack` one
            for each expert.
        target: Its dotted path.
        transpose: True if the last two axes change places.
        is_stack: True if the parts are stacked along a new first axis.
        shape: Its shape.
        is_wide: True if it stays in fp32 whatever dtype is written.
    """

    parts: tuple[TensorEntry, ...]
    target: str
    transpose: bool
    is_stack: bool
    shape: tuple[int, ...]
    is_wide: bool


@dataclasses.dataclass(slots=True)
class KeyLine:
    """One line of the key map as it applies here: a line of the table and what it found.

    Attributes:
        source: The key, with `{n}` and `{e}` for numbers.
        target: Our parameter, with `{n}`.
        transform: What happens on the way.
        shape: Shape of one parameter; `None` if the sizes are not known.
        parameters: Parameters that the line fills.
        wanted: Tensors that it asks for.
        found: How many of them are there.
    """

    source: str
    target: str
    transform: str
    shape: tuple[int, ...] | None
    parameters: int = 0
    wanted: int = 0
    found: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to write, keys that are left out (nothing in them is learned), and the key map."""

    planned: list[Planned]
    ignored: list[str]
    key_map: list[KeyLine]


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """What the files say about the model.

    Attributes:
        config: The description; with stand-in sizes where faults were noted, and `None` if
            not even the numbers of layers and experts are known.
        facts: Values with their sources.
        sizes_known: False if the config has stand-in sizes, so that only names can be checked.
    """

    config: ModelConfig | None
    facts: dict[str, Fact]
    sizes_known: bool


def find_family(hf: HuggingFaceFolder, out: Findings) -> Family | None:
    """The family that the config names; `None` after noting that it names none."""
    names = hf.config.get("architectures") or []
    names = [str(name) for name in names] if isinstance(names, list) else [str(names)]
    found = detect(names, hf.config.get("model_type"))
    if found is None and hf.config:
        known = "; ".join(f"{f.name} ({', '.join(f.architectures)})" for f in families().values())
        out.fault(
            "config",
            "config.json: architectures",
            expected=known,
            found=f"{names} with model_type {hf.config.get('model_type')!r}",
            fix="Name the family with --family if the checkpoint is one of these.",
        )
    return found


def refuse_quantised(hf: HuggingFaceFolder, out: Findings) -> None:
    """Notes a fault if the weights are quantised."""
    for name in ("quantization_config", "compression_config"):
        if hf.config.get(name) is not None:
            out.fault(
                "config",
                f"config.json: {name}",
                expected="absent",
                found="a quantised checkpoint",
                fix="Convert the bf16 or fp32 release instead.",
            )


def describe(
    family: Family,
    family_flag: str | None,
    hf: HuggingFaceFolder,
    mask_flag: int | None,
    block_flag: int | None,
    out: Findings,
) -> Description:
    """The model's description, with the source of every fact that configs tend to lack."""
    fields = family.parse_config(FieldReader(hf.config, out))
    fields |= {"attention": family.attention, "shifts_predictions": family.shifts_predictions}
    _bound_counts(family, hf, fields, out)
    head_key, _ = family.rule_for("lm_head.kernel")
    if family.attention == "canvas":
        mask = facts_of.no_mask_token(mask_flag, out)
    else:
        mask = facts_of.mask_token(family, hf, mask_flag, fields["vocab_size"], out)
    block = facts_of.block_length(family, hf, block_flag, out)
    tied = facts_of.tied_embeddings(family, hf, head_key, out)
    field = "architectures" if hf.config.get("architectures") else "model_type"
    family_source = "--family" if family_flag else f"config.json: {field}"
    facts = {
        "family": Fact(family.name, family_source),
        "mask_token_id": mask,
        "block_length": block,
        "stop_token_ids": facts_of.stop_tokens(family, hf, fields["vocab_size"], out),
        "tokenizer_vocab_size": facts_of.tokenizer_size(hf),
        "tie_word_embeddings": tied,
    }
    known = {name: fact for name, fact in facts.items() if fact is not None}
    if all(value is not None for value in fields.values()):
        # Facts at fault already get stand-ins, so that they do not hide other faults.
        values = fields | {"mask_token_id": fields["vocab_size"] - 1, "block_length": 1}
        values |= {name: fact.value for name, fact in known.items()}
        if mask is None:
            values["stop_token_ids"] = ()
        try:
            return Description(ModelConfig(**values), known, sizes_known=True)
        except ConfigError as error:
            out.fault("config", "config.json", expected="a usable model", found=str(error), fix="")
    counts = ("num_layers", "num_experts", "num_shared_experts", "first_dense_layers")
    # The sizes of a canvas model decide which parameters there are, so without them none is known.
    unknown = any(fields[name] is None for name in counts if name in fields)
    if unknown or family.attention == "canvas":
        return Description(None, known, sizes_known=False)
    options = {name: fields[name] for name in _NAMING_FIELDS if fields.get(name) is not None}
    if options.get("num_experts"):
        options |= {"experts_per_token": 1, "expert_intermediate_size": 2}
    names_only = ModelConfig(
        family=family.name,
        num_layers=fields["num_layers"],
        **options,
        tie_word_embeddings=tied.value,
        vocab_size=2,
        hidden_size=2,
        intermediate_size=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
        block_length=2,
        mask_token_id=0,
    )
    return Description(names_only, known, sizes_known=False)


def _bound_counts(
    family: Family, hf: HuggingFaceFolder, fields: dict[str, Any], out: Findings
) -> None:
    """Notes counts beyond what the tensors can be of, before any work is done for each of them.

    Stand-ins that fit the tensors take their place in `fields`.
    """
    keys = hf.tensors.keys() | hf.unreadable
    prefixes = {rule.source.split("{n}")[0] for rule in family.keys if "{n}" in rule.source}
    pattern = re.compile(f"(?:{'|'.join(map(re.escape, sorted(prefixes)))})([0-9]{{1,9}})[.]")
    numbers = {int(match[1]) for key in keys if (match := pattern.match(key))}
    named = 1 + max(numbers, default=-1)
    if named > len(keys):  # a key may hold any number, but no layer is without tensors
        named = len(numbers)
    proves = named > 0 and not hf.has_blind_spots
    layers = named if proves else max(named, _PLAUSIBLE)
    wanted = fields["num_layers"]
    if wanted is not None and wanted > layers:
        out.fault(
            "config",
            f"config.json: {'n_layers' if 'n_layers' in hf.config else 'num_hidden_layers'}",
            expected=f"{layers} at most, as the tensors are of {named} layers",
            found=str(wanted),
            fix="Fetch the files that hold the other layers, or correct config.json.",
        )
        fields["num_layers"] = max(named, 1)
    experts = max(len(keys), _PLAUSIBLE)  # one tensor may hold the experts of a layer
    if (fields.get("num_experts") or 0) > experts:
        out.fault(
            "config",
            "config.json: num_experts",
            expected=f"{experts} at most, as there are {len(keys)} tensors",
            found=str(fields["num_experts"]),
            fix="Correct config.json.",
        )
        fields["num_experts"] = None


def plan(family: Family, description: Description, hf: HuggingFaceFolder, out: Findings) -> Plan:
    """Pairs parameters with tensors; notes missing, unexpected and unusable ones."""
    config = description.config
    if config is None:
        return Plan([], [], [])
    planned: list[Planned] = []
    lines: dict[KeyRule, KeyLine] = {}
    examined: set[str] = set()
    head_key, _ = family.rule_for("lm_head.kernel")
    for target, leaf in dotted_leaves(abstract_params(config)).items():
        source, rule = _choose(family.rules_for(target), hf)
        is_stack = "{e}" in rule.source
        shape = leaf.shape[1:] if is_stack else leaf.shape
        if rule.transform == "transpose":
            shape = (*shape[:-2], *shape[:-3:-1])
        span = rule.rows(config) if rule.rows is not None else None
        axis = max(len(shape) - 2, 0)
        whole = shape if span is None else (*shape[:axis], span[2], *shape[axis + 1 :])
        keys = _keys_of(source, leaf.shape[0] if is_stack else None)
        for key in keys:
            if key in examined:
                continue  # a fused tensor, met before
            examined.add(key)
            wanted = whole if description.sizes_known else None
            if key in hf.tensors:
                _check_tensor(hf.tensors[key], wanted, out)
            elif key != head_key and key not in hf.unreadable and not hf.has_blind_spots:
                out.fault(
                    "missing",
                    key,
                    expected=f"a tensor of shape {list(wanted)}" if wanted else "a tensor",
                    found="none",
                    fix="Fetch the file that holds it, or correct config.json.",
                )
        line = lines.get(rule)
        if line is None:
            known = leaf.shape if description.sizes_known else None
            line = KeyLine(rule.source, rule.target, _transform_of(rule, span), known)
            lines[rule] = line
        entries = [hf.tensors[key] for key in keys if key in hf.tensors]
        line.parameters += 1
        line.wanted += len(keys)
        line.found += len(entries)
        if len(entries) == len(keys):
            if span is not None and entries[0].shape == whole:
                is_stack = len(whole) == 3  # rows of every expert's matrix are put together
                matrices = entries[0].matrices() if is_stack else entries
                entries = [matrix.rows(span[0], span[1]) for matrix in matrices]
            wide = leaf.dtype == jnp.float32
            transpose = rule.transform == "transpose"
            planned.append(Planned(tuple(entries), target, transpose, is_stack, leaf.shape, wide))
    ignored = [key for key in hf.tensors if family.ignores(key)]
    left_out: set[str] = set()
    for pattern, reason in family.left_out.items():
        keys = {key for key in hf.tensors if re.fullmatch(pattern, key)}
        left_out |= keys
        if keys:
            out.remark(f"{len(keys)} tensors like {min(keys)} are left out: {reason}.")
    if config.tie_word_embeddings and head_key in hf.tensors:
        _compare_tied(family, hf, out)
        ignored.append(head_key)
    for key in sorted(set(hf.tensors) - examined - left_out - set(ignored)):
        out.fault(
            "unexpected",
            key,
            expected=f"only tensors of the key table of {family.name}",
            found=f"a tensor {hf.tensors[key].dtype_name} {list(hf.tensors[key].shape)}",
            fix="Use the release that fits config.json, or --family; nothing is dropped unseen.",
        )
    return Plan(planned, sorted(ignored), list(lines.values()))


def _keys_of(source: str, count: int | None) -> list[str]:
    """The key, or those of all experts."""
    return [source] if count is None else [source.replace("{e}", str(e)) for e in range(count)]


def _choose(rules: list[tuple[str, KeyRule]], hf: HuggingFaceFolder) -> tuple[str, KeyRule]:
    """The first rule whose tensors are there (of stacked ones, the first); else the first."""
    for source, rule in rules:
        if _keys_of(source, 1 if "{e}" in source else None)[0] in hf.tensors:
            return source, rule
    return rules[0]


def _transform_of(rule: KeyRule, span: tuple[int, int, int] | None) -> str:
    steps = [f"rows {span[0]} to {span[1]} of {span[2]}"] if span is not None else []
    steps += ["transposed"] if rule.transform == "transpose" else []
    steps += ["stacked over {e}"] if "{e}" in rule.source else []
    return ", ".join(steps) or "as it is"


def _check_tensor(entry: TensorEntry, wanted: tuple[int, ...] | None, out: Findings) -> None:
    if wanted is not None and entry.shape != wanted:
        turned = len(wanted) == 2 and entry.shape == wanted[::-1]
        hint = "It looks transposed. " if turned else ""
        out.fault(
            "shape",
            f"{entry.key} in {entry.path.name}",
            expected=f"{list(wanted)} by config.json",
            found=f"{list(entry.shape)}",
            fix=f"{hint}Correct the sizes in config.json (a padded vocabulary counts in "
            "vocab_size), or fetch the release that fits.",
        )
    if entry.dtype is None:
        out.fault(
            "dtype",
            f"{entry.key} in {entry.path.name}",
            expected="BF16, F16 or F32",
            found=entry.dtype_name,
            fix="Convert the bf16 or fp32 release; quantised weights are not supported.",
        )


def _compare_tied(family: Family, hf: HuggingFaceFolder, out: Findings) -> None:
    """Notes a fault unless the LM head of a tied checkpoint equals its embedding table."""
    keys = [family.rule_for(name)[0] for name in ("lm_head.kernel", "embed_tokens.embedding")]
    head, table = (hf.tensors.get(key) for key in keys)
    if head is None or table is None or head.dtype is None or table.dtype is None:
        return
    files = {file.path: file for file in hf.files}
    if head.path not in files or table.path not in files:
        return  # in a file that is cut short, which is noted already
    with FileStream(files[head.path]) as one, FileStream(files[table.path]) as other:
        same = (head.shape, head.dtype) == (table.shape, table.dtype) and all(
            np.array_equal(a, b)
            for (_, a), (_, b) in zip(one.parts(head), other.parts(table), strict=True)
        )
    if not same:
        out.fault(
            "tied",
            head.key,
            expected=f"equal to {table.key}, because tie_word_embeddings is true",
            found=f"other values ({head.dtype_name} {list(head.shape)})",
            fix="Set tie_word_embeddings to false if the checkpoint was trained untied.",
        )
