"""Table and plot of Fast-dLLM's rows from their records, into docs/bidirectional.md.

python -m benchmarks.bidirectional_report
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.bidirectional_table import RULES
from benchmarks.record import RESULTS
from herald_jax.decoding.bidirectional import CACHES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "bidirectional.md"
PLOT = PAGE.parent / "bidirectional" / "table.svg"
BEGIN, END = "<!-- table: benchmarks/bidirectional_report.py -->", "<!-- end of table -->"
RULE_NAMES = {"one": "one token a step", "threshold": "threshold 0.9", "factor": "factor 1"}


def read(name: str, folder: Path = RESULTS) -> dict[tuple[str, str], dict[str, Any]]:
    """The records that there are, by cache and rule."""
    paths = {
        (cache, rule): folder / f"bidirectional_table_{name}_{cache}_{rule}.json"
        for rule in RULES
        for cache in CACHES
    }
    return {
        key: json.loads(path.read_text(encoding="utf-8"))
        for key, path in paths.items()
        if path.exists()
    }


def points(difference: list[float] | None) -> str:
    """A paired difference in points, with its interval."""
    if difference is None:
        return ""
    middle, low, high = (100 * x for x in difference)
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]"


def rows_of(records: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """The lines of the table; speed is compared with no cache under the same rule."""
    cells = next(iter(records.values()))["settings"]["cells"]
    head = ["rule", "cache", *cells, "difference to no cache", "passes", "tok/s", "times no cache"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (cache, rule), record in records.items():
        figures = record["figures"]
        line = [RULE_NAMES[rule], cache]
        line += [f"{figures['cells'][cell]['contained']:.3f}" for cell in cells]
        line += [points(figures.get("difference")), f"{figures['passes']:.1f}"]
        line += [f"{figures['tokens_per_second']:,.0f}"]
        times = figures.get("times_no_cache")
        line += [f"{times:.1f}" if times else ""]
        lines.append(f"| {' | '.join(line)} |")
    return lines


def draw(records: dict[tuple[str, str], dict[str, Any]]) -> bool:
    """Draws share of right answers over tokens a second; False without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        print("matplotlib is not installed (extra `bench`): the plot stays as it is")
        return False
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "herald"
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for rule in RULES:
        for cache, marker in zip(CACHES, ("o", "s", "^"), strict=True):
            record = records.get((cache, rule))
            if record is None:
                continue
            figures = record["figures"]
            share, count = figures["contained"], figures["prompts"]
            error = 1.96 * (share * (1 - share) / count) ** 0.5
            colour = f"C{list(RULES).index(rule)}"
            axis.errorbar(
                figures["tokens_per_second"],
                share,
                yerr=error,
                marker=marker,
                color=colour,
                linestyle="none",
                capsize=2,
                label=f"{RULE_NAMES[rule]}, {cache}",
            )
    axis.set(xscale="log", xlabel="tokens a second", ylabel="answers right")
    figure.legend(loc="outside right center", fontsize="small")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, metadata={"Date": None})
    return True


def main() -> None:
    """Renews the page between its two marks."""
    records = read("tiny-llada")
    if not records:
        raise SystemExit(
            f"no records in {RESULTS}; run `python -m benchmarks bidirectional --table`"
        )
    draw(records)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{PAGE} lacks the marks {BEGIN} and {END}")
    plot = f"![Answers right over tokens a second]({PLOT.relative_to(PAGE.parent)})"
    middle = "\n".join([BEGIN, *rows_of(records), "", plot, END])
    PAGE.write_text(before + middle + after, encoding="utf-8")


if __name__ == "__main__":
    main()
