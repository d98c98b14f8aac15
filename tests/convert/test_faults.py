"""Every kind of fault alone, and many in one report; nothing is ever left at the target."""

import json

import ml_dtypes
import numpy as np
import pytest

from convert import ConversionError, convert_checkpoint
from convert.report import Fault


def faults_of(source, tmp_path, **options):
    """The faults of a conversion, after checking that it wrote nothing."""
    folder = source if not hasattr(source, "write") else source.write()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConversionError) as caught:
        convert_checkpoint(folder, tmp_path / "dst", progress=False, **options)
    assert sorted(tmp_path.iterdir()) == before
    for fault in caught.value.faults:
        assert fault.where in str(caught.value)
        assert fault.found in str(caught.value) or fault.found.endswith(".")
    return list(caught.value.faults)


def only(faults, kind):
    assert [fault.kind for fault in faults] == [kind], faults
    return faults[0]


def test_missing(make_source, tmp_path):
    source = make_source()
    del source.tensors["model.layers.1.self_attn.q_norm.weight"]
    fault = only(faults_of(source, tmp_path), "missing")
    assert fault.where == "model.layers.1.self_attn.q_norm.weight"
    assert "[10]" in fault.expected


def test_unexpected(make_source, tmp_path):
    source = make_source()
    source.tensors["model.layers.0.mlp.gate.weight"] = np.ones((4, 24), np.float32)
    fault = only(faults_of(source, tmp_path), "unexpected")
    assert fault.where == "model.layers.0.mlp.gate.weight"
    assert "F32 [4, 24]" in fault.found


def test_unexpected_layer(make_source, tmp_path):
    """One layer more than the config says: all of its tensors are named."""
    source = make_source()
    extra = make_source(num_hidden_layers=3, name="other").tensors
    source.tensors |= {k: v for k, v in extra.items() if k.startswith("model.layers.2.")}
    faults = faults_of(source, tmp_path)
    assert {fault.kind for fault in faults} == {"unexpected"} and len(faults) == 11


@pytest.mark.parametrize("transposed", [True, False])
def test_shape(make_source, tmp_path, transposed):
    source = make_source()
    key = "model.layers.0.self_attn.o_proj.weight"
    found = np.zeros((60, 24) if transposed else (24, 59), np.float32)
    source.tensors[key] = found
    fault = only(faults_of(source, tmp_path), "shape")
    assert key in fault.where and "model.safetensors" in fault.where
    assert fault.expected.startswith("[24, 60]") and str(list(found.shape)) == fault.found
    assert ("transposed" in fault.fix) == transposed


def test_vocabulary_padded_in_the_file_only(make_source, tmp_path):
    """Rows beyond the config's vocabulary: both shapes and the field are named.

    Kind of fault: padded vocabulary or stacked layers clash in shape.
    """
    source = make_source()
    source.config["vocab_size"] = 61
    faults = faults_of(source, tmp_path)
    assert [fault.kind for fault in faults] == ["shape", "shape"]
    assert "[61, 24]" in faults[0].expected and faults[0].found == "[64, 24]"
    assert "vocab_size" in faults[0].fix


@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.float8_e4m3fn])
def test_dtype(make_source, tmp_path, dtype):
    source = make_source()
    key = "model.layers.0.mlp.up_proj.weight"
    source.tensors[key] = np.zeros((36, 24)).astype(dtype)
    if dtype is ml_dtypes.float8_e4m3fn:
        pytest.importorskip("safetensors", minversion="0.8")
    fault = only(faults_of(source, tmp_path), "dtype")
    assert key in fault.where and "BF16" in fault.expected


def test_tied_flag_fills_the_absent_head(make_source, tmp_path):
    """Tied config, no LM head: the embedding table is the head.

    Kind of fault: the tied key is absent and the head comes out random.
    """
    source = make_source(tie_word_embeddings=True)
    assert "lm_head.weight" not in source.tensors
    report = convert_checkpoint(source.write(), tmp_path / "dst", progress=False)
    assert report.config.tie_word_embeddings
    assert report.facts["tie_word_embeddings"].source == "config.json: tie_word_embeddings"


