"""Text to ids and back, and chat templates, from the files of a checkpoint folder."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald_jax._checks import ConfigError, require

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": ..., "content": ...}` and what the template reads."""

TOKENIZER_FILE = "tokenizer.json"
OLDER_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "sep_token")


class Tokenizer:
    """A tokenizer with the special tokens and the chat template of its folder.

    Args:
        backend: The tokenizer itself. Padding and truncation stored with it are switched off.
        config: Content of `tokenizer_config.json`.
        chat_template: Jinja text; the one in `config` if left out.

    Raises:
        ConfigError: If a field of `config` cannot be used.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        require(isinstance(config, Mapping | None), "tokenizer_config.json", config, "a table")
        self._config = dict(config or {})
        # Training scripts leave these in the file; they would cut or fill prompts unseen.
        backend.no_padding()
        backend.no_truncation()
        self._mark_special_tokens()
        self.chat_template = (
            _default_template(self._config) if chat_template is None else chat_template
        )
        self.byte_pieces = self._find_byte_pieces()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder, or `None` if it has none.

        Raises:
            ConfigError: If there are tokenizer files that cannot be read.
        """
        folder = Path(folder)
        backend = _load_backend(folder)
        if backend is None:
            return None
        config_file, template_file = (
            folder / "tokenizer_config.json",
            folder / "chat_template.jinja",
        )
        path = config_file
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else "{}"
            config = json.loads(text)
            require(isinstance(config, dict), "tokenizer_config.json", config, "a table")
            path = template_file
            template = path.read_text(encoding="utf-8") if path.exists() else None
        except ConfigError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return cls(backend, config, template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; what the tokenizer puts around every text is added if asked."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids: special tokens and ids without a token left out, no clean-up."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: The turns.
            add_generation_prompt: True to open the assistant's turn at the end.
            chat_template: Jinja text instead of the folder's own.
            **variables: Further names that the template reads.

        Raises:
            ConfigError: If there is no template, or it cannot be used, or it refuses the
                messages.
        """
        import jinja2

        template = self.chat_template if chat_template is None else chat_template
        require(
            template is not None,
            "chat_template",
            template,
            "given, since the tokenizer's folder has none",
            "Pass chat_template=..., or put the text together yourself and use generate().",
        )
        is_text = isinstance(template, str) and bool(template.strip())
        require(is_text, "chat_template", template, "a Jinja text that is not empty")
        for number, message in enumerate(messages):
            is_message = isinstance(message, Mapping) and "role" in message
            require(is_message, f"messages[{number}]", message, "a dict with a role")
        names = {token: _content(self._config.get(token)) for token in NAMED_TOKENS}
        given = {name: text for name, text in names.items() if text is not None}
        try:
            return _compile_template(str(template)).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{**given, **variables},
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template refuses the messages: {error}") from error
        except Exception as error:  # a template computes, and whatever can fail there may fail
            raise ConfigError(
                f"The chat template fails on the messages: {type(error).__name__}: {error}"
            ) from error

    def _mark_special_tokens(self) -> None:
        """Tells the backend of special tokens that only `tokenizer_config.json` knows."""
        from tokenizers import AddedToken

        for token_id, entry in _added_tokens(self._config):
            options = {
                name: entry[name]
                for name in ("single_word", "lstrip", "rstrip", "normalized")
                if name in entry
            }
            token = AddedToken(entry["content"], special=entry.get("special", False), **options)
            if entry.get("special", False):
                self._backend.add_special_tokens([token])
            else:
                self._backend.add_tokens([token])
            found = self._backend.token_to_id(entry["content"])
            require(
                found == token_id,
                f"added_tokens_decoder[{token_id}]",
                entry["content"],
                f"the token of that id, but tokenizer.json gives it {found}",
                "The tokenizer's files come from different versions.",
            )
        others = self._config.get("additional_special_tokens") or []
        require(isinstance(others, list), "additional_special_tokens", others, "a list of tokens")
        named = [(name, self._config.get(name)) for name in NAMED_TOKENS]
        named += [(f"additional_special_tokens[{at}]", token) for at, token in enumerate(others)]
        for name, token in named:
            is_token = token is None or _is_text(_content(token))
            require(is_token, name, token, "a text, or a table with a text content")
        contents = [text for _, token in named if (text := _content(token)) is not None]
        known = [text for text in contents if self._backend.token_to_id(text) is not None]
        self._backend.add_special_tokens(known)

    def _find_byte_pieces(self) -> frozenset[int]:
        """Ids such as `<0xE4>` of a tokenizer that falls back to bytes."""
        if '"ByteFallback"' not in self._backend.to_str():
            return frozenset()
        vocabulary = self._backend.get_vocab().items()
        return frozenset(i for piece, i in vocabulary if re.fullmatch(r"<0x[0-9A-F]{2}>", piece))


def _load_backend(folder: Path) -> tokenizers.Tokenizer | None:
    import tokenizers

    path = folder / TOKENIZER_FILE
    if path.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be read: {error}") from error
    older = [name for name in OLDER_FILES if (folder / name).exists()]
    if not older:
        return None
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:
        raise ConfigError(
            f"{folder} has {older[0]} but no {TOKENIZER_FILE}, and building one with transformers "
            f"failed: {error}. Install transformers, save the tokenizer with it "
            "(save_pretrained) and copy tokenizer.json into the folder."
        ) from error


def _added_tokens(config: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """The entries of `added_tokens_decoder` in the order of their ids, checked."""
    table = config.get("added_tokens_decoder") or {}
    require(isinstance(table, dict), "added_tokens_decoder", table, "a table of tokens by id")
    found: dict[int, dict[str, Any]] = {}
    for key, entry in table.items():
        is_id = re.fullmatch("[0-9]{1,9}", str(key)) is not None
        require(is_id, "added_tokens_decoder", key, "a table whose keys are token ids")
        name = f"added_tokens_decoder[{key}]"
        is_token = isinstance(entry, dict) and _is_text(entry.get("content"))
        require(is_token, name, entry, "a table with a text content")
        for option in ("special", "single_word", "lstrip", "rstrip", "normalized"):
            is_flag = isinstance(entry.get(option, False), bool)
            require(is_flag, f"{name}.{option}", entry.get(option), "true or false")
        found[int(key)] = entry
    return sorted(found.items())


def _is_text(value: Any) -> bool:
    """True for a text that has a UTF-8 form; JSON can spell halves of a character."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _content(token: Any) -> Any:
    """The text of a special token (not checked), which the file gives bare or with its options."""
    return token.get("content") if isinstance(token, dict) else token


def _default_template(config: Mapping[str, Any]) -> str | None:
    """The template in `tokenizer_config.json`: one text, or several with names."""
    template = config.get("chat_template")
    if not isinstance(template, list):
        is_text = template is None or isinstance(template, str)
        require(is_text, "chat_template", template, "a text, or a list of templates with names")
        return template
    found: dict[str, str] = {}
    for number, entry in enumerate(template):
        texts = [entry.get(n) for n in ("name", "template")] if isinstance(entry, dict) else []
        is_named = len(texts) == 2 and all(isinstance(text, str) for text in texts)
        require(is_named, f"chat_template[{number}]", entry, "a table with name and template")
        found[entry["name"]] = entry["template"]
    return found.get("default")


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=16)
def _compile_template(text: str) -> Any:
    """A template with the names and settings that chat templates are written for."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own `tojson` escapes HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(text)
