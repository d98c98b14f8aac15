"""The arms of the study: what chooses the keys that a block attends, and how many of them.

An arm is data; `decode.py` interprets it. All arms but the dense one keep the first layers
dense, attend the newest finished block and the sinks besides their budget, and commit a block
with the keys that it was denoised with.
"""

from __future__ import annotations

import dataclasses

from herald_jax._checks import require, require_float, require_one_of
from herald_jax.retrieval import SelectionConfig

SOURCES = ("none", "own", "exact", "single_pass", "lone")
SCORES = ("attention", "pages", "random", "recent")


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
        scores: `attention` of the queries; `pages`: Quest's bound of a page of keys; `random`;
            `recent`: the newest keys.
        selection: Which of the queries, and what becomes of their scores.
        budget: Share of the prefix.
        first_block: Positions that choose for the first decoded block, which holds the
            prompt's tail: those of the `block`, the same spread over its `masks`, or `all`.
        is_first_step_exact: True if step 0 attends everything (sparse from step 1).
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
    is_first_step_exact: bool = False
    is_commit_exact: bool = False
    is_main: bool = False

    def __post_init__(self) -> None:
        """Checks every field."""
        require_one_of("source", self.source, SOURCES)
        require_one_of("prefix", self.prefix, ("draft", "final"))
        require_one_of("scores", self.scores, SCORES)
        require_one_of("first_block", self.first_block, ("block", "masks", "all"))
        require_float("budget", self.budget, 1e-6, 1.0, "a share in (0, 1]")
        is_lone_sound = self.source != "lone" or self.first_block != "masks"
        require(is_lone_sound, "first_block", self.first_block, "block or all with lone queries")


DEFAULT = SelectionConfig()
MAGE = SelectionConfig(queries="all", heads="apart", pooling="mean", dilation=0)
CENTRE = SelectionConfig(queries="centre", heads="apart", pooling="mean", dilation=0)
BUDGETS = (0.01, 0.025, 0.05, 0.1, 0.2)


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
    """All arms, the dense one first."""
    change = dataclasses.replace
    arms = [Arm(name="dense", source="none", is_main=True)]
    arms += ladder("default", main=(0.05, 0.1))
    arms += ladder("default, exact lookahead", source="exact", main=(0.05,))
    arms += ladder("MAGE", source="own", selection=MAGE, main=(0.05,))
    # The paper chooses for the first block from all of its queries, in the prefill.
    paper = {"source": "lone", "selection": CENTRE, "first_block": "all"}
    arms += ladder("HERALD, lone centre", main=(0.05,), **paper)
    arms += [
        Arm(name=f"default, first block by {first} 5%", first_block=first)
        for first in ("block", "all")
    ]
    # More queries, for answers that fill their block.
    for queries in ("even16", "all"):
        arms += [
            Arm(
                name=f"{queries} {percent(budget)}",
                selection=change(DEFAULT, queries=queries),
                budget=budget,
                is_main=True,
            )
            for budget in (0.05, 0.1)
        ]
    for queries, weight in (("even8", 1.0), ("even16", 0.3), ("even16", 1.0)):
        arms += [
            Arm(
                name=f"{queries}, dilation {weight:g} {percent(budget)}",
                selection=change(DEFAULT, queries=queries, dilation_weight=weight),
                budget=budget,
                is_main=True,
            )
            for budget in (0.05, 0.1)
        ]
    # What stands for block N, crossed with the queries.
    for name, selection in (("default", DEFAULT), ("all", MAGE), ("centre", CENTRE)):
        for prefix in ("final", "draft"):
            if (name, prefix) != ("default", "draft"):
                arms.append(
                    Arm(
                        name=f"{name}, exact lookahead on {prefix} 5%",
                        source="exact",
                        prefix=prefix,
                        selection=selection,
                    )
                )
    arms.append(Arm(name="default on final 5%", prefix="final"))
    # One change of the recipe at a time.
    recipes = {
        "first": change(DEFAULT, queries="first"),
        "even4": change(DEFAULT, queries="even4"),
        "centre": change(DEFAULT, queries="centre"),
        "even8": change(DEFAULT, queries="even8"),
        "all, heads apart": change(DEFAULT, queries="all", heads="apart"),
        "even16, heads apart": change(DEFAULT, queries="even16", heads="apart"),
        "all, heads apart, mean": change(MAGE, dilation=8),
        "all, hard dilation": change(DEFAULT, queries="all", dilation_weight=1.0),
        "heads apart": change(DEFAULT, heads="apart"),
        "mean over positions": change(DEFAULT, pooling="mean"),
        "no dilation": change(DEFAULT, dilation=0),
        "hard dilation": change(DEFAULT, dilation_weight=1.0),
        "dilation 0.3": change(DEFAULT, dilation_weight=0.3),
    }
    arms += [
        Arm(name=f"default but {name} 5%", selection=recipe) for name, recipe in recipes.items()
    ]
    arms += [
        Arm(name="default, sparse from step 1 5%", is_first_step_exact=True),
        Arm(name="default, exact commit 5%", is_commit_exact=True),
        Arm(name="own step 0, default queries 5%", source="own"),
        Arm(name="HERALD, sparse from step 1 5%", is_first_step_exact=True, **paper),
        Arm(
            name="HERALD, first block by centre 5%",
            source="lone",
            selection=CENTRE,
            first_block="block",
        ),
        Arm(name="lone default 5%", source="lone", first_block="block"),
    ]
    for budget in (0.05, 0.1):
        share = percent(budget)
        arms += [
            Arm(
                name=f"pages {share}",
                scores="pages",
                selection=change(DEFAULT, dilation=0),
                budget=budget,
            ),
            Arm(name=f"random {share}", scores="random", budget=budget),
            Arm(name=f"recent {share}", scores="recent", budget=budget),
        ]
    return arms
