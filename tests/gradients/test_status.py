"""What ranks say with the last bucket: numbers whose sums every rank reads alike."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from paceline.gradients.status import STATUS_DTYPES, Status, StatusCode


def _sum(code: StatusCode, statuses: list[Status], dtype: torch.dtype = torch.float32) -> Status:
    """What every rank reads once the vectors of all were added up."""
    total = torch.zeros(code.numel, dtype=dtype)
    for status in statuses:
        target = torch.full((code.numel,), -7.0, dtype=dtype)
        code.write(status, target)
        total += target
    return code.read(total)


def _same(status: Status, expected: Status) -> bool:
    """Equal by value, whatever kind of sequence the flags are in."""
    plain = [replace(each, late=list(each.late), used=list(each.used)) for each in (status, expected)]
    return plain[0] == plain[1]


@pytest.mark.parametrize("dtype", STATUS_DTYPES, ids=str)
def test_the_sum_of_vectors_is_the_sum_of_what_they_say(dtype: torch.dtype) -> None:
    ours = Status(3.5, 1.0, 0.0, [0.0, 1.0], [1.0, 0.0, 1.0])
    theirs = Status(2.0, 1.0, 1.0, [0.0, 1.0], [1.0, 0.0, 0.0])
    assert _same(_sum(StatusCode(n_ranks=1, n_buckets=2, n_params=3), [ours], dtype), ours)
    code = StatusCode(n_ranks=2, n_buckets=2, n_params=3)
    assert _same(_sum(code, [ours, theirs], dtype), Status(5.5, 2.0, 1.0, [0.0, 2.0], [2.0, 0.0, 1.0]))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 7, 8, 64, 255, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_flags_of_any_number_of_ranks_and_parameters_add_up_exactly(n_ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    n_buckets, n_params = rng.randint(1, 6), rng.randint(1, 60)
    code = StatusCode(n_ranks=n_ranks, n_buckets=n_buckets, n_params=n_params)
    # Dense flags: sums come near the largest that a number must hold.
    late, used = (
        [[float(rng.random() < 0.9) for _ in range(n)] for _ in range(n_ranks)] for n in (n_buckets, n_params)
    )
    statuses = [Status(1.0, 0.0, 0.0, *flags) for flags in zip(late, used, strict=True)]
    sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in (late, used)]
    assert _same(_sum(code, statuses), Status(float(n_ranks), 0.0, 0.0, *sums))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 8, 1000])
def test_the_largest_sums_do_not_carry_over_and_the_usual_step_is_recognised(n_ranks: int) -> None:
    code = StatusCode(n_ranks=n_ranks, n_buckets=2, n_params=40)
    for late in (0.0, 1.0):
        status = _sum(code, [Status(1.0, 0.0, 0.0, [late] * 2, [1.0] * 40)] * n_ranks)
        assert code.is_usual(status) == (not late)
        assert list(status.late) == [late * n_ranks] * 2
        assert list(status.used) == [n_ranks] * 40


@pytest.mark.parametrize("place", [0, 13, 29])
@pytest.mark.parametrize("what", ["late", "used"])
def test_a_step_that_differs_in_one_flag_is_not_usual(what: str, place: int) -> None:
    code = StatusCode(n_ranks=2, n_buckets=30, n_params=30)
    usual = Status(1.0, 0.0, 0.0, [0.0] * 30, [1.0] * 30)
    late, used = [0.0] * 30, [1.0] * 30
    if what == "late":
        late[place] = 1.0
    else:
        used[place] = 0.0
    status = _sum(code, [usual, Status(1.0, 0.0, 0.0, late, used)])
    assert not code.is_usual(status)
    assert [n for n, count in enumerate(status.late) if count] == ([place] if what == "late" else [])
    assert [n for n, count in enumerate(status.used) if count < 2] == ([place] if what == "used" else [])


@pytest.mark.parametrize(("n_buckets", "n_params"), [(1, 0), (0, 4), (2, 3), (1, 500)])
def test_the_size_is_known_beforehand_and_small(n_buckets: int, n_params: int) -> None:
    code = StatusCode(n_ranks=2, n_buckets=n_buckets, n_params=n_params)
    assert 6 <= code.numel <= 6 + n_buckets + n_params
    status = Status(1.0, 0.0, 0.0, [0.0] * n_buckets, [1.0] * n_params)
    assert _same(_sum(code, [status, status]), Status(2.0, 0.0, 0.0, [0.0] * n_buckets, [2.0] * n_params))


def test_a_target_of_another_size_is_refused() -> None:
    code = StatusCode(n_ranks=2, n_buckets=2, n_params=3)
    with pytest.raises(RuntimeError):
        code.write(Status(1.0, 0.0, 0.0, [0.0] * 2, [1.0] * 3), torch.empty(code.numel + 1))


def test_it_is_written_into_the_tail_of_a_larger_buffer_only() -> None:
    code = StatusCode(n_ranks=1, n_buckets=2, n_params=3)
    status = Status(3.5, 1.0, 0.0, [0.0, 1.0], [1.0, 0.0, 1.0])
    flat = torch.zeros(4 + code.numel)
    code.write(status, flat[4:])
    assert flat[:4].tolist() == [0.0] * 4
    assert _same(code.read(flat[4:]), status)


@pytest.mark.parametrize("dtype", STATUS_DTYPES)
@pytest.mark.parametrize("n_ranks", [2, 3, 1000, 100_000])
def test_a_backward_of_another_kind_on_one_rank_is_noticed(n_ranks: int, dtype: torch.dtype) -> None:
    def code(wrapper: int) -> StatusCode:
        return StatusCode(n_ranks=n_ranks, n_buckets=1, n_params=1, wrapper=wrapper)

    def total(*marks: tuple[float, float, float]) -> Status:
        # Sums in the dtype in which they travel, as though all other ranks had brought the first mark.
        sums = [sum(torch.tensor(float(n), dtype=dtype) for n in numbers) for numbers in zip(*marks, strict=True)]
        rest = [torch.tensor(number * (n_ranks - len(marks)), dtype=dtype) for number in marks[0]]
        opinions, marks_sum, squares = (float(one + other) for one, other in zip(sums, rest, strict=True))
        return Status(1.0, 0.0, 0.0, [0.0], [1.0], opinions, marks_sum, squares)

    ours = code(wrapper=3).mark(of_module=False)
    assert total(ours, ours).is_one_backward
    assert not total(ours, code(wrapper=3).mark(of_module=True)).is_one_backward
    assert not total(ours, code(wrapper=4).mark(of_module=False)).is_one_backward
    # A rank without an opinion fits to any.
    assert total(ours, (0.0, 0.0, 0.0)).is_one_backward
