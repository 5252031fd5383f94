"""Which rank waits for which, and why, from the whereabouts of all ranks. It knows neither store nor process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.control.whereabouts import Whereabouts

LONE_FORWARD = "To evaluate on one rank, call ddp.module(x) there, or have every rank call ddp(x)."
UNKNOWN = "nothing is known of it; it has no wrapper yet, or has deleted it"

# The record of collectives has this name for what a forward sends before the module runs.
_OF_BUFFERS = "broadcast of buffers,"


@dataclass(frozen=True)
class Diagnosis:
    """Why nothing happens."""

    cause: str
    """One sentence, or two."""
    ranks: tuple[int, ...]
    """The ranks that are the cause, as far as can be told."""
    lines: tuple[str, ...] = ()
    """Where each rank is."""
    parted: bool = False
    """The ranks have started different collectives."""
    is_lone_forward: bool = False
    """One rank has called the wrapper's forward, and others have not."""

    def __str__(self) -> str:
        return "\n  ".join([self.cause, *self.lines])


def explain(answers: Mapping[int, Whereabouts | None], size: int, *, unknown_why: str = UNKNOWN) -> Diagnosis:
    """Explain where the ranks are: where they first parted, or who is behind, and in what."""
    known = {rank: answer for rank, answer in answers.items() if answer is not None}
    lines = [f"rank {rank}: collective {answer.started}; {answer.where()}" for rank, answer in sorted(known.items())]
    unknown = tuple(rank for rank in range(size) if rank not in known)
    lines += [f"rank {rank}: {unknown_why}" for rank in unknown]
    cause, ranks, is_lone = _divergence(known) or ("", (), False)
    parted = bool(cause)
    if not parted:
        cause, ranks = _behind(known, unknown)
    return Diagnosis(cause, ranks, tuple(lines), parted, is_lone)


def explain_finished(rank: int, theirs: Whereabouts, *, me: int, mine: Whereabouts, evaluates: bool) -> Diagnosis:
    """Explain why rank ``me`` waits in vain: ``rank`` has finished.

    ``evaluates`` tells whether ``me`` is in a forward that does not train.
    """
    if evaluates:
        cause = f"Rank {rank} has finished, and rank {me} alone called the wrapper's forward. {LONE_FORWARD}"
        return Diagnosis(cause, (me,), is_lone_forward=True)
    if skipped := _skipped(rank, theirs, me, mine, is_certain=True):
        return Diagnosis(skipped, (rank,))
    for what, done, now in (
        ("backward", theirs.backwards, mine.backwards),
        ("forward", theirs.forwards, mine.forwards),
    ):
        if done < now:
            return Diagnosis(
                f"Rank {rank} finished after {_count(done, what)}, and this is the {_ordinal(now)} of rank {me}. If "
                "ranks have different numbers of batches, use ddp.join(), or drop_last and a sampler that gives "
                "every rank the same number.",
                (rank,),
            )
    return Diagnosis(f"Rank {rank} {theirs.where()}. Every rank has to make the same calls.", (rank,))


def _divergence(known: dict[int, Whereabouts]) -> tuple[str, tuple[int, ...], bool] | None:
    """The first collective that is not the same on all ranks that have started it."""
    for number in sorted({number for answer in known.values() for number in answer.recent}):
        told = {rank: p.recent[number] for rank, p in sorted(known.items()) if number in p.recent}
        kinds = Counter(told.values())
        if len(kinds) > 1:
            # The larger group is taken to be right. If both are of the same size, that is the one with the lowest rank.
            usual = kinds.most_common(1)[0][0]
            odd = tuple(rank for rank, text in told.items() if text != usual)
            first = min(rank for rank, text in told.items() if text == usual)
            cause = (
                f"Ranks parted at collective {number}: rank {first} started {usual}; "
                f"rank {odd[0]} started {told[odd[0]]}."
            )
            ahead = [rank for rank in (first, odd[0]) if told[rank].startswith(_OF_BUFFERS)]
            if not ahead:
                return cause, odd, False
            one = ahead[0]
            other = odd[0] if one == first else first
            # Rank `one` began a forward where `other` was in a backward. If `one` trains, it has left out a backward.
            if known[one].forwards > known[other].forwards and (
                skipped := _skipped(one, known[one], other, known[other], is_certain=True)
            ):
                return f"{cause} {skipped}", (one,), False
            return f"{cause} Rank {one} called the wrapper's forward alone. {LONE_FORWARD}", (one,), True
    return None


def _behind(known: dict[int, Whereabouts], unknown: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    last = min((p.started for p in known.values()), default=0)
    behind = {rank: p for rank, p in sorted(known.items()) if p.started == last}
    ahead = {rank: p for rank, p in sorted(known.items()) if p.started > last}
    if not ahead:
        silent = tuple(rank for rank, p in known.items() if p.silent) + unknown
        elsewhere = tuple(rank for rank, p in known.items() if not p.waiting and rank not in silent)
        who = "All ranks that answer have" if unknown else "All ranks have"
        for ranks in (silent, elsewhere):
            if ranks:
                where = known[ranks[0]].where() if ranks[0] in known else "says nothing"
                return f"{who} started collective {last}; rank {ranks[0]} {where}.", ranks
        return f"All ranks wait in collective {last}, which does not end.", ()
    first, answer = next(iter(ahead.items()))
    wanted = answer.recent.get(last + 1, f"collective {last + 1}")
    rank, laggard = next(iter(behind.items()))
    others = f" (nor has rank {', '.join(map(str, list(behind)[1:]))})" if len(behind) > 1 else ""
    skipped = _skipped(rank, laggard, first, answer, is_certain=False)
    return (
        f"Rank {rank} has not started {wanted}, for which rank {first} waits{others}: it {laggard.where()}."
        + (f" {skipped}" if skipped else ""),
        tuple(behind),
    )


def _skipped(rank: int, theirs: Whereabouts, other: int, others: Whereabouts, *, is_certain: bool) -> str:
    """A sentence for a rank that has begun at least as many forwards as another, but fewer backwards; else nothing."""
    fewer = others.backwards - theirs.backwards
    if fewer <= 0 or theirs.forwards < others.forwards:
        return ""
    forwards = (
        f"as many forwards as rank {other} ({theirs.forwards})"
        if theirs.forwards == others.forwards
        else f"more forwards than rank {other} ({theirs.forwards} instead of {others.forwards})"
    )
    perhaps = "" if is_certain else ", unless that backward is still to come"
    return (
        f"Rank {rank} has run {forwards}, but {_NUMBERS.get(fewer, fewer)} backward{'s' * (fewer > 1)} fewer "
        f"({theirs.backwards} instead of {others.backwards}): it skipped the backward of a step, for example because "
        f"its loss was not finite{perhaps}."
    )


_NUMBERS = {1: "one", 2: "two", 3: "three"}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _ordinal(number: int) -> str:
    teens = 10 < number % 100 < 20
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
