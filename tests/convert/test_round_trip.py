"""What a good checkpoint becomes."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert import convert_checkpoint
from herald_jax.checkpoint import load_config, load_params


def quiet(src, dst, **options):
    return convert_checkpoint(src, dst, progress=False, **options)


def expected(tensors, layers):
    """Our tree, written out by hand instead of by the table under test."""
    tree = {
        "embed_tokens": {"embedding": tensors["model.embed_tokens.weight"]},
        "norm": {"scale": tensors["model.norm.weight"]},
        "layers": {},
    }
    if "lm_head.weight" in tensors:
        tree["lm_head"] = {"kernel": tensors["lm_head.weight"].T}
    for n in range(layers):
        own = {
            k.removeprefix(f"model.layers.{n}."): v
            for k, v in tensors.items()
            if k.startswith(f"model.layers.{n}.")
        }
        attention = {f"{p}_proj": {"kernel": own[f"self_attn.{p}_proj.weight"].T} for p in "qkvo"}
        for p in "qkv":
            if f"self_attn.{p}_proj.bias" in own:
                attention[f"{p}_proj"]["bias"] = own[f"self_attn.{p}_proj.bias"]
        for p in "qk":
            attention[f"{p}_norm"] = {"scale": own[f"self_attn.{p}_norm.weight"]}
        tree["layers"][n] = {
            "input_layernorm": {"scale": own["input_layernorm.weight"]},
            "post_attention_layernorm": {"scale": own["post_attention_layernorm.weight"]},
            "attention": attention,
            "mlp": {
                f"{p}_proj": {"kernel": own[f"mlp.{p}_proj.weight"].T}
                for p in ("gate", "up", "down")
            },
        }
    return tree


def same_bits(found, wanted, path=""):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted) or set(found) == set(wanted), path
        for key, value in wanted.items():
            same_bits(found[key], value, f"{path}.{key}")
        return
    array = np.asarray(found)
    assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), path
    assert array.tobytes() == np.ascontiguousarray(wanted).tobytes(), path


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (np.float32, "bfloat16"),
        (ml_dtypes.bfloat16, "float32"),
        (np.float16, "float32"),
    ],
)
def test_tensors_are_bit_exact(make_source, tmp_path, stored, asked):
    """Equal dtypes copy bits; others round to nearest even as NumPy does."""
    source = make_source(dtype=stored)
    quiet(source.write(), tmp_path / "dst", dtype=asked)
    wanted = {k: v.astype(jnp.dtype(asked)) for k, v in source.tensors.items()}
    same_bits(load_params(tmp_path / "dst"), expected(wanted, 2))


def test_more_than_ten_layers_in_shards(make_source, tmp_path):
    """As strings, layer 10 would come before layer 2."""
    source = make_source(num_hidden_layers=12, shards=5)
    report = quiet(source.write(), tmp_path / "dst")
    params = load_params(tmp_path / "dst")
    assert list(params["layers"]) == list(range(12))
    same_bits(params, expected(source.tensors, 12))
    assert report.tensors == len(source.tensors)
    assert report.bytes_read == sum(p.stat().st_size for p in source.folder.glob("*.safetensors"))


def test_shards_without_index(make_source, tmp_path):
    source = make_source(shards=2)
    (source.write() / "model.safetensors.index.json").unlink()
    quiet(source.folder, tmp_path / "dst")
    same_bits(load_params(tmp_path / "dst"), expected(source.tensors, 2))


def test_attention_biases(make_source, tmp_path):
    source = make_source(attention_bias=True)
    report = quiet(source.write(), tmp_path / "dst")
    assert report.config.qkv_bias
    same_bits(load_params(tmp_path / "dst"), expected(source.tensors, 2))


def test_config_says_what_the_published_one_says(make_source, tmp_path):
    quiet(make_source().write(), tmp_path / "dst")
    config = load_config(tmp_path / "dst")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (64, 24, 36)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 10)
    assert (config.rope_theta, config.rms_norm_eps) == (12345.0, 3e-5)
    assert (config.num_layers, config.max_position_embeddings) == (2, 512)
    assert (config.qk_norm, config.qkv_bias, config.tie_word_embeddings) == (True, False, False)
    assert (config.block_length, config.mask_token_id) == (4, 60)
    assert config.stop_token_ids == (56, 57)


def test_padded_vocabulary_is_recorded(make_source, tmp_path):
    """The table is padded beyond the tokenizer: the config tells where real tokens end.

    Kind of fault: padded rows clash in shape, or are chosen as tokens.
    """
    report = quiet(make_source().write(), tmp_path / "dst")
    assert (report.config.vocab_size, report.config.tokenizer_vocab_size) == (64, 61)
    params = load_params(tmp_path / "dst")
    assert params["embed_tokens"]["embedding"].shape == (64, 24)
    record = json.loads((tmp_path / "dst" / "conversion.json").read_text())
    assert record["facts"]["tokenizer_vocab_size"] == {
        "value": 61,
        "source": "tokenizer.json: highest id + 1",
        "overrides": None,
    }


def test_small_files_and_digests(make_source, tmp_path):
    """Tokenizer files are copied byte for byte; digests are those of the whole files."""
    import hashlib

    source = make_source(shards=2, tie_word_embeddings=True)
    source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"]
    source.tensors["model.rotary_emb.inv_freq"] = np.ones(5, np.float32)
    report = quiet(source.write(), tmp_path / "dst")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "dst" / name).read_bytes() == (source.folder / name).read_bytes()
    record = json.loads((tmp_path / "dst" / "conversion.json").read_text())
    for path in source.folder.glob("*.safetensors"):
        entry = record["source"]["files"][path.name]
        assert entry["bytes"] == path.stat().st_size
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert record["ignored_keys"] == ["lm_head.weight", "model.rotary_emb.inv_freq"]
    assert report.ignored == ("lm_head.weight", "model.rotary_emb.inv_freq")
    assert record["versions"]["jax"]


def test_large_tensors_are_read_in_pieces(make_source, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.safetensors_file.READ_BYTES", 100)
    source = make_source(dtype=np.float32)
    quiet(source.write(), tmp_path / "dst", dtype="float32")
    same_bits(load_params(tmp_path / "dst"), expected(source.tensors, 2))


def test_no_pickle_and_no_torch(make_source, tmp_path, monkeypatch, run_python):
    """A pickle beside the safetensors is not opened, and nothing imports torch."""
    source = make_source().write()
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04never")
    (source / "modeling_sdar.py").write_text("raise SystemExit('ran')")
    code = f"""
import pickle, sys
def refuse(*args, **kwargs): raise AssertionError("a pickle was opened")
from convert import convert_checkpoint
pickle.load = pickle.loads = pickle.Unpickler = refuse
convert_checkpoint({str(source)!r}, {str(tmp_path / "dst")!r}, progress=False)
assert not {{"torch", "transformers"}} & set(sys.modules), "torch was imported"
assert not any(name.startswith("herald_jax.llm") for name in sys.modules)
"""
    run_python(code)
    assert not (tmp_path / "dst" / "pytorch_model.bin").exists()
    assert not (tmp_path / "dst" / "modeling_sdar.py").exists()
