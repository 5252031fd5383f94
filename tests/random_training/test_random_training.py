"""Some random programs, the same every time; ``make soak`` has twenty thousand (``tests.random_training``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from paceline.reduction.exchange import Exchange

from .expectations import ALLOWED
from .generate import generate
from .program import Backward, Freeze, Net, Op, Options, Program, Step, ZeroGrad, parse
from .reference import expected
from .session import Session

FAST = 10
MANY = 500


def _check(session: Session, programs: list[Program]) -> None:
    failed = [(program, outcome) for program, outcome in session.outcomes(programs) if outcome.failed]
    print(session.table())
    if failed:
        program, outcome = failed[0]
        small = session.smallest(program, outcome)
        others = [program.seed for program, _ in failed[1:]]
        pytest.fail(
            f"{outcome.kind}: {outcome.cause} (python -m tests.random_training --seed {program.seed})\n"
            f"{small.listing()}\n{outcome.told}\nother seeds that fail: {others}"
        )
    assert session.counts["right", ""] > len(programs) / 2


def _with_backend(program: Program, backend: str) -> Program:
    return Program(program.seed, backend, program.options, program.nets, program.ops)


@pytest.mark.parametrize("backend", ["gloo", "cpu:shm"])
def test_programs_are_right_or_refused(rank_pool, backend):
    _check(Session(rank_pool), [_with_backend(generate(seed), backend) for seed in range(FAST)])


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_many_programs_are_right_or_refused(rank_pool):
    _check(Session(rank_pool), [generate(seed) for seed in range(FAST, FAST + MANY)])


# -- the tests are tested ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _skips_a_bucket() -> Iterator[None]:
    """Of several buckets only the last one is averaged."""
    start = Exchange.start

    def skip(self: Exchange, bucket: Any, buffer: Any, *, is_last: bool) -> Any:
        return start(self, bucket, buffer, is_last=is_last) if is_last else lambda: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "start", skip)
        yield


def test_a_bucket_that_is_not_averaged_is_found_and_shrunk(rank_pool):
    session = Session(rank_pool, around=_skips_a_bucket)
    program = Program(
        1,
        options=Options(small_buckets=True, momentum=0.9),
        nets=(Net(layers=3, width=3), Net()),
        ops=(
            Backward(1, data=1, no_sync="around"),
            ZeroGrad(1),
            Freeze(0, 1),
            Backward(0, data=2, repeat=(1, 2)),
            Step(0),
            ZeroGrad(0, set_to_none=False),
        ),
    )
    outcome = session.outcome(program)
    assert outcome.kind in ("silently wrong", "replicas differ")
    small = session.smallest(program, session.outcome(program))
    assert [type(op) for op in small.ops if not isinstance(op, Step)] == [Backward]
    assert small.options == Options(small_buckets=True)
    assert small.nets == (Net(),)
    # Without the defect there is nothing to be found in it.
    assert Session(rank_pool).outcome(small).kind == "right"


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (Backward(0, data=9, ranks=(0,)), "counts"),
        (Backward(0, data=9, weight=(1.0, None)), "weights"),
        (Freeze(0, 0, ranks=(1,)), "parameters"),
        (Backward(0, data=9, way="module", ranks=(0,)), "paths"),
    ],
)
def test_the_reference_knows_what_cannot_be_right(op: Op, kind):
    program = Program(1, ops=(Backward(0, data=1), op, *([] if kind == "counts" else [Backward(0, data=2)])))
    assert kind in {result.mismatch for result in expected(program)}
    assert kind in {allowed.feature for allowed in ALLOWED}


def test_a_program_is_its_seed_and_its_listing():
    programs = [generate(seed) for seed in range(50)]
    assert programs == [generate(seed) for seed in range(50)]
    assert programs == [parse(program.listing()) for program in programs]


def test_programs_cover_everything():
    """Each kind of op, each way, both backends and every option are among the five hundred."""
    programs = [generate(seed) for seed in range(MANY)]
    ops = [op for program in programs for op in program.ops]
    assert {type(op).__name__ for op in ops} == {kind.__name__ for kind in get_args(Op)}
    backwards = [op for op in ops if isinstance(op, Backward)]
    assert {op.way for op in backwards} == {"wrapper", "module", "layers"}
    assert {op.checkpoint for op in backwards} == {"", "reentrant", "recomputed"}
    assert {op.no_sync for op in backwards} == {"", "around", "backward"}
    for what in ("twice", "penalty", "closure", "again"):
        assert any(getattr(op, what) for op in backwards)
    assert {op.fault.phase for op in backwards if op.fault is not None} == {"forward", "backward", "loss"}
    assert {program.backend for program in programs} == {"gloo", "cpu:shm"}
    assert any(net.shares is not None for program in programs for net in program.nets)
