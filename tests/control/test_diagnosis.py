"""What the whereabouts of ranks come to: who waits for whom, and why."""

from __future__ import annotations

import pytest

from paceline.control.diagnosis import LONE_FORWARD, explain, explain_finished
from paceline.control.whereabouts import Whereabouts

AHEAD = {4: "all-reduce of bucket 2", 5: "all-reduce of bucket 3 (layers.7.weight)"}
BEHIND = {4: "all-reduce of bucket 2"}


def test_the_rank_that_is_behind_is_named_with_what_it_does_instead() -> None:
    told = explain(
        {
            0: Whereabouts(5, 1, waiting="the all-reduce of bucket 3", line="train.py:90 in step", recent=AHEAD),
            1: Whereabouts(4, 1, activity="data loading", line="train.py:88 in load", recent=BEHIND),
        },
        2,
    )
    assert told.ranks == (1,)
    assert told.cause == (
        "Rank 1 has not started all-reduce of bucket 3 (layers.7.weight), for which rank 0 waits: "
        "it is in data loading at train.py:88 in load."
    )
    assert "rank 0: collective 5; waits in the all-reduce of bucket 3 at train.py:90 in step" in told.lines


def test_ranks_that_parted_are_named_by_the_first_collective_that_differs() -> None:
    odd = {4: "broadcast of buffers", 5: "all-reduce of bucket 0", 6: "all-reduce of bucket 1"}
    told = explain(
        {0: Whereabouts(5, 1, recent=AHEAD), 1: Whereabouts(6, 1, recent=odd), 2: Whereabouts(5, 1, recent=AHEAD)}, 3
    )
    assert told.ranks == (1,)
    assert told.cause == (
        "Ranks parted at collective 4: rank 0 started all-reduce of bucket 2; rank 1 started broadcast of buffers."
    )


def test_a_rank_of_which_nothing_is_known_is_named() -> None:
    told = explain({0: Whereabouts(5, 1, waiting="x", recent=AHEAD), 1: None}, 2)
    assert told.ranks == (1,)
    assert "rank 1: nothing is known of it" in str(told)
    told = explain({0: Whereabouts(5, 1, waiting="x"), 1: Whereabouts(5, 1, waiting="x")}, 2)
    assert told.ranks == ()
    assert "All ranks wait in collective 5" in told.cause


# -- counts --------------------------------------------------------------------------------------------

BUCKET = {7: "all-reduce of bucket 0, 14 x torch.float32"}
BUFFERS = {7: "broadcast of buffers, 24 x torch.uint8"}


def test_a_rank_that_skipped_a_backward_is_told_from_one_that_is_only_late() -> None:
    ahead = Whereabouts(7, forwards=5, backwards=4, waiting="x", recent=BUCKET)
    told = explain({0: ahead, 1: Whereabouts(6, forwards=5, backwards=3, activity="code of its own")}, 2)
    assert told.ranks == (1,)
    assert told.cause.endswith(
        "Rank 1 has run as many forwards as rank 0 (5), but one backward fewer (3 instead of 4): it skipped the "
        "backward of a step, for example because its loss was not finite, unless that backward is still to come."
    )
    late = explain({0: ahead, 1: Whereabouts(6, forwards=4, backwards=3, activity="data loading")}, 2)
    assert "skipped" not in late.cause


@pytest.mark.parametrize("skipper", [0, 1])
def test_a_forward_where_others_are_in_backward_follows_a_skipped_backward(skipper: int) -> None:
    ranks = {
        skipper: Whereabouts(7, forwards=5, backwards=3, waiting="x", recent=BUFFERS),
        1 - skipper: Whereabouts(7, forwards=4, backwards=4, waiting="x", recent=BUCKET),
    }
    told = explain(ranks, 2)
    assert (told.ranks, told.parted, told.is_lone_forward) == ((skipper,), True, False)
    assert f"Rank {skipper} has run more forwards than rank {1 - skipper} (5 instead of 4), but one" in told.cause
    assert told.cause.endswith("its loss was not finite.")


@pytest.mark.parametrize("backwards", [2, 3])
def test_a_forward_where_others_are_in_backward_is_alone_if_nothing_was_skipped(backwards: int) -> None:
    ranks = {
        0: Whereabouts(8, forwards=3, backwards=backwards, recent=BUFFERS),
        1: Whereabouts(7, forwards=3, backwards=3, recent=BUCKET),
    }
    told = explain(ranks, 2)
    assert (told.ranks, told.is_lone_forward) == ((0,), True)
    assert told.cause.endswith(LONE_FORWARD)


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ((4, 4), (3, 3), "Rank 0 finished after 3 backwards, and this is the 4th of rank 1."),
        ((2, 1), (1, 1), "Rank 0 finished after 1 forward, and this is the 2nd of rank 1."),
        ((12, 12), (11, 11), "Rank 0 finished after 11 backwards, and this is the 12th of rank 1."),
        ((5, 5), (5, 4), "Rank 0 has run as many forwards as rank 1 (5), but one backward fewer (4 instead of 5)"),
        ((3, 3), (3, 3), "Rank 0 has finished. Every rank has to make the same calls."),
    ],
)
def test_a_rank_that_finished_is_not_lost(mine: tuple[int, int], theirs: tuple[int, int], said: str) -> None:
    told = explain_finished(
        0, Whereabouts(9, *theirs, silent="has finished"), me=1, mine=Whereabouts(9, *mine), evaluates=False
    )
    assert told.cause.startswith(said)
    assert (told.ranks, told.is_lone_forward) == ((0,), False)
    alone = explain_finished(0, Whereabouts(9, *theirs), me=1, mine=Whereabouts(9, *mine), evaluates=True)
    assert (alone.ranks, alone.is_lone_forward) == ((1,), True)
