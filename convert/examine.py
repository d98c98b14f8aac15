"""The examination of a checkpoint before anything is written, and its report for `--dry-run`.

Only JSON files and the headers of safetensors files are read (and, of a tied checkpoint that
stores its head, the two tables that have to be equal), so the size of a checkpoint hardly matters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from convert.check import require_reference
from convert.families import Family, families
from convert.plan import Description, KeyLine, Plan, describe, find_family, plan, refuse_quantised
from convert.reader import HuggingFaceFolder, find_source
from convert.report import Findings
from herald_jax._checks import require_one_of
from herald_jax.checkpoint import CheckpointError, check_target, leftovers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What a checkpoint is, what would be written, and all that is wrong with it.

    Attributes:
        source: What was examined, as given.
        commit: The commit, if it was fetched from a hub.
        hf: The folder.
        family: The family, or `None` after a fault that says so.
        description: The model and where its facts come from.
        plan: What would be written, with the key map.
        findings: Faults and remarks.
    """

    source: str
    commit: str | None
    hf: HuggingFaceFolder
    family: Family | None
    description: Description
    plan: Plan
    findings: Findings

    @property
    def parameters(self) -> int:
        """Numbers that would be written."""
        sizes = (part.shape for item in self.plan.planned for part in item.parts)
        total = 0
        for shape in sizes:
            count = 1
            for length in shape:
                count *= length
            total += count
        return total

    def summary(self) -> str:
        """The key map, the facts and all faults, for people."""
        name = self.family.name if self.family else "unknown family"
        tensors, files = len(self.hf.tensors), len(self.hf.files)
        lines = [
            f"{self.source} ({name}): {tensors} tensors in {files} files; nothing is written",
            *(f"  {name}: {fact}" for name, fact in self.description.facts.items()),
            f"  parameters to write: {len(self.plan.planned)}, {self.parameters:,} numbers",
            "  key map:",
            *(f"    {_spelled(line)}" for line in self.plan.key_map),
            *(f"  left out, nothing learned in it: {key}" for key in self.plan.ignored),
            *(f"  note: {remark}" for remark in self.findings.remarks),
        ]
        faults = self.findings.faults
        lines.append(f"  faults: {len(faults) or 'none'}")
        lines += [f"    {number}. {fault}" for number, fault in enumerate(faults[:_SHOWN], 1)]
        if len(faults) > _SHOWN:
            lines.append(f"    ... and {len(faults) - _SHOWN} more.")
        return "\n".join(lines)


_SHOWN = 50


def examine(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    family: str | None = None,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    force: bool = False,
    check: bool = False,
) -> Examination:
    """Examines a checkpoint; faults are noted in the result and not raised.

    Args:
        src: A folder with `config.json`, safetensors and tokenizer files, or a hub id.
        dst: The folder to write, examined as well if given.
        family: Name of the key table to use, if the config does not tell.
        mask_token_id: Mask id; beats what the files say.
        block_length: Block length; beats what the config says.
        force: A checkpoint at `dst` may be replaced.
        check: Logits are to be compared with the torch reference.

    Raises:
        ConversionError: If there is no such source.
        ConfigError: If an argument has a value that is not allowed.
    """
    if family is not None:
        require_one_of("family", family, families())
    folder, commit = find_source(src)
    findings = Findings(str(src))
    if dst is not None:
        _check_target(folder, Path(dst), force, findings)
    hf = HuggingFaceFolder(folder, findings)
    chosen = families()[family] if family else find_family(hf, findings)
    refuse_quantised(hf, findings)
    description, planned = Description(None, {}, sizes_known=False), Plan([], [], [])
    if chosen is not None:
        if check:
            require_reference(chosen, findings)
        description = describe(chosen, family, hf, mask_token_id, block_length, findings)
        planned = plan(chosen, description, hf, findings)
    return Examination(
        source=str(src),
        commit=commit,
        hf=hf,
        family=chosen,
        description=description,
        plan=planned,
        findings=findings,
    )


def _spelled(line: KeyLine) -> str:
    shape = f" {list(line.shape)}" if line.shape is not None else ""
    count = f"{line.found} of {line.wanted}" if line.found != line.wanted else f"{line.wanted}"
    return (
        f"{line.source} -> {line.target}{shape} ({line.transform}); "
        f"{count} tensors for {line.parameters} parameters"
    )


def _check_target(folder: Path, dst: Path, force: bool, out: Findings) -> None:
    found = None
    here, there = folder.resolve(), dst.resolve()
    if here == there or here in there.parents or there in here.parents:
        found = "the source folder, or one inside or around it"
    else:
        try:
            check_target(dst, force)
        except CheckpointError as error:
            found = str(error)
    if found:
        out.fault("target", str(dst), expected="a free target", found=found, fix="")
    for path in leftovers(dst):
        out.remark(f"{path} was left by an interrupted write.")
