"""The expressions that trace with Paceline: the list that the tests run and the table in the docs is made from."""

from __future__ import annotations

from tests.tracing import asynchronous, autograd, collectives, groups, hooks, meshes, peers, placements
from tests.tracing.row import Expression

EXPRESSIONS: tuple[Expression, ...] = tuple(
    expression
    for rows in (
        groups.row,
        meshes.row,
        placements.row,
        collectives.row,
        asynchronous.row,
        collectives.asynchronous,
        peers.row,
        autograd.row,
        hooks.row,
    )
    for expression in rows.rows
)

BY_ID = {expression.id: expression for expression in EXPRESSIONS}
