"""`docs/add-a-family.md`, followed to the letter."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import convert_checkpoint
from convert.examine import examine
from herald_jax.checkpoint import load_params
from herald_jax.cli import main

GUIDE = Path(__file__).parents[2] / "docs" / "add-a-family.md"


def block(language: str, number: int = 0) -> str:
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)[number]


@pytest.fixture
def example_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file of step 3, where the registry looks for families."""
    import convert.families

    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "example.py").write_text(block("python"), encoding="utf-8")
    path = [*convert.families.__path__, str(tmp_path / "families")]
    monkeypatch.setattr(convert.families, "__path__", path)
    yield
    sys.modules.pop("convert.families.example", None)
    vars(convert.families).pop("example", None)


def test_one_file_is_a_family(
    example_family: None,
    make_source: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = make_source(architectures=["ExampleForCausalLM"], model_type="example")
    folder = source.write()
    assert not examine(folder, mask_token_id=60).findings.faults
    report = convert_checkpoint(folder, tmp_path / "dst", mask_token_id=60, progress=False)
    assert report.config.family == "example"
    kernel = load_params(tmp_path / "dst")["layers"][1]["mlp"]["up_proj"]["kernel"]
    wanted = source.tensors["model.layers.1.mlp.up_proj.weight"].T
    np.testing.assert_array_equal(np.asarray(kernel), wanted)
    assert main(["models"]) == 0
    assert "example (checked on random weights)" in capsys.readouterr().out
    other = make_source(
        architectures=["ExampleForCausalLM"], model_type="example", use_sinks=True, name="other"
    )
    (fault,) = examine(other.write(), mask_token_id=60).findings.faults
    assert fault.where == "config.json: use_sinks"


def test_our_parameters_are_listed(run_python: Callable[..., str]) -> None:
    code = re.search(r"<<'PY'\n(.*?)\nPY", block("bash"), flags=re.DOTALL)
    assert code is not None
    out = run_python(code[1])
    assert "layers.0.mlp.experts.up_proj (4, 6, 3) bfloat16" in out
    assert "layers.0.mlp.router.kernel (6, 4) float32" in out


def test_names_in_the_guide_exist() -> None:
    from herald_jax.configs import ModelConfig

    text = GUIDE.read_text(encoding="utf-8")
    table = text.split("| Option | Fields |")[1].split("\n\n")[0]
    fields = re.findall(r"`(\w+)`", table)
    assert len(fields) > 12 and set(fields) <= set(ModelConfig.__dataclass_fields__)
    for path in re.findall(r"`((?:convert|tests|herald_jax)/[\w/]+\.py)`", text):
        if "NAME" not in path:
            assert (GUIDE.parents[1] / path).is_file(), path
