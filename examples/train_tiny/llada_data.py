"""Training batches for full attention: whole texts with some of their answers masked.

A text reads as in `data.py`, but for its end: the last answer is followed by eos up to a random
room, as a text of `generate_bidirectional` ends. In half of the texts that is the only turn. Every
answer has a noise level t of its own, uniform in (0.1, 1), or 1 in a quarter of them, the state in
which decoding begins; its tokens are masked with probability t and weigh 1/t (LLaDA, arXiv
2502.09992; from 0.1 on, so that no token weighs more than ten). In a fifth of the answers a random
beginning stays visible, as after a first block.
"""

from dataclasses import dataclass

import numpy as np

from examples.train_tiny import data
from examples.train_tiny.data import KINDS, MASK
from examples.train_tiny.tasks import ASSISTANT, EOS, USER, Prose, Tasks

ROOMS = (32, 64, 64)  # tokens of the last answer and the eos after it
LOWEST_LEVEL = 0.1
FILL_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What the texts of a stage hold."""

    shares: dict[str, float]
    questions: float  # share of a text's tokens for turns, where there are several
    plain: float = 0.5  # share of questions answered in a random form
    single: float = 0.5  # share of texts with one turn
    full: float = 0.25  # share of answers that are all mask
    given: float = 0.2  # share of answers whose beginning stays visible
    prose_weight: float = 0.3
    novels_only: bool = False  # prose texts from the novels alone


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, the spans that are learned (start, end), where the fill begins, the kind's index."""

    ids: np.ndarray
    spans: list[tuple[int, int]]
    fill: int
    kind: int


def text(rng, tasks: Tasks, prose: Prose, mixture: Mixture, length: int) -> Text:
    """A random text of exactly `length` tokens."""
    kind = rng.choice(len(KINDS), p=[mixture.shares.get(name, 0.0) for name in KINDS])
    name = KINDS[kind]
    if name == "lm":
        return Text(prose.span(rng, length)[1], [(0, length)], length, kind)
    room = int(rng.choice(ROOMS))
    questions = room if rng.random() < mixture.single else int(mixture.questions * length)
    task = tasks.kinds[name](rng, length - room - questions - 32, questions)
    answers = [turn.answers[rng.integers(len(turn.answers))] for turn in task.turns]
    fits = [i for i, answer in enumerate(answers) if len(answer) < room]
    if not fits:
        return text(rng, tasks, prose, mixture, length)
    last = fits[-1]
    order = [i for i in range(len(answers)) if i != last] if questions > room else []
    tail, spans = [], []
    for i in [*order, last]:
        end = [EOS] if i != last else [EOS] * (room - len(answers[i]))
        tail += [USER, *task.turns[i].question, ASSISTANT]
        spans.append((len(tail), len(tail) + len(answers[i]) + len(end)))
        tail += [*answers[i], *end]
    context = tasks.context(rng, task, length - len(tail))
    if not context:  # statements and turns were too long together
        return text(rng, tasks, prose, mixture, length)
    offset = length - len(tail)
    spans = [(start + offset, end + offset) for start, end in spans]
    fill = spans[-1][0] + len(answers[last]) + 1
    return Text(np.array([*context, *tail], np.uint16), spans, fill, kind)


def noise(rng, texts: list[Text], mixture: Mixture) -> dict:
    """A batch: what the model reads, what it should say, and what each position weighs."""
    target = np.stack([one.ids for one in texts]).astype(np.uint16)
    weight = np.zeros(target.shape, np.float32)
    for row, one in zip(weight, texts, strict=True):
        base = mixture.prose_weight if KINDS[one.kind] == "lm" else 1.0
        for start, end in one.spans:
            level = 1.0 if rng.random() < mixture.full else rng.uniform(LOWEST_LEVEL, 1.0)
            if rng.random() < mixture.given:
                start = int(rng.integers(start, min(end, one.fill)))
            masked = rng.random(end - start) < level
            row[start:end] = np.where(masked, base / level, 0.0)
        row[one.fill :] *= FILL_WEIGHT
    place = np.arange(target.shape[1])
    is_fill = place >= np.array([one.fill for one in texts])[:, None]
    return {
        "tokens": np.where(weight > 0, MASK, target).astype(np.uint16),
        "target": target,
        "weight": weight,
        "is_fill": is_fill,
        "kind": np.array([one.kind for one in texts], np.int32),
    }


class Batches(data.Batches):
    """Builds any batch of a mixture from the tokenized training text."""

    def __call__(self, size: tuple[int, int], seed: list[int]) -> dict:
        """One batch of (length, rows)."""
        length, rows = size
        rng = np.random.default_rng(seed)
        texts = [text(rng, self.tasks, self.prose, self.mixture, length) for _ in range(rows)]
        return noise(rng, texts, self.mixture)
