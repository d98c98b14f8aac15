"""`ModelConfig`: every field checked, and kept through JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from herald_jax._checks import ConfigError
from herald_jax.configs import ModelConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0.*>= 1"),
        ({"hidden_size": 2.5}, "hidden_size=2.5"),
        ({"num_layers": True}, "num_layers=True"),
        ({"head_dim": -8}, "head_dim=-8"),
        ({"block_length": 0}, "block_length=0"),
        ({"num_kv_heads": 4}, "num_kv_heads=4.*num_heads=6"),
        ({"rope_theta": 0.5}, "rope_theta=0.5"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rotary_fraction": 0.0}, "rotary_fraction=0.0"),
        ({"rotary_fraction": 1.5}, "rotary_fraction=1.5"),
        ({"rotary_fraction": 0.4}, "rotary_fraction=0.4.*head_dim=8"),
        ({"head_dim": 7}, "rotary_fraction=1.0.*head_dim=7"),
        ({"mask_token_id": 61}, "mask_token_id=61.*vocab_size=61.*--mask-token-id"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"mask_token_id": None}, "mask_token_id=None"),
        ({"stop_token_ids": (1, 61)}, "stop_token_ids"),
        ({"stop_token_ids": (60,)}, "stop_token_ids.*mask id"),
        ({"tokenizer_vocab_size": 62}, "tokenizer_vocab_size=62.*vocab_size=61"),
        ({"attention": "causal"}, "attention='causal'.*block_causal, canvas, full"),
        ({"shifts_predictions": 1}, "shifts_predictions=1"),
        ({"tokenizer_vocab_size": 0}, "tokenizer_vocab_size=0"),
    ],
)
def test_values_that_cannot_be_used_are_named(
    tiny_config: ModelConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(tiny_config, **changes)


def test_derived_sizes(tiny_config: ModelConfig) -> None:
    assert tiny_config.heads_per_kv_head == 3
    assert tiny_config.rotary_dim == 8
    assert dataclasses.replace(tiny_config, rotary_fraction=0.5).rotary_dim == 4
    assert tiny_config.kv_values_per_token == 2 * 3 * 2 * 8


def test_configs_are_static_arguments(tiny_config: ModelConfig) -> None:
    listed = dataclasses.replace(tiny_config, stop_token_ids=[1])  # type: ignore[arg-type]
    assert hash(listed) == hash(tiny_config) and listed == tiny_config
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config.vocab_size = 3  # type: ignore[misc]


def test_json_keeps_every_field(tiny_config: ModelConfig, tmp_path: Path) -> None:
    changed = dataclasses.replace(
        tiny_config, qkv_bias=True, qk_norm=False, tie_word_embeddings=True, rotary_fraction=0.5,
        tokenizer_vocab_size=59, max_position_embeddings=77, stop_token_ids=(3, 2),
    )  # fmt: skip
    for config in (tiny_config, changed):
        (tmp_path / "config.json").write_text(config.to_json(), encoding="utf-8")
        assert ModelConfig.load(tmp_path) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format=2.*Convert"),
        ({"format": None}, "format=None"),
        ({"colour": "red"}, "colour"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tiny_config: ModelConfig, change: dict[str, Any], message: str
) -> None:
    fields = json.loads(tiny_config.to_json())
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(json.dumps({**fields, **change}))


def test_missing_fields_are_all_named(tiny_config: ModelConfig) -> None:
    fields = json.loads(tiny_config.to_json())
    del fields["block_length"], fields["mask_token_id"]
    with pytest.raises(ConfigError, match="block_length.*mask_token_id"):
        ModelConfig.from_json(json.dumps(fields))
    for text in ("{", "[1]", '"text"'):
        with pytest.raises(ConfigError):
            ModelConfig.from_json(text)


def test_a_vocabulary_without_an_id_to_emit_is_refused(tiny_config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="tokenizer_vocab_size|mask_token_id"):
        dataclasses.replace(tiny_config, mask_token_id=0, tokenizer_vocab_size=1, stop_token_ids=())


@pytest.mark.parametrize(
    ("field", "value"),
    [("qk_norm", "no"), ("tie_word_embeddings", 1), ("tokenizer_vocab_size", 40.5)],
)
def test_a_value_of_the_wrong_type_is_refused(tiny_config, field, value):
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(tiny_config, **{field: value})
