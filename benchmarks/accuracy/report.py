"""Renders the records of the study as a page, with plots where matplotlib is installed.

Records are grouped by run, and every run is a section of its own: the same name may stand for
another recipe in each, so a section says what its arms are.

What stands between the two findings marks of an existing page is kept: conclusions are written
by hand, figures are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.arms import BUDGETS, percent
from benchmarks.accuracy.plots import draw_plots

OPEN, CLOSE = "<!-- findings -->", "<!-- end of findings -->"
CONTROLS = ("pages", "recent", "random")
BOUND, MEAN_BOUND = -0.02, -0.01
"""An arm is non-inferior if its difference's interval lies above the one, its mean above the
other."""

Record = dict[str, Any]


def write_report(results: Path, page: Path) -> None:
    """Writes the page, and its plots beside it in a folder of the page's name."""
    records = [json.loads(path.read_text()) for path in sorted(results.glob("accuracy_*.json"))]
    if not records:
        raise ValueError(f"{results} has no records of the accuracy study; run it first")
    findings = f"{OPEN}\n{CLOSE}"
    if page.exists() and OPEN in page.read_text():
        text = page.read_text()
        findings = text[text.index(OPEN) : text.index(CLOSE) + len(CLOSE)]
    parts = ["# What selection costs in accuracy", findings, _common(records)]
    for name, run in runs_of(records).items():
        plots = draw_plots(run, page.with_suffix("") / name, ladders_of(run))
        parts += [
            f"## {_title(name)}",
            _setup(run),
            *(f"![{title}]({path.relative_to(page.parent)})" for title, path in plots),
            *_verdicts(run),
            *_cells(run),
            *_budgets(run),
            *_side_arms(run),
            *_drift(run),
            *_selection(run),
        ]
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _cell(record: Record) -> str:
    return record["settings"]["cell"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _share(value: float) -> str:
    return f"{value:.3f}"


def _gap(values: Sequence[float], digits: int = 1, scale: float = 100) -> str:
    mean, low, high = (scale * value for value in values)
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def runs_of(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by the name of their run; one without a name is called by its commit."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record["settings"].get("run") or record["commit"][:7], []).append(record)
    return runs


def _title(run: str) -> str:
    return f"Run `{run}`"


def ladders_of(run: Sequence[Record]) -> list[str]:
    """Arms that a run has at three budgets or more, without the budget, in their order."""
    counts: dict[str, int] = {}
    for name in run[0]["settings"]["arms"]:
        counts.setdefault(_family(name), 0)
        counts[_family(name)] += 1
    return [name for name, count in counts.items() if count >= 3]


def _family(name: str) -> str:
    return name.rpartition(" ")[0] if name.endswith("%") else name


def _common(records: list[Record]) -> str:
    lines = [
        "A budget is a share of the prefix at the block's start; sinks, recent blocks and the "
        "block itself come on top. Every arm decodes the same prompts; differences are to the "
        "dense arm on the same prompts, in points, with intervals of "
        f"{records[0]['settings']['interval']}. `contained`: every value asked for stands in the "
        "answer; `exact`: right to the letter. Tasks and prompts are those of "
        "`examples/train_tiny/tasks.py`; records are `benchmarks/results/accuracy_*.json`, and "
        "`python -m benchmarks accuracy --report docs/accuracy.md` writes this page.",
        f"An arm is non-inferior to dense if the mean difference in `contained` is above "
        f"{100 * MEAN_BOUND:g} and the lower bound above {100 * BOUND:g} points, lengths pooled.",
    ]
    return "\n\n".join(lines)


def _setup(run: list[Record]) -> str:
    one = run[0]
    settings, device = one["settings"], one["device"]
    layout = settings["layout"]
    commits = sorted({record["commit"] for record in run})
    text = (
        f"Model `{settings['model']}` in {settings['dtype']} on {device['kind']} "
        f"(jax {one['versions']['jax']}), commit {', '.join(commits)}. Greedy, threshold "
        f"{layout['threshold']}; {layout['dense_layers']} dense layers, {layout['sink_tokens']} "
        f"sinks, {layout['recent_blocks']} recent block."
    )
    return f"{text}\n\n{_recipes(run)}"


def _recipes(run: list[Record]) -> str:
    """What the arms of a run are, one line for all budgets of an arm."""
    seen: dict[str, list[str]] = {}
    for record in run:
        for name, arm in record["settings"]["arms"].items():
            if arm["source"] != "none" and arm["is_main"]:
                seen.setdefault(_family(name), [_exactness(arm), arm["source"], _recipe(arm)])
    head = ["arm", "step 0 exact in", "queries of", "selection"]
    return table(head, [[name, *cells] for name, cells in seen.items()])


def _exactness(arm: dict[str, Any]) -> str:
    if "exact_first_step" in arm:
        kind = arm["exact_first_step"]
    else:  # a record of before the field had three values
        is_every = arm["source"] == "own" or arm["is_first_step_exact"]
        kind = "every" if is_every else "none"
    return {"none": "no block", "first": "the first block", "every": "every block"}[kind]


def _recipe(arm: dict[str, Any]) -> str:
    if arm["scores"] in ("random", "recent"):
        return arm["scores"]
    spec = arm["selection"]
    width = f"dilation {spec['dilation']} x {spec['dilation_weight']:g}"
    return ", ".join(
        [
            spec["queries"],
            f"heads {spec['heads']}",
            spec["pooling"],
            width if spec["dilation"] else "no dilation",
        ]
    )


def _verdicts(run: list[Record]) -> Iterable[str]:
    yield "### Non-inferiority to dense"
    rows = []
    for record in run:
        for name, line in record["figures"]["pooled"].items():
            if not record["settings"]["arms"][name]["is_main"] or name == "dense":
                continue
            gap = line["contained_difference"]
            passes = gap[0] > MEAN_BOUND and gap[1] > BOUND
            verdict = "passes" if passes else "worse" if gap[2] < 0 else "not shown"
            rows.append([_cell(record), name, str(line["n"]), _gap(gap, 2), verdict])
    yield table(["task", "arm", "pairs", "contained, difference", ""], rows)


def _cells(records: list[Record]) -> Iterable[str]:
    yield "### Arms that ran on all prompts"
    yield "Contained / exact / denoising steps a block, and the difference in `contained`."
    for record in records:
        figures, arms = record["figures"], record["settings"]["arms"]
        lengths = list(figures["by_length"])
        yield f"#### {_cell(record)}"
        head = ["arm", *lengths, "all lengths, difference", "steps a block, difference"]
        rows = []
        for name, arm in arms.items():
            if not arm["is_main"] or name not in figures["pooled"]:
                continue
            cells = [_line(figures["by_length"][length].get(name)) for length in lengths]
            pooled = figures["pooled"][name]
            gaps = [
                _gap(pooled["contained_difference"], 2),
                _gap(pooled["steps_per_block_difference"], 2, 1),
            ]
            rows.append([f"{name} (n = {pooled['n']})", *cells, *gaps])
        yield table(head, rows)


def _line(line: dict[str, Any] | None) -> str:
    if line is None:
        return "-"
    shares = f"{_share(line['contained'])} / {_share(line['exact'])}"
    return f"{shares} / {line['steps_per_block']:.2f}"


def _budgets(records: list[Record]) -> Iterable[str]:
    ladders = ladders_of(records)
    if not ladders:
        return
    yield "### Budgets"
    yield "Share contained, all lengths together."
    for record in records:
        pooled = record["figures"]["pooled"]
        rows = [
            [ladder, *(_pooled_share(pooled, f"{ladder} {percent(b)}") for b in BUDGETS)]
            for ladder in ladders
        ]
        rows.append(["dense", *[_pooled_share(pooled, "dense")] * len(BUDGETS)])
        yield f"#### {_cell(record)}"
        yield table(["arm", *map(percent, BUDGETS)], rows)


def _pooled_share(pooled: dict[str, Any], name: str) -> str:
    return _share(pooled[name]["contained"]) if name in pooled else "-"


def _side_arms(records: list[Record]) -> Iterable[str]:
    known = {f"{ladder} {percent(budget)}" for ladder in ladders_of(records) for budget in BUDGETS}
    names = [
        name
        for name, arm in records[0]["settings"]["arms"].items()
        if name not in known and not arm["is_main"] and name in records[0]["figures"]["pooled"]
    ]
    if not names:
        return
    yield "### All arms on the first prompts"
    yield (
        "Difference to dense in `contained`, all lengths together, and denoising steps a block. "
        "Only arms outside the tables above."
    )
    rows = []
    for name in names:
        cells = []
        for record in records:
            line = record["figures"]["pooled"].get(name)
            gap = _gap(line["contained_difference"]) if line else "-"
            cells.append(f"{gap}; {line['steps_per_block']:.2f}" if line else gap)
        rows.append([name, *cells])
    counts = [
        f"{_cell(record)} (n = {min(x['n'] for x in record['figures']['pooled'].values())})"
        for record in records
    ]
    yield table(["arm", *counts], rows)


def _drift(records: list[Record]) -> Iterable[str]:
    rows = []
    for record in records:
        for name in record["settings"]["arms"]:
            found = [
                by_arm[name]
                for by_arm in record["figures"]["committed_error"].values()
                if name in by_arm
            ]
            if not found:
                continue
            most = max(len(line["rows"]) for line in found)
            errors = []
            for nth in range(most):
                there = [line for line in found if len(line["rows"]) > nth]
                count = sum(line["rows"][nth] for line in there)
                total = sum(line["rows"][nth] * line["mean"][nth] for line in there)
                errors.append((total / count, count))
            text = " ".join(f"{mean:.3f}" for mean, _ in errors)
            rows.append([_cell(record), name, text, str(errors[-1][1])])
    if rows:
        yield "### Drift of committed keys and values"
        yield (
            "Relative error of what the decoded blocks left in the cache, against the same tokens "
            "committed with full attention: first block, second, and so on; mean over sparse "
            "layers, rows and lengths, with the rows of the last block given."
        )
        yield table(["task", "arm", "error by block", "rows"], rows)


def _selection(records: list[Record]) -> Iterable[str]:
    if not any(any(record["figures"]["selection"].values()) for record in records):
        return
    yield "### Recall and captured mass by layer"
    yield (
        "Against the mean importance over all queries of the block, heads apart (MAGE's): recall "
        "of its best keys, and the share of attention to the candidates that the selected ones "
        "hold, beside the most that as many keys can hold. Sparse layers in order; mean over KV "
        "heads, rows and lengths."
    )
    for record in records:
        rows = []
        for name in record["settings"]["arms"]:
            for part in ("first_block", "later_blocks"):
                found = mean_quality(record, name, part)
                if found is None or not name.endswith(" 5%"):
                    continue
                recall, mass, best = (
                    " ".join(f"{value:.2f}" for value in values) for values in found
                )
                rows.append([name, part.replace("_", " "), recall, mass, best])
        if rows:
            yield f"#### {_cell(record)}"
            yield table(["arm", "block", "recall", "mass", "best mass"], rows)


def mean_quality(record: Record, name: str, part: str) -> list[list[float]] | None:
    """Recall, mass and best mass of an arm by layer, over all lengths; None if not measured."""
    found = [
        by_arm[name][part]
        for by_arm in record["figures"]["selection"].values()
        if part in by_arm.get(name, {})
    ]
    rows = sum(line["rows"] for line in found)
    if not rows:
        return None
    return [
        [
            sum(line["rows"] * line[kind][layer] for line in found) / rows
            for layer in range(len(found[0][kind]))
        ]
        for kind in ("recall", "mass", "best_mass")
    ]
