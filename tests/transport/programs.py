"""What ranks do in the kernel's tests; imported by every rank."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.transport.shm.codes import DTYPES, Kind, Op
from paceline.transport.shm.kernel import Job
from tests.transport.processes import TIMEOUT_S, Rank

# Ranks share the cores.
torch.set_num_threads(1)

# Around everything that changes with size: nothing, less than a line, the small limit, one half and several.
SIZES = (0, 1, 7, 1000, 8193, 100_003)
SEVERAL_CHUNKS = 700_001
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)


# -- helpers -------------------------------------------------------------------------------------------------


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
        total = total / len(inputs)
    return total.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def all_reduce(
    rank: Rank, t: Tensor, op: Op = Op.SUM, *, out: Tensor | None = None, inline: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Job:  # fmt: skip
    out = t if out is None else out
    return rank.endpoint.all_reduce(
        t.data_ptr(), out.data_ptr(), t.numel(), DTYPES[t.dtype], op,
        timeout_s=timeout_s, inline=inline, keep=(t, out),
    )  # fmt: skip


def pieces(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.nbytes) for t in tensors]


def cases() -> Iterator[tuple[torch.dtype, Op]]:
    for dtype, op in itertools.product(DTYPES, Op):
        if dtype in COMPLEX and op not in (Op.SUM, Op.AVG):
            continue
        if dtype in FLOATS and op in (Op.BAND, Op.BOR, Op.BXOR):
            continue
        if dtype not in FLOATS + COMPLEX and op is Op.AVG:
            continue
        yield dtype, op


# -- collectives ---------------------------------------------------------------------------------------------


def reduces_every_dtype_and_op(rank: Rank, *, sizes: tuple[int, ...]) -> int:
    checked = 0
    for number, (dtype, op) in enumerate(cases()):
        for count in sizes if op is not Op.SUM else (*sizes, SEVERAL_CHUNKS):
            inputs = [data(r, count, dtype, number) for r in range(rank.size)]
            want = fold(inputs, op)
            mine = inputs[rank.rank].clone()
            out = torch.empty_like(mine) if checked % 2 else mine
            all_reduce(rank, mine, op, out=out, inline=checked % 3 != 0).wait()
            assert same_bits(out, want), f"{dtype} {op.name} {count}"
            assert out is mine or same_bits(mine, inputs[rank.rank]), "the input was written to"
            checked += 1
    return checked


def reduces_tensors_here(rank: Rank) -> None:
    for dtype, op in cases():
        inputs = [data(r, 1000, dtype) for r in range(rank.size)]
        if dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            inputs = [t - 60 for t in inputs]
        mine = inputs[rank.rank].clone().view(10, 1, 100)
        done = rank.endpoint.all_reduce_here(mine, op, TIMEOUT_S)
        assert done is not dtype.is_complex, (dtype, op)
        assert same_bits(mine.flatten(), fold(inputs, op) if done else inputs[rank.rank]), (dtype, op)
    for tensor in (torch.tensor(2.0), torch.empty(0, 3), torch.nn.Parameter(torch.ones(3))):
        assert rank.endpoint.all_reduce_here(tensor.detach().clone(), Op.SUM, TIMEOUT_S)
        assert rank.endpoint.all_reduce_here(tensor, Op.SUM, TIMEOUT_S)


def leaves_other_tensors_alone(rank: Rank) -> None:
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
    assert [rank.endpoint.all_reduce_here(tensor, Op.SUM, TIMEOUT_S) for tensor in others] == [False] * len(others)
    assert not rank.endpoint.all_reduce_here(torch.ones(2), Op.BOR, TIMEOUT_S)
    assert not rank.endpoint.all_reduce_here(torch.ones(2), len(Op), TIMEOUT_S)


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


def exchanges(rank: Rank) -> None:
    me, size, endpoint = rank.rank, rank.size, rank.endpoint
    common = {"timeout_s": TIMEOUT_S, "keep": None, "dtype": torch.int32}
    for turn, count in enumerate((0, 3, 50_000, 1_500_000)):
        inline = turn % 2 == 0
        inputs = [data(r, count, torch.int32) for r in range(size)]
        nothing = torch.empty(0, dtype=torch.int32)

        gathered = [torch.empty(count, dtype=torch.int32) for _ in range(size)]
        endpoint.exchange(
            pieces([inputs[me]]), pieces(gathered), same=True, kind=Kind.ALL_GATHER, inline=inline, **common
        ).wait()
        assert all(same_bits(a, b) for a, b in zip(gathered, inputs, strict=True)), "all_gather"

        root = size - 1
        mine = inputs[root].clone() if me == root else torch.zeros(count, dtype=torch.int32)
        recvs = [mine if r == root else nothing for r in range(size)]
        endpoint.exchange(
            pieces([mine if me == root else nothing]), pieces(recvs), same=True, kind=Kind.BROADCAST, root=root,
            inline=inline, **common,
        ).wait()  # fmt: skip
        assert same_bits(mine, inputs[root]), "broadcast"

        # Rank s sends count + s + 2 * d elements to rank d: no two pieces are of one size, and some are empty.
        def piece(s: int, d: int, count: int = count) -> Tensor:
            return data(10 * s + d, 0 if (s + d) % 3 == 2 else count + s + 2 * d, torch.int32)

        sends = [piece(me, d) for d in range(size)]
        outs = [torch.empty_like(piece(s, me)) for s in range(size)]
        endpoint.exchange(pieces(sends), pieces(outs), same=False, kind=Kind.ALL_TO_ALL, inline=inline, **common).wait()
        assert all(same_bits(out, piece(s, me)) for s, out in enumerate(outs)), "all_to_all"

        # Both of these at once: a gather to rank 0 and a scatter from rank 0.
        sends = [inputs[me] if me == 0 or d == 0 else nothing for d in range(size)]
        outs = [torch.zeros(count if me == 0 or s == 0 else 0, dtype=torch.int32) for s in range(size)]
        endpoint.exchange(pieces(sends), pieces(outs), same=False, kind=Kind.GATHER, inline=inline, **common).wait()
        assert all(same_bits(out, inputs[s]) for s, out in enumerate(outs) if out.numel()), "gather"


def reduce_exchanges(rank: Rank) -> None:
    me, size = rank.rank, rank.size
    for turn, base in enumerate((0, 3, 40_000, 900_000)):
        counts = [base + 5 * d if d % 3 != 2 else 0 for d in range(size)]
        inputs = [[data(10 * s + d, counts[d], torch.float32) for d in range(size)] for s in range(size)]
        out = torch.empty(counts[me])
        rank.endpoint.reduce_exchange(
            [t.data_ptr() for t in inputs[me]], counts, out.data_ptr(), dtype=DTYPES[torch.float32], op=Op.SUM,
            kind=Kind.REDUCE_SCATTER, timeout_s=TIMEOUT_S, inline=turn % 2 == 0, keep=None,
        ).wait()  # fmt: skip
        assert same_bits(out, fold([inputs[s][me] for s in range(size)], Op.SUM)), f"reduce_scatter {base}"

        counts = [base if d == 1 else 0 for d in range(size)]
        mine = inputs[me][0][:base].clone()
        rank.endpoint.reduce_exchange(
            [mine.data_ptr()] * size, counts, mine.data_ptr(), dtype=DTYPES[torch.float32], op=Op.MAX,
            kind=Kind.REDUCE, root=1, timeout_s=TIMEOUT_S, inline=turn % 2 == 0, keep=None,
        ).wait()  # fmt: skip
        want = fold([inputs[s][0][:base] for s in range(size)], Op.MAX) if me == 1 else inputs[me][0][:base]
        assert same_bits(mine, want), f"reduce {base}"


def reduces_in_arenas(rank: Rank) -> None:
    me, size = rank.rank, rank.size
    arenas = [rank.arena(number, 4 << 20) for number in (3, 4)]
    first, second = (torch.frombuffer(arena.map, dtype=torch.float32) for arena in arenas)

    def check(where: list[Tensor], what: str, *, out: Tensor | None = None) -> None:
        for count in (10, 9000, 500_001):
            inputs = [data(r, count, torch.float32) for r in range(size)]
            mine = where[me][:count]
            mine.copy_(inputs[me])
            result = mine if out is None else out[:count]
            all_reduce(rank, mine, out=result, inline=count != 9000).wait()
            assert same_bits(result, fold(inputs, Op.SUM)), f"{what} {count}"

    private = torch.empty(1 << 20)
    check([first] * size, "all in one arena")
    check([first[64 * (r + 1) :] for r in range(size)], "at different places of one")
    check([first if r == 0 else private for r in range(size)], "one rank in an arena")
    check([first if r == 0 else second for r in range(size)], "in different arenas")
    check([private] * size, "out of private memory into an arena", out=first)
    for number in (3, 4):
        rank.endpoint.unregister_arena(number)
    check([first] * size, "in shared memory that is no arena any more")


def runs_jobs_in_order(rank: Rank, *, jobs: int) -> None:
    """Asynchronous jobs, waited for late, never, and out of order; some callers run inline between them."""
    tensors = [torch.full((100 + 5000 * (i % 4),), float(i + rank.rank)) for i in range(jobs)]
    pending = {}
    for i, t in enumerate(tensors):
        job = all_reduce(rank, t, inline=i % 5 == 0)
        if i % 3:
            pending[i] = job
    for i in sorted(pending, key=lambda i: -i):
        pending[i].wait(30.0 if i % 2 else None)
        assert pending[i].done()
    rank.settle()
    for i, t in enumerate(tensors):
        assert torch.equal(t, torch.full_like(t, sum(float(i + r) for r in range(rank.size)))), i


def keeps_memory_of_dropped_jobs(rank: Rank) -> None:
    for _ in range(20):
        all_reduce(rank, torch.full((200_000,), 1.0), inline=False)
    rank.settle()


def several_threads_submit(rank: Rank) -> None:
    # Ranks need one order, so threads take turns; that they are several is what is tested.
    turn = threading.Condition()
    order = iter(range(40))
    wrong = []

    def work() -> None:
        while True:
            with turn:
                i = next(order, None)
                if i is None:
                    return
                t = torch.full((3000,), float(i))
                job = all_reduce(rank, t, inline=i % 4 == 1)
            job.wait()
            if not torch.equal(t, torch.full((3000,), float(i * rank.size))):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- disagreement --------------------------------------------------------------------------------------------


def disagrees(rank: Rank) -> list[str]:
    """Every mistake is an error on every rank, and the group goes on."""
    said = []

    def expect(job: Job) -> None:
        try:
            job.wait()
        except PacelineError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
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
    said = []
    for dtype, op in ((torch.float32, Op.BAND), (torch.int32, Op.AVG), (torch.complex64, Op.MAX)):
        try:
            all_reduce(rank, torch.ones(2, dtype=dtype), op).wait()
        except PacelineError as error:
            said.append(f"{type(error).__name__}: {error}")
    rank.settle()
    return said


# -- faults --------------------------------------------------------------------------------------------------


def one_poisons(rank: Rank) -> None:
    if rank.rank == 1:
        rank.endpoint.poison("the dog ate the gradients", blamed=11)
    t = torch.ones(100_000)
    all_reduce(rank, t).wait()


def one_aborts(rank: Rank) -> None:
    """Ranks 1 and 2 are in a collective that rank 0, which waits for a message, never joins; rank 2 aborts."""
    t = torch.ones(10)
    if rank.rank == 0:
        rank.endpoint.recv(t.data_ptr(), t.nbytes, 1, 0, timeout_s=TIMEOUT_S, keep=t).wait()
        return
    job = all_reduce(rank, t, inline=False)
    if rank.rank == 2:
        rank.endpoint.abort()
    job.wait()


def stays_poisoned(rank: Rank) -> list[str]:
    rank.settle()
    rank.endpoint.poison("one", blamed=None)
    said = []
    for _ in range(2):
        try:
            rank.settle()
        except PacelineError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def forks(rank: Rank) -> str:
    """A child of fork is refused, and its end changes nothing for its parent."""
    rank.settle()
    other, t = 1 - rank.rank, torch.ones(1)
    common = {"timeout_s": TIMEOUT_S, "keep": t}
    pending = rank.endpoint.recv(t.data_ptr(), t.nbytes, other, 0, **common)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for call in (rank.settle, pending.wait):
            try:
                call()
            except PacelineError as error:
                os.write(write, f"{type(error).__name__}: {error}\n".encode())
        rank.endpoint.close()
        os.close(rank.control.fd)
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read, 1000).decode()
    # Still a rank, and its lock still says so.
    rank.endpoint.send(t.data_ptr(), t.nbytes, other, 0, **common).wait()
    pending.wait()
    for _ in range(3):
        rank.settle()
    return said


# -- messages ------------------------------------------------------------------------------------------------


def sends_and_receives(rank: Rank) -> None:
    me, size, endpoint = rank.rank, rank.size, rank.endpoint
    timeout = {"timeout_s": TIMEOUT_S}
    after, before = (me + 1) % size, (me - 1) % size
    for count in (0, 1, 1000, 400_000):
        out, into = data(me, count, torch.float32), torch.empty(count)
        sent = endpoint.send(out.data_ptr(), out.nbytes, after, 5, keep=out, **timeout)
        received = endpoint.recv(into.data_ptr(), into.nbytes, before, 5, keep=into, **timeout)
        received.wait()
        sent.wait()
        assert received.source == before
        assert same_bits(into, data(before, count, torch.float32)), count
    rank.settle()


def receives_in_any_order(rank: Rank) -> None:
    """Tags are received in another order than sent, more bytes than a ring holds are set aside, sources mix."""
    me, size, endpoint = rank.rank, rank.size, rank.endpoint
    timeout = {"timeout_s": TIMEOUT_S}
    tags = range(6)

    def message(source: int, tag: int) -> Tensor:
        return data(source, 1 + 50_000 * (tag % 3), torch.float32, seed=tag)

    if me != 0:
        sends = []
        for tag in tags:
            t = message(me, tag)
            sends.append(endpoint.send(t.data_ptr(), t.nbytes, 0, tag, keep=t, **timeout))
        for job in sends:
            job.wait()
        rank.settle()
        return
    for tag in reversed(tags):
        if tag % 2:
            for source in reversed(range(1, size)):
                into = torch.empty_like(message(source, tag))
                endpoint.recv(into.data_ptr(), into.nbytes, source, tag, keep=into, **timeout).wait()
                assert same_bits(into, message(source, tag))
        else:
            seen = set()
            for _ in range(1, size):
                into = torch.empty_like(message(1, tag))
                job = endpoint.recv(into.data_ptr(), into.nbytes, None, tag, keep=into, **timeout)
                job.wait()
                assert same_bits(into, message(job.source, tag))
                seen.add(job.source)
            assert seen == set(range(1, size))
    rank.settle()


def messages_do_not_overtake(rank: Rank) -> None:
    t = torch.empty(1)
    for i in range(200):
        if rank.rank == 0:
            t = torch.full((1 + 300 * (i % 7),), float(i))
            rank.endpoint.send(t.data_ptr(), t.nbytes, 1, 0, timeout_s=TIMEOUT_S, keep=t)
        else:
            t = torch.empty(1 + 300 * (i % 7))
            rank.endpoint.recv(t.data_ptr(), t.nbytes, 0, 0, timeout_s=TIMEOUT_S, keep=t).wait()
            assert (t == i).all()
    rank.settle()


def receives_what_a_rank_sent_before_it_left(rank: Rank) -> None:
    t = torch.full((1000,), 4.0)
    if rank.rank == 0:
        rank.endpoint.send(t.data_ptr(), t.nbytes, 1, 0, timeout_s=TIMEOUT_S, keep=t)
        return
    t.zero_()
    rank.endpoint.recv(t.data_ptr(), t.nbytes, 0, 0, timeout_s=TIMEOUT_S, keep=t).wait()
    assert (t == 4).all()


def receives_wrong_sizes(rank: Rank) -> list[str]:
    t, said = torch.ones(100), []
    for nbytes in (40, 400):
        if rank.rank == 0:
            rank.endpoint.send(t.data_ptr(), 80, 1, 0, timeout_s=TIMEOUT_S, keep=t).wait()
            continue
        try:
            rank.endpoint.recv(t.data_ptr(), nbytes, 0, 0, timeout_s=TIMEOUT_S, keep=t).wait()
        except PacelineError as error:
            said.append(f"{type(error).__name__}: {error}")
    sends_and_receives(rank)
    return said


def waits_for_a_message_in_vain(rank: Rank) -> list[str]:
    t, said = torch.ones(10), []
    if rank.rank == 1:
        for source in (0, None):
            try:
                rank.endpoint.recv(t.data_ptr(), t.nbytes, source, 9, timeout_s=0.1, keep=t).wait()
            except PacelineError as error:
                said.append(f"{type(error).__name__}: {error}")
    # A message that did not come is not the end of the group.
    sends_and_receives(rank)
    return said


def waits_for_a_little_while(rank: Rank) -> str:
    job = rank.endpoint.barrier(timeout_s=TIMEOUT_S, inline=False) if rank.rank == 0 else None
    said = "nothing"
    if job is not None:
        try:
            job.wait(0.05)
        except PacelineError as error:
            said = f"{type(error).__name__}: {error}"
        rank.endpoint.send(0, 0, 1, 0, timeout_s=TIMEOUT_S, keep=None).wait()
        job.wait()
    else:
        rank.endpoint.recv(0, 0, 0, 0, timeout_s=TIMEOUT_S, keep=None).wait()
        rank.settle()
    return said
