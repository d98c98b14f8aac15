"""`herald models`: the supported families, their status, and how each was checked."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.families import Family

HELP = "List the supported model families and how each was checked."


_ATTENTION = {
    "block_causal": "block-causal",
    "full": "full, decoded by herald_jax.generate_bidirectional",
    "canvas": "causal text and canvases of random ids, decoded by herald_jax.generate_canvas",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sub-command."""
    parser.add_argument("--json", action="store_true", help="one JSON object for each family")


def run(options: argparse.Namespace) -> int:
    """Prints the registry of the converter and returns the exit code."""
    from convert.families import families

    for family in sorted(families().values(), key=lambda family: family.name):
        facts = _facts(family)
        print(json.dumps(facts, ensure_ascii=False) if options.json else _text(facts))
    return 0


def _facts(family: Family) -> dict[str, Any]:
    return {
        "family": family.name,
        "status": "checked on random weights" if family.checked else "unchecked",
        "architectures": list(family.architectures),
        "model_types": list(family.model_types),
        "models": list(family.models),
        "attention": family.attention,
        "shifts_predictions": family.shifts_predictions,
        "block_length": family.block_length,
        "mask_token_id": family.mask_token_id,
        "checked": list(family.checked),
        "limits": list(family.limits),
    }


def _text(facts: dict[str, Any]) -> str:
    block = facts["block_length"] or "from the checkpoint or --block-length"
    mask = facts["mask_token_id"]
    mask_text = "from the checkpoint" if mask is None else mask
    mask_text = "none" if facts["attention"] == "canvas" else mask_text
    attention = _ATTENTION[facts["attention"]]
    if facts["shifts_predictions"]:
        attention += "; a position is predicted from the one before it"
    lines = [
        f"{facts['family']} ({facts['status']})",
        f"  architecture: {', '.join(facts['architectures'])}",
        f"  models: {', '.join(facts['models']) or 'no published one is known'}",
        f"  attention: {attention}",
        f"  block length: {block}",
        f"  mask id: {mask_text}",
        *(f"  checked: {line}" for line in facts["checked"]),
        *(f"  differs: {line}" for line in facts["limits"]),
    ]
    return "\n".join(
        textwrap.fill(line, 100, subsequent_indent="    ", break_on_hyphens=False) for line in lines
    )