@pytest.mark.parametrize("flag", [False, ...])
def test_untied_needs_its_head(make_source, tmp_path, flag):
    """Untied config (or no flag at all) without LM head: never filled from the embedding.

    Kind of fault: the tie flag of the base model is inherited.
    """
    source = make_source(tie_word_embeddings=flag)
    source.tensors.pop("lm_head.weight", None)
    fault = only(faults_of(source, tmp_path), "tied")
    assert fault.where == "lm_head.weight" and "base model" in fault.fix


def test_no_flag_and_a_head_is_untied(make_source, tmp_path):
    report = convert_checkpoint(
        make_source(tie_word_embeddings=...).write(), tmp_path / "dst", progress=False
    )
    assert not report.config.tie_word_embeddings
    assert "tensors" in report.facts["tie_word_embeddings"].source


def test_tied_with_another_head(make_source, tmp_path):
    source = make_source(tie_word_embeddings=True)
    head = source.tensors["model.embed_tokens.weight"].copy()
    head[63, 23] += 1
    source.tensors["lm_head.weight"] = head
    fault = only(faults_of(source, tmp_path), "tied")
    assert "model.embed_tokens.weight" in fault.expected


def test_truncated_shard(make_source, tmp_path):
    """Only the shard is reported, not each tensor that lies in it."""
    source = make_source(shards=3)
    path = source.write() / "model-00002-of-00003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    fault = only(faults_of(source.folder, tmp_path), "truncated")
    assert fault.where == path.name
    assert (fault.expected.split()[0], fault.found.split()[0]) == (
        str(len(whole)),
        str(len(whole) - 7),
    )


@pytest.mark.parametrize("length", [0, 5, 60])
@pytest.mark.parametrize("shards", [1, 3])
def test_header_cut_short(make_source, tmp_path, length, shards):
    source = make_source(shards=shards)
    source.write()
    path = sorted(source.folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:length])
    only(faults_of(source.folder, tmp_path), "truncated")


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        (9).to_bytes(8, "little") + b"not json!",
        (2).to_bytes(8, "little") + b"{}" + b"tail",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_not_safetensors(make_source, tmp_path, content):
    source = make_source()
    (source.write() / "model.safetensors").write_bytes(content)
    only(faults_of(source.folder, tmp_path), "header")


def test_overlapping_tensors(make_source, tmp_path):
    header = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": offsets}
        for name, offsets in {"a": [0, 16], "b": [8, 24]}.items()
    }
    text = json.dumps(header).encode()
    source = make_source()
    path = source.write() / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    only(faults_of(source.folder, tmp_path), "header")


@pytest.mark.parametrize("with_index", [True, False])
def test_absent_shard(make_source, tmp_path, with_index):
    source = make_source(shards=3)
    folder = source.write()
    (folder / "model-00003-of-00003.safetensors").unlink()
    if not with_index:
        (folder / "model.safetensors.index.json").unlink()
    fault = only(faults_of(folder, tmp_path), "absent-shard")
    assert fault.where == "model-00003-of-00003.safetensors"


def test_shard_outside_the_folder(make_source, tmp_path):
    """An index cannot make the converter read files elsewhere."""
    source = make_source()
    folder = source.write()
    (folder / "model.safetensors").rename(tmp_path / "away.safetensors")
    index = {"weight_map": dict.fromkeys(source.tensors, "../away.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    only(faults_of(folder, tmp_path), "absent-shard")


def test_index_and_shards_disagree(make_source, tmp_path):
    source = make_source(shards=2)
    path = source.write() / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    moved = next(k for k, v in index["weight_map"].items() if v == one)
    index["weight_map"][moved] = two
    path.write_text(json.dumps(index))
    faults = faults_of(source.folder, tmp_path)
    assert sorted(fault.kind for fault in faults) == ["missing", "unexpected"]
    assert {fault.where for fault in faults} == {moved}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "w.pt"])
