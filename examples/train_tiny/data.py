"""Training batches: documents of an exact length and noised copies of their answer blocks.

A document reads `context, user, question, assistant, answer eos, user, question, ...`. Blocks that
hold answer tokens are drawn with replacement and noised independently; in a noised block the prompt
stays visible and everything after the answer's eos is eos, which is what decoding meets. Batches
depend on (seed, stage, step) alone, so a run can stop and resume anywhere.
"""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from examples.train_tiny import corpus
from examples.train_tiny.tasks import ASSISTANT, EOS, USER, Prose, Tasks

BLOCK, MASK = 32, 2
KINDS = ("lm", "write", "kv", "niah", "list", "vt", "cwe", "copy", "story")
NOVELS = 6  # books at the corpus's start that prose documents come from: Austen
FILL_WEIGHT = 0.05  # of the eos after an answer's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What the documents of a stage hold."""

    shares: dict[str, float]
    questions: float = 0.3  # share of a document's tokens for turns
    plain: float = 0.5  # share of questions answered in a random form
    full: float = 0.25  # share of noised blocks that are all mask
    lone: float = 0.15  # share of noised blocks that are lone-mask probes
    prose_weight: float = 0.5
    given: float = 0.33  # share of prose blocks whose first tokens are given, as in a prompt
    novels_only: bool = False  # prose documents from the novels alone


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens, the spans that are learned (start, end), and the kind's index."""

    ids: np.ndarray
    spans: list[tuple[int, int]]
    kind: int


def document(rng, tasks: Tasks, prose: Prose, mixture: Mixture, length: int) -> Document:
    """A random document of exactly `length` tokens; `prose` is what `lm` and `write` learn."""
    kind = rng.choice(len(KINDS), p=[mixture.shares.get(name, 0.0) for name in KINDS])
    name = KINDS[kind]
    if name == "lm":
        return Document(prose.span(rng, length)[1], [(0, length)], kind)
    if name == "write":
        ask = [USER, *tasks.encode(" Continue the text."), ASSISTANT]
        text = prose.span(rng, length - len(ask))[1]
        at = int(rng.integers(8, max(9, len(text) // 2)))
        ids = np.concatenate([text[:at], ask, text[at:]])
        return Document(ids, [(at + len(ask), length)], kind)
    room = int((0.7 if name == "story" else mixture.questions) * length)
    task = tasks.kinds[name](rng, length - room, room)
    inside = rng.random() < 0.25  # the context as part of the first user message
    tail, spans = [], []
    for i, turn in enumerate(task.turns):
        question = (
            [*turn.question, ASSISTANT] if inside and i == 0 else [USER, *turn.question, ASSISTANT]
        )
        answer = turn.answers[rng.integers(len(turn.answers))]
        start = len(tail) + len(question)
        tail += [*question, *answer, EOS]
        spans.append((start, len(tail)))
    # A beginning of one more turn: else the last answer would always end with the document and with
    # a block, and the model learns to expect eos there.
    rest = int(rng.integers(max(BLOCK, length // 8)))
    tail += [USER, *tasks.prose.span(rng, rest)[1].tolist()]
    head = [USER] if inside else []
    context = tasks.context(rng, task, length - len(head) - len(tail))
    if not context or not spans:  # a last turn was too long, or no sentence of a passage fits
        return document(rng, tasks, prose, mixture, length)
    ids = np.array([*head, *context, *tail], np.uint16)
    offset = length - len(tail)
    return Document(ids, [(s + offset, e + offset) for s, e in spans], kind)


def noise(rng, documents: list[Document], mixture: Mixture, blocks: int) -> dict:
    """Clean tokens and `blocks` noised blocks of each document, sorted by position."""
    chosen = []
    for doc in documents:
        places = [(b, s, e) for s, e in doc.spans for b in range(s // BLOCK, (e - 1) // BLOCK + 1)]
        chosen.append(sorted(places[i] for i in rng.integers(len(places), size=blocks)))
    block, start, end = np.moveaxis(np.array(chosen), 2, 0)
    clean = np.stack([doc.ids for doc in documents]).astype(np.uint16)
    kind = np.array([doc.kind for doc in documents])
    is_prose = np.isin(kind, (KINDS.index("lm"), KINDS.index("write")))[:, None, None]
    position = block[:, :, None] * BLOCK + np.arange(BLOCK)
    target = np.take_along_axis(clean, position.reshape(len(clean), -1), 1).reshape(position.shape)
    shape = block.shape
    given = np.where(rng.random(shape) < mixture.given, rng.integers(0, BLOCK, shape), 0)
    begin = np.where(is_prose, block[..., None] * BLOCK + given[..., None], start[..., None])
    begin = np.maximum(begin, start[..., None])
    target = np.where(position < end[..., None], target, EOS).astype(np.uint16)
    weight = np.where(position < end[..., None], 1.0, FILL_WEIGHT)
    weight = np.where(is_prose, mixture.prose_weight, weight)
    lone = rng.random(shape) < mixture.lone
    level = np.where(lone | (rng.random(shape) < mixture.full), 1.0, rng.random(shape))
    masked = (rng.random(position.shape) < level[..., None]) & (position >= begin)
    return {
        "clean": clean,
        "block": block.astype(np.int32),
        "noised": np.where(masked, MASK, target).astype(np.uint16),
        "target": target,
        "weight": (weight * masked).astype(np.float32),
        "hidden": masked & lone[..., None],
        "kind": np.broadcast_to(kind[:, None], shape).astype(np.int32),
    }


class Batches:
    """Builds any batch of a mixture from the tokenized training text."""

    def __init__(self, tokenizer, text: np.ndarray, mixture):
        novels_end = np.flatnonzero(text == EOS)[NOVELS - 1]
        self.mixture = mixture
        self.tasks = Tasks(tokenizer, Prose(text, tokenizer), plain=mixture.plain)
        self.prose = self.tasks.prose
        if mixture.novels_only:
            self.prose = Prose(text[:novels_end], tokenizer)

    def __call__(self, size: tuple[int, int, int], seed: list[int]) -> dict:
        """One batch of (length, rows, noised blocks)."""
        length, rows, blocks = size
        rng = np.random.default_rng(seed)
        documents = [
            document(rng, self.tasks, self.prose, self.mixture, length) for _ in range(rows)
        ]
        return noise(rng, documents, self.mixture, blocks)


def _work(queue, kind, mixture, sizes, seed, first, last, stride) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from examples.train_tiny import tokenizer

    batches = kind(tokenizer.load(), np.load(corpus.DATA / "train.npy"), mixture)
    for step in range(first, last, stride):
        queue.put(batches(sizes[step % len(sizes)], [*seed, step]))


def stream(mixture, sizes, seed: list[int], first: int, last: int, kind=Batches) -> Iterator[dict]:
    """Batches of steps `first` to `last`, made by all processor cores but two.

    Args:
      mixture: what `kind` is made with, besides tokenizer and text.
      kind: a class whose objects are called with one of `sizes` and a seed.
    """
    context = multiprocessing.get_context("spawn")
    count = max(1, min((os.cpu_count() or 2) - 2, last - first))
    queues = [context.Queue(maxsize=4) for _ in range(count)]
    workers = [
        context.Process(
            target=_work, args=(q, kind, mixture, sizes, seed, first + i, last, count), daemon=True
        )
        for i, q in enumerate(queues)
    ]
    for worker in workers:
        worker.start()
    try:
        for step in range(first, last):
            yield queues[(step - first) % count].get()
    finally:
        for worker in workers:
            worker.terminate()
