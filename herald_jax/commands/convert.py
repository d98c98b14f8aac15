"""`herald convert`: the converter under the name of the main command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

HELP = "Convert a Hugging Face checkpoint (same as herald-convert)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing: the converter reads its own options."""


def run(arguments: Sequence[str]) -> int:
    """Hands the arguments to the converter and returns its exit code."""
    from convert.__main__ import main

    return main(arguments)
