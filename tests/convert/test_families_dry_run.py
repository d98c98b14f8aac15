"""`--dry-run`: the key map and what would be missing, from headers alone, at any size."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from convert.__main__ import main
from convert.examine import examine
from convert.families import families
from herald_jax.checkpoint import dotted_leaves
from herald_jax.models import abstract_params
from tests.convert.family_folders import Golden
from tests.convert.test_families_config import FULL_SIZE, config_of


@pytest.fixture(autouse=True)
def keep_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.__main__.signal.signal", lambda *args: None)


def write_header_only(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A bf16 file whose tensors are holes: full size, no bytes on disk."""
    header, end = {}, 0
    for key, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return end


def published_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The published tensors at full size, by the key table read backwards."""
    family_name, published, _ = FULL_SIZE[name]
    family = families()[family_name]
    config = config_of(family, published)
    shapes: dict[str, tuple[int, ...]] = {}
    for target, leaf in dotted_leaves(abstract_params(config)).items():
        source, rule = family.rule_for(target)
        shape = leaf.shape[1:] if "{e}" in source else leaf.shape
        shape = shape[::-1] if rule.transform == "transpose" else shape
        if rule.rows is not None:
            shape = (rule.rows(config)[2], *shape[1:])
        for e in range(config.num_experts if "{e}" in source else 1):
            shapes[source.replace("{e}", str(e))] = shape
    return shapes


@pytest.mark.parametrize(("name", "tensors"), [("SDAR-30B-A3B", 18_867), ("LLaDA2-flash", 24_161)])
def test_full_size_from_headers_alone(
    name: str, tensors: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, published, count = FULL_SIZE[name]
    shapes = published_shapes(name)
    keys = list(shapes)
    total = 0
    for number in range(8):
        begin, end = number * len(keys) // 8, (number + 1) * len(keys) // 8
        kept = {key: shapes[key] for key in keys[begin:end]}
        total += write_header_only(tmp_path / f"model-{number + 1:05d}-of-00008.safetensors", kept)
    assert total == 2 * count
    architecture = families()[family].architectures[0]
    config = {**published, "architectures": [architecture], "block_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    started = time.perf_counter()
    assert main([str(tmp_path), "--dry-run"]) == 0
    assert time.perf_counter() - started < 60
    out = capsys.readouterr().out
    assert f"{tensors} tensors in 8 files; nothing is written" in out
    assert f"{count:,} numbers" in out and "faults: none" in out
    assert "mlp.experts.{e}.down_proj.weight -> layers.{n}.mlp.experts.down_proj" in out
    assert len(out.splitlines()) < 60


def test_llada_at_full_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head and the MLPs' last projections share a name; all 32 of these are found."""
    _, published, count = FULL_SIZE["LLaDA-8B"]
    write_header_only(tmp_path / "model.safetensors", published_shapes("LLaDA-8B"))
    config = {**published, "architectures": ["LLaDAModelLM"], "mask_token_id": 126336}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([str(tmp_path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"{count:,} numbers" in out and "291 tensors in 1 files" in out
    head = (
        "model.transformer.ff_out.weight -> lm_head.kernel [4096, 126464] (transposed); 1 tensors"
    )
    assert head in out
    down = "model.transformer.blocks.{n}.ff_out.weight -> layers.{n}.mlp.down_proj.kernel"
    assert f"{down} [12288, 4096] (transposed); 32 tensors for 32 parameters" in out
    assert "block_length: 32 (from family table: llada)" in out


def test_what_would_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = Golden("llada2")
    del golden.tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    golden.tensors["model.extra"] = np.ones(3, np.float32)
    source = golden.write(tmp_path / "src")
    assert main([str(source), str(tmp_path / "dst"), "--dry-run"]) == 1
    out = capsys.readouterr().out
    assert (
        "model.layers.{n}.mlp.experts.{e}.up_proj.weight -> layers.{n}.mlp.experts.up_proj "
        "[12, 20, 9] (transposed, stacked over {e}); 23 of 24 tensors for 2 parameters"
    ) in out
    assert (
        "model.layers.{n}.attention.query_key_value.weight -> layers.{n}.attention.k_proj.kernel "
        "[20, 16] (rows 48 to 64 of 80, transposed); 3 tensors for 3 parameters"
    ) in out
    assert "faults: 2" in out and "[unexpected] model.extra" in out
    assert "[missing] model.layers.1.mlp.experts.3.up_proj.weight" in out
    assert not (tmp_path / "dst").exists()


def test_quiet_and_an_unknown_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Golden("sdar_moe").write(tmp_path / "src")
    assert main([str(source), "--dry-run", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    other = Golden("sdar_moe").write(tmp_path / "other", architectures=["NoSuchModel"])
    assert main([str(other), "--dry-run"]) == 1
    assert "unknown family" in capsys.readouterr().out


def test_numbers_add_up(tmp_path: Path) -> None:
    golden = Golden("llada2")
    found = examine(golden.write(tmp_path / "src"))
    assert found.parameters == sum(array.size for array in golden.tensors.values())
