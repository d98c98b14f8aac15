"""The way in: prompts become checked requests with a progress object for each sample."""

from __future__ import annotations

from herald_jax.configs import ModelConfig
from herald_jax.engine.detokenizer import TextStream
from herald_jax.engine.request import Request, RowProgress
from herald_jax.prompts import Prompt, check_request, read_prompt
from herald_jax.sampling import SamplingParams
from herald_jax.tokenizer import Tokenizer


class Intake:
    """Reads prompts for one model.

    Args:
        config: The model.
        tokenizer: For text; without one, prompts are lists of ids and texts are empty.
        max_model_len: Most tokens of a prompt and its generation together.
    """

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer | None, max_model_len: int
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len

    def request(
        self, prompt: Prompt, sampling: SamplingParams, *, add_special_tokens: bool = True
    ) -> Request:
        """The checked request.

        Raises:
            ConfigError: If the prompt or its options do not fit.
        """
        text, ids = read_prompt(prompt, self.tokenizer, add_special_tokens=add_special_tokens)
        has_text = self.tokenizer is not None
        check_request(ids, sampling, self.config, self.max_model_len, has_text=has_text)
        return Request(prompt=text, prompt_token_ids=ids, sampling=sampling)

    def progresses(self, sampling: SamplingParams) -> list[RowProgress]:
        """A fresh progress object for each of the `n` samples."""
        return [
            RowProgress(sampling, self.config.stop_token_ids, self._text(sampling))
            for _ in range(sampling.n)
        ]

    def _text(self, sampling: SamplingParams) -> TextStream | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return TextStream(tokenizer.decode, sampling.stop or (), tokenizer.byte_pieces)
