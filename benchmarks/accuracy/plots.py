"""Plots of the study's records as SVG; none where matplotlib is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.arms import BUDGETS, percent

BUDGET_FILE, LAYER_FILE = "budgets.svg", "layers.svg"
TITLES = {
    BUDGET_FILE: "Share of answers that contain the value, by budget",
    LAYER_FILE: "Captured attention mass by layer at 5 %",
}


def draw_plots(
    records: list[dict[str, Any]], folder: Path, ladders: Sequence[str]
) -> list[tuple[str, Path]]:
    """Titles and paths of the plots; without matplotlib those that are there already."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        print("matplotlib is not installed (extra `bench`): the plots stay as they are")
    else:
        matplotlib.use("svg")
        # Ids and dates that change with every run would make every page differ.
        matplotlib.rcParams["svg.hashsalt"] = "herald"
        folder.mkdir(parents=True, exist_ok=True)
        _budgets(records, folder / BUDGET_FILE, ladders)
        _layers(records, folder / LAYER_FILE)
    paths = [(title, folder / name) for name, title in TITLES.items()]
    return [(title, path) for title, path in paths if path.exists()]


def _axes(count: int) -> tuple[Any, Any]:
    pyplot = importlib.import_module("matplotlib.pyplot")
    columns = min(count, 3)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False, layout="constrained"
    )
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return figure, axes.flat


def _save(figure: Any, axis: Any, path: Path) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def _budgets(records: list[dict[str, Any]], path: Path, ladders: Sequence[str]) -> None:
    figure, axes = _axes(len(records))
    for record, axis in zip(records, axes, strict=False):
        pooled = record["figures"]["pooled"]
        for ladder in (*ladders, "pages", "recent", "random"):
            names = [(100 * b, pooled.get(f"{ladder} {percent(b)}")) for b in BUDGETS]
            points = [(budget, line["contained"]) for budget, line in names if line]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=ladder)
        axis.axhline(pooled["dense"]["contained"], color="black", linewidth=0.8, label="dense")
        axis.set(xscale="log", ylim=(-0.02, 1.02), title=record["settings"]["cell"])
        axis.set(xlabel="budget, % of the prefix", ylabel="contained")
        axis.set_xticks([100 * b for b in BUDGETS], [f"{100 * b:g}" for b in BUDGETS], minor=False)
        axis.minorticks_off()
    _save(figure, axes[0], path)


def _layers(records: list[dict[str, Any]], path: Path) -> None:
    from benchmarks.accuracy.report import mean_quality

    figure, axes = _axes(len(records))
    for record, axis in zip(records, axes, strict=False):
        first = record["settings"]["layout"]["dense_layers"]
        names = [name for name in record["settings"]["arms"] if name.endswith(" 5%")][:6]
        for name in names:
            part = "later_blocks"
            found = mean_quality(record, name, part) or mean_quality(record, name, "first_block")
            if found:
                _, mass, _ = found
                axis.plot(range(first, first + len(mass)), mass, marker="o", label=name)
        axis.set(title=record["settings"]["cell"], xlabel="layer", ylabel="captured mass")
        axis.set_ylim(0, 1)
    _save(figure, axes[0], path)
