"""Prompts of the tiny model's tasks, for its own tokenizer or any other one with a chat template.

Worker processes make them in the order in which the study wants them, while the device decodes.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from examples.train_tiny.tasks import USER, Prompt, held_out_prose, prompt
from examples.train_tiny.tokenizer import ASSETS, load
from herald_jax.tokenizer import TOKENIZER_FILE, Tokenizer

_worker: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Prompts `start` to `start + count - 1` of a cell at a length."""

    cell: str
    length: int
    start: int
    count: int


def _make(job: Job) -> list[Prompt]:
    if not _worker:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _worker["tokenizer"] = load()
        _worker["prose"] = held_out_prose(_worker["tokenizer"])
    seeds = range(job.start, job.start + job.count)
    return [prompt(job.cell, job.length, seed, **_worker) for seed in seeds]


def made_ahead(jobs: Iterable[Job], processes: int) -> Iterator[tuple[Job, list[Prompt]]]:
    """The jobs with their prompts, in order; with no processes they are made on demand."""
    jobs = list(jobs)
    if not processes:
        yield from ((job, _make(job)) for job in jobs)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from zip(jobs, pool.imap(_make, jobs), strict=True)


class Texts:
    """Prompt ids for one model, and its answers as text.

    Args:
        folder: The model's folder. If its tokenizer is not that of the tasks, a prompt is
            decoded and put through the model's chat template, context first; its length in the
            tables is then that of the tasks' tokenizer.

    Attributes:
        is_own: True if the model has the tasks' tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self._tasks = load()
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer is None:
            raise ValueError(f"{folder} has no tokenizer, so its answers cannot be judged")
        self._tokenizer = tokenizer
        own = folder / TOKENIZER_FILE
        theirs = (ASSETS / TOKENIZER_FILE).read_bytes()
        self.is_own = own.exists() and own.read_bytes() == theirs

    def ids(self, one: Prompt) -> list[int]:
        """The prompt as the model reads it."""
        if self.is_own:
            return one.ids
        at = len(one.ids) - 1 - one.ids[::-1].index(USER)
        context, question = one.ids[:at], one.ids[at + 1 : -1]
        text = f"{self._tasks.decode(context).strip()}\n\n{self._tasks.decode(question).strip()}"
        messages = [{"role": "user", "content": text}]
        conversation = self._tokenizer.apply_chat_template(messages)
        return self._tokenizer.encode(conversation, add_special_tokens=False)

    def text(self, ids: list[int]) -> str:
        """An answer."""
        return self._tokenizer.decode(ids).strip()
