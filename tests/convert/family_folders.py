"""The golden families as published folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.families import write_folder

GOLDEN = Path(__file__).parent.parent / "golden"


class Golden:
    """One file of `tests.golden.families`: a published model with tokens and logits."""

    def __init__(self, name: str) -> None:
        with np.load(GOLDEN / f"family_{name}.npz") as file:
            self.config: dict[str, Any] = json.loads(str(file["config"]))
            self.tokens, self.logits = file["tokens"], file["logits"]
            self.tensors = {k[7:]: file[k] for k in file.files if k.startswith("tensor:")}

    def write(self, folder: Path, shards: int = 1, **changes: Any) -> Path:
        """Writes the folder; keyword arguments change config fields (`...` removes one)."""
        config = {k: v for k, v in {**self.config, **changes}.items() if v is not ...}
        return write_folder(folder, config, self.tensors, shards)
