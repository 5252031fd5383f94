"""Runs expressions on ranks and says, for each, what was wrong.

One run does many rows: a group and a compiler cost more to start than most rows to run. A row that fails may leave
its group out of step, so the run ends with it, and the parent starts another one for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.tracing.expressions import BY_ID
from tests.tracing.row import Expression, Place, difference

EAGER = "not compiled"
# Inductor that leaves arithmetic to torch: no C compiler, a tenth of the time.
LITE = "inductor lite"
# How long ranks wait for each other before a row counts as failed: one may compile long after the other is done.
PATIENCE_S = 60
# How long a run may take: less than pytest allows for a test, and ten times what the longest takes on an idle machine.
LIMIT_S = 170
ALLOWED_WARNINGS = (
    # Names that torch has begun to rename; people write the old ones.
    (r".*deprecated", FutureWarning),
    # The compiler itself makes an instance of an autograd.Function to trace it, and looks at .grad of what it traces.
    (r".*should not be instantiated", DeprecationWarning),
    # Importing inductor.
    (r"`torch\.jit\.", DeprecationWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf", UserWarning),
)


def outcomes(
    pool_run: Callable[..., list[Any]], ids: Sequence[str], *, backend: str, world_size: int
) -> dict[str, str | None]:
    """For each row, what is wrong with it on some rank, or None."""
    found: dict[str, str | None] = {}
    left = list(ids)
    limits = {"timeout": LIMIT_S, "allow_warnings": ALLOWED_WARNINGS}
    while left:
        by_rank = pool_run(_on_ranks, left, backend, world_size=world_size, group_timeout_s=PATIENCE_S, **limits)
        done = max(len(answer) for answer in by_rank)
        for number, name in enumerate(left[:done]):
            errors = [
                f"rank {rank}: {answer[number]}"
                for rank, answer in enumerate(by_rank)
                if number < len(answer) and answer[number] is not None
            ]
            found[name] = "\n".join(errors) or None
        left = left[done:]
    return found


def _on_ranks(rank: int, world_size: int, ids: Sequence[str], backend: str) -> list[str | None]:
    return run_rows(Place(rank, world_size), ids, backend)


def run_rows(place: Place, ids: Sequence[str], backend: str) -> list[str | None]:
    """What is wrong with each row, in order; ends at the first that fails."""
    answers: list[str | None] = []
    try:
        for name in ids:
            answers.append(run_row(BY_ID[name], place, backend))
            if answers[-1] is not None:
                break
    finally:
        if backend != EAGER:
            torch._dynamo.reset()
    return answers


def run_row(expression: Expression, place: Place, backend: str) -> str | None:
    try:
        want = None
        if expression.eager_on_gloo:
            want = expression.run(place, lambda function: function)
            if found := not_the_answer(expression, place, want):
                return f"eager: {found}"
        if backend == EAGER:
            return None
        # A row's code, or a module class that rows share, may have been compiled for something else.
        torch._dynamo.reset()
        got = expression.run(place, lambda function: compiled(function, backend))
        return not_the_answer(expression, place, got) if want is None else difference(got, want)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def not_the_answer(expression: Expression, place: Place, seen: dict[str, Any]) -> str | None:
    if expression.answer is None:
        return None
    result = seen["result"]
    assert isinstance(result, tuple), "a row with an answer returns a pair, of which the second is it"
    return difference(result[1], expression.answer(place))


def compiled(function: Any, backend: str) -> Any:
    """``function`` as one graph."""
    options = None
    if backend == LITE:
        backend, options = "inductor", {"fallback_by_default": True}
    return torch.compile(function, fullgraph=True, backend=backend, options=options)
