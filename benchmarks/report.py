"""Renders the records into the generated part of docs/performance.md, with plots.

What is written by hand stands outside the two markers and is kept. Plots need matplotlib (extra
`bench`); without it the tables are renewed and the plots stay as they are.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS
from benchmarks.tables import TABLES, Record, found, kind_of, order, others, written

BEGIN = "<!-- The rest of this section is written by `python -m benchmarks report`. -->"
END = "<!-- End of what `python -m benchmarks report` writes. -->"

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"


def read_records(folder: Path) -> list[Record]:
    """All records of a folder."""
    paths = sorted(folder.glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _sources(records: Sequence[Record]) -> str:
    """Where and with what a table's records were measured."""
    devices = {str(record["device"]["kind"]) for record in records}
    commits = {record["commit"][:8] for record in records}
    versions = {f"jax {record['versions']['jax']}" for record in records}
    return ", ".join(", ".join(sorted(names)) for names in (devices, versions)) + (
        f"; commit{'s' if len(commits) > 1 else ''} {', '.join(sorted(commits))}."
    )


def rendered(records: Sequence[Record], images: Sequence[tuple[str, str]]) -> str:
    """The generated part, without its markers; `images` are titles and paths of plots."""
    lines: list[str] = []
    for title, path in images:
        lines += [f"![{title}]({path})", ""]
    for table in TABLES:
        own = sorted((r for r in records if kind_of(r) is table), key=order)
        if own:
            lines += [f"### {table.title}", "", *written(table.columns, own), "", _sources(own), ""]
    rest = [record for record in records if kind_of(record) is None]
    if rest:
        lines += ["### Other records", "", *others(rest), ""]
    return "\n".join(lines)


def replaced(document: str, generated: str) -> str:
    """The document with what stands between the markers renewed.

    Raises:
        ValueError: If it does not hold both markers once, in their order.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in before:
        raise ValueError(f"the document must hold {BEGIN!r} and then {END!r}, once each")
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def _plot_steps(axes: Any, records: Sequence[Record]) -> bool:
    own = [r for r in records if r["name"].startswith("step_") and "bound_ms" in r["figures"]]
    own.sort(key=order)
    numbers = range(len(own))
    labels = [f"{r['shapes']['rows']} x {r['shapes']['context_tokens'] // 1024}K" for r in own]
    lines = {
        "bound": "figures.bound_ms",
        "HERALD": "figures.ms_per_step",
        "torch, captured": "figures.torch_ms_per_step",
    }
    for at, (label, path) in enumerate(lines.items()):
        heights = [found(record, path) or float("nan") for record in own]
        axes.bar([n + 0.27 * (at - 1) for n in numbers], heights, 0.27, label=label)
    axes.set_xticks(list(numbers), labels, rotation=45, ha="right")
    axes.set_ylabel("ms a step (log)")
    axes.set_yscale("log")
    axes.set_title("A dense step of SDAR-8B: rows x context")
    axes.legend(frameon=False)
    return bool(own)


def _plot_kernels(axes: Any, records: Sequence[Record]) -> bool:
    own = [r for r in records if r["name"].startswith("kernels_block_")]
    own.sort(key=order)
    names = [record["name"].removeprefix("kernels_block_") for record in own]
    axes.barh(names, [100 * record["figures"]["share_of_bound"] for record in own])
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the bound")
    axes.set_title("Attention of a block")
    return bool(own)


PLOTS = {
    "step": ("Time of a dense step, its bound and torch", _plot_steps),
    "kernels": ("Attention kernel as a share of its bound", _plot_kernels),
}


def draw(records: Sequence[Record], folder: Path) -> None:
    """Writes the plots as SVG files, the same bytes for the same records."""
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, which is small
    matplotlib.rcParams["svg.hashsalt"] = "herald"  # names of parts are the same every time
    folder.mkdir(parents=True, exist_ok=True)
    for name, (_, plot) in PLOTS.items():
        figure = figures.Figure(figsize=(7, 3.6), layout="constrained")
        if plot(figure.add_subplot(), records):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _images(document: Path) -> Iterator[tuple[str, str]]:
    for name, (title, _) in PLOTS.items():
        if (document.parent / "images" / f"{name}.svg").exists():
            yield title, f"images/{name}.svg"


def main(arguments: argparse.Namespace) -> None:
    """Renews the document."""
    records = read_records(arguments.records)
    document: Path = arguments.document
    if importlib.util.find_spec("matplotlib") is None:
        print("no matplotlib (extra `bench`): plots are left as they are")
    else:
        draw(records, document.parent / "images")
    generated = rendered(records, list(_images(document)))
    text = replaced(document.read_text(encoding="utf-8"), generated)
    document.write_text(text, encoding="utf-8")
    print(f"{len(records)} records into {document}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
