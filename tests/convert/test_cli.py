"""The command line: exit codes, streams, hub ids."""

import subprocess
import sys

import pytest

from convert import ConversionError, convert_checkpoint
from convert.__main__ import main
from convert.families import detect, families
from herald_jax.checkpoint import dotted_leaves
from herald_jax.configs import ModelConfig
from herald_jax.models import abstract_params


@pytest.fixture(autouse=True)
def keep_signal_handlers(monkeypatch):
    monkeypatch.setattr("convert.__main__.signal.signal", lambda *args: None)


def test_converted(make_source, tmp_path, capsys):
    assert main([str(make_source().write()), str(tmp_path / "dst")]) == 0
    out, err = capsys.readouterr()
    assert "mask_token_id: 60 (from tokenizer.json: mask token)" in out
    assert "25 tensors" in out
    assert "model.safetensors" in err  # the progress bar
    assert "%" not in out


def test_quiet(make_source, tmp_path, capsys):
    assert main([str(make_source().write()), str(tmp_path / "dst"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_faults(make_source, tmp_path, capsys):
    source = make_source(block_size=..., rope_theta=...).write()
    assert main([str(source), str(tmp_path / "dst")]) == 1
    out, err = capsys.readouterr()
    assert not out and "2 faults" in err and "rope_theta" in err and "--block-length" in err
    assert not (tmp_path / "dst").exists()
    flags = ["--block-length", "8", "--mask-token-id", "61", "--dtype", "float32"]
    assert main([str(source), str(tmp_path / "dst"), *flags]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["only-one"],
        ["a", "b", "--dtype", "int8"],
        ["a", "b", "--family", "gpt"],
        ["a", "b", "c"],
    ],
)
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: herald-convert" in capsys.readouterr().err


def test_as_a_module(make_source, tmp_path):
    source = make_source().write()
    command = [sys.executable, "-m", "convert", str(source), str(tmp_path / "dst")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sdar" in done.stdout
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "--force" in done.stderr


def test_hub_id_without_network(tmp_path, monkeypatch):
    """The name, the reason and the way out are in one message."""
    hub = pytest.importorskip("huggingface_hub")

    def refuse(*args, **kwargs):
        raise ConnectionError("Name or service not known\nand more lines")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(ConversionError) as caught:
        convert_checkpoint("some-org/some-model", tmp_path / "dst", progress=False)
    (fault,) = caught.value.faults
    assert fault.kind == "source" and fault.where == "some-org/some-model"
    assert fault.found == "ConnectionError: Name or service not known"
    assert "network" in fault.fix


def test_hub_id_without_the_client(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConversionError, match=r"herald_jax\[convert\]"):
        convert_checkpoint("some-org/some-model", tmp_path / "dst", progress=False)


def test_hub_id_that_is_fetched(make_source, tmp_path, monkeypatch):
    """The fetched commit is recorded; pickles and code are not even asked for."""
    hub = pytest.importorskip("huggingface_hub")
    source = make_source(name="0123abcd").write()
    asked = {}

    def fetch(name, *, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(source)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    convert_checkpoint("some-org/some-model", tmp_path / "dst", progress=False)
    assert asked["name"] == "some-org/some-model"
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked["patterns"])
    assert '"commit": "0123abcd"' in (tmp_path / "dst" / "conversion.json").read_text()


@pytest.mark.parametrize("name", ["/no/such/folder", "just-a-name", "a/b/c"])
def test_no_such_source(tmp_path, name):
    with pytest.raises(ConversionError, match="no such folder"):
        convert_checkpoint(name, tmp_path / "dst", progress=False)


def test_families():
    assert families()["sdar"].name == "sdar"
    assert detect(["SDARForCausalLM"], "llama") is families()["sdar"]
    assert detect(["LlamaForCausalLM"], "sdar") is None
    assert detect([], "sdar") is families()["sdar"]
    assert detect([], "qwen3") is None


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        ((28, 2048, 16, 8, 6144), 4_063_479_808),
        ((36, 2560, 32, 8, 9728), 8_822_848_512),
        ((36, 4096, 32, 8, 12288), 16_381_470_720),
    ],
)
def test_bytes_of_the_published_models(sizes, total):
    """The tables and the decoder together give the published sizes to the byte."""
    layers, hidden, heads, kv_heads, inner = sizes
    config = ModelConfig(
        family="sdar",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        block_length=4,
        mask_token_id=151669,
    )
    leaves = dotted_leaves(abstract_params(config))
    sources = {families()["sdar"].rule_for(target)[0] for target in leaves}
    assert len(sources) == len(leaves)
    assert sum(2 * leaf.size for leaf in leaves.values()) == total
