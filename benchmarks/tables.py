"""Tables of the records: which kinds there are, and what a row of each says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Record = dict[str, Any]


class Column(NamedTuple):
    """A column: its header, where the number lies in a record, and how it is written."""

    header: str
    path: str
    form: str = ""
    factor: float = 1.0

    def cell(self, record: Record) -> str:
        """The text of a record's cell, empty where the record lacks it."""
        value = found(record, self.path)
        if value is None:
            return ""
        if isinstance(value, bool | str | list | dict):
            return str(value)
        return format(value * self.factor if self.factor != 1.0 else value, self.form or ",")


class Table(NamedTuple):
    """Records of one kind: those whose name begins so, unless a longer beginning fits another."""

    prefix: str
    title: str
    columns: Sequence[Column]


MODEL = Column("model", "shapes.model")
ROWS = Column("rows", "shapes.rows")
CONTEXT = Column("context", "shapes.context_tokens")
SPEED = Column("tokens/s", "figures.tokens_per_second", ",.0f")

TABLES = [
    Table(
        "step_",
        "A dense step of the engine",
        [
            MODEL,
            ROWS,
            CONTEXT,
            Column("ms", "figures.ms_per_step", ".2f"),
            Column("bound", "figures.bound_ms", ".2f"),
            Column("times the bound", "figures.ratio_to_bound", ".2f"),
            Column("kernels alone, ms", "figures.kernel_busy_ms", ".2f"),
            Column("attention", "figures.kernel_groups_ms.attention", ".2f"),
            Column("matmuls", "figures.kernel_groups_ms.matmul", ".2f"),
            Column("torch, ms", "figures.torch_ms_per_step", ".2f"),
            Column("times faster than torch", "figures.times_faster_than_torch", ".2f"),
            Column("temporary MB", "figures.temp_bytes", ",.0f", 1e-6),
        ],
    ),
    Table(
        "variant_",
        "The same step under other compiler options",
        [
            MODEL,
            ROWS,
            CONTEXT,
            Column("options", "figures.compiler_options"),
            Column("ms", "figures.ms_per_step", ".2f"),
        ],
    ),
    Table(
        "products_",
        "The matmuls of all layers",
        [
            MODEL,
            Column("queries", "shapes.queries"),
            Column("bound, ms", "figures.bound_ms", ".2f"),
            Column("separate weights", "figures.separate_default_ms", ".2f"),
            Column("joined weights", "figures.joined_default_ms", ".2f"),
            Column("separate, not merged", "figures.separate_no_dot_merger_ms", ".2f"),
            Column("separate, no Triton", "figures.separate_no_triton_gemm_ms", ".2f"),
            Column("joined, no Triton", "figures.joined_no_triton_gemm_ms", ".2f"),
        ],
    ),
    Table(
        "block_",
        "Whole dense blocks through the engine",
        [
            MODEL,
            ROWS,
            CONTEXT,
            Column("denoising steps a block", "figures.denoising_steps_per_block", ".1f"),
            Column("ms a step in the engine", "figures.ms_per_step_in_engine", ".2f"),
            Column("back to back", "figures.ms_per_step", ".2f"),
            Column("ratio", "figures.wall_over_steps", ".3f"),
            Column("ms a block", "figures.ms_per_block", ",.0f"),
            SPEED,
        ],
    ),
    Table(
        "prefill_",
        "Prefill",
        [
            MODEL,
            Column("path", "settings.path"),
            Column("tokens", "shapes.tokens"),
            Column("at a time", "shapes.chunk_tokens"),
            Column("seconds", "figures.seconds", ".3f"),
            SPEED,
            Column("share of the matmul rate", "figures.share_of_matmul_rate", ".1%"),
        ],
    ),
    Table(
        "kernels_block_",
        "Attention of a block, one layer",
        [
            MODEL,
            ROWS,
            Column("keys", "shapes.tokens"),
            Column("us", "figures.us_per_call", ".0f"),
            Column("bound", "figures.bound_us", ".0f"),
            Column("share", "figures.share_of_bound", ".0%"),
            Column("plain", "figures.baseline_us.plain", ",.0f"),
            Column("cuDNN", "figures.baseline_us.cudnn", ",.0f"),
            Column("torch SDPA", "figures.baseline_us.torch_sdpa", ",.0f"),
        ],
    ),
    Table(
        "kernels_prefill_",
        "Attention of a prompt's chunk, one layer",
        [
            MODEL,
            Column("chunk", "shapes.chunk"),
            Column("before it", "shapes.prefix"),
            Column("us", "figures.us_per_call", ",.0f"),
            Column("share of the bound", "figures.share_of_bound", ".0%"),
        ],
    ),
    Table(
        "mixture_step_",
        "A dense step of a mixture",
        [
            MODEL,
            ROWS,
            CONTEXT,
            Column("experts touched a layer", "figures.experts_touched_mean", ".1f"),
            Column("ms", "figures.ms_per_step", ".2f"),
            Column("bound", "figures.bound_ms_per_step", ".2f"),
            Column("times the bound", "figures.ratio_to_bound", ".2f"),
        ],
    ),
    Table(
        "throughput_",
        "Decoding with and without a sparse cache",
        [
            Column("record", "name"),
            ROWS,
            CONTEXT,
            SPEED,
            Column("predicted", "figures.predicted.tokens_per_second", ",.0f"),
            Column("ms a pass", "figures.ms_per_pass", ".2f"),
            Column("alone", "figures.ms_per_pass_alone", ".2f"),
            Column("ms a block", "figures.ms_per_block", ",.0f"),
            Column("exposed", "figures.exposed_ms_per_block", ",.0f"),
        ],
    ),
    Table(
        "host_lane_",
        "The host's retrieval lane",
        [
            Column("stage", "settings.stage"),
            Column("threads", "settings.threads"),
            CONTEXT,
            Column("columns", "shapes.columns"),
            Column("scan, ms", "figures.scan_ms", ".1f"),
            Column("gather", "figures.gather_ms", ".1f"),
            Column("scan beside steps", "figures.scan_ms_beside", ".1f"),
            Column("gather beside steps", "figures.gather_ms_beside", ".1f"),
        ],
    ),
]
"""One entry a kind; records of other kinds are listed with what plain figures they have."""

