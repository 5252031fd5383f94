"""The C kernel on real processes: results to the bit, errors on every rank, faults in every phase."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import BadArgumentError, PeerFailedError, StateError
from paceline.transport.shm.codes import Op
from paceline.transport.shm.kernel import Endpoint, control_nbytes
from paceline.transport.shm.segment import Segment
from tests.transport import programs
from tests.transport.requirements import needs_shm

Run = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def _kernel() -> None:
    needs_shm()


@pytest.fixture
def run(ranks: Callable[..., list[Any]]) -> Run:
    """Run a program of ``programs`` on the endpoints of as many ranks: ``run(2, programs.forks)``."""
    return lambda size, program, *args: ranks(programs.run_program, program, *args, world_size=size)


# -- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "sizes"), [(2, programs.SIZES), (3, (1, 1000, 100_003)), (1, (0, 5, 100_003))])
def test_all_reduce_gives_the_fold_in_rank_order_to_the_bit(run: Run, size: int, sizes: tuple[int, ...]) -> None:
    checked = run(size, programs.reduces_every_dtype_and_op, sizes)
    assert checked == [len(list(programs.cases())) * len(sizes) + 1] * size


@pytest.mark.parametrize("program", [programs.reduces_special_values, programs.every_half_survives_the_conversion])
def test_arithmetic(run: Run, program: Callable[..., None]) -> None:
    run(2, program)


def test_only_tensors_that_are_plain_memory_take_the_quick_way(run: Run) -> None:
    run(1, programs.reduces_plain_tensors_here)


def test_memory_is_kept_if_the_caller_is_interrupted_before_it_has_the_job() -> None:
    """A signal's exception may come between the kernel's return and the next instruction of Python."""

    def started_and_interrupted(*arguments: object) -> None:
        submit(*arguments)
        raise KeyboardInterrupt

    with Segment.create(control_nbytes(1)) as control:
        endpoint = _open(control, size=1)
        submit = endpoint._library.pl_all_reduce
        tensor = torch.ones(1000)
        kept = weakref.ref(tensor)
        at = tensor.data_ptr()
        with pytest.raises(KeyboardInterrupt):
            endpoint._collective(started_and_interrupted, at, at, 1000, 0, Op.SUM, 60.0, inline=False, keep=tensor)
        del tensor
        endpoint.barrier(timeout_s=60, inline=True).wait()
        assert kept() is not None
        endpoint.close()
        assert kept() is None


# -- errors ----------------------------------------------------------------------------------------------------------


def test_ranks_in_different_collectives_are_told_on_every_rank_and_go_on(run: Run) -> None:
    said = run(2, programs.disagrees)
    assert said[0] == said[1]
    assert [line.split(":")[0] for line in said[0]] == ["DisagreementError"] * 10
    assert "rank 10 in all_reduce(SUM, 10 x float32), rank 11 in all_reduce(SUM, 11 x float32)" in said[0][0]
    assert "rank 10 in all_reduce(SUM, 90000 x float32), rank 11 in barrier" in said[0][4]
    assert "all_gather(float32): rank 10 sends 40 bytes to rank 11, which expects 80" in said[0][5]
    assert "broadcast(float32) root 0, rank 11 in broadcast(float32) root 1" in said[0][6]
    assert "rank 10 in all_gather(float32), rank 11 in all_gather(int32)" in said[0][7]


def test_what_makes_no_sense_is_refused(run: Run) -> None:
    said = run(2, programs.is_refused)
    assert [line.split(":")[0] for line in said[0]] == ["BadArgumentError"] * 3


def test_a_fork_is_not_a_rank(run: Run) -> None:
    said = run(2, programs.forks)
    for lines in said:
        assert [line.startswith("StateError: this process is a fork") for line in lines.splitlines()] == [True] * 3


def test_poison_carries_its_cause(run: Run) -> None:
    assert run(3, programs.one_poisons) == [("the dog ate the gradients", 11)] * 3


def test_abort_ends_what_is_under_way_everywhere(run: Run) -> None:
    assert run(3, programs.one_aborts) == ["PeerFailedError: rank 12 has aborted the group"] * 3


def test_abort_ends_a_close_that_hangs(run: Run) -> None:
    said = "PeerFailedError: rank 10 has aborted the group"
    assert run(2, programs.is_aborted_while_it_closes) == [said] * 2


def test_signals_are_handled_in_waits(run: Run) -> None:
    said = run(2, programs.is_interrupted)
    assert said[0] == ["KeyboardInterrupt"] * 3 + ["nothing", "KeyboardInterrupt"]
    assert said[1] == ["PeerFailedError: rank 10 was interrupted in barrier"]


def test_poison_stays(run: Run) -> None:
    assert run(1, programs.stays_poisoned) == [["PeerFailedError: one"] * 2]


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "program"),
    [
        (2, programs.sends_and_receives),
        (4, programs.sends_and_receives),
        (2, programs.receives_what_a_rank_sent_before_it_left),
    ],
)
def test_messages(run: Run, size: int, program: Callable[..., None]) -> None:
    run(size, program)


def test_a_message_of_the_wrong_size_is_an_error_and_gone(run: Run) -> None:
    said = run(2, programs.receives_wrong_sizes)
    assert said[1] == [
        f"DisagreementError: rank 10 sent 80 bytes to rank 11, which receives {nbytes}" for nbytes in (40, 400)
    ]


def test_a_message_that_does_not_come_is_a_time_out(run: Run) -> None:
    said = run(2, programs.waits_for_a_message_in_vain)
    assert said[1] == [
        f"RankLostError: rank 11 waited 0.1 s for {who} to send a message of 40 bytes with tag 9"
        for who in ("rank 10", "any rank")
    ]


def test_a_message_that_races_with_the_end_leaves_no_thread() -> None:
    """Ranks are threads here: both ends of a group in one process, closed while the first message is on its way."""

    def send(endpoint: Endpoint, t: torch.Tensor, said: list[str]) -> None:
        try:
            endpoint.send(t.data_ptr(), t.nbytes, 1, 0, timeout_s=60, keep=t).wait()
        except StateError as error:
            said.append(str(error))

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    for _ in range(100):
        memory = mmap.mmap(-1, control_nbytes(2))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ends_of_it = [
            Endpoint(address=address, nbytes=len(memory), fd=-1, rank=rank, size=2, create=rank == 0)
            for rank in range(2)
        ]
        said: list[str] = []
        sender = threading.Thread(target=send, args=(ends_of_it[0], torch.ones(2), said))
        sender.start()
        for endpoint in ends_of_it:
            endpoint.close()
        sender.join()
        assert said in ([], ["this rank has closed the group"])
    # Python's join returns a moment before the thread is gone.
    deadline = time.monotonic() + 30
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0)
    assert threads() <= before


# -- memory that was overwritten -------------------------------------------------------------------------------------


def test_a_group_whose_memory_was_overwritten_says_so() -> None:
    with Segment.create(control_nbytes(1)) as control:
        endpoint = _open(control, size=1)
        # The word at this place says that a rank has given up, and which: here one that does not exist. Then it is 0.
        for word in (b"\xff\xff\xff\xff", bytes(4)):
            os.pwrite(control.fd, word, 128)
            with pytest.raises(PeerFailedError, match="control memory of the group was overwritten: rank 0 has found"):
                endpoint.barrier(timeout_s=60, inline=True).wait()
        endpoint.close()


@pytest.mark.full
@pytest.mark.parametrize("program", ["lies", "overwrite"])
def test_words_that_were_overwritten_become_errors(program: str, tmp_path: Path) -> None:
    """C programs under the address sanitizer; ``make sanitize`` and ``make soak`` run the second one for longer."""
    folder = Path(__file__).parent / "sanitize"
    if shutil.which("make") is None or shutil.which("gcc") is None:
        pytest.skip("needs make and gcc")
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n", encoding="utf-8")
    sanitized = ("gcc", "-fsanitize=address,undefined", "-o", tmp_path / "empty", tmp_path / "empty.c")
    if subprocess.run(sanitized, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs gcc's address sanitizer (Debian: libasan and libubsan)")
    command = ("make", "-C", folder, f"OUT={tmp_path}", "CC=gcc", "OVERWRITES=5000", program)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("no lie was believed" if program == "lies" else "said that memory was overwritten") in done.stdout


# -- joining ---------------------------------------------------------------------------------------------------------


def _open(
    segment: Segment, *, rank: int = 0, size: int = 2, create: bool = True, nbytes: int | None = None
) -> Endpoint:
    return Endpoint(
        address=segment.address,
        nbytes=segment.nbytes if nbytes is None else nbytes,
        fd=segment.fd,
        rank=rank,
        size=size,
        create=create,
    )


def test_a_segment_that_is_not_right_is_refused() -> None:
    with Segment.create(control_nbytes(2)) as segment:
        with pytest.raises(StateError, match="was not made by this library"):
            _open(segment, create=False)
        with pytest.raises(StateError, match="too small"):
            _open(segment, nbytes=segment.nbytes - 4096)
        endpoint = _open(segment)
        with pytest.raises(StateError, match="a rank of it already"):
            _open(segment, rank=1, create=False)
        endpoint.close()
        with pytest.raises(StateError, match="another number of ranks"):
            _open(segment, size=1, create=False)
        os.pwrite(segment.fd, b"\xff\xff\xff\xff", 8)
        with pytest.raises(StateError, match="another version"):
            _open(segment, create=False)


def test_arguments_are_checked() -> None:
    with Segment.create(control_nbytes(2)) as segment:
        endpoint = _open(segment)
        with pytest.raises(BadArgumentError):
            endpoint.send(0, 0, 0, 0, timeout_s=1, keep=None)
        with pytest.raises(BadArgumentError):
            endpoint.exchange([], [], same=False, kind=0, dtype=torch.uint8, timeout_s=1, inline=True, keep=None)
        endpoint.close()
        endpoint.close()
        with pytest.raises(StateError, match="has closed the group"):
            endpoint.barrier(timeout_s=1, inline=True)
    with pytest.raises(BadArgumentError, match="1 to 64"):
        control_nbytes(65)


def test_memory_is_bounded() -> None:
    assert control_nbytes(2) < 8 << 20
    assert control_nbytes(16) <= 24 << 20
