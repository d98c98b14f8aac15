"""Tokenizer files: what is read from a folder, what encoding and decoding keep."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from herald_jax import ConfigError
from herald_jax.tokenizer import Tokenizer

PIECES = sorted(pre_tokenizers.ByteLevel.alphabet())


def backend() -> Backend:
    made = Backend(models.BPE({piece: at for at, piece in enumerate(PIECES)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def write(folder, made: Backend, config: dict | None = None):
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_a_folder_without_a_tokenizer(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_round_trip_without_clean_up(tmp_path):
    tokenizer = load(write(tmp_path, backend()))
    text = "  It 's  , n't\n\n 中🦜 ."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.byte_pieces == frozenset()


def test_padding_and_truncation_left_in_the_file_are_switched_off(tmp_path):
    made = backend()
    made.enable_truncation(4)
    made.enable_padding(length=8)
    assert len(load(write(tmp_path, made)).encode("abcdef")) == 6


def test_special_tokens_named_only_in_the_config_are_left_out_of_texts(tmp_path):
    made = backend()
    made.add_tokens([AddedToken("<turn>", special=False)])
    config = {"eos_token": {"content": "<turn>"}, "additional_special_tokens": ["<absent>"]}
    tokenizer = load(write(tmp_path, made, config))
    ids = tokenizer.encode("a<turn>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab"
    assert len(tokenizer.encode("<absent>")) == 8


def test_added_tokens_of_the_config_get_their_ids(tmp_path):
    added = {"256": {"content": "<m>", "special": True}, "257": {"content": "<think>"}}
    tokenizer = load(write(tmp_path, backend(), {"added_tokens_decoder": added}))
    assert tokenizer.encode("<m><think>") == [256, 257]
    assert tokenizer.decode([256, 257]) == "<think>"


def test_added_tokens_that_contradict_the_file_are_refused(tmp_path):
    write(tmp_path, backend(), {"added_tokens_decoder": {"300": {"content": "<m>"}}})
    with pytest.raises(ConfigError, match=r"added_tokens_decoder\[300\]"):
        Tokenizer.from_folder(tmp_path)


def test_ids_without_a_token_give_no_text(tmp_path):
    tokenizer = load(write(tmp_path, backend()))
    assert tokenizer.decode([*tokenizer.encode("a"), 5000]) == "a"


def test_unreadable_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, backend())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        Tokenizer.from_folder(tmp_path)


def test_the_template_file_beats_the_config(tmp_path):
    template = (
        "{{ eos_token }}{% for m in messages %}\n  {% if true %}\n{{ m.content }}|{% endif %}\n"
        "{% endfor %}"
    )
    config = {"eos_token": "<e>", "chat_template": [{"name": "default", "template": "config"}]}
    turns = [{"role": "user", "content": "<b>"}, {"role": "user", "content": "c"}]
    write(tmp_path, backend(), config)
    assert load(tmp_path).apply_chat_template(turns) == "config"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert load(tmp_path).apply_chat_template(turns) == "<e><b>|c|"


def test_template_helpers_and_faults(tmp_path):
    tokenizer = load(write(tmp_path, backend()))
    turns = [{"role": "user", "content": "é<"}]

    def render(template: str, **variables) -> str:
        return tokenizer.apply_chat_template(turns, chat_template=template, **variables)

    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "é<"}'
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{{ tools }}", tools=3) == "3"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    with pytest.raises(ConfigError, match="refuses"):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="refuses"):
        render("{% if %}")
    with pytest.raises(ConfigError, match=r"messages\[0\]"):
        tokenizer.apply_chat_template([{"content": "x"}], chat_template="x")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ([], "tokenizer_config.json"),
        ({"added_tokens_decoder": {"abc": {"content": "<m>"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"256": "<m>"}}, r"added_tokens_decoder\[256\]"),
        ({"added_tokens_decoder": {"256": {"special": True}}}, r"added_tokens_decoder\[256\]"),
        (
            {"added_tokens_decoder": {"256": {"content": "<m>", "lstrip": "no"}}},
            r"added_tokens_decoder\[256\]\.lstrip",
        ),
        ({"eos_token": 5}, "eos_token"),
        ({"eos_token": {"content": 5}}, "eos_token"),
        ({"eos_token": "\ud800"}, "eos_token"),
        ({"additional_special_tokens": "<m>"}, "additional_special_tokens"),
        ({"additional_special_tokens": [5]}, r"additional_special_tokens\[0\]"),
        ({"chat_template": 5}, "chat_template"),
        ({"chat_template": [{"template": "x"}]}, r"chat_template\[0\]"),
        ({"chat_template": ["x"]}, r"chat_template\[0\]"),
        ({"chat_template": [{"name": "default", "template": 5}]}, r"chat_template\[0\]"),
    ],
)
def test_unusable_fields_are_named(tmp_path, config, field):
    write(tmp_path, backend(), config)
    with pytest.raises(ConfigError, match=f"^{field}="):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_endless_nesting(tmp_path, name):
    write(tmp_path, backend())
    (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_a_template_file_that_is_no_text(tmp_path):
    write(tmp_path, backend())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ absent.field }}",
        "{{ absent() }}",
        "{{ messages[0].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_templates_that_fail(template):
    tokenizer = Tokenizer(backend(), chat_template=template)
    with pytest.raises(ConfigError, match="^The chat template (refuses|fails on) the messages: "):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("template", ["", " \n"])
def test_an_unusable_template_of_the_caller_is_not_ignored(template):
    turns = [{"role": "user", "content": "x"}]
    tokenizer = Tokenizer(backend(), {"chat_template": "config"})
    with pytest.raises(ConfigError, match="^chat_template="):
        tokenizer.apply_chat_template(turns, chat_template=template)
    tokenizer = Tokenizer(backend(), {"chat_template": "config"}, template)
    with pytest.raises(ConfigError, match="^chat_template="):
        tokenizer.apply_chat_template(turns)