def test_only_pickles(make_source, tmp_path, monkeypatch, name):
    """Pickle files alone are refused by name and not opened."""
    source = make_source()
    folder = source.write()
    (folder / "model.safetensors").rename(folder / name)
    (folder / name).chmod(0)
    fault = only(faults_of(folder, tmp_path), "pickle")
    assert name in fault.where and "never opened" in fault.found


def test_no_weights_at_all(make_source, tmp_path):
    source = make_source()
    (source.write() / "model.safetensors").unlink()
    only(faults_of(source.folder, tmp_path), "missing")


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "hidden_act",
    ],
)
def test_no_class_default_stands_in(make_source, tmp_path, field):
    source = make_source(**{field: ...})
    fault = only(faults_of(source, tmp_path), "config")
    assert field in fault.where and fault.found == "no such field"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 12345.0}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta"),
        ({"sliding_window": 128, "use_sliding_window": True}, "sliding_window"),
        ({"sliding_window": 128, "use_sliding_window": ...}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"block_causal_prompt": False}, "block_causal_prompt"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"head_dim": True}, "head_dim"),
        ({"head_dim": 10.0}, "head_dim"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"num_key_value_heads": 4}, "config.json"),
        ({"eos_token_id": "57"}, "eos_token_id"),
        ({"eos_token_id": 60}, "config.json"),
        ({"block_size": 0}, "block_length"),
        ({"block_length": 8}, "block_length"),
        ({"mask_token_id": 64}, "mask_token_id"),
        ({"mask_token_id": 59}, "mask_token_id"),
    ],
)
def test_unusable_fields(make_source, tmp_path, changes, name):
    """Each names its field; sizes are left alone, so no tensor fault comes along."""
    source = make_source()
    source.config |= changes
    source.config = {k: v for k, v in source.config.items() if v is not ...}
    faults = faults_of(source, tmp_path)
    assert any(name in fault.where for fault in faults)
    assert {fault.kind for fault in faults} <= {"config", "tokenizer"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 12345}},
        {"block_causal_prompt": True},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {"fuse_cross_entropy": True, "ep_size": 1, "attn_implementation": "flex"},
        {"architectures": ..., "model_type": "sdar"},
        {"block_size": ..., "block_length": 4},
    ],
)
def test_harmless_fields(make_source, tmp_path, changes):
    report = convert_checkpoint(make_source(**changes).write(), tmp_path / "dst", progress=False)
    assert (report.config.rope_theta, report.config.block_length) == (12345.0, 4)


def test_type_alone_is_no_family(make_source, tmp_path):
    """`qwen3` says nothing about the decoding; the user may."""
    changes = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    source = make_source(**changes)
    fault = only(faults_of(source, tmp_path), "config")
    assert "SDARForCausalLM" in fault.expected and "--family" in fault.fix
    report = convert_checkpoint(source.folder, tmp_path / "dst", family="sdar", progress=False)
    assert report.facts["family"].source == "--family"


def test_mixture_of_experts_is_another_family(make_source, tmp_path):
    """Its config lacks the experts, and nothing is said of names that depend on them."""
    source = make_source(architectures=["SDARMoeForCausalLM"], model_type="sdar_moe")
    faults = faults_of(source, tmp_path)
    assert {fault.kind for fault in faults} == {"config"}
    assert "config.json: num_experts" in [fault.where for fault in faults]


def test_bias_on_the_output_projection_is_not_dropped(make_source, tmp_path):
    source = make_source(attention_bias=True)
    source.tensors["model.layers.0.self_attn.o_proj.bias"] = np.ones(24, np.float32)
    only(faults_of(source, tmp_path), "unexpected")


