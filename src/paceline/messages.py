"""Error texts that people and tests look for.

Programs and test suites written for torch's class recognise some errors by phrases of their messages; those
phrases are part of the interface and stand here, and nowhere else. The rest of each text is ours: which
parameters, which rank, what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.plan import BucketPlan

_UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."
_STATIC = (
    "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
    "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
    "set to True."
)


def graph_changed_message(
    plan: BucketPlan, rank: int, *, newly: Sequence[int], missing: Sequence[int], place: Mapping[int, int]
) -> str:
    """``static_graph=True`` was promised and this rank's backward used other parameters than the first one."""
    remedy = "Drop static_graph=True: parameters that are used only sometimes need no flag."
    if missing:
        indices = " ".join(str(place[i]) for i in missing)
        return (
            f"{_UNFINISHED} {_STATIC}\nParameter indices which did not receive grad for rank {rank}: {indices} "
            f"({', '.join(plan.names(missing))}). {remedy}"
        )
    return (
        f"Your training graph has changed in this iteration, which static_graph=True rules out: on rank {rank} "
        f"{', '.join(plan.names(newly))} received a gradient and did not in the first iteration. {remedy}"
    )


def unfinished_message(names: Sequence[str], rank: int) -> str:
    """A backward was not completed on this rank."""
    told = ", ".join(names)
    return f"{_UNFINISHED} On rank {rank} a backward has begun and not ended; gradients still to come: {told}."
