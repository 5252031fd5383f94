"""One suite for both transports: every case here passes on gloo and on ``cpu:shm``.

A case is a function of a rank, run on live ranks in a group of its own. What it expects it computes itself, without a
process group, so that gloo is judged as well as shm. Cases of what gloo refuses or gets wrong are marked ``shm_only``
with the reason, and cases whose result has to be *the same as gloo's* return it (``compare=True``).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

GLOO = "gloo"
SHM = "cpu:shm"

Body = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Something every transport has to do."""

    name: str
    body: Body
    world_sizes: tuple[int, ...] = (2,)
    # Why gloo is not asked.
    shm_only: str = ""
    # The ranks return a result that is compared with gloo's.
    compare: bool = False
    timeout_s: float = 60
    allow_warnings: tuple[tuple[str, type[Warning]], ...] = ()


CASES: list[Case] = []


def case(
    *world_sizes: int,
    shm_only: str = "",
    compare: bool = False,
    timeout_s: float = 60,
    allow_warnings: tuple[tuple[str, type[Warning]], ...] = (),
) -> Callable[[Body], Body]:
    """Add the decorated function to the suite, on each of ``world_sizes`` ranks (2 if none is given)."""

    def add(body: Body) -> Body:
        name = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        CASES.append(Case(name, body, world_sizes or (2,), shm_only, compare, timeout_s, allow_warnings))
        return body

    return add


def load() -> list[Case]:
    """All cases, in the order they are written in."""
    if not CASES:
        package = importlib.import_module(f"{__package__}.cases")
        for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
            importlib.import_module(f"{package.__name__}.{module}")
    return CASES


def run_case(rank: int, world_size: int, body: Body) -> Any:
    """What a rank does: make sure that it is the transport that is tested, then run the case."""
    if dist.get_backend() != "gloo":
        assert_shared_memory(dist.group.WORLD)
    return body(rank, world_size)


def assert_shared_memory(group: Any) -> None:
    """A group that quietly fell back to gloo would pass everything and prove nothing."""
    from paceline.transport.c10d.process_group import ShmProcessGroup

    assert isinstance(group, ShmProcessGroup), f"not the shared-memory transport: {type(group).__name__}"
