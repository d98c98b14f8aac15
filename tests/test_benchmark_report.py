"""The generated part of a document says what the records say and leaves the rest alone."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import BEGIN, DOCUMENT, END, rendered, replaced
from benchmarks.tables import TABLES, kind_of


def _record(name: str, figures: dict[str, Any], **shapes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "commit": "0123456789abcdef",
        "device": {"kind": "a device"},
        "versions": {"jax": "1.2.3"},
        "shapes": shapes,
        "settings": {},
        "figures": figures,
    }


def test_a_table_has_a_row_a_record_in_order_and_no_empty_columns():
    def step(rows: int, ms: float) -> dict[str, Any]:
        figures = {"ms_per_step": ms, "ratio_to_bound": 1.25}
        return _record(f"step_m_r{rows}_s8", figures, model="m", rows=rows, context_tokens=8192)

    lines = rendered([step(16, 20.126), step(2, 5.0)], [("plot", "images/p.svg")]).splitlines()
    assert "![plot](images/p.svg)" in lines
    at = lines.index("| model | rows | context | ms | times the bound |")
    assert lines[at + 2 : at + 4] == [
        "| m | 2 | 8,192 | 5.00 | 1.25 |",
        "| m | 16 | 8,192 | 20.13 | 1.25 |",
    ]
    assert "a device, jax 1.2.3; commit 01234567." in lines


def test_the_longest_prefix_decides_the_kind_and_the_rest_is_listed():
    block = kind_of(_record("kernels_block_x", {}))
    assert block is not None and block.prefix == "kernels_block_"
    plain, nested = _record("new_a", {"gain": 2.5}), _record("new_b", {"case": {"gain": 1}})
    text = rendered([plain, nested], [])
    assert "- `new_a`: gain 2.5" in text and "several cases each: `new_b`" in text
    assert len({table.prefix for table in TABLES}) == len(TABLES)


def test_only_what_stands_between_the_markers_is_replaced():
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(document, "new\n") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replaced(replaced(document, "new\n"), "new\n") == replaced(document, "new\n")
    for broken in ("no markers", f"{BEGIN} {BEGIN} {END} {BEGIN}", f"{END} {BEGIN}"):
        with pytest.raises(ValueError, match="document must hold"):
            replaced(broken, "new")


def test_the_performance_page_has_a_place_for_the_records():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert replaced(text, "x").count(BEGIN) == 1
