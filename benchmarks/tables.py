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
    """The cases that have been asked for, in the tables' order: whole tables, or parts of cases' names; all without names.

    Raises:
        ValueError: for a name that is neither, with what there is.
    """
    cases = [(table, case) for table, its in TABLES.items() for case in its]
    for name in names:
        if name not in TABLES and not any(name in case.name for _, case in cases):
            known = "\n".join(f"  {table}: {' '.join(case.name for case in its)}" for table, its in TABLES.items())
            raise ValueError(f"{name!r} is no table and in no case's name; the tables and their cases are\n{known}")
    return [
        case
        for table, case in cases
        if not names or any(name == table or (name not in TABLES and name in case.name) for name in names)
    ]
