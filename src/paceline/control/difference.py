"""Says in words where the rows that ranks compare differ."""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import DisagreementError

# Rows that begin with this compare an option of the wrapper instead of a parameter.
OPTION = "option "
_SHOWN = 8
_SHOWN_CHARACTERS = 1000
# Values of options are nested a little.
_DEPTH = 8


def read_rows(text: str, rank: int, what: str) -> list[list[Any]]:
    """The rows that ``rank`` has sent as JSON. Raises if they do not have the form that others can compare."""
    try:
        # A number of thousands of digits is a ValueError, and deep nesting is a RecursionError.
        match json.loads(text):
            case [*rows] if all(isinstance(row, list) and _is_row(row) for row in rows):
                return rows
    except (ValueError, RecursionError):
        pass
    raise DisagreementError(
        f"What rank {rank} said about its {what} cannot be understood. Run the same version of Paceline on every rank."
    )


def _is_row(row: list[Any]) -> bool:
    return bool(row) and isinstance(row[0], str) and all(_is_shallow(field, _DEPTH) for field in row)


def _is_shallow(value: Any, depth: int) -> bool:
    # What is nested deeply can be read, but neither compared nor shown.
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in items)


def describe_difference(what: str, rows_of_rank: list[list[list[Any]]], names: list[str]) -> str:
    """The first difference of each rank from rank 0, in words. Ranks with the same difference are named together."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, theirs in enumerate(rows_of_rank):
        if found := _first_difference(rows_of_rank[0], theirs, names):
            ranks_of.setdefault(found, []).append(rank)
    clauses = [f"{before} {_named(ranks)}{after}" for (before, after), ranks in ranks_of.items()]
    more = f"; and {len(clauses) - _SHOWN} more differences" if len(clauses) > _SHOWN else ""
    return (
        f"Ranks were given different {what}: {'; '.join(clauses[:_SHOWN])}{more}. "
        "Build the module in the same way on every rank; nothing has been communicated yet."
    )


def _first_difference(ours: list[list[Any]], theirs: list[list[Any]], names: list[str]) -> tuple[str, str] | None:
    """The words of a sentence before and after the ranks that differ from rank 0; None if nothing differs."""
    for ours_row, theirs_row in zip(ours, theirs, strict=False):
        for name, a, b in zip(names, ours_row, theirs_row, strict=False):
            if a == b:
                continue
            values = f"is {_shown(a)} on rank 0 and {_shown(b)} on"
            if ours_row[0].startswith(OPTION):
                return f"{ours_row[0][:_SHOWN_CHARACTERS]} {values}", ""
            if name == "name":
                return f"the first parameter that differs {values}", ""
            return f"the {name} of parameter {_shown(ours_row[0])} {values}", ""
    if len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)
        extra = longer[min(len(ours), len(theirs))][0]
        where = "on rank 0 but not on" if longer is ours else "not on rank 0 but on"
        return f"parameter {_shown(extra)} is {where}", f" ({len(ours)} parameters on rank 0, and {len(theirs)} there)"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _named(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
