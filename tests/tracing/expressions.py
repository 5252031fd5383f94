"""The expressions that trace with Paceline: the list that the tests run and the table in the docs is made from."""

from __future__ import annotations

from tests.tracing import asynchronous, autograd, collectives, groups, hooks, meshes, peers, placements
from tests.tracing.row import Expression

EXPRESSIONS: tuple[Expression, ...] = tuple(
    expression
    for module in (groups, meshes, placements, collectives, asynchronous, peers, autograd, hooks)
    for expression in module.row.rows
)

BY_ID = {expression.id: expression for expression in EXPRESSIONS}
