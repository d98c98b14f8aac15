"""Where mask id, block length, stop ids and tokenizer size come from."""

import json

import pytest

from convert import ConversionError, convert_checkpoint


def facts(source, tmp_path, **options):
    report = convert_checkpoint(source.write(), tmp_path / "dst", progress=False, **options)
    record = json.loads((tmp_path / "dst" / "conversion.json").read_text())["facts"]
    for name, fact in report.facts.items():
        value = list(fact.value) if isinstance(fact.value, tuple) else fact.value
        assert record[name]["value"] == value
        assert record[name]["source"] == fact.source
    return report.facts


def test_mask_from_config(make_source, tmp_path):
    fact = facts(make_source(mask_token_id=60), tmp_path)["mask_token_id"]
    assert (fact.value, fact.source) == (60, "config.json: mask_token_id")


def test_mask_flag_beats_config_and_tokenizer(make_source, tmp_path):
    found = facts(make_source(mask_token_id=60), tmp_path, mask_token_id=62)["mask_token_id"]
    assert (found.value, found.source) == (62, "--mask-token-id")
    assert found.overrides == "config.json: 60; tokenizer.json: 60"


def test_mask_from_tokenizer(make_source, tmp_path):
    fact = facts(make_source(), tmp_path)["mask_token_id"]
    assert (fact.value, fact.source) == (60, "tokenizer.json: mask token")


def test_mask_from_family_table(make_source, tmp_path):
    """The published vocabulary, without a tokenizer: the table's ids exist in it."""
    source = make_source(vocab_size=151936, eos_token_id=..., hidden_size=2)
    source.tokenizer = source.generation_config = None
    found = facts(source, tmp_path)
    assert (found["mask_token_id"].value, found["mask_token_id"].source) == (
        151669,
        "family table: sdar",
    )
    assert found["stop_token_ids"].value == (151643, 151645)
    assert found["stop_token_ids"].source == "family table: sdar"
    assert found["tokenizer_vocab_size"].value is None


def test_mask_of_the_table_needs_its_row(make_source, tmp_path):
    source = make_source()
    source.tokenizer["added_tokens"] = source.tokenizer["added_tokens"][:2]
    with pytest.raises(ConversionError, match="--mask-token-id"):
        convert_checkpoint(source.write(), tmp_path / "dst", progress=False)
    report = convert_checkpoint(source.folder, tmp_path / "dst", progress=False, mask_token_id=61)
    assert report.config.mask_token_id == 61
    assert any("none of its tokens" in remark for remark in report.remarks)


def test_mask_of_the_table_that_is_a_word(make_source, tmp_path):
    """The id of the table is another token in this tokenizer: refused, not guessed."""
    source = make_source(vocab_size=151936, hidden_size=2)
    source.tokenizer["added_tokens"][-1] = {"id": 151669, "content": "<tool>"}
    with pytest.raises(ConversionError, match="<tool>"):
        convert_checkpoint(source.write(), tmp_path / "dst", progress=False)


def test_block_length_has_no_table(make_source, tmp_path):
    source = make_source(block_size=...)
    with pytest.raises(ConversionError, match="--block-length"):
        convert_checkpoint(source.write(), tmp_path / "dst", progress=False)
    fact = facts(source, tmp_path, block_length=8)["block_length"]
    assert (fact.value, fact.source, fact.overrides) == (8, "--block-length", None)


def test_block_length_flag_beats_config(make_source, tmp_path):
    fact = facts(make_source(), tmp_path, block_length=16)["block_length"]
    assert (fact.value, fact.overrides) == (16, "config.json: block_size 4")


def test_stop_ids_are_a_union(make_source, tmp_path):
    source = make_source(eos_token_id=1)
    source.generation_config = {"eos_token_id": [2, 3]}
    fact = facts(source, tmp_path)["stop_token_ids"]
    assert fact.value == (1, 2, 3, 56, 57)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert name in fact.source


def test_no_stop_id_is_said(make_source, tmp_path):
    source = make_source(eos_token_id=...)
    source.generation_config = source.tokenizer = None
    report = convert_checkpoint(source.write(), tmp_path / "dst", progress=False, mask_token_id=60)
    assert report.config.stop_token_ids == ()
    assert any("stop id" in remark for remark in report.remarks)


def test_vocab_json_with_added_tokens(make_source, tmp_path):
    source = make_source()
    added = {token["content"]: token["id"] for token in source.tokenizer["added_tokens"]}
    words = source.tokenizer["model"]["vocab"]
    source.tokenizer = None
    (source.write() / "vocab.json").write_text(json.dumps(words))
    (source.folder / "added_tokens.json").write_text(json.dumps(added))
    report = convert_checkpoint(source.folder, tmp_path / "dst", progress=False)
    assert report.config.tokenizer_vocab_size == 61
    assert report.facts["mask_token_id"].source == "vocab.json: mask token"


def test_tokenizer_larger_than_the_table(make_source, tmp_path):
    source = make_source()
    source.tokenizer["added_tokens"].append({"id": 64, "content": "<extra>"})
    with pytest.raises(ConversionError, match="tokenizer_vocab_size"):
        convert_checkpoint(source.write(), tmp_path / "dst", progress=False)


def test_family_by_type_where_no_architecture_is_named(make_source, tmp_path):
    fact = facts(make_source(architectures=...), tmp_path)["family"]
    assert (fact.value, fact.source) == ("sdar", "config.json: model_type")