MOST_FIGURES = 8
"""Figures of a record of a kind without a table."""


def found(record: Record, path: str) -> Any:
    """What lies at a path of names joined by dots; None where there is nothing."""
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def kind_of(record: Record) -> Table | None:
    """The table that a record belongs to."""
    fitting = [table for table in TABLES if record["name"].startswith(table.prefix)]
    return max(fitting, key=lambda table: len(table.prefix), default=None)


def written(columns: Sequence[Column], records: Sequence[Record]) -> Iterator[str]:
    """Lines of a Markdown table; columns that no record has anything for are left out."""
    kept = [column for column in columns if any(column.cell(record) for record in records)]
    yield "| " + " | ".join(column.header for column in kept) + " |"
    yield "|" + "---|" * len(kept)
    for record in records:
        yield "| " + " | ".join(column.cell(record) for column in kept) + " |"


def others(records: Sequence[Record]) -> Iterator[str]:
    """Records without a table: their plain figures, or else only their names."""
    nameless = []
    for record in records:
        figures = [
            f"{name} {value:,.4g}"
            for name, value in record["figures"].items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        if figures:
            yield f"- `{record['name']}`: {', '.join(figures[:MOST_FIGURES])}"
        else:
            nameless.append(f"`{record['name']}`")
    if nameless:
        yield f"- with figures of several cases each: {', '.join(nameless)}"


def order(record: Record) -> tuple[Any, ...]:
    """Where a record stands in its table."""
    shapes = record["shapes"]
    model = shapes.get("model")
    numbers = [shapes.get(name) for name in ("rows", "context_tokens", "tokens", "chunk")]
    return (
        model if isinstance(model, str) else "",
        *[number if isinstance(number, int) else 0 for number in numbers],
        record["name"],
    )
