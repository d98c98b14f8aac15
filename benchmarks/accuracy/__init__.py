"""What selection costs in accuracy: arms against dense decoding on the same prompts.

Prompts are prefilled once a batch, and every arm decodes them over the same cache. One record
a task goes to the results, after every round of batches, so that a run that is stopped keeps
what it has. `--report` renders the committed records as a page:

    python -m benchmarks accuracy --model assets/tiny-sdar --minutes 8
    python -m benchmarks accuracy --report docs/accuracy.md
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.record import RESULTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", default="assets/tiny-sdar", help="converted or HF folder")
    parser.add_argument("--dtype", default="auto", help="as in LLM")
    parser.add_argument("--cells", nargs="+", default=["niah1", "niah8", "kv"], help="tasks")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--prompts", type=int, default=800, help="of each task and length")
    parser.add_argument(
        "--side-prompts", type=int, default=192, help="the first ones, on which all arms run"
    )
    parser.add_argument("--rows", type=int, default=64, help="prompts decoded at once")
    parser.add_argument("--max-blocks", type=int, default=9, help="most blocks of an answer")
    parser.add_argument("--arms", default="", help="regular expression; dense always runs")
    parser.add_argument(
        "--measured", type=int, default=1, help="batches of each task and length with recall"
    )
    parser.add_argument("--minutes", type=float, default=60, help="no batch begins after these")
    processes = max((os.cpu_count() or 2) - 1, 1)
    parser.add_argument("--processes", type=int, default=processes, help="that make prompts")
    parser.add_argument(
        "--run", default="", help="name of the run, at the end of its records' names"
    )
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--report", type=Path, help="write this page from the records, no more")


def main(arguments: argparse.Namespace) -> None:
    """Runs the study, or writes the page."""
    if arguments.report:
        from benchmarks.accuracy.report import write_report

        write_report(arguments.output, arguments.report)
    else:
        from benchmarks.accuracy.study import run_study

        run_study(arguments)
