"""The pipeline: examine everything, report all faults at once, then stream tensor by tensor."""

from __future__ import annotations

import contextlib
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

from convert.check import CheckResult, compare_logits
from convert.examine import examine
from convert.facts import Fact
from convert.plan import Planned
from convert.reader import HuggingFaceFolder
from convert.report import ConversionError, Fault
from convert.safetensors_file import FileStream
from herald_jax._checks import require_one_of
from herald_jax.checkpoint import CheckpointError, CheckpointWriter
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
    there stays as it was until then. At most a pack of small tensors and one large tensor (or
    the stack of one projection of one layer's experts) are held in memory.

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
    found = examine(
        src,
        dst,
        family=family,
        mask_token_id=mask_token_id,
        block_length=block_length,
        force=force,
        check=check,
    )
    findings, hf, chosen = found.findings, found.hf, found.family
    findings.raise_if_any()
    assert chosen is not None, "an unknown family is a fault"
    config, facts = found.description.config, found.description.facts
    planned, ignored = found.plan.planned, found.plan.ignored
    assert config is not None, "an unusable config is a fault"
    try:
        with CheckpointWriter(dst, config, force=force) as writer:
            digests = _stream(hf, planned, writer, jnp.dtype(dtype), progress)
            for path in hf.tokenizer_files():
                writer.add_file(path.name, path)
            record = {
                "source": {"given": str(src), "commit": found.commit, "files": digests},
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


def _stream(
    hf: HuggingFaceFolder,
    planned: list[Planned],
    writer: CheckpointWriter,
    dtype: np.dtype[Any],
    progress: bool,
) -> dict[str, dict[str, Any]]:
    """Writes all parameters in the order of the files and returns the files' digests.

    A stack is gathered whole when its first tensor comes by, from whatever files its tensors
    are in, so that one stack at a time is held however the shards were cut. Its tensors are
    read a second time for the digests of their files; by then they mostly are in the page cache.
    """
    single: dict[str, list[Planned]] = {}
    stacks: dict[str, list[Planned]] = {}
    for item in sorted(planned, key=lambda item: item.parts[0].begin):
        if item.is_stack:
            for key in {part.key for part in item.parts}:
                stacks.setdefault(key, []).append(item)
        else:
            single.setdefault(item.parts[0].key, []).append(item)
    written: set[str] = set()
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
                    for stack in stacks.get(entry.key, ()):  # several if fused
                        if stack.target in written:
                            continue
                        array = _read_stack(hf, stack, _dtype_of(stack, dtype))
                        writer.write(stack.target, array)
                        written.add(stack.target)
                        del array
                    items = single.get(entry.key, ())
                    for item in items:  # several if the tensor is fused, in the order of rows
                        array = stream.read(
                            item.parts[0], _dtype_of(item, dtype), transpose=item.transpose
                        )
                        writer.write(item.target, array)
                        del array  # the next tensor is read before the name is bound anew
                    if not items:
                        stream.skip(entry)
                    bar.update(entry.nbytes)
                digests[file.path.name] = {"bytes": file.nbytes, "sha256": stream.sha256}
    return digests


def _dtype_of(item: Planned, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if item.is_wide else dtype


def _read_stack(hf: HuggingFaceFolder, item: Planned, dtype: np.dtype[Any]) -> np.ndarray:
    """One parameter that is stacked from the tensors of all experts."""
    files = {file.path: file for file in hf.files}
    out = np.empty(item.shape, dtype)
    with contextlib.ExitStack() as opened:
        streams: dict[Path, FileStream] = {}
        for index, part in enumerate(item.parts):
            stream = streams.get(part.path)
            if stream is None:
                stream = opened.enter_context(FileStream(files[part.path], digest=False))
                streams[part.path] = stream
            stream.read(part, dtype, transpose=item.transpose, out=out[index])
    return out


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
