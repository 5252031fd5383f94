"""What ranks do in the kernel's tests; imported by every rank.

Collectives and messages that come out right are tested through the process group (``cases``). Here is the arithmetic,
and what the group hides: disagreement, poison, interruptions.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError, PeerFailedError
from paceline.transport.hosts.rendezvous import meet
from paceline.transport.shm.codes import DTYPES, Kind, Op
from paceline.transport.shm.kernel import Endpoint, Job
from paceline.transport.shm.segment import Segment

TIMEOUT_S = 60.0
# Around everything that changes with size: nothing, less than a line, the small limit and one half.
SIZES = (0, 7, 8193, 100_003)
SEVERAL_CHUNKS = 700_001
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
# Long enough for the main thread to be asleep in its wait; what is tested does not depend on it.
ALARM_S = 0.15


# -- helpers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """What a program is given. In messages, ranks are called 10, 11, ..."""

    endpoint: Endpoint
    control: Segment
    rank: int
    size: int

    def settle(self) -> None:
        """Wait until every rank has come here."""
        self.endpoint.barrier(timeout_s=TIMEOUT_S, inline=True).wait()


def run_program(rank: int, world_size: int, program: Callable[..., Any], *args: Any) -> Any:
    """Give ``program`` an endpoint of its own, beside the process group of the rank."""
    store = dist.PrefixStore("kernel", dist.distributed_c10d._get_default_store())
    met = meet(store, rank=rank, size=world_size, names=range(10, 10 + world_size))
    assert met.endpoint is not None, met.reason
    assert met.control is not None
    value = program(Rank(met.endpoint, met.control, rank, world_size), *args)
    met.endpoint.close()
    met.control.close()
    return value


def data(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The same on whichever rank it is made."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(torch.bool)
    return torch.randint(0, 120, (count,), generator=generator).to(dtype)


def fold(inputs: list[Tensor], op: Op) -> Tensor:
    """The reference: in rank order, 16-bit floats in float32 and rounded once."""
    dtype = inputs[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(fold([torch.view_as_real(t) for t in inputs], op))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        wide = torch.int64  # small values: torch has no arithmetic for these
    steps: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
        Op.SUM: torch.Tensor.__or__ if dtype is torch.bool else torch.Tensor.__add__,
        Op.AVG: torch.Tensor.__add__,
        Op.PRODUCT: torch.Tensor.__mul__,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.Tensor.__and__,
        Op.BOR: torch.Tensor.__or__,
        Op.BXOR: torch.Tensor.__xor__,
    }
    wides = [t.to(wide) for t in inputs]
    total = wides[0]
    for t in wides[1:]:
        total = steps[op](total, t)
    if op is Op.AVG:
        # A conversion to integers rounds toward zero.
        total = total / len(inputs)
    return total.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def all_reduce(rank: Rank, t: Tensor, op: Op = Op.SUM, *, out: Tensor | None = None, inline: bool = True) -> Job:
    out = t if out is None else out
    what = (t.data_ptr(), out.data_ptr(), t.numel(), DTYPES[t.dtype], op)
    return rank.endpoint.all_reduce(*what, timeout_s=TIMEOUT_S, inline=inline, keep=(t, out))


def send(rank: Rank, t: Tensor, to: int, tag: int = 0) -> Job:
    return rank.endpoint.send(t.data_ptr(), t.nbytes, to, tag, timeout_s=TIMEOUT_S, keep=t)


def recv(rank: Rank, t: Tensor, frm: int | None, tag: int = 0, *, timeout_s: float = TIMEOUT_S) -> Job:
    return rank.endpoint.recv(t.data_ptr(), t.nbytes, frm, tag, timeout_s=timeout_s, keep=t)


def said_by(call: Callable[[], Any]) -> str:
    """The error that ``call`` raises, in words."""
    try:
        call()
    except (PacelineError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return "nothing"


def cases() -> Iterator[tuple[torch.dtype, Op]]:
    for dtype, op in itertools.product(DTYPES, Op):
        if dtype in COMPLEX and op not in (Op.SUM, Op.AVG):
            continue
        if dtype in FLOATS and op in (Op.BAND, Op.BOR, Op.BXOR):
            continue
        if dtype is torch.bool and op is Op.AVG:
            continue
        yield dtype, op


# -- collectives ---------------------------------------------------------------------------------------------


def reduces_every_dtype_and_op(rank: Rank, sizes: tuple[int, ...]) -> int:
    checked = 0
    for number, (dtype, op) in enumerate(cases()):
        is_plain_sum = (dtype, op) == (torch.float32, Op.SUM)
        for count in (*sizes, SEVERAL_CHUNKS) if is_plain_sum else sizes:
            inputs = [data(r, count, dtype, number) for r in range(rank.size)]
            want = fold(inputs, op)
            mine = inputs[rank.rank].clone()
            out = torch.empty_like(mine) if checked % 2 else mine
            all_reduce(rank, mine, op, out=out, inline=checked % 3 != 0).wait()
            assert same_bits(out, want), f"{dtype} {op.name} {count}"
            assert out is mine or same_bits(mine, inputs[rank.rank]), "the input was written to"
            checked += 1
    return checked


def reduces_plain_tensors_here(rank: Rank) -> None:
    """The quick way takes tensors that are plain memory. It leaves all others to the general way."""

    def takes(tensor: Tensor, op: int = Op.SUM) -> bool:
        return rank.endpoint.all_reduce_here(tensor, op, TIMEOUT_S)

    for dtype in DTYPES:
        assert takes(torch.ones(2, dtype=dtype)) is not dtype.is_complex, dtype
    assert all(takes(t) for t in (torch.tensor(2.0), torch.empty(0, 3), torch.nn.Parameter(torch.ones(3))))
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_contiguous()
    others = [
        torch.ones(3, 2).t(),
        torch.ones(4)[::2],
        torch.ones(1).expand(4),
        negated,
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2).as_subclass(OtherTensor),
    ]
    assert not any(takes(tensor) for tensor in others)
    assert not takes(torch.ones(2), Op.BOR)
    assert not takes(torch.ones(2), len(Op))


class OtherTensor(Tensor):
    """May mean anything by its elements."""


def reduces_special_values(rank: Rank) -> None:
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65504.0, 6e-8, 1e-7, 1e-40, 3.0, 2049.0, 0.1]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        a = torch.tensor([x for x in special for _ in special], dtype=torch.float64).to(dtype)
        b = torch.tensor([x for _ in special for x in special], dtype=torch.float64).to(dtype)
        for op in (Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT):
            mine = (a if rank.rank == 0 else b).clone()
            all_reduce(rank, mine, op).wait()
            want = fold([a, b], op)
            assert torch.equal(mine.isnan(), want.isnan()), f"{dtype} {op.name}"
            assert torch.equal(mine[~mine.isnan()], want[~want.isnan()]), f"{dtype} {op.name}"


def every_half_survives_the_conversion(rank: Rank) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-32768, 32768, dtype=torch.int16).view(dtype)
        mine = every.clone() if rank.rank == 0 else torch.zeros_like(every)
        all_reduce(rank, mine, Op.SUM).wait()
        want = every + torch.zeros_like(every)
        assert torch.equal(mine.isnan(), want.isnan())
        assert same_bits(mine[~mine.isnan()], want[~want.isnan()])


# -- disagreement --------------------------------------------------------------------------------------------


def disagrees(rank: Rank) -> list[str]:
    """Every mistake is an error on every rank, and the group goes on."""
    said = []

    def expect(job: Job) -> None:
        said.append(said_by(job.wait))
        t = torch.ones(50_000)
        all_reduce(rank, t).wait()
        assert torch.equal(t, torch.full_like(t, float(rank.size)))

    odd = rank.rank == 1
    keep = {"timeout_s": TIMEOUT_S, "inline": True, "keep": None}
    expect(all_reduce(rank, torch.ones(11 if odd else 10)))
    expect(all_reduce(rank, torch.ones(100_000 if odd else 10)))
    expect(all_reduce(rank, torch.ones(10, dtype=torch.int32 if odd else torch.float32)))
    expect(all_reduce(rank, torch.ones(10), Op.MAX if odd else Op.SUM))
    expect(rank.endpoint.barrier(timeout_s=TIMEOUT_S, inline=True) if odd else all_reduce(rank, torch.ones(90_000)))
    t = torch.ones(100)
    recvs = [(t.data_ptr(), 80 if odd else 40)] * rank.size
    bytes_of = {"same": True, "dtype": t.dtype, **keep}
    expect(rank.endpoint.exchange([(t.data_ptr(), 40)], recvs, kind=Kind.ALL_GATHER, **bytes_of))
    expect(rank.endpoint.exchange([(t.data_ptr(), 40)], recvs, kind=Kind.BROADCAST, root=int(odd), **bytes_of))
    recvs = [(t.data_ptr(), 40)] * rank.size
    for dtypes in ((torch.float32, torch.int32), (torch.float8_e5m2, torch.float8_e4m3fn)):
        bytes_of["dtype"] = dtypes[odd]
        expect(rank.endpoint.exchange([(t.data_ptr(), 40)], recvs, kind=Kind.ALL_GATHER, **bytes_of))
    # What has no bytes goes with any dtype.
    bytes_of["dtype"] = torch.int8 if odd else torch.float32
    rank.endpoint.exchange([(0, 0)], [(0, 0)] * rank.size, kind=Kind.ALL_GATHER, **bytes_of).wait()
    expect(
        rank.endpoint.reduce_exchange(
            [t.data_ptr()] * rank.size, [3, 1] if odd else [1, 3], t.data_ptr(), dtype=0, op=Op.SUM,
            kind=Kind.REDUCE_SCATTER, **keep,
        )
    )  # fmt: skip
    return said


def is_refused(rank: Rank) -> list[str]:
    """What is wrong on its own is refused before other ranks are involved."""
    wrong = ((torch.float32, Op.BAND), (torch.bool, Op.AVG), (torch.complex64, Op.MAX))
    said = [said_by(all_reduce(rank, torch.ones(2, dtype=dtype), op).wait) for dtype, op in wrong]
    rank.settle()
    return said


# -- faults --------------------------------------------------------------------------------------------------


def one_poisons(rank: Rank) -> tuple[str, int | None]:
    if rank.rank == 1:
        rank.endpoint.poison("the dog ate the gradients", blamed=11)
    try:
        all_reduce(rank, torch.ones(100_000)).wait()
    except PeerFailedError as error:
        return str(error), error.rank
    return "nothing", None


def one_aborts(rank: Rank) -> str:
    """Ranks 1 and 2 are in a collective that rank 0, which waits for a message, never joins; rank 2 aborts."""
    if rank.rank == 0:
        return said_by(recv(rank, torch.ones(10), 1).wait)
    job = all_reduce(rank, torch.ones(10), inline=False)
    if rank.rank == 2:
        rank.endpoint.abort()
    return said_by(job.wait)


def stays_poisoned(rank: Rank) -> list[str]:
    rank.settle()
    rank.endpoint.poison("one", blamed=None)
    return [said_by(rank.settle) for _ in range(2)]


def forks(rank: Rank) -> str:
    """A child of fork is refused, and its end changes nothing for its parent."""
    rank.settle()
    other, t = 1 - rank.rank, torch.ones(1)
    pending = recv(rank, t, other)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for call in (rank.settle, pending.wait, lambda: rank.endpoint.all_reduce_here(t, Op.SUM, TIMEOUT_S)):
            os.write(write, f"{said_by(call)}\n".encode())
        rank.endpoint.close()
        os.close(rank.control.fd)
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read, 1000).decode()
    # Still a rank, and its lock still says so.
    send(rank, t, other).wait()
    pending.wait()
    for _ in range(3):
        rank.settle()
    return said


# -- messages ------------------------------------------------------------------------------------------------


def sends_and_receives(rank: Rank) -> None:
    after, before = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    for count in (0, 1, 1000, 400_000):
        into = torch.empty(count)
        sent = send(rank, data(rank.rank, count, torch.float32), after, 5)
        received = recv(rank, into, before, 5)
        received.wait()
        sent.wait()
        assert received.source == before
        assert same_bits(into, data(before, count, torch.float32)), count
    rank.settle()


def receives_what_a_rank_sent_before_it_left(rank: Rank) -> None:
    t = torch.full((1000,), 4.0)
    if rank.rank == 0:
        send(rank, t, 1)
        return
    t.zero_()
    recv(rank, t, 0).wait()
    assert (t == 4).all()


def receives_wrong_sizes(rank: Rank) -> list[str]:
    said = []
    for count in (10, 100):
        if rank.rank == 0:
            send(rank, torch.ones(20), 1).wait()
        else:
            said.append(said_by(recv(rank, torch.ones(count), 0).wait))
    sends_and_receives(rank)
    return said


def waits_for_a_message_in_vain(rank: Rank) -> list[str]:
    said = []
    if rank.rank == 1:
        said = [said_by(recv(rank, torch.ones(10), source, 9, timeout_s=0.1).wait) for source in (0, None)]
    # A message that did not come is not the end of the group.
    sends_and_receives(rank)
    return said


# -- waits that end in another way than by what was waited for -----------------------------------------------


def _raise(*_: object) -> None:
    raise KeyboardInterrupt


def _during(wait: Callable[[], Any], handler: Callable[..., None] = _raise) -> str:
    """What comes out of ``wait``, which has set the alarm, when that arrives in it."""
    signal.signal(signal.SIGALRM, handler)
    said = said_by(wait)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return said


def _alarmed(call: Callable[..., Any]) -> Callable[..., Any]:
    def set_alarm_and_call(*args: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, ALARM_S)
        return call(*args)

    return set_alarm_and_call


def _settle_with_alarm(rank: Rank) -> None:
    """An alarm before the kernel has the barrier would keep this rank from it, and the ranks' barriers would shift."""
    # So it is set right before the kernel is called, which looks for signals itself.
    submit = _alarmed(rank.endpoint._library.pl_barrier)
    rank.endpoint._collective(submit, TIMEOUT_S, inline=True, keep=None).wait()