def test_all_faults_in_one_report(make_source, tmp_path):
    """Config, facts, tensors and files at once; each with what to do."""
    source = make_source(shards=3, block_size=..., rope_theta=..., hidden_act="relu")
    source.tensors["model.embed_tokens.weight"] = source.tensors["model.embed_tokens.weight"].T
    source.tensors["model.embed_tokens.weight"] = np.ascontiguousarray(
        source.tensors["model.embed_tokens.weight"]
    )
    source.tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((36, 24), np.int8)
    source.tensors["odd"] = np.ones(3, np.float32)
    del source.tensors["lm_head.weight"]
    del source.tensors["model.layers.0.self_attn.k_norm.weight"]
    folder = source.write()
    last = folder / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    faults = faults_of(folder, tmp_path)
    kinds = [fault.kind for fault in faults]
    assert {"config", "tied", "missing", "unexpected", "dtype", "truncated"} <= set(kinds)
    named = " ".join(fault.where for fault in faults)
    for name in ("block_length", "rope_theta", "hidden_act", "odd", "k_norm", "lm_head"):
        assert name in named
    assert all(fault.fix for fault in faults)


def test_shapes_are_checked_while_facts_are_missing(make_source, tmp_path):
    """No block length is no reason to hide a wrong shape until the next run."""
    source = make_source(block_size=...)
    source.tensors["model.norm.weight"] = np.ones(23, np.float32)
    kinds = sorted(fault.kind for fault in faults_of(source, tmp_path))
    assert kinds == ["config", "shape"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_broken_json(make_source, tmp_path, name):
    source = make_source()
    (source.write() / name).write_text("{broken")
    faults = faults_of(source.folder, tmp_path)
    assert any(fault.where == name for fault in faults)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_endless_nesting(make_source, tmp_path, name):
    source = make_source()
    (source.write() / name).write_text("[" * 200_000)
    faults = faults_of(source.folder, tmp_path)
    assert any(fault.where == name for fault in faults)


def test_endless_nesting_in_a_header(make_source, tmp_path):
    source = make_source()
    content = (200_000).to_bytes(8, "little") + b"[" * 200_000
    (source.write() / "model.safetensors").write_bytes(content)
    only(faults_of(source.folder, tmp_path), "header")


@pytest.mark.parametrize("count", [3, 10_000_000])
def test_more_layers_than_the_tensors_are_of(make_source, tmp_path, monkeypatch, count):
    """One fault, before anything is done for each of the layers."""
    import convert.plan as module

    original, most = module.abstract_params, 2

    def abstract_params(config):
        assert config.num_layers <= most
        return original(config)

    monkeypatch.setattr(module, "abstract_params", abstract_params)
    source = make_source()
    source.config["num_hidden_layers"] = count
    fault = only(faults_of(source, tmp_path), "config")
    assert fault.where == "config.json: num_hidden_layers"
    assert fault.expected.startswith("2 ") and fault.found == str(count)
    # A key may name any layer, and there may be no keys at all.
    source.tensors["model.layers.99999999.mlp.up_proj.weight"] = np.ones(3, np.float32)
    most = 3
    source.config["num_hidden_layers"] = 10_000_000
    wheres = [fault.where for fault in faults_of(source, tmp_path)]
    assert "config.json: num_hidden_layers" in wheres
    most = 1
    (source.folder / "model.safetensors").unlink()
    faults = faults_of(source.folder, tmp_path)
    assert sorted(fault.kind for fault in faults) == ["config", "missing"]


def test_more_experts_than_there_are_tensors(make_source, tmp_path):
    changes = {"num_experts": 10_000_000, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    source = make_source(architectures=["SDARMoeForCausalLM"], norm_topk_prob=True, **changes)
    fault = only(faults_of(source, tmp_path), "config")
    assert fault.where == "config.json: num_experts"


def test_long_reports_are_cut_but_complete_in_the_attribute():
    faults = [Fault("missing", f"k{i}", "a tensor", "none", "Fetch it.") for i in range(300)]
    error = ConversionError(faults, "src")
    assert len(error.faults) == 300 and "and 100 more" in str(error)
