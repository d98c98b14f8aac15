"""Converted folders, Hugging Face folders, and names that are neither."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from convert.report import ConversionError
from herald_jax import LLM, ConfigError, SamplingParams, checkpoint, settings
from herald_jax.model_source import find_checkpoint, resolve_dtype

TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny-sdar"


@pytest.fixture
def converted(tmp_path, tiny_config, tiny_params):
    checkpoint.save(tmp_path / "converted", tiny_config, tiny_params)
    return tmp_path / "converted"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(settings.CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_dtypes():
    assert resolve_dtype("auto") == "float32"
    assert resolve_dtype("bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match="auto, bfloat16, float32"):
        resolve_dtype("float16")


def test_a_converted_folder(converted, tiny_config):
    assert find_checkpoint(converted, dtype="float32") == (converted, tiny_config)
    assert find_checkpoint(str(converted), dtype="float32")[0] == converted


def test_mask_id_and_block_length_of_a_converted_folder_can_be_replaced(converted, tiny_config):
    _, config = find_checkpoint(converted, dtype="float32", mask_token_id=59, block_length=8)
    assert (config.mask_token_id, config.block_length) == (59, 8)
    assert config.hidden_size == tiny_config.hidden_size
    with pytest.raises(ConfigError, match="mask_token_id=61"):
        find_checkpoint(converted, dtype="float32", mask_token_id=61)
    with pytest.raises(ConfigError, match="block_length=0"):
        find_checkpoint(converted, dtype="float32", block_length=0)


def test_a_converted_folder_generates_from_ids(converted, caplog):
    llm = LLM(converted, block_length=2, max_model_len=16, max_num_seqs=1)
    assert "no tokenizer" in caplog.text
    (output,) = llm.generate([3, 4], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    assert len(output.stats.steps_per_block[0]) == 2
    with pytest.raises(ConfigError, match="tokenizer="):
        LLM(converted, tokenizer=converted)


def test_names_that_are_no_model(tmp_path):
    with pytest.raises(ConversionError, match="no such folder"):
        find_checkpoint(tmp_path / "none", dtype="float32")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_checkpoint(tmp_path, dtype="float32")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        find_checkpoint(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "options",
    [{"device_memory_fraction": 0.0}, {"device_memory_fraction": 1.5}, {"max_num_seqs": 0}]
    + [{"max_model_len": 0}, {"dtype": "float16"}],
)
def test_options_are_checked_before_the_model_is_looked_for(tmp_path, options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        LLM(tmp_path / "none", **options)


def test_an_incomplete_conversion_is_not_taken_for_another_format(converted):
    (converted / "params" / "index.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="incomplete"):
        find_checkpoint(converted, dtype="float32")


@pytest.mark.skipif(not (TINY / "model.safetensors").exists(), reason="no tiny model")
def test_a_hugging_face_folder_is_converted_once(cache, tmp_path, caplog):
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    first, config = find_checkpoint(source, dtype="float32")
    assert first.parent == cache / "converted"
    assert "Hugging Face format" in caplog.text and str(first) in caplog.text
    assert (first / "tokenizer.json").exists()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(source, dtype="float32") == (first, config)
    assert caplog.text == ""
    other, changed = find_checkpoint(source, dtype="float32", block_length=16)
    assert other != first
    assert changed.block_length == 16
    (source / "generation_config.json").touch()
    assert find_checkpoint(source, dtype="float32")[0] not in (first, other)
