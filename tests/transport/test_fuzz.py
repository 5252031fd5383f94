"""A hundred random programs, the same every time; the nightly run has two thousand (``tests.transport.fuzz``)."""

from __future__ import annotations

from math import nan

import pytest
import torch

from . import fuzz, fuzz_program
from .conformance import SHM
from .inputs import GLOO_DTYPES, OPS
from .requirements import needs_shm

PROGRAMS = 100
BATCHES = list(fuzz.batches(list(range(PROGRAMS))))


@pytest.mark.parametrize(
    ("world_size", "seeds"), BATCHES, ids=[f"{size} ranks, {len(seeds)} programs" for size, seeds in BATCHES]
)
def test_programs_give_what_gloo_gives(ranks, world_size, seeds):
    needs_shm()
    steps = ranks(
        fuzz.run_programs,
        seeds,
        SHM,
        world_size=world_size,
        backend="gloo",
        timeout=120,
        group_timeout_s=fuzz.GROUP_TIMEOUT_S,
    )
    assert sum(steps) > len(seeds)


def test_programs_cover_everything():
    """Each collective, operation, dtype and layout, subgroups and both ways to wait are among the hundred."""
    steps = [step for seed in range(PROGRAMS) for step in fuzz_program.program(seed)]
    assert {step.kind for step in steps} == set(fuzz_program.KINDS)
    assert {step.op for step in steps if step.kind in fuzz_program.REDUCING} == set(OPS)
    assert {step.dtype for step in steps} == set(GLOO_DTYPES)
    assert {step.layout for step in steps} == {"plain", "offset", "transposed"}
    assert {step.asynchronous for step in steps} == {True, False}
    assert {len(step.members) for step in steps} == {2, 3, 4}
    assert any(step.count == 0 for step in steps)
    assert any(step.count > 200_000 for step in steps)


def test_a_program_is_its_seed():
    assert fuzz_program.program(7) == fuzz_program.program(7)
    assert fuzz_program.program(7) != fuzz_program.program(8)


def _some_sum() -> tuple[int, fuzz_program.Step]:
    for seed in range(1000):
        for step in fuzz_program.program(seed):
            is_sum = (step.kind, step.op, step.dtype) == ("all_reduce", "SUM", torch.float32)
            if is_sum and len(step.members) == 3 and step.count and step.layout == "plain":
                return seed, step
    raise AssertionError("no program has such a step")


@pytest.mark.parametrize(("wrong_by", "found"), [(0.0, False), (1e-7, False), (1e-3, True), (nan, True)])
def test_a_wrong_result_is_found(wrong_by, found):
    """The comparison can fail: what is off by more than rounding is reported, what is not is not."""
    seed, step = _some_sum()
    inputs = [fuzz_program.numbers(step, seed, rank=member, count=step.count) for member in step.members]
    want = inputs[0] + inputs[1] + inputs[2]
    got = want.clone()
    got[-1] += wrong_by
    steps = {other.number: [] for other in fuzz_program.program(seed)}
    reports = list(
        fuzz.differences(
            seed, rank=step.members[0], shm=steps | {step.number: [got]}, gloo=steps | {step.number: [want]}
        )
    )
    assert bool(reports) is found
    if found:
        assert f"first at {step.count - 1}" in reports[0]
