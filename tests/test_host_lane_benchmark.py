"""The benchmark of the host lane runs on any machine and records what it says."""

from __future__ import annotations

import argparse
import json

from benchmarks import host_lane


def test_small_run(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    host_lane.add_arguments(parser)
    stages = ("matrix", "numba", "xla")
    options = ["--small", "--threads", "1", "--columns", "1", "8", "--stages", *stages]
    options += ["--commit", "c" * 40, "--output", str(tmp_path)]
    host_lane.main(parser.parse_args(options))
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(records) == sorted(
        f"host_lane_{stage}_c{columns}_k2_s4096_t1" for stage in stages for columns in (1, 8)
    )
    for record in records.values():
        figures, shapes = record["figures"], record["shapes"]
        row = shapes["layers"] * shapes["kv_heads"] * shapes["head_dim"] * 2
        assert figures["bytes_scanned"] == shapes["context_tokens"] * row
        assert figures["bytes_gathered"] == 2 * shapes["entries"] * row
        rates = [value for name, value in figures.items() if name.endswith("per_second")]
        assert len(rates) == 5 and min(rates) > 0
    assert "numba" in capsys.readouterr().out