def is_interrupted(rank: Rank) -> list[str]:
    """Rank 0 is called away from all kinds of waits. Only the last of them, inside a collective, ends the group."""
    go, message, reduced = torch.ones(1), torch.zeros(1), torch.ones(100_000)
    if rank.rank == 1:
        recv(rank, go, 0, 1).wait()
        all_reduce(rank, reduced).wait()
        rank.settle()
        send(rank, torch.full((1,), 7.0), 0, 2).wait()
        recv(rank, go, 0, 3).wait()
        rank.settle()
        return [_during(_alarmed(recv(rank, go, 0, 4).wait), lambda *_: None)]

    receiving = recv(rank, message, 1, 2)
    said = [_during(_alarmed(receiving.wait))]
    reducing = all_reduce(rank, reduced, inline=False)
    # With a limit, as without one this thread would do the work itself, if it came first.
    said.append(_during(_alarmed(lambda: reducing.wait(TIMEOUT_S))))
    # It waits its turn behind the other.
    said.append(_during(lambda: _settle_with_alarm(rank)))
    assert not receiving.done()
    assert not reducing.done()
    send(rank, go, 1, 1).wait()
    receiving.wait()
    reducing.wait()
    assert message.item() == 7.0
    assert reduced.unique().tolist() == [2.0]
    # A handler that returns runs in the middle of the wait, which goes on.
    said.append(_during(lambda: _settle_with_alarm(rank), lambda *_: send(rank, go, 1, 3).wait()))
    return [*said, _during(lambda: _settle_with_alarm(rank))]


def is_aborted_while_it_closes(rank: Rank) -> str:
    """Rank 0 closes, which waits for rank 1 in a collective; aborting ends that."""
    if rank.rank == 1:
        rank.settle()
        return said_by(recv(rank, torch.zeros(1), 0).wait)
    rank.settle()
    job = all_reduce(rank, torch.ones(10), inline=False)
    closing = threading.Thread(target=rank.endpoint.close)
    closing.start()
    while rank.endpoint._endpoint is not None:
        time.sleep(0)
    assert not job.done()
    rank.endpoint.abort()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    # Whoever gives up late finds nobody to tell, and that is no error.
    rank.endpoint.poison("too late", blamed=None)
    rank.endpoint.abort()
    return said_by(job.wait)
