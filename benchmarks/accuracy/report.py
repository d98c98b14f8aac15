"""Renders the records of the study as a page, with plots where matplotlib is installed.

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
LADDERS = ("default", "default, exact lookahead", "MAGE", "HERALD, lone centre")
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
    plots = draw_plots(records, page.with_suffix(""), LADDERS)
    parts = [
        "# What selection costs in accuracy",
        findings,
        _setup(records),
        *(f"![{title}]({path.relative_to(page.parent)})" for title, path in plots),
        *_verdicts(records),
        *_cells(records),
        *_budgets(records),
        *_side_arms(records),
        *_drift(records),
        *_selection(records),
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


def _setup(records: list[Record]) -> str:
    one = records[0]
    settings, device = one["settings"], one["device"]
    layout = settings["layout"]
    lines = [
        f"Model `{settings['model']}` in {settings['dtype']} on {device['kind']} "
        f"(jax {one['versions']['jax']}). Greedy, threshold {layout['threshold']}. "
        f"The first {layout['dense_layers']} layers attend everything; the others attend the "
        f"budget, {layout['sink_tokens']} sinks, {layout['recent_blocks']} finished block and the "
        "block itself. A budget is a share of the prefix at the block's start. Every arm decodes "
        "the same prompts; differences are to the dense arm on the same prompts, in points, with "
        f"intervals of {settings['interval']}.",
        "`contained`: every value asked for stands in the answer; `exact`: right to the letter. "
        "Tasks and prompts are those of `examples/train_tiny/tasks.py`; arms are defined in "
        "`benchmarks/accuracy/arms.py`, records are `benchmarks/results/accuracy_*.json`, and "
        "`python -m benchmarks accuracy --report docs/accuracy.md` writes this page.",
    ]
    return "\n\n".join(lines)


def _verdicts(records: list[Record]) -> Iterable[str]:
    names = ("default 5%", "default 10%")
    yield "## Non-inferiority to dense"
    yield (
        f"An arm passes if the mean difference in `contained` is above {100 * MEAN_BOUND:g} "
        f"and the lower bound above {100 * BOUND:g} points, lengths pooled."
    )
    rows = []
    for record in records:
        pooled = record["figures"]["pooled"]
        for name, line in pooled.items():
            if name in names or ("first block by" in name and line["n"] > 0):
                gap = line["contained_difference"]
                passes = gap[0] > MEAN_BOUND and gap[1] > BOUND
                verdict = "passes" if passes else "fails"
                rows.append([_cell(record), name, str(line["n"]), _gap(gap, 2), verdict])
    yield table(["task", "arm", "pairs", "contained, difference", ""], rows)


def _cells(records: list[Record]) -> Iterable[str]:
    yield "## Arms that ran on all prompts"
    yield "Contained / exact / denoising steps a block, and the difference in `contained`."
    for record in records:
        figures, arms = record["figures"], record["settings"]["arms"]
        lengths = list(figures["by_length"])
        yield f"### {_cell(record)}"
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
    yield "## Budgets"
    yield "Share contained, all lengths together."
    for record in records:
        pooled = record["figures"]["pooled"]
        rows = [
            [ladder, *(_pooled_share(pooled, f"{ladder} {percent(b)}") for b in BUDGETS)]
            for ladder in LADDERS
        ]
        rows.append(["dense", *[_pooled_share(pooled, "dense")] * len(BUDGETS)])
        yield f"### {_cell(record)}"
        yield table(["arm", *map(percent, BUDGETS)], rows)


def _pooled_share(pooled: dict[str, Any], name: str) -> str:
    return _share(pooled[name]["contained"]) if name in pooled else "-"


def _side_arms(records: list[Record]) -> Iterable[str]:
    yield "## All arms on the first prompts"
    yield (
        "Difference to dense in `contained`, all lengths together, and denoising steps a block. "
        "Only arms outside the tables of budgets, or with other prompts than all."
    )
    known = {f"{ladder} {percent(budget)}" for ladder in LADDERS for budget in BUDGETS}
    names = [
        name
        for name in records[0]["settings"]["arms"]
        if name not in known and name != "dense" and name in records[0]["figures"]["pooled"]
    ]
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
    yield "## Drift of committed keys and values"
    yield (
        "Relative error of what the decoded blocks left in the cache, against the same tokens "
        "committed with full attention: first block, second, and so on; mean over sparse "
        "layers, rows and lengths, with the rows of the last block given."
    )
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
        yield table(["task", "arm", "error by block", "rows"], rows)


def _selection(records: list[Record]) -> Iterable[str]:
    yield "## Recall and captured mass by layer"
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
            yield f"### {_cell(record)}"
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
