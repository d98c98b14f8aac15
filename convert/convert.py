"""The pipeline: examine everything, report all faults at once, then stream tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from convert.check import CheckResult, compare_logits, require_reference
from convert.facts import Fact
from convert.families import families
from convert.plan import Planned, describe, find_family, plan, refuse_quantised
from convert.reader import HuggingFaceFolder, find_source
from convert.report import ConversionError, Fault, Findings
from convert.safetensors_file import FileStream
from herald_jax._checks import require_one_of
from herald_jax.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    check_target,
    leftovers,
)
from herald_jax.configs import ModelConfig

_PACKAGES = ("herald-jax", "jax", "flax", "orbax-checkpoint", "numpy", "ml_dtypes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What was read and written.

    Attributes:
        config: Description of the converted model.
        source: What was converted, as given.
        target: The checkpoint folder.
        dtype: Dtype of the parameters.
        facts: Values that a config may lack, each with its source.
        tensors: Parameters written.
        bytes_read: Bytes of the safetensors files.
        bytes_written: Bytes of the written packs.
        seconds: Duration.
        ignored: Keys left out because nothing in them is learned.
        remarks: What the user should know.
        check: Comparison with the reference, if it was asked for.
    """

    config: ModelConfig
    source: str
    target: Path
    dtype: str
    facts: dict[str, Fact]
    tensors: int
    bytes_read: int
    bytes_written: int
    seconds: float
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    check: CheckResult | None = None

    def summary(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.source} -> {self.target} ({self.config.family}, {self.dtype})",
            f"  {self.tensors} tensors, {self.bytes_read:,} bytes read, "
            f"{self.bytes_written:,} written in {self.seconds:.1f} s",
            *(f"  {name}: {fact}" for name, fact in self.facts.items()),
        ]
        if self.ignored:
            lines.append(f"  left out, nothing learned in them: {', '.join(self.ignored)}")
        if self.check is not None:
            lines.append(f"  {self.check}")
        lines += [f"  note: {remark}" for remark in self.remarks]
        return "\n".join(lines)


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    family: str | None = None,
    dtype: str = "bfloat16",
    mask_token_id: int | None = None,
    block_length: int | None = None,
    force: bool = False,
    check: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Converts a Hugging Face checkpoint and returns what was read and written.

    The write is atomic: `dst` appears once everything is complete, and an older checkpoint
    there stays as it was until then. At most a pack of small tensors and one large tensor are
    held in memory.

    Args:
        src: A folder with `config.json`, safetensors and tokenizer files, or a hub id.
        dst: The folder to write.
        family: Name of the key table to use, if the config does not tell.
        dtype: `bfloat16` or `float32`.
        mask_token_id: Mask id; beats what the files say.
        block_length: Block length; beats what the config says.
        force: Replace a checkpoint at `dst`.
        check: Compare logits with the torch reference before the result appears.
        progress: Show a progress bar on stderr.

    Raises:
        ConversionError: With all faults found; nothing was written.
        ConfigError: If an argument has a value that is not allowed.
    """
    started = time.perf_counter()
    require_one_of("dtype", dtype, ("bfloat16", "float32"))
    if family is not None:
        require_one_of("family", family, families())
    folder, commit = find_source(src)
    findings = Findings(str(src))
    _check_target(folder, Path(dst), force, findings)
    hf = HuggingFaceFolder(folder, findings)
    chosen = families()[family] if family else find_family(hf, findings)
    refuse_quantised(hf, findings)
    if chosen is None:
        findings.raise_if_any()
        raise AssertionError("an unknown family is a fault")
    if check:
        require_reference(chosen, findings)
    description = describe(chosen, family, hf, mask_token_id, block_length, findings)
    config, facts = description.config, description.facts
    planned, ignored = plan(chosen, description, hf, findings)
    findings.raise_if_any()
    assert config is not None, "an unusable config is a fault"
    try:
        with CheckpointWriter(dst, config, force=force) as writer:
            digests = _stream(hf, planned, writer, jnp.dtype(dtype), progress)
            for path in hf.tokenizer_files():
                writer.add_file(path.name, path)
            record = {
                "source": {"given": str(src), "commit": commit, "files": digests},
                "family": chosen.name,
                "dtype": dtype,
                "facts": {name: dataclasses.asdict(fact) for name, fact in facts.items()},
                "ignored_keys": ignored,
                "remarks": findings.remarks,
                "versions": _versions(),
            }
            writer.add_file("conversion.json", json.dumps(record, indent=2) + "\n")
            result = compare_logits(chosen, hf, config, writer.seal(), dtype) if check else None
            if result is not None and not result.agrees:
                findings.fault(
                    "check",
                    "logits",
                    expected=f"equal up to {result.tolerance:.1e}",
                    found=str(result),
                    fix="Report this with the name of the checkpoint.",
                )
                findings.raise_if_any()
    except CheckpointError as error:  # the target appeared while the tensors were streamed
        fault = Fault("target", str(dst), "a free target", str(error), "Convert again.")
        raise ConversionError([fault], str(src)) from error
    return ConversionReport(
        config=config,
        source=str(src),
        target=Path(dst),
        dtype=dtype,
        facts=facts,
        tensors=len(planned),
        bytes_read=sum(file.nbytes for file in hf.files),
        bytes_written=writer.bytes_written,
        seconds=time.perf_counter() - started,
        ignored=tuple(ignored),
        remarks=tuple(findings.remarks),
        check=result,
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


def _stream(
    hf: HuggingFaceFolder,
    planned: list[Planned],
    writer: CheckpointWriter,
    dtype: np.dtype[Any],
    progress: bool,
) -> dict[str, dict[str, Any]]:
    """Writes all parameters in the order of the files and returns the files' digests."""
    by_key = {item.entry.key: item for item in planned}
    digests: dict[str, dict[str, Any]] = {}
    total = sum(file.nbytes for file in hf.files)
    with tqdm(
        total=total, unit="B", unit_scale=True, disable=not progress, file=sys.stderr, leave=False
    ) as bar:
        for file in hf.files:
            bar.set_description(file.path.name)
            bar.update(file.data_begin)
            with FileStream(file) as stream:
                for entry in file.tensors:
                    item = by_key.get(entry.key)
                    if item is None:
                        stream.skip(entry)
                    else:
                        array = stream.read(entry, dtype, transpose=item.transpose)
                        writer.write(item.target, array)
                        del array  # the next tensor is read before the name is bound anew
                    bar.update(entry.nbytes)
                digests[file.path.name] = {"bytes": file.nbytes, "sha256": stream.sha256}
    return digests


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
