"""The arms of the study: what chooses the keys that a block attends, and how many of them.

An arm is data; `decode.py` interprets it. All arms but the dense one keep the first layers
dense, attend the newest finished block and the sinks besides their budget, and commit a block
with the keys that it was denoised with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from herald_jax._checks import require, require_float, require_one_of
from herald_jax.retrieval import SelectionConfig

SOURCES = ("none", "own", "exact", "single_pass", "lone")
SCORES = ("attention", "int8", "pages", "random", "recent")
EXACT_BLOCKS = ("none", "first", "every")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to decode.

    Attributes:
        name: Unique name, as in the tables.
        source: Where the queries of a block come from. `none`: dense. `own`: the block's own
            step 0 with full attention (MAGE). The others look ahead from the block before:
            `exact` from all masks of the block with full attention, `single_pass` the same with
            the keys that the block before attends, `lone` from one mask at each position that
            sees the text and itself only, with full attention (HERALD's retrieval token).
        prefix: What stands for the block before in a lookahead: its `draft` after step 0, or
            its `final` tokens, which no overlapped engine can have.
        scores: `attention` of the queries; `int8`, the same over keys of 8 bits; `pages`:
            Quest's bound of a page of keys; `random`; `recent`: the newest keys.
        selection: Which of the queries, and what becomes of their scores.
        budget: Share of the prefix.
        first_block: Positions that choose for the first decoded block, which holds the
            prompt's tail: those of the `block`, the same spread over its `masks`, or `all`.
        exact_first_step: Blocks whose step 0 attends everything: `none`, the `first` decoded
            one, which the engine's prefill runs anyway, or `every` (sparse from step 1).
        is_commit_exact: True if the commit pass attends everything.
        is_main: True if the arm runs on all prompts, and not only on the first ones.
    """

    name: str
    source: str = "single_pass"
    prefix: str = "draft"
    scores: str = "attention"
    selection: SelectionConfig = SelectionConfig()
    budget: float = 0.05
    first_block: str = "masks"
    exact_first_step: str = "first"
    is_commit_exact: bool = False
    is_main: bool = False

    def __post_init__(self) -> None:
        """Checks every field."""
        require_one_of("source", self.source, SOURCES)
        require_one_of("prefix", self.prefix, ("draft", "final"))
        require_one_of("scores", self.scores, SCORES)
        require_one_of("first_block", self.first_block, ("block", "masks", "all"))
        require_one_of("exact_first_step", self.exact_first_step, EXACT_BLOCKS)
        is_own_sound = self.source != "own" or self.exact_first_step == "every"
        require(is_own_sound, "exact_first_step", self.exact_first_step, "every with own queries")
        require_float("budget", self.budget, 1e-6, 1.0, "a share in (0, 1]")
        is_lone_sound = self.source != "lone" or self.first_block != "masks"
        require(is_lone_sound, "first_block", self.first_block, "block or all with lone queries")


DEFAULT = SelectionConfig(queries="even16", dilation=8, dilation_weight=0.1)
MAGE = SelectionConfig(queries="all", heads="apart", pooling="mean", dilation=0)
CENTRE = SelectionConfig(queries="centre", heads="apart", pooling="mean", dilation=0)
BUDGETS = (0.01, 0.025, 0.05, 0.1, 0.2)
WEIGHTS = (0.1, 0.3, 1.0)


def percent(budget: float) -> str:
    """A budget as it stands in an arm's name."""
    return f"{100 * budget:g}%"


def ladder(name: str, main: tuple[float, ...] = (), **fields: object) -> list[Arm]:
    """One arm a budget; those of `main` run on all prompts."""
    return [
        Arm(name=f"{name} {percent(budget)}", budget=budget, is_main=budget in main, **fields)  # type: ignore[arg-type]
        for budget in BUDGETS
    ]


def study_arms() -> list[Arm]:
    """All arms, the dense one first; the others change one thing of the default at a time."""
    change = dataclasses.replace
    arms = [Arm(name="dense", source="none", is_main=True)]
    arms += ladder(default_name(DEFAULT.dilation_weight), main=(0.05, 0.1), selection=DEFAULT)
    arms += [
        Arm(
            name=f"{default_name(weight)} {percent(budget)}",
            selection=change(DEFAULT, dilation_weight=weight),
            budget=budget,
            is_main=True,
        )
        for weight in WEIGHTS
        if weight != DEFAULT.dilation_weight
        for budget in (0.05, 0.1)
    ]
    own = {"source": "own", "exact_first_step": "every"}
    arms += ladder("MAGE", main=(0.05,), selection=MAGE, first_block="block", **own)
    # The paper chooses for the first block from all of its queries, in the prefill.
    paper = {"source": "lone", "selection": CENTRE, "first_block": "all"}
    arms += ladder("HERALD, lone centre", **paper)
    recipes = {
        "log8": change(DEFAULT, queries="log8"),
        "even4": change(DEFAULT, queries="even4"),
        "even8": change(DEFAULT, queries="even8"),
        "all": change(DEFAULT, queries="all"),
        "centre": change(DEFAULT, queries="centre"),
        "heads apart": change(DEFAULT, heads="apart"),
        "mean over positions": change(DEFAULT, pooling="mean"),
        "no dilation": change(DEFAULT, dilation=0),
    }
    arms += [
        Arm(name=f"default but {name} 5%", selection=recipe) for name, recipe in recipes.items()
    ]
    changes: dict[str, Mapping[str, str | bool]] = {
        "no exact step": {"exact_first_step": "none"},
        "sparse from step 1": {"exact_first_step": "every"},
        "exact commit": {"is_commit_exact": True},
        "8-bit keys": {"scores": "int8"},
        "exact lookahead": {"source": "exact"},
        "exact lookahead on final": {"source": "exact", "prefix": "final"},
        "own step 0": own,
        "first block by all": {"first_block": "all"},
    }
    arms += [
        Arm(name=f"default but {name} 5%", selection=DEFAULT, **fields)  # type: ignore[arg-type]
        for name, fields in changes.items()
    ]
    arms.append(Arm(name="HERALD, no exact step 5%", exact_first_step="none", **paper))
    for budget in (0.05, 0.1):
        share = percent(budget)
        # Controls and page bounds get no exact step, which would answer for them.
        bare = {"budget": budget, "exact_first_step": "none"}
        pages = change(DEFAULT, dilation=0)
        arms += [
            Arm(name=f"pages {share}", scores="pages", selection=pages, **bare),
            Arm(name=f"random {share}", scores="random", **bare),
            Arm(name=f"recent {share}", scores="recent", **bare),
        ]
    return arms


def default_name(weight: float) -> str:
    """The name of the default recipe with a weight of its dilation."""
    return f"default, dilation {weight:g}"
