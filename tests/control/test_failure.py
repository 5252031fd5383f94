"""What ranks say of failures and of differences: when it counts, and how it is put in words."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from paceline.control import OPTION, Failure
from paceline.control.board import Board
from paceline.control.difference import describe_difference
from paceline.control.failure import News
from paceline.control.wire import MessageKind

FIELDS = ["name", "shape", "dtype"]
ROWS: list[list[Any]] = [["a", [2, 3], "float32"], ["b", [4], "float32"]]


def test_news_is_put_in_words() -> None:
    assert str(Failure(3, "forward", "KeyError", "'x'")) == "rank 3 raised in forward: KeyError: 'x'"
    assert str(Failure(3, "backward", "KeyError", "")) == "rank 3 raised in backward: KeyError"
    told = str(Failure(3, "forward", "KeyError", "'x'", line="train.py:88 in load"))
    assert told == "rank 3 raised in forward: KeyError: 'x' (train.py:88 in load)"
    assert str(Failure(3, "forward", "", "Rank 3 is gone", lost=True)) == "Rank 3 is gone"


def _news(size: int) -> list[News]:
    """The news of ``size`` ranks, over a store of this process."""
    board = Board(dist.HashStore(), name="job/1")
    return [News(board, rank=rank, size=3) for rank in range(size)]


def _report(news: News, message: str, *, where: str = "forward") -> None:
    news.report(Failure(news._rank, where, "KeyError", message), nameless=False)


def test_failures_that_were_taken_back_are_not_read_again() -> None:
    own, theirs = _news(2)
    board = own._board
    for n in range(20):
        _report(theirs, str(n))
        assert str(n) in str(own.first())
        assert theirs.first() is None  # one's own failure is no news
        theirs.retract()
        own.retract()  # there is nothing to take back
        assert own.first() is None
    _report(own, "own")
    assert own.first() is None
    # Somebody has a number and has not put up yet what happened: it must be found when it is there.
    late = board.store.add("failures", 1)
    _report(theirs, "second")
    assert "second" in str(own.first())
    board.put(f"failure/{late}", MessageKind.FAILURE, 2, "forward", "KeyError", "first", "", 0)
    with mock.patch.object(board, "has", side_effect=board.has) as looks:
        assert "first" in str(own.first())
    assert [call.args for call in looks.mock_calls] == [(f"failure/{late}",)]


def test_the_first_cause_that_stands_is_told_to_all_others() -> None:
    news = _news(3)
    for rank in range(2):
        _report(news[rank], f"from {rank}")
    assert [one.first() and str(one.first()) for one in news[1:]] == ["rank 0 raised in forward: KeyError: from 0"] * 2
    # Rank 0 caught its own and goes on; rank 1 did not, and the others must know.
    news[0].retract()
    for rank in (0, 2):
        assert "from 1" in str(news[rank].first())
    news[1].retract()
    assert [one.first() for one in news] == [None] * 3


def test_news_that_is_taken_back_while_it_is_read_is_no_news() -> None:
    own, theirs = _news(2)
    _report(theirs, "for a moment")
    has = own._board.has

    def has_and_then_not(*keys: str) -> bool:
        seen = has(*keys)
        theirs.retract()
        return seen

    with mock.patch.object(own._board, "has", has_and_then_not):
        assert own.first() is None  # neither an error nor a wait for a key that is gone


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            [["a", [2, 3], "float64"], ROWS[1]],
            "the dtype of parameter 'a' is 'float32' on rank 0 and 'float64' on rank 1",
        ),
        ([ROWS[0], ["b", [5], "float32"]], "the shape of parameter 'b' is [4] on rank 0 and [5] on rank 1"),
        ([["c", [2, 3], "float32"], ROWS[1]], "the first parameter that differs is 'a' on rank 0 and 'c' on rank 1"),
        (ROWS[:1], "parameter 'b' is on rank 0 but not on rank 1 (2 parameters on rank 0, and 1 there). "),
        (
            [*ROWS, ["c", [1], "int8"]],
            "parameter 'c' is not on rank 0 but on rank 1 (2 parameters on rank 0, and 3 there). ",
        ),
        ([], "parameter 'a' is on rank 0 but not on rank 1"),
    ],
    ids=["dtype", "shape", "name", "fewer", "more", "none"],
)
def test_a_difference_is_put_in_words(theirs: list[list[Any]], words: str) -> None:
    told = describe_difference("parameters", [ROWS, theirs], FIELDS)
    assert words in told
    assert told.startswith("Ranks were given different parameters:")
    assert "nothing has been communicated yet" in told


def test_options_are_called_so_and_ranks_that_differ_in_the_same_way_are_named_together() -> None:
    rows = [[[f"{OPTION}static_graph", value]] for value in (True, False)]
    told = describe_difference("options", rows, ["name", "value"])
    assert "option static_graph is True on rank 0 and False on rank 1" in told
    assert "parameter" not in told
    other = [["a", [2, 3], "float64"], ROWS[1]]
    told = describe_difference("parameters", [ROWS, ROWS, other, other, other], FIELDS)
    assert told.count("on rank 0 and") == 1
    assert "'float32' on rank 0 and 'float64' on ranks 2, 3 and 4. " in told
    others = [[["a", [2, n], "float32"]] for n in range(10, 30)]
    told = describe_difference("parameters", [ROWS, *others], FIELDS)
    assert told.count("on rank 0 and") == 8
    assert "; and 12 more differences. " in told
