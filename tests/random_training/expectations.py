"""Which refusals are right."""

from __future__ import annotations

from dataclasses import dataclass

from .program import RANKS, Backward, Program


@dataclass(frozen=True)
class Allowed:
    """These errors, or classes below them, may end a program that has the feature."""

    feature: str
    errors: tuple[str, ...]
    reason: str


ALLOWED = (
    Allowed(
        "counts", ("RankLostError",), "A rank that runs one synchronised backward more has nobody to average with."
    ),
    Allowed("wrappers", ("RankLostError", "DisagreementError"), "Ranks are in backwards of different wrappers."),
    Allowed(
        "paths",
        ("RankLostError", "DisagreementError", "StateError"),
        "One rank is in a backward of the bare module and the other in one of the wrapper; nobody can tell whether "
        "they belong together.",
    ),
    Allowed(
        "parameters",
        ("DisagreementError", "PeerError"),
        "Parameters were changed, frozen or cast on one rank only. A rank that was waiting for the other one by then "
        "raises a PeerError, which names the rank and the change.",
    ),
    Allowed(
        "values", ("DisagreementError",), "A new parameter has different values; an average would not make it one."
    ),
    Allowed(
        "parted", ("ReplicaMismatchError",), "The program gave the ranks different weights, and verify_every noticed."
    ),
    Allowed("weights", ("DisagreementError",), "Some ranks weigh and some do not (documented)."),
    Allowed(
        "fault on one rank",
        ("PeerFailedError", "StateError", "RankLostError", "ReplicaMismatchError"),
        "The other rank waits one second for the rank that raised and caught it, which may have more to do. That rank "
        "throws its gradients away, as it is told to; verify_every notices those that the other rank still has.",
    ),
    Allowed("fault in backward", ("StateError",), "Buckets that were under way cannot be called back (documented)."),
)
"""Nothing else may be refused: torch's class, or the guarantees, handle it."""


def features(program: Program, mismatches: set[str]) -> set[str]:
    """The words of ``ALLOWED`` that this program has."""
    found = set(mismatches) - {""}
    for op in program.ops:
        if isinstance(op, Backward) and op.fault is not None:
            if op.fault.phase == "backward":
                found.add("fault in backward")
            if op.fault.ranks != RANKS or op.ranks != RANKS:
                found.add("fault on one rank")
    return found


def may_raise(found: set[str]) -> set[str]:
    """The error classes that are right for these features."""
    return {error for allowed in ALLOWED if allowed.feature in found for error in allowed.errors}
