"""What an outcome is called: right, refused, or one of the failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .expectations import features, may_raise
from .program import Cast, Program
from .ranks import Ended, Gone
from .reference import Result
from .replica import Snapshot

PASSED = ("right", "refused", "invalid")
"""All others are failures: silently wrong, replicas differ, not refused, wrongly refused, no cause, hang, crash."""


@dataclass(frozen=True)
class Outcome:
    """The kind, the cause by which outcomes of a kind are counted, and what there is to tell."""

    kind: str
    cause: str = ""
    told: str = ""

    @property
    def failed(self) -> bool:
        return self.kind not in PASSED


def judge(program: Program, wanted: Sequence[Result], ended: Sequence[Ended | Gone]) -> Outcome:
    """What became of a program."""
    errors = [str(result.error) for result in wanted if result.error is not None]
    if errors:
        # The program makes no sense without a wrapper either.
        return Outcome("invalid", errors[0].split("\n")[0][:60], errors[0])
    ended_by_gloo = _ended_by_gloo(program, wanted, ended)
    if ended_by_gloo is not None:
        return ended_by_gloo
    gone = [f"rank {rank}: {each.what}\n{each.log}" for rank, each in enumerate(ended) if isinstance(each, Gone)]
    if gone:
        kinds = {each.what for each in ended if isinstance(each, Gone)}
        return Outcome(min(kinds), told="\n".join(gone))
    answers = [each for each in ended if isinstance(each, Ended)]
    errors = [f"rank {rank}: {each.error[0]}: {each.message}" for rank, each in enumerate(answers) if each.error]
    wrong = [
        f"rank {rank}: {told}"
        for rank, (each, result) in enumerate(zip(answers, wanted, strict=True))
        if (told := _difference(program, each.snapshots, result.snapshots))
    ]
    if wrong:
        kind = "replicas differ" if _parted(answers) and not _parted(wanted) else "silently wrong"
        return Outcome(kind, told="\n".join(wrong + errors))
    for each, result in zip(answers, wanted, strict=True):
        if result.mismatch and not each.error:
            told = [f"should be refused: {result.mismatch}", *errors]
            return Outcome("not refused", result.mismatch, "\n".join(told))
    return _refusal(program, wanted, answers, errors) if errors else Outcome("right")


def _ended_by_gloo(program: Program, wanted: Sequence[Result], ended: Sequence[Ended | Gone]) -> Outcome | None:
    """Collectives that do not match may make gloo end a process (documented). The other rank has to name the cause."""
    mismatches = sorted({result.mismatch for result in wanted} - {""})
    crashed = [each for each in ended if isinstance(each, Gone) and each.what == "crash"]
    others = [each for each in ended if isinstance(each, Ended)]
    if program.backend != "gloo" or not mismatches or len(crashed) != 1 or len(others) != 1:
        return None
    if "PacelineError" not in others[0].error:
        return None
    return Outcome("refused", f"{others[0].error[0]}, and gloo ended a process ({mismatches[0]})", others[0].message)


def _refusal(program: Program, wanted: Sequence[Result], answers: Sequence[Ended], errors: list[str]) -> Outcome:
    found = features(program, {result.mismatch for result in wanted})
    if program.options.verify_every and any(result.parted for result in wanted):
        found.add("parted")
    allowed = may_raise(found)
    raised = [each.error for each in answers if each.error]
    told = "\n".join(errors)
    names = " and ".join(sorted({error[0] for error in raised}))
    if any("PacelineError" not in error for error in raised):
        return Outcome("no cause", names, told)
    right = [bool(allowed & set(error)) for error in raised]
    # A rank that is told of the other's error is right if that error is.
    if all(fine or (any(right) and "PeerError" in error) for fine, error in zip(right, raised, strict=True)):
        return Outcome("refused", f"{names} ({', '.join(sorted(found))})", told)
    return Outcome("wrongly refused", names, told)


def _difference(program: Program, got: Sequence[Snapshot], want: Sequence[Snapshot]) -> str:
    """The first op after which a rank does not have what it should have."""
    single = any(isinstance(op, Cast) and op.to == "float32" for op in program.ops)
    # Where all ranks do the same, the reference adds in the same order as two ranks do.
    tolerance = 1e-4 if single else 1e-12 if program.is_symmetric else 1e-9
    for number, (mine, right) in enumerate(zip(got, want, strict=False)):
        op = program.ops[number - 1] if number else "wrapping"
        if mine.keys() != right.keys():
            return f"after op {number - 1} ({op}): parameters {sorted(mine.keys() ^ right.keys())}"
        for name, (value, grad) in mine.items():
            for what, have, should in (("grad of ", grad, right[name][1]), ("", value, right[name][0])):
                if not _close(have, should, tolerance):
                    return f"after op {number - 1} ({op}): {what}{name} is {_brief(have)}, should be {_brief(should)}"
    return ""


def _close(have: Tensor | None, should: Tensor | None, tolerance: float) -> bool:
    if have is None or should is None:
        return have is should
    return have.shape == should.shape and torch.allclose(have, should, rtol=tolerance, atol=tolerance)


def _brief(tensor: Tensor | None) -> str:
    return "None" if tensor is None else str([round(value, 6) for value in tensor.flatten().tolist()[:4]])


def _parted(ranks: Sequence[Ended] | Sequence[Result]) -> bool:
    """Whether the weights differ between the ranks in the last snapshot that both have."""
    last = min(len(each.snapshots) for each in ranks) - 1
    if last < 0:
        return False
    first, second = (each.snapshots[last] for each in ranks)
    return any(
        name not in second or not torch.allclose(value, second[name][0], rtol=1e-6, atol=1e-9)
        for name, (value, _) in first.items()
    )
