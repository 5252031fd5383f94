"""Every case of the suite on gloo and on shm."""

from __future__ import annotations

import pytest
import torch

from . import conformance
from .conformance import GLOO, SHM, Case
from .requirements import needs_shm

PARAMS = [
    pytest.param(
        *(backend, case, world_size),
        id=f"{case.name}-{world_size}-{'shm' if backend == SHM else 'gloo'}",
        # compiled.whole_graph shows the same without a minute in a compiler.
        marks=[pytest.mark.full] if case.name == "compiled.inductor" else [],
    )
    for case in conformance.load()
    for world_size in case.world_sizes
    for backend in ([SHM] if case.shm_only else [SHM, GLOO])
]


@pytest.mark.parametrize(("backend", "case", "world_size"), PARAMS)
def test_case(ranks, many_ranks, backend: str, case: Case, world_size: int) -> None:
    if backend == SHM:
        needs_shm()
    run = ranks if world_size <= 4 else many_ranks

    def on(which: str) -> list:
        return run(
            conformance.run_case,
            case.body,
            world_size=world_size,
            backend=which,
            timeout=case.timeout_s,
            group_timeout_s=30,
            allow_warnings=case.allow_warnings,
        )

    got = on(backend)
    if case.compare and backend == SHM:
        _same(got, on(GLOO), case.name)


def _same(got: object, want: object, where: str) -> None:
    """Equal to the bit, through lists, tuples and dictionaries."""
    assert type(got) is type(want), f"{where}: {type(got)} and {type(want)}"
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want), f"{where}: differs from gloo's by {(got - want).abs().max()}"
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            _same(got[key], want[key], f"{where}[{key}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            _same(one, other, f"{where}[{index}]")
    else:
        assert got == want, where
