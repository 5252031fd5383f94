"""Says in words where the rows that ranks compare differ."""

from __future__ import annotations

from typing import Any

# Rows that begin with this compare an option of the wrapper instead of a parameter.
OPTION = "option "


def describe_difference(what: str, rows_of_rank: list[list[list[Any]]], names: list[str]) -> str:
    """The first difference of each rank from rank 0, in words."""
    ours = rows_of_rank[0]
    lines = []
    for rank, theirs in enumerate(rows_of_rank):
        line = _first_difference(ours, theirs, rank, names)
        if line:
            lines.append(line)
    told = "\n  ".join(lines[:8])
    more = f"\n  (and {len(lines) - 8} more ranks)" if len(lines) > 8 else ""
    return (
        f"Ranks were given different {what}:\n  {told}{more}\n"
        "Build the module in the same way on every rank; nothing has been communicated yet."
    )


def _first_difference(ours: list[list[Any]], theirs: list[list[Any]], rank: int, names: list[str]) -> str:
    for ours_row, theirs_row in zip(ours, theirs, strict=False):
        for name, a, b in zip(names, ours_row, theirs_row, strict=False):
            if a == b:
                continue
            if ours_row[0].startswith(OPTION):
                return f"{ours_row[0]} is {a!r} on rank 0 and {b!r} on rank {rank}"
            label = "" if name == "name" else f"parameter {ours_row[0]!r}: "
            return f"{label}{name} is {a!r} on rank 0 and {b!r} on rank {rank}"
    if len(ours) != len(theirs):
        longer, has, lacks = (ours, 0, rank) if len(ours) > len(theirs) else (theirs, rank, 0)
        extra = longer[min(len(ours), len(theirs))][0]
        return (
            f"rank 0 has {len(ours)} parameters and rank {rank} has {len(theirs)}: "
            f"{extra!r} is on rank {has} but not on rank {lacks}"
        )
    return ""
