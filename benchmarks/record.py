"""One JSON record per measured row, with everything that is needed to repeat it."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from jaxlib import version as jaxlib_version

RESULTS = Path(__file__).parent / "results"

FIELDS = ("name", "commit", "time", "device", "versions", "shapes", "settings", "figures")
"""Top-level fields of every record; a test checks the committed ones."""


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def current_commit() -> str:
    """The commit of the working tree, marked if there are changes."""
    commit = _output_of("git", "rev-parse", "HEAD")
    dirty = "" if _output_of("git", "status", "--porcelain") in ("", "unknown") else "-dirty"
    return commit + dirty


def environment() -> dict[str, Any]:
    """Device, driver and versions."""
    device = jax.devices()[0]
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": {
            "kind": device.device_kind,
            "platform": device.platform,
            "driver": _output_of(*query) if device.platform == "gpu" else None,
        },
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib_version.__version__,
            "flax": flax.__version__,
            "numpy": np.__version__,
        },
    }


def write_record(
    name: str,
    *,
    commit: str,
    shapes: dict[str, Any],
    settings: dict[str, Any],
    figures: dict[str, Any],
    folder: Path = RESULTS,
) -> Path:
    """Writes one row to `<folder>/<name>.json` and returns the path."""
    record = {
        "name": name,
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **environment(),
        "shapes": shapes,
        "settings": settings,
        "figures": figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path
