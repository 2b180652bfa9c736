"""The tables, by name."""

from __future__ import annotations

from benchmarks import dense, graph, graph_parts, grid, inspection, models, stiefel
from benchmarks.case import Case

TABLES: dict[str, tuple[Case, ...]] = {
    "dense": dense.CASES,
    "graph": graph.CASES,
    "graph-compiled": graph.COMPILED,
    "graph-parts": graph_parts.CASES,
    "grid": grid.CASES,
    "inspection": inspection.CASES,
    "models": models.CASES,
    "stiefel": stiefel.CASES,
}


def chosen(names: list[str]) -> list[Case]:
    """The requested cases, in the order of the tables: whole tables, or parts of the names of cases; all without names.

    Raises:
        ValueError: for an unknown name, with all known ones.
    """
    cases = [(table, case) for table, its in TABLES.items() for case in its]
    for name in names:
        if name not in TABLES and not any(name in case.name for _, case in cases):
            known = "\n".join(f"  {table}: {' '.join(case.name for case in its)}" for table, its in TABLES.items())
            raise ValueError(f"unknown table or case {name!r}; the tables and their cases are\n{known}")
    return [
        case
        for table, case in cases
        if not names or any(name == table or (name not in TABLES and name in case.name) for name in names)
    ]
