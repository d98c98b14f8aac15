"""Generators of long-context tasks: facts scattered in prose, questions about them, answers.

Only numpy and a tokenizer are needed. `prompt(kind, length, seed, ...)` gives one evaluation
prompt; `document(...)` in `data.py` builds training sequences from the same generators. A task is a
list of statements and a list of turns; statements, questions and answers start with a space, so
that encoding them apart equals encoding the whole text.

Plain questions may be answered in several forms, chosen at random while training: each has its own
first word, so one committed token settles the rest, and a mask cannot know beforehand where the
value will stand. A question that ends in "Answer briefly." wants the value alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.train_tiny import stories

EOS, USER, ASSISTANT = 1, 3, 4
ANSWER_ROOM = 128  # tokens of an evaluation length that are not prompt
WORDS_FILE = Path(__file__).parent / "words.txt"
HELD_OUT_FILE = Path(__file__).parents[2] / "assets" / "text" / "held-out.txt"

ATTRIBUTES = (
    "access code",
    "locker number",
    "badge number",
    "room number",
    "account number",
    "serial number",
    "ticket number",
    "telephone extension",
)
FORMS = (
    " {v}",
    " It is {v}.",
    " The answer is {v}, as the text says.",
    " According to the text, {s} is {v}.",
    " I have looked through the text above and found {v} there.",
    " Somewhere in the text it says that {s} is {v}, and nothing else is said of it.",
    " Since you ask, I can tell you: {v} is what you want.",
    " We are told that {s} is {v}.",
    " You will see, if you read it again, that {s} is {v}.",
)
LIST_FORMS = (
    " {v}.",
    " Here they are: {v}.",
    " In the order in which you asked: {v}.",
    " From the text above I can give you all of them: {v}, and that is all.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, every acceptable answer, and the values that a right answer contains."""

    question: list[int]
    answers: tuple[list[int], ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Statements to scatter in prose (or `context` as it is) and turns about them."""

    statements: list[list[int]]
    turns: list[Turn]
    context: list[int] | None = None


class Prose:
    """Tokenized running text that can be cut at sentence starts."""

    def __init__(self, tokens: np.ndarray, tokenizer):
        pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in range(2048)]
        ends = np.array([p.rstrip("\"')").endswith((".", "?", "!")) for p in pieces])
        starts = np.array([p[:1] in (" ", "\n") for p in pieces])
        self.tokens = tokens
        self.word_start = starts[tokens]
        self.starts = np.flatnonzero(ends[tokens[:-1]] & starts[tokens[1:]]) + 1

    def span(self, rng: np.random.Generator, length: int) -> tuple[int, np.ndarray]:
        """(start, tokens) of a passage that begins with a sentence."""
        usable = np.searchsorted(self.starts, len(self.tokens) - length)
        start = int(self.starts[rng.integers(max(1, usable))])
        return start, self.tokens[start : start + length]

    def scatter(self, rng: np.random.Generator, statements: list, length: int) -> list[int]:
        """Statements in order between the sentences of a passage, `length` tokens in all."""
        start, filler = self.span(rng, length - sum(map(len, statements)))
        low, high = np.searchsorted(self.starts, (start, start + len(filler)))
        cuts = self.starts[low:high] - start if high > low else np.zeros(1, np.int64)
        cuts = np.sort(rng.choice(cuts, len(statements)))
        text, last = [], 0
        for cut, statement in zip(cuts, statements, strict=True):
            text.extend(filler[last:cut].tolist())
            text.extend(statement)
            last = cut
        return text + filler[last:].tolist()


class Tasks:
    """The generators. Each takes (rng, room, questions): tokens for statements and for turns."""

    def __init__(self, tokenizer, prose: Prose, *, plain: float = 0.5):
        """`prose` is filler; `plain` the share of questions without "Answer briefly."."""
        self.tokenizer = tokenizer
        self.prose = prose
        self.plain = plain
        self.words = WORDS_FILE.read_text().split()
        self.kinds: dict[str, Callable[..., Task]] = {
            "kv": self.kv,
            "niah": self.niah,
            "list": self.several,
            "vt": self.vt,
            "cwe": self.cwe,
            "copy": self.copy,
            "story": self.story,
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a text piece."""
        return self.tokenizer.encode(text).ids

    def pick(self, rng: np.random.Generator, count: int) -> list[str]:
        """Distinct words."""
        return [self.words[i] for i in rng.choice(len(self.words), count, replace=False)]

    def _turn(self, rng, subject: str, value: str) -> Turn:
        question = f" What is {subject}?"
        if rng.random() < self.plain:
            answers = [self.encode(form.format(s=subject, v=value)) for form in FORMS]
        else:
            question += " Answer briefly."
            answers = [self.encode(f" {value}")]
        return Turn(self.encode(question), tuple(answers), (value,))

    def _list_turn(self, rng, subject: str, keys: list[str], values: list[str]) -> Turn:
        names = ", ".join(keys[:-1]) + f" and {keys[-1]}"
        if rng.random() < 0.3:
            question = f" List only the values of {subject} {names}."
            answers = [" " + ", ".join(values) + "."]
        else:
            question = f" List {subject} {names}."
            pairs = "; ".join(f"{k}: {v}" for k, v in zip(keys, values, strict=True))
            forms = LIST_FORMS if rng.random() < self.plain else LIST_FORMS[:1]
            question += "" if len(forms) > 1 else " Answer briefly."
            answers = [form.format(v=pairs) for form in forms]
        return Turn(self.encode(question), tuple(map(self.encode, answers)), tuple(values))

    def _ask(self, rng, facts: list, make: Callable[..., Turn], room: int) -> list[Turn]:
        """Turns about the facts in random order until `room` is used up; at least one."""
        turns = []
        for i in rng.permutation(len(facts)):
            turn = make(*facts[i])
            room -= len(turn.question) + max(map(len, turn.answers)) + 3
            if room < 0 and turns:
                break
            turns.append(turn)
        return turns

    def _pairs(self, rng, room: int, fill: float) -> tuple[list, list]:
        """(statements, [(key, value)]) of distinct keys filling a share of the room."""
        statements, facts, seen, used = [], [], set(), 0
        kind = rng.integers(4)  # words, 4 digits, 5 digits, or all of these
        while True:
            words = self.pick(rng, 3)
            key = " ".join(words[: 1 if rng.random() < 0.35 else 2])
            value_kind = rng.integers(3) if kind == 3 else kind
            value = (words[2], str(rng.integers(1000, 10000)), str(rng.integers(10000, 100000)))
            if key in seen:
                continue
            statement = self.encode(f" {key}: {value[value_kind]};")
            used += len(statement)
            if facts and used > room * fill:
                return statements, facts
            seen.add(key)
            statements.append(statement)
            facts.append((key, value[value_kind]))

    def kv(self, rng, room: int, questions: int, fill: float | None = None) -> Task:
        """Recall of one of many `key: value;` pairs."""
        fill = rng.uniform(0.3, 1.0) if fill is None else fill
        statements, facts = self._pairs(rng, room, fill)
        turns = self._ask(
            rng, facts, lambda k, v: self._turn(rng, f"the entry for {k}", v), questions
        )
        return Task(statements, turns)

    def _needles(self, rng, room: int, count: int, one: bool) -> tuple[list, list]:
        statements, facts, seen = [], [], set()
        attribute = ATTRIBUTES[rng.integers(len(ATTRIBUTES))]
        for _ in range(max(1, min(count, room // 18))):
            name = " ".join(self.pick(rng, 2))
            attribute = attribute if one else ATTRIBUTES[rng.integers(len(ATTRIBUTES))]
            if (attribute, name) in seen:
                continue
            seen.add((attribute, name))
            value = str(rng.integers(10000, 100000))
            statements.append(self.encode(f" The {attribute} of {name} is {value}."))
            facts.append((attribute, name, value))
        return statements, facts

    def niah(self, rng, room: int, questions: int, needles: int | None = None) -> Task:
        """Recall of one of several sentences hidden in prose."""
        count = int(2 ** rng.uniform(0, 5)) if needles is None else needles
        statements, facts = self._needles(rng, room, count, rng.random() < 0.4)
        turns = self._ask(
            rng, facts, lambda a, n, v: self._turn(rng, f"the {a} of {n}", v), questions
        )
        return Task(statements, turns)

    def several(self, rng, room: int, questions: int, items: int | None = None) -> Task:
        """Several values in one answer, which runs over two or three blocks."""
        if rng.random() < 0.5:
            statements, pairs = self._pairs(rng, room, rng.uniform(0.3, 1.0))
            subject = "the entries for"
        else:
            statements, needles = self._needles(rng, room, int(rng.integers(2, 33)), True)
            subject = f"the {needles[0][0]}s of"
            pairs = [(name, value) for _, name, value in needles]
        turns = []
        while True:
            count = int(rng.integers(2, 9)) if items is None else items
            count = min(count, len(pairs), 1 + max(1, questions // 32))
            if count < 2:
                return Task(statements, [self._turn(rng, f"{subject} {pairs[0][0]}", pairs[0][1])])
            chosen = [pairs[i] for i in rng.choice(len(pairs), count, replace=False)]
            turn = self._list_turn(rng, subject, *map(list, zip(*chosen, strict=True)))
            questions -= len(turn.question) + max(map(len, turn.answers)) + 3
            if turns and questions < 0:
                return Task(statements, turns)
            turns.append(turn)

    def vt(self, rng, room: int, questions: int, variables: int | None = None) -> Task:
        """Variables assigned along chains of up to four hops."""
        count = int(2 ** rng.uniform(2, 5)) if variables is None else variables
        count = max(2, min(count, room // 14))
        hops, names = 1 + int(4 * rng.random() ** 2), self.pick(rng, count)
        order, facts = [], []
        for i in range(0, count, hops + 1):
            chain, value = names[i : i + hops + 1], str(rng.integers(10000, 100000))
            at = np.sort(rng.random(len(chain)))
            sources = [value] + [f"VAR {name}" for name in chain]
            for when, name, source in zip(at, chain, sources, strict=False):
                order.append((when, f" VAR {name} = {source}."))
                facts.append((f"the value of VAR {name}", value))
        statements = [self.encode(text) for _, text in sorted(order)]
        turns = self._ask(rng, facts, lambda s, v: self._turn(rng, s, v), questions)
        return Task(statements, turns)

    def cwe(self, rng, room: int, questions: int) -> Task:
        """The three commonest words of a long list, commonest first."""
        del questions
        pool = self.pick(rng, int(rng.integers(20, 45)))
        total = max(30, room * 2 // 5)
        shares = (rng.uniform(0.17, 0.22), rng.uniform(0.1, 0.13), rng.uniform(0.06, 0.08))
        counts = [int(np.ceil(total * share)) for share in shares]
        ranks = rng.choice(np.arange(3, len(pool)), total - sum(counts))
        ranks = rng.permutation(np.concatenate([np.repeat(range(3), counts), ranks]))
        context = [t for rank in ranks for t in self.encode(" " + pool[rank])][:room]
        answer = self.encode(f" {pool[0]}, {pool[1]}, {pool[2]}.")
        question = self.encode(" What are the three most common words?")
        return Task([], [Turn(question, (answer,), tuple(pool[:3]))], context)

    def copy(self, rng, room: int, questions: int) -> Task:
        """Repetition of the text after a quotation, up to the sentence's end."""
        start, passage = self.prose.span(rng, room)
        low, high = np.searchsorted(self.prose.starts, (start, start + room))
        stops = self.prose.starts[low:high] - start
        words = np.flatnonzero(self.prose.word_start[start : start + room])
        ask = self.encode(" Repeat the text after:")
        turns: list[Turn] = []
        for at in rng.permutation(words)[:200]:
            ends = words[words >= at + 8]
            later = stops[stops >= at + 20]
            if not len(ends) or not len(later) or later[0] > at + 110:
                continue
            answer = passage[ends[0] : later[0]].tolist()
            question = ask + passage[at : ends[0]].tolist()
            questions -= len(question) + len(answer) + 3
            if turns and questions < 0:
                break
            turns.append(Turn(question, (answer,), (self.tokenizer.decode(answer).strip(),)))
        return Task([], turns, passage.tolist())

    def story(self, rng, room: int, questions: int) -> Task:
        """Stories told after unrelated prose: answers of five to eight blocks."""
        del room
        turns: list[Turn] = []
        while True:
            question, text, hero = stories.story(rng)
            turn = Turn(self.encode(question), (self.encode(" " + text),), (hero,))
            questions -= len(turn.question) + len(turn.answers[0]) + 3
            if turns and questions < 0:
                return Task([], turns)
            turns.append(turn)

    def context(self, rng, task: Task, length: int) -> list[int]:
        """The task's context with as much prose as makes it `length` tokens; empty if too long."""
        spare = length - sum(map(len, task.statements)) - len(task.context or [])
        if spare < 0:
            return []
        if task.context is None:
            return self.prose.scatter(rng, task.statements, length)
        return [*self.prose.span(rng, spare)[1].tolist(), *task.context]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One evaluation prompt: token ids, values that must appear, every exactly right answer.

    A story has no list of right answers: any story of the grammar with the hero asked for is one.
    """

    ids: list[int]
    values: tuple[str, ...]
    answers: tuple[str, ...] | None

    def contained(self, text: str) -> bool:
        """Whether every value stands in the answer."""
        return all(value in text for value in self.values)

    def exact(self, text: str) -> bool:
        """Whether the answer is right to the letter."""
        if self.answers is None:
            return self.contained(text) and stories.well_formed(text)
        return text in self.answers


# Cell name: generator, its fixed arguments, and whether questions are plain or ask for brevity.
CELLS = {
    "niah1": ("niah", {"needles": 1}, True),
    "niah8": ("niah", {"needles": 8}, True),
    "kv": ("kv", {"fill": 1.0}, True),
    "niah1-brief": ("niah", {"needles": 1}, False),
    "niah8-brief": ("niah", {"needles": 8}, False),
    "kv-brief": ("kv", {"fill": 1.0}, False),
    "list": ("list", {"items": 6}, True),
    "vt": ("vt", {"variables": 16}, True),
    "cwe": ("cwe", {}, False),
    "copy": ("copy", {}, False),
    "story": ("story", {}, False),
    # New cells come last: prompts depend on a cell's place.
    "list3": ("list", {"items": 3}, True),
}


def held_out_prose(tokenizer) -> Prose:
    """The bundled held-out text, which no training document contains."""
    ids = tokenizer.encode(HELD_OUT_FILE.read_text()).ids
    return Prose(np.array(ids, np.uint16), tokenizer)


def prompt(cell: str, length: int, seed: int, tokenizer, prose: Prose) -> Prompt:
    """Prompt number `seed` of a cell; prompt and answer together take about `length` tokens.

    `ANSWER_ROOM` tokens are kept for the answer, and 0 to 31 more, so that answers may start
    anywhere in a block.

    Args:
      cell: a key of `CELLS`.
      tokenizer: a `tokenizers.Tokenizer`.
      prose: filler, usually `held_out_prose(tokenizer)`.
    """
    kind, arguments, plain = CELLS[cell]
    rng = np.random.default_rng([list(CELLS).index(cell), length, seed])
    tasks = Tasks(tokenizer, prose, plain=float(plain))
    length -= ANSWER_ROOM + int(rng.integers(32))
    task = tasks.kinds[kind](rng, length - 160, 160, **arguments)
    turn = task.turns[0]
    tail = [USER, *turn.question, ASSISTANT]
    context = tasks.context(rng, task, length - len(tail))
    answers = None
    if kind != "story":
        answers = tuple(tokenizer.decode(answer).strip() for answer in turn.answers)
    return Prompt([*context, *tail], turn.values, answers)
