"""Distributed objects and collectives inside compiled code.

After ``import paceline``, groups, meshes, placements, collectives and hooks compile with
``torch.compile(fullgraph=True)``: a whole training step, communication included, can be one graph. There is nothing
to call. What traces, in plain torch and with Paceline, is listed in ``docs/tracing.md``.

- ``registry``: the rows, one for each function or type; ``installation``: puts them in place
- ``import_hook``: waits for the compiler to be imported, since rows are put in place then and not before
- ``ops``: the operators that stand in a graph for collectives; ``work``: the handle of an asynchronous one;
  ``operator_namespace``: their names
- ``collectives``, ``point_to_point``, ``differentiable``, ``groups``, ``meshes``, ``placements``, ``hooks``: what is
  traced in place of torch's functions
- ``refusals``: what is not traced, why, and what to write instead
"""

from __future__ import annotations

# The functions of this module have a group as their default argument: the one that is the default at the import.
# torch's compiler imports the module on the first compilation. When that group has been destroyed and made anew, the
# functions go on with the old one, and hang. Here there is no group yet, so they ask for the current default group
# when called.
import torch.distributed.nn.functional  # noqa: F401

from paceline import _torch
from paceline.tracing.import_hook import when_imported

__all__: list[str] = []


def _install() -> None:
    from paceline.tracing.installation import install

    install()


when_imported(_torch.COMPILER, _install)
