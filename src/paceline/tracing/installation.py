"""Puts all rows in place; called once, when the compiler has been imported."""

from __future__ import annotations

import functools
import warnings

from paceline import _torch
from paceline.tracing import ops
from paceline.tracing.import_hook import when_imported
from paceline.tracing.operator_namespace import NAMESPACE
from paceline.tracing.registry import Row


def rows() -> list[Row]:
    """All rows: groups, meshes, placements, collectives, hooks, refusals."""
    # They are imported late, since these modules look at the operators and at the compiler when they are imported.
    from paceline.tracing import (
        collectives,
        differentiable,
        groups,
        hooks,
        meshes,
        placements,
        point_to_point,
        refusals,
    )

    files = (groups, meshes, placements, collectives, point_to_point, differentiable, hooks, refusals)
    return [row for file in files for row in file.ROWS]


def install() -> None:
    """Install every row. One that does not fit this version of torch is left out with a warning."""
    ops.define()
    misfits = []
    for row in rows():
        try:
            row.install()
        except Exception as error:
            misfits.append(f"{row.subject} ({type(error).__name__}: {error})")
    if misfits:
        warnings.warn(
            "Paceline cannot make the following traceable in this version of torch: " + "; ".join(misfits),
            stacklevel=2,
        )
    when_imported(_torch.INDUCTOR, ops.lower)
    when_imported(_torch.INDUCTOR_GRAPH, functools.partial(_torch.keep_lowerings, NAMESPACE))
