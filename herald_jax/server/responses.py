"""Answers in OpenAI's shapes, with what a diffusion model has to add.

`usage` also counts `forwards` (denoising and commit passes), `denoising_steps` and `blocks`. A
choice also has `stop_reason`, the stop string or id that ended it, and `token_ids` if they were
asked for. A choice that was cut short has the finish reason `abort`.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from herald_jax.outputs import RequestOutput, StreamEvent
from herald_jax.server.protocol import ApiRequest


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """What requests cost; the prompt counts once, whatever `n` is."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(output.stats.generated_tokens for output in outputs)
    steps = [count for output in outputs for row in output.stats.steps_per_block for count in row]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "forwards": sum(output.stats.forwards for output in outputs),
        "denoising_steps": sum(steps),
        "blocks": len(steps),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One answer in the making: its name and what all of its pieces share."""

    request: ApiRequest
    name: str
    created: int

    @classmethod
    def begin(cls, request: ApiRequest) -> Answer:
        """A new answer with a name of its own."""
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        return cls(request, f"{prefix}-{secrets.token_hex(12)}", int(time.time()))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer that comes at once."""
        choices = []
        for at, output in enumerate(outputs):
            for sample in output.outputs:
                choice: dict[str, Any] = {"index": self._index(at, sample.index)}
                if self.request.is_chat:
                    choice["message"] = {"role": "assistant", "content": sample.text}
                else:
                    choice["text"] = sample.text
                choice["logprobs"] = None
                choice["finish_reason"] = sample.finish_reason
                choice["stop_reason"] = sample.stop_reason
                if self.request.return_token_ids:
                    choice["token_ids"] = sample.token_ids
                choices.append(choice)
        return {**self._head(is_chunk=False), "choices": choices, "usage": usage_of(outputs)}

    def opening(self, prompts: int) -> list[dict[str, Any]]:
        """Pieces before any text: in a chat, who speaks."""
        if not self.request.is_chat:
            return []
        count = prompts * self.request.samples
        delta = {"role": "assistant", "content": ""}
        return [self._chunk({"index": at, "delta": delta}, None) for at in range(count)]

    def piece(self, prompt: int, event: StreamEvent) -> dict[str, Any] | None:
        """The piece for an event, or `None` if there is nothing to tell."""
        with_ids = self.request.return_token_ids
        if not event.text and event.finish_reason is None and not with_ids:
            return None
        choice: dict[str, Any] = {"index": self._index(prompt, event.index)}
        if self.request.is_chat:
            choice["delta"] = {"content": event.text} if event.text else {}
        else:
            choice["text"] = event.text
        if with_ids:
            choice["token_ids"] = event.token_ids
        return self._chunk(choice, event.finish_reason)

    def closing(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Pieces behind all text: the usage, if it was asked for."""
        if not self.request.include_usage:
            return []
        return [{**self._head(is_chunk=True), "choices": [], "usage": usage_of(outputs)}]

    def _index(self, prompt: int, sample: int) -> int:
        return prompt * self.request.samples + sample

    def _chunk(self, choice: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {**choice, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self.request.include_usage else {}
        return {**self._head(is_chunk=True), "choices": [choice], **usage}

    def _head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.request.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
        }
