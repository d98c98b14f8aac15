"""What may be passed as prompts, and the checks that run before any device work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from herald_jax._checks import ConfigError, require
from herald_jax.configs import ModelConfig
from herald_jax.sampling import SamplingParams
from herald_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
"""A text, a list of ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

FORMS = "a text, a list of ids, {'prompt': text} or {'prompt_token_ids': ids}"


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list, where a single one may have been given."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    require(isinstance(prompts, Sequence), "prompts", type(prompts), f"{FORMS}, or a list of these")
    is_one = len(prompts) > 0 and isinstance(prompts[0], Integral)
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item]


def pair_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, prompts: int
) -> list[SamplingParams]:
    """One set of options for each of so many prompts.

    Raises:
        ConfigError: If a list of another length was given, or something else.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * prompts
    allowed = "SamplingParams or a list of them"
    is_list = isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str)
    require(is_list, "sampling_params", sampling_params, allowed)
    require(
        len(sampling_params) == prompts,
        "len(sampling_params)",
        len(sampling_params),
        f"{prompts}, the number of prompts",
        "Give one for all prompts, or one for each.",
    )
    for index, params in enumerate(sampling_params):
        require(isinstance(params, SamplingParams), f"sampling_params[{index}]", params, allowed)
    return list(sampling_params)


def require_unicode(field: str, text: str) -> None:
    """Raises `ConfigError` if a text has half of a surrogate pair, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{field} is not valid Unicode: character {error.start} is the lone surrogate "
            f"{text[error.start]!r}. Remove it, or write both halves of the pair."
        ) from error


def read_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, *, add_special_tokens: bool
) -> tuple[str | None, tuple[int, ...]]:
    """The text (if it was given as text) and the ids of a prompt.

    Raises:
        ConfigError: If it is no prompt, no valid Unicode, or a text without a tokenizer.
    """
    value: Any = prompt
    if isinstance(prompt, Mapping):
        names = set(prompt)
        is_known = names in ({"prompt"}, {"prompt_token_ids"})
        require(is_known, "prompt", sorted(map(str, names)), FORMS)
        (name,) = names
        value = prompt[name]
        require(isinstance(value, str) == (name == "prompt"), name, value, FORMS)
    if isinstance(value, str):
        require_unicode("prompt", value)
        if tokenizer is None:
            raise ConfigError(
                "the prompt is a text, but the model's folder has no tokenizer. Give a list of "
                "ids, or the folder of a tokenizer (tokenizer=...)."
            )
        return value, tuple(tokenizer.encode(value, add_special_tokens=add_special_tokens))
    is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, bytes)
    require(is_list, "prompt", value, FORMS)
    ids = value.tolist() if isinstance(value, np.ndarray) else value
    for position, token_id in enumerate(ids):
        if type(token_id) is not int:  # prompts are long, so what is usual is asked first
            is_id = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            require(is_id, f"prompt_token_ids[{position}]", token_id, "an integer")
    return None, tuple(map(int, ids))


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    config: ModelConfig,
    max_model_len: int,
    *,
    has_text: bool,
) -> None:
    """Checks one request against the model.

    Prompt and `max_tokens` together may fill `max_model_len` exactly. The cache is rounded up to
    whole blocks inside the engine, so the last block may be denoised past the limit and cut.

    Raises:
        ConfigError: With what does not fit and what to change.
    """
    params.check_against(config.block_length, config.vocab_size)
    if params.stop and not has_text:
        raise ConfigError(
            f"stop={params.stop!r} needs text, but the model's folder has no tokenizer. "
            "Use stop_token_ids."
        )
    wrong = [at for at, i in enumerate(prompt_token_ids) if not 0 <= i < config.vocab_size]
    if wrong:
        field, allowed = f"prompt_token_ids[{wrong[0]}]", f"[0, vocab_size={config.vocab_size})"
        require(False, field, prompt_token_ids[wrong[0]], f"an id in {allowed}")
    length = len(prompt_token_ids)
    if length + params.max_tokens > max_model_len:
        room = max_model_len - length
        fix = f"lower max_tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise ConfigError(
            f"the prompt's {length} tokens and max_tokens={params.max_tokens} make "
            f"{length + params.max_tokens}, more than max_model_len={max_model_len}: {fix}, or "
            "raise max_model_len as far as the model and memory allow."
        )
