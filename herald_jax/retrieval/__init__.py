"""Which keys of the finished text a block attends, and how they are found."""

from herald_jax.retrieval.queries import query_positions
from herald_jax.retrieval.select import (
    choose,
    column_group,
    columns,
    gather_rows,
    importance,
)
from herald_jax.retrieval.settings import SelectionConfig

__all__ = [
    "SelectionConfig",
    "choose",
    "column_group",
    "columns",
    "gather_rows",
    "importance",
    "query_positions",
]
