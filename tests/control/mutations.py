"""Messages that were mutated, by the thousand, against everything that reads what other ranks say.

``python -m tests.control.mutations --messages 100000`` is the soak; ``test_mutations.py`` runs fewer. A message is
mutated in one of three ways: its bytes, its bytes with a seal that fits them, or its content, which is then encoded and
sealed as a rank that is authenticated but broken would do it. Whoever reads it must ignore it, or raise an error of
Paceline: any other exception, a case that takes long, and a value that cannot be right are faults.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import resource
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from paceline.compiler.consensus import compile_agreement, compile_exchange, shapes, shared_compile
from paceline.compiler.consensus.collectives import Collective, RankCollectives, first_misfit
from paceline.compiler.consensus.compile_exchange import CompileExchange, NoteKind
from paceline.compiler.consensus.fingerprint import first_difference
from paceline.control import wire
from paceline.control.board import Board
from paceline.control.census import Census
from paceline.control.channel import Channel
from paceline.control.diagnosis import explain, explain_finished
from paceline.control.difference import describe_difference, read_rows
from paceline.control.failure import News
from paceline.control.hang import Inquiries
from paceline.control.progress import Progress
from paceline.control.store_line import StoreLine
from paceline.control.store_thread import StoreThread
from paceline.control.tensor_line import ROW_BYTES, TensorLine, row_of
from paceline.control.waiter import Patience
from paceline.control.whereabouts import Whereabouts
from paceline.control.wire import Item, MessageKind
from paceline.errors import PacelineError
from paceline.run import meeting
from paceline.transport.c10d.sparse import SparseSum
from paceline.transport.hosts import parcels, rendezvous
from paceline.transport.hosts.peer_reports import Report
from paceline.transport.shm.codes import ABI, Op
from tests.control.mutator import NUMBERS, Mutator, mutated_bytes, mutated_json, seal

SIZE = 2
LIMIT_S = 1.0
"""How long the reading of one message may take."""
MEMORY_BYTES = 2 * 2**30
"""How much more memory than at its beginning the soak may take. Where it runs out, there is an exception."""


class WrongValueError(AssertionError):
    """A reader has taken a mutated message for something that it cannot be."""


# -- readers ----------------------------------------------------------------------------------------------------

_asking = StoreThread()


def _board(name: str = "job/1") -> Board:
    return Board(dist.HashStore(), name=name, store_thread=_asking)


def _require(holds: object, what: str) -> None:
    if not holds:
        raise WrongValueError(what)


def _failure(change: Mutator) -> bool:
    board = _board()
    key = change.rng.choice(("failure/1", "given_up"))
    fields = (1, "forward", "KeyError", "'x'", "train.py:88 in load", change.rng.randrange(8))
    board.set(key, change.message(MessageKind.FAILURE, *fields, place=f"job/1/{key}"))
    board.store.set("failures", str(change.rng.choice((1, 2, *NUMBERS))))
    found = News(board, rank=0, size=SIZE).first()
    _require(found is None or (found.rank in range(SIZE) and str(found) is not None), f"{found}")
    return found is not None


def _replan(change: Mutator) -> bool:
    channel: Any = mock.Mock(_board=_board(), _generation=0, step=3, rank=0, size=SIZE)
    data = change.message(MessageKind.REPLAN, 1, 3, "'weight' was frozen", place="job/1/replan/1")
    channel._board.set("replan/1", data)
    try:
        Channel.raise_replan(channel, "the all-reduce")
    except PacelineError as error:
        _require(getattr(error, "rank", None) in range(SIZE), f"{error}")
        return True
    return False


def _whereabouts(change: Mutator) -> bool:
    board = _board()
    census = Census(board, ranks=range(SIZE))
    inquiries = Inquiries(
        board, Progress(None, rank=0, size=SIZE, wrapper=1), census, rank=0, size=SIZE, directory=None
    )
    recent = ("1 all-reduce of bucket 0", "2 broadcast of buffers, float32")
    data = change.message(
        MessageKind.WHEREABOUTS, 1, 2, 1, 1, "a", "b", "c.py:1", "", recent, place="job/1/whereabouts/1"
    )
    board.set("whereabouts/1", data)
    found = inquiries._answer_of(1, 1)
    mine = Whereabouts(2, 2, 2, "all-reduce", recent={1: "all-reduce of bucket 0", 2: "all-reduce of bucket 1"})
    _require(str(explain({0: mine, 1: found}, SIZE)), "no report")
    if found is not None:
        _require(str(explain_finished(1, found, me=0, mine=mine, evaluates=False)), "no report")
    return found is not None


def _process(change: Mutator) -> bool:
    board = _board()
    host = rendezvous.os.uname().nodename
    board.set("process/1", change.message(MessageKind.PROCESS, 4711, 123, host, place="job/1/process/1"))
    state = Census(board, ranks=range(SIZE)).state(1)
    _require(state in ("", "running", "stopped", "gone"), state)
    return False


def _agreement(change: Mutator) -> bool:
    """The word of a rank, or the verdict about all words."""
    board = _board()
    line = StoreLine(board, rank=1, size=SIZE, waiter=lambda topic, timeout_s: Patience(0))
    place = "job/1/agree/plan/0"
    mine = wire.encode(MessageKind.WORD, (b"digest", 7), place=f"{place}/1")
    word = change.message(MessageKind.WORD, (b"digest", 7), place=f"{place}/0")
    word_is_sealed = change.sealed
    if change.rng.random() < 0.5:
        board.set("agree/plan/0/0", word)
        payload = b"".join(map(wire._field, (b"\1\1", (word, mine))))
        verdict = seal(MessageKind.VERDICT, payload, f"{place}/verdict")
    else:
        word_is_sealed = True
        honest = wire.encode(MessageKind.WORD, (b"digest", 7), place=f"{place}/0")
        board.set("agree/plan/0/0", honest)
        verdict = change.message(MessageKind.VERDICT, b"\1\1", (honest, mine), place=f"{place}/verdict")
    board.set("agree/plan/0/verdict", verdict)
    found = line.agree("plan", b"digest", 7, timeout_s=0)
    forms = [tuple(map(type, theirs)) for theirs in found.words if theirs is not None]
    _require(set(forms) <= {(bytes, int)} and len(found.words) == SIZE, f"{found}")
    _require(len(found.values) == SIZE and found.reduce(lambda numbers: 0) == 0, f"{found}")
    return word_is_sealed and found.words[0] is not None


def _report(change: Mutator) -> bool:
    data = change.message(MessageKind.REPORT, 7, "lost", "rank 7 is gone", place="report of 1")
    row = mutated_bytes(change.rng, bytes(row_of(data[:4000], 4096).numpy())) if change.rng.random() < 0.1 else b""
    message = torch.frombuffer(bytearray(row[:4096].ljust(4096, b"\0")), dtype=torch.uint8) if row else None
    found = Report.decode(row_of(data[:4000], 4096) if message is None else message, 1, [5, 7])
    _require(found.rank in (None, 5, 7) and isinstance(found.error(), PacelineError), f"{found}")
    return not found.said.endswith("cannot be understood") and not row


def _gathered(change: Mutator, words: Callable[[int], bytes]) -> Callable[..., None]:
    """An all-gather in which rank 1 brings another row than it should."""
    hops = iter(range(100))

    def all_gather(mine: torch.Tensor, everybodys: list[torch.Tensor], timeout_s: float) -> None:
        everybodys[0].copy_(mine)
        _require(len(mine) <= compile_exchange.BODY_LIMIT_BYTES + 2 * ROW_BYTES, f"a row of {len(mine)} bytes")
        data = words(next(hops))
        length = len(data) if change.rng.random() < 0.8 else abs(change.rng.choice(NUMBERS)) % 2**32
        row = (length % 2**32).to_bytes(4, "little") + data
        everybodys[1].copy_(torch.frombuffer(bytearray(row[: len(mine)].ljust(len(mine), b"\0")), dtype=torch.uint8))

    return all_gather


def _tensor_line(change: Mutator) -> bool:
    data = change.message(MessageKind.WORD, ("all_reduce(SUM, 8 x float32)",), place="leaders/collective/0/1")
    line = TensorLine(_gathered(change, lambda hop: data), name="leaders", rank=0, size=SIZE, limit_bytes=2**20)
    found = line.agree("collective", "all_reduce(SUM, 8 x float32)", timeout_s=1)
    _require(all(word is None or isinstance(word[0], str) for word in found.words), f"{found}")
    return found.words[1] is not None


def _meet(change: Mutator) -> bool:
    """The making of a group: a rank of ours meets a broken one."""
    store = dist.HashStore()
    words: dict[str, tuple[Item, ...]] = {
        "_Hello": ("", ABI, "a process", "paceline-" + "0" * 32, b"s" * 16),
        "_View": (b"\1\0\0\0", "", ""),
        "_Acceptance": ("",),
    }
    broken = change.rng.choice(list(words))
    sealed = True
    for name, word in words.items():
        key = f"agree/{name}/0/1"
        data = wire.encode(MessageKind.WORD, word, place=f"shm/1/{key}")
        if name == broken:
            data = change.message(MessageKind.WORD, word, place=f"shm/1/{key}")
            sealed = change.sealed
        dist.PrefixStore("shm/1", store).set(key, data)
    found = rendezvous.meet(store, rank=0, size=SIZE, timeout=rendezvous.timedelta(seconds=1))
    if found.endpoint is not None:
        found.endpoint.abort()
    _require(sorted(rank for ranks in found.hosts for rank in ranks) == [0, 1], f"{found.hosts}")
    _require(
        found.endpoint is None and len(found.hosts) == SIZE, "a segment is shared with a rank that does not see it"
    )
    return sealed


def _exchange(change: Mutator) -> bool:
    """A conversation about a compilation, over rows of bytes."""
    exchange: Any = object.__new__(CompileExchange)
    kind, body, read = change.rng.choice(_BODIES)
    theirs = body if change.rng.random() < 0.2 else mutated_json(change.rng, json.loads(body))
    digest = compile_exchange.hashlib.sha256(theirs).digest()
    flag = change.rng.choice((0, 0, *NUMBERS))
    sealed = []

    def words(hop: int) -> bytes:
        place = f"exchange/{('notes', 'bodies')[hop > 0]}/0/1"
        word = (theirs,) if hop else (int(kind), flag, digest, len(theirs))
        if change.rng.random() < 0.7:
            return wire.encode(MessageKind.WORD, word, place=place, limit_bytes=2**30)
        if len(theirs) > wire.LIMIT_BYTES // 2:
            return b""
        data = change.message(MessageKind.WORD, word, place=place)
        sealed.append(change.sealed)
        return data

    gather = _gathered(change, words)
    exchange.__dict__.update(rank=0, size=SIZE, timeout_s=1.0, has_ended=False, _n_exchanges=0)
    exchange.__dict__.update(_n_begun=collections.Counter(), _wait=lambda *args, **options: None)
    line = compile_exchange.partial(TensorLine, gather, name="exchange", rank=0, size=SIZE)
    exchange._notes, exchange._bodies = line(limit_bytes=128), line(limit_bytes=compile_exchange.BODY_LIMIT_BYTES)
    if kind is NoteKind.ARTIFACTS:
        shared = shared_compile.SharedCompile(exchange)
        _require(-1 <= shared._announce(0, "f") <= shared_compile._LIMIT_BYTES, "artifacts")
        return True
    notes = exchange.gather_alike(kind, doing="a test", body=body)
    read(notes[1].body)
    return all(sealed)


def _read_sizes(body: bytes) -> None:
    _, sizes = shapes.decode(body, 1)
    state: Any = collections.defaultdict(_frame_entry)
    with mock.patch("paceline._torch.dynamo_frames._frame_state", return_value=state):
        compile_agreement._torch.merge_sizes(None, sizes)


def _frame_entry() -> Any:
    from torch._dynamo.pgo import FrameStateSizeEntry

    return FrameStateSizeEntry.make_tensor((3, 4), (4, 1))


def _read_ending(body: bytes) -> None:
    note = compile_exchange.Note(NoteKind.GRAPH, 0, body)
    failed, nodes, collectives = compile_agreement._ending(note, 1)
    first_difference([["a", "b"], nodes])
    honest = RankCollectives(0, ["a", "b"], [Collective(0, (0, 1)), Collective(1, ())])
    misfit = first_misfit([honest, RankCollectives(1, nodes, collectives)])
    _require(len(failed) <= 2000 and (misfit is None or misfit >= 0), "an ending")


def _read_offer(body: bytes) -> None:
    exchange = mock.Mock()
    exchange.gather_alike.return_value = [compile_exchange.Note(NoteKind.OFFER, 0, data) for data in (_OFFER, body)]
    with mock.patch.object(shared_compile, "environment", dict):
        reason = shared_compile.SharedCompile(exchange)._obstacle("f", mock.Mock(exact_digest="digest"))
    _require(len(reason) < 5000, "a reason")


_OFFER = json.dumps({"graph": "digest", "processor": "x86"}).encode()
_SIZES = {"L['x']": [None, [3, "?"], [["S", 1], 1]], "L['n']": [7, None, None]}
_ENDING = json.dumps({"failed": "", "nodes": ["a", "b"], "collectives": [[0, [0, 1]], [1, []]]}).encode()
_BODIES: list[tuple[NoteKind, bytes, Callable[[bytes], None]]] = [
    (NoteKind.FRAME, json.dumps({"frame": "f (a.py:1)", "sizes": _SIZES}).encode(), _read_sizes),
    (NoteKind.GRAPH, _ENDING, _read_ending),
    (NoteKind.OFFER, _OFFER, _read_offer),
    (NoteKind.ARTIFACTS, b"{}", lambda body: None),
]


def _given_up(change: Mutator) -> bool:
    exchange: Any = object.__new__(CompileExchange)
    exchange.__dict__.update(rank=0, size=SIZE, _board=_board(), channel=mock.Mock())
    for key, word in (("given_up/1", (3, "f", 1, "no graph")), ("compiling/1", ("f",)), ("waiting/1", (3,))):
        exchange._board.set(key, change.message(MessageKind.WORD, word, place=f"job/1/{key}"))
    _require(isinstance(exchange._is_compiling(1), bool), "compiling")
    exchange._raise_given_up(3, "f", 1)
    return True


def _artifacts(change: Mutator) -> bool:
    kernels = {"ab/c" + "d" * 20 + ".main.so": shared_compile.Kernel("ctypes", b"\x7fELF")}
    honest = shared_compile.Artifacts(b"cache", kernels).encode()
    if change.rng.random() < 0.5:
        data = mutated_bytes(change.rng, honest)
    else:
        head = mutated_json(change.rng, [5, [[next(iter(kernels)), "ctypes", 4]]])
        data = len(head).to_bytes(8, "little") + head + b"cache\x7fELF"
    found = shared_compile.Artifacts.decode(data)
    _require(set(map(len, found)) and all(map(shared_compile._KERNEL.fullmatch, found.kernels)), f"{found}")
    return True


def _rows(change: Mutator) -> bool:
    ours = [["option bucket_cap_mb", 25], ["weight", [3, 4], "float32", [4, 1], True]]
    names = ["name", "shape", "dtype", "strides", "requires_grad"]
    told = [json.dumps(ours), mutated_json(change.rng, ours).decode(errors="replace")]
    rows = [read_rows(text, rank, "parameters") for rank, text in enumerate(told)]
    _require(len(describe_difference("parameters", rows, names)) < 100_000, "a difference")
    return True


def _share(change: Mutator) -> bool:
    """A long text, in pieces: how many there are is a number of the other rank."""
    board = _board()
    topics = ("rows: length", "rows", "rows")
    turns: collections.Counter[str] = collections.Counter()
    line = StoreLine(board, rank=0, size=SIZE, waiter=lambda topic, timeout_s: Patience(0))
    channel: Any = mock.Mock(size=SIZE, rank=0, timeout_s=1.0)
    channel._nobody_came = lambda missing, to_do: Channel._nobody_came(channel, missing, to_do)
    channel.agree = lambda topic, value: line.agree(topic, value, timeout_s=0)
    for topic in topics:
        key = f"agree/{topic}/{turns[topic]}/1"
        number = change.rng.choice((1, 2, 2, *NUMBERS))
        word: tuple[Item, ...] = (number,) if "length" in topic else (b"[]",)
        is_changed = change.rng.random() < 0.3
        message = change.message if is_changed else wire.encode
        board.set(key, message(MessageKind.WORD, word, place=f"job/1/{key}"))
        turns[topic] += 1
    _require(len(Channel._share(channel, "rows", "[]")) == SIZE, "texts")
    return True


def _meeting(change: Mutator) -> bool:
    store = dist.HashStore()
    store.set("first", mutated_bytes(change.rng, b"rank 1 has WORLD_SIZE 2"))
    store.set("came", str(change.rng.choice((0, 1, 2**62))))
    if change.rng.random() < 0.5:
        store.set("difference", mutated_bytes(change.rng, b"rank 0 has WORLD_SIZE 2 and rank 1 has WORLD_SIZE 3"))
    try:
        meeting._gather(store, 0, SIZE, 0.0)
    except PacelineError as error:
        _require(len(str(error)) < 2000 and not re.search(r"[\x00-\x08\x1b]", str(error)), f"{error!r}")
        raise
    return True


def _route(change: Mutator) -> bool:
    rows = [[4, 8, 4, 16, 1], [16, 0, 8, 0, 1]]
    if change.rng.random() < 0.8:
        rows[1] = [change.rng.choice((number, *NUMBERS)) for number in rows[1]]
    table = parcels.check_route(torch.tensor(rows), [0, 1], "all_to_all")
    _require(table[0][1] == 8 and table[1][0] == 16 and min(map(min, table)) >= 0, f"{table}")
    return True


def _sparse(change: Mutator) -> bool:
    indices, values = torch.tensor([[0, 2, 5]]), torch.ones(3, 2)
    mine = torch.sparse_coo_tensor(indices, values, (8, 2), check_invariants=True).coalesce()
    total = SparseSum(mine, op=int(Op.SUM), rank=0, names=[0, 1])
    data = bytearray(total.sent.numpy().tobytes())
    if change.rng.random() < 0.5:
        data = bytearray(mutated_bytes(change.rng, bytes(data)))
    else:
        at = 8 * change.rng.choice((0, 0, *range(20, 23)))
        data[at : at + 8] = change.rng.choice((*NUMBERS, 3, 4, 7, 8)).to_bytes(8, "little", signed=True)
    theirs = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    total.finish([total.sent, theirs])
    found = mine.coalesce().indices()
    _require(int(found.min()) >= 0 and int(found.max()) < 8, f"{found}")
    return True


_of_wire = (_failure, _replan, _whereabouts, _process, _agreement, _report, _tensor_line, _meet, _exchange, _given_up)
_of_others = (_artifacts, _rows, _share, _meeting, _route, _sparse)
READERS: dict[str, Callable[[Mutator], bool]] = {
    read.__name__[1:].replace("_", " "): read for read in (*_of_wire, *_of_others)
}
UNSEALED = ("artifacts", "rows", "meeting", "route", "sparse")
"""These hold no message of the wire, or none by itself."""


# -- the soak ---------------------------------------------------------------------------------------------------


def run(name: str, seed: str) -> tuple[bool, str]:
    """Have ``name`` read one message: whether it was read, and what is wrong with that (nothing: empty)."""
    change = Mutator(f"{name}/{seed}")
    began = time.process_time()
    was_read, wrong = False, ""
    try:
        was_read = READERS[name](change)
    except PacelineError as error:
        str(error)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"[:300]
    if name not in (*UNSEALED, "meet", "exchange", "given up", "share", "agreement") and was_read and not change.sealed:
        wrong = "a message whose seal does not fit was read"
    if (took_s := time.process_time() - began) > LIMIT_S:
        wrong = f"it took {took_s:.1f} s"
    return was_read, wrong


def soak(messages: int, *, seed: int, only: str = "") -> tuple[collections.Counter[str], list[str]]:
    """Run ``messages`` cases. Returns how many messages each reader took, and what is wrong."""
    names = [only] if only else list(READERS)
    # Dynamo, which the first exchange reads for, takes a second to import.
    _frame_entry()
    read: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for number in range(messages):
        name = names[number % len(names)]
        was_read, fault = run(name, f"{seed}/{number}")
        read[name] += was_read
        if fault:
            wrong.append(f"{name}, seed {seed}/{number}: {fault}")
    return read, wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.control.mutations", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", choices=("", *READERS), help="one reader")
    options = parser.parse_args(argv)
    # What reads for the first time imports much.
    soak(len(READERS), seed=-1)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    started = time.monotonic()
    read, wrong = soak(options.messages, seed=options.seed, only=options.only)
    for line in wrong[:100]:
        print(line)
    print(", ".join(f"{name} {count}" for name, count in read.items()))
    print(f"{options.messages} mutated messages in {time.monotonic() - started:.0f} s, {len(wrong)} faults found")
    return 1 if wrong else 0


if __name__ == "__main__":
    import logging

    logging.disable()
    sys.exit(main())
