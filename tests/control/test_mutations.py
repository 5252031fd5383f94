"""What a broken rank may say: mutated messages by the hundred, and each kind of harm that they once did."""

from __future__ import annotations

import collections
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.compiler.consensus import compile_agreement, shapes, shared_compile
from paceline.compiler.consensus.compile_exchange import CompileExchange, Note, NoteKind
from paceline.control import wire
from paceline.control.board import Board
from paceline.control.census import Census
from paceline.control.channel import Channel
from paceline.control.difference import read_rows
from paceline.control.failure import News
from paceline.control.store_line import StoreLine
from paceline.control.tensor_line import TensorLine, row_of
from paceline.control.waiter import Patience
from paceline.control.whereabouts import Whereabouts
from paceline.control.wire import MessageKind
from paceline.errors import DisagreementError, RankLostError
from paceline.reduction.exchange import Exchange
from paceline.reduction.planner import Planner
from paceline.run import meeting
from paceline.transport.c10d.sparse import SparseSum
from paceline.transport.hosts import parcels, rendezvous
from paceline.transport.hosts.leaders import Leaders
from paceline.transport.shm.codes import Op
from tests.control import broken_rank, mutations, mutator

Ranks = Callable[..., list[Any]]
FAST_MESSAGES, FULL_MESSAGES = 20 * len(mutations.READERS), 20_000
DEEP = "[" * 5000 + "]" * 5000
LARGE = "9" * 5000


def test_hundreds_of_mutated_messages_are_ignored_or_a_clear_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    read, wrong = mutations.soak(FAST_MESSAGES, seed=0)
    assert not wrong
    # Some are fine messages all the same.
    assert 0 < sum(read.values()) < FAST_MESSAGES / 2


@pytest.mark.full
@pytest.mark.timeout(700)
def test_thousands_of_mutated_messages_are_ignored_or_a_clear_error() -> None:
    command = [sys.executable, "-m", "tests.control.mutations", "--messages", str(FULL_MESSAGES), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert f"{FULL_MESSAGES} mutated messages" in done.stdout


def test_a_reader_that_is_wrong_is_found() -> None:
    def crash(change: mutator.Mutator) -> bool:
        raise IndexError("a rank that does not exist")

    def believe(change: mutator.Mutator) -> bool:
        change.sealed = False
        return True

    with mock.patch.dict(mutations.READERS, replan=crash, report=believe):
        assert mutations.run("replan", "0") == (False, "IndexError: a rank that does not exist")
        assert "seal" in mutations.run("report", "0")[1]


def _run_broken(rank: int, size: int, seed: int) -> str:
    return broken_rank.train(rank, size, seed)


@pytest.mark.parametrize("backend", broken_rank.BACKENDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))])
def test_a_rank_that_writes_mutated_messages_does_no_harm(ranks: Ranks, backend: str, seed: int) -> None:
    outcomes = ranks(_run_broken, seed, world_size=2, backend=backend, group_timeout_s=broken_rank.GROUP_TIMEOUT_S)
    assert outcomes[0] == "right" or outcomes[0].endswith("Error")


# -- the wire and the board --------------------------------------------------------------------------------------


def _board() -> Board:
    return Board(dist.HashStore(), name="job/1")


def test_texts_are_cut_between_two_characters() -> None:
    assert wire.fitting("abc", 3) == "abc"
    assert wire.fitting("abcd", 3) == "abc"
    assert wire.fitting("é" * 4, 5) == "éé"
    # Half a surrogate pair is sent as the 6 characters of its escape, or not at all.
    assert wire.fitting("a\ud800b", 7) == "a\ud800"
    assert wire.fitting("a\ud800b", 6) == "a"


def _agree_with(*theirs: wire.Item, mine: tuple[wire.Item, ...] = (7,)) -> tuple[object, ...]:
    place = "line/topic/0/1"
    data = wire.encode(MessageKind.WORD, theirs, place=place)

    def all_gather(row: torch.Tensor, rows: list[torch.Tensor], timeout_s: float) -> None:
        rows[0].copy_(row)
        rows[1].copy_(row_of(data, len(row)))

    return TensorLine(all_gather, name="line", rank=0, size=2).agree("topic", *mine, timeout_s=1).values


@pytest.mark.parametrize("theirs", [(), ("7",), (7, 7), (b"7",)])
def test_a_word_of_another_form_counts_as_missing(theirs: tuple[wire.Item, ...]) -> None:
    assert _agree_with(8) == (7, 8)
    assert _agree_with(*theirs) == (7, None)


def test_a_verdict_says_only_who_came() -> None:
    board = _board()
    words = [wire.encode(MessageKind.WORD, (n,), place=f"job/1/agree/topic/0/{n}") for n in range(2)]
    board.put("agree/topic/0/verdict", MessageKind.VERDICT, b"\2\0", (words[0], words[1]))
    line = StoreLine(board, rank=1, size=2, waiter=lambda topic, timeout_s: Patience(0))
    assert line.agree("topic", 1, timeout_s=0).values == (None, 1)


def test_a_huge_number_of_failures_is_not_read_through() -> None:
    board = _board()
    board.store.set("failures", str(2**62))
    board.put("given_up", MessageKind.FAILURE, 1, "", "", "gone", "", 3)
    news = News(board, rank=0, size=2)
    assert str(news.first()) == "gone"
    # Nobody is failing who does not exist.
    for rank in (2, -1, 2**62):
        board.put("failure/1", MessageKind.FAILURE, rank, "forward", "KeyError", "x", "", 1)
        assert str(news.first()) == "gone"


def test_a_plan_is_left_only_by_ranks_that_exist() -> None:
    channel: Any = mock.Mock(_board=_board(), _generation=0, step=3, rank=0, size=2)
    for rank in (2, -1):
        channel._board.put("replan/1", MessageKind.REPLAN, rank, 1, "frozen")
        Channel.raise_replan(channel, "the all-reduce")


def test_whereabouts_have_numbers_that_python_reads() -> None:
    found = Whereabouts.from_fields((1, 1, 1, "", "", "", "", (f"{LARGE} all-reduce", "2 broadcast")))
    assert found is not None
    assert found.recent == {2: "broadcast"}


def test_of_ranks_and_processes_that_cannot_be_nothing_is_known() -> None:
    board = _board()
    board.put("process/1", MessageKind.PROCESS, -1, 0, mutations.rendezvous.os.uname().nodename)
    with mock.patch("paceline.control.census.process_state", return_value="gone"):
        assert [Census(board, ranks=range(2)).state(rank) for rank in (1, 2, -1, 2**62)] == [""] * 4


# -- long texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '[["a", ' + DEEP[:40] + DEEP[-40:] + "]]", DEEP, f"[[{LARGE}]]", "[", '[["a"], []]', "[[1]]"]
)
def test_rows_that_cannot_be_compared_are_refused(text: str) -> None:
    assert read_rows('[["a", [1, [2]]]]', 1, "parameters") == [["a", [1, [2]]]]
    with pytest.raises(DisagreementError, match="rank 1 said about its parameters"):
        read_rows(text, 1, "parameters")


def test_a_text_in_too_many_pieces_is_refused_before_it_is_read() -> None:
    agreement = mock.Mock(missing=(), words=((1,), (2**62,)))
    agreement.reduce.return_value = 2**62
    channel: Any = mock.Mock(size=2)
    channel.agree.side_effect = [agreement]
    with pytest.raises(DisagreementError, match="Rank 1 says"):
        Channel._share(channel, "rows", "[]")
    agreement.missing = (1,)
    channel.agree.side_effect = [agreement]
    channel._nobody_came.return_value = RankLostError("rank 1 never came")
    with pytest.raises(RankLostError):
        Channel._share(channel, "rows", "[]")


def test_what_a_rank_wrote_into_the_meeting_is_shown_escaped() -> None:
    store = dist.HashStore()
    store.set("first", b"\xff\x1b[2J" + b"x" * 100_000)
    with pytest.raises(DisagreementError) as raised:
        meeting._gather(store, 0, 2, 0.0)
    assert "\x1b" not in str(raised.value)
    assert len(str(raised.value)) < 2000


# -- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", [b"\1\0\0", b"\7\0\0\0", b"\xff" * 4000, b""])
def test_views_of_ranks_that_do_not_exist_divide_nothing(seen: bytes) -> None:
    store = dist.HashStore()
    hello = ("", mutations.ABI, "a process", "paceline-" + "0" * 32, b"s" * 16)
    for name, word in (("_Hello", hello), ("_View", (seen, "", ""))):
        key = f"agree/{name}/0/1"
        data = wire.encode(MessageKind.WORD, word, place=f"shm/1/{key}")
        dist.PrefixStore("shm/1", store).set(key, data)
    found = rendezvous.meet(store, rank=0, size=2)
    assert "do not agree on whose shared memory" in (found.reason or "")
    assert len(found.reason or "") < 500


def test_a_host_whose_lowest_rank_names_no_segment_does_without() -> None:
    views = [rendezvous._View(b"", name, "") for name in ("", "a segment")]
    assert rendezvous._unnamed([(0, 1)], views, [5, 6]) == "rank 5 has named no control segment"
    assert rendezvous._unnamed([(1, 0)], views, [5, 6]) is None
    assert rendezvous._unnamed([(0,), (1,)], views, [5, 6]) is None


def test_leaders_whose_words_are_all_refused_do_not_go_on() -> None:
    backend = mock.Mock(spec=c10d.ProcessGroupGloo)
    backend.rank.return_value = 0
    leaders = Leaders(backend, hosts=[(0,), (1,)], names=[0, 1])
    leaders._line = mock.Mock()
    leaders._line.agree.return_value = mock.Mock(equal=False, values=(None, None))
    with pytest.raises(DisagreementError, match="different collectives"):
        leaders.barrier(timeout_s=1)


def test_nobody_sends_less_than_nothing() -> None:
    table = torch.tensor([[0, -8, 0, 8, 1], [8, 0, -8, 0, 1]])
    with pytest.raises(DisagreementError, match="rank 5"):
        parcels.check_route(table, [5, 6], "all_to_all")


# -- sparse tensors ----------------------------------------------------------------------------------------------


def _sparse(rows: list[int]) -> torch.Tensor:
    values = torch.ones(len(rows), 2)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (8, 2), check_invariants=False, is_coalesced=True)


@pytest.mark.parametrize("rows", [[1, 8], [-1, 2], [1, 2**62], [3, 1], [3, 3]])
def test_rows_outside_the_tensor_are_refused(rows: list[int]) -> None:
    total = SparseSum(_sparse([0, 5]), op=int(Op.SUM), rank=0, names=[5, 6])
    theirs = SparseSum(_sparse(rows), op=int(Op.SUM), rank=1, names=[5, 6]).sent
    with pytest.raises(DisagreementError, match="from rank 6 is damaged"):
        total.finish([total.sent, theirs])


@pytest.mark.parametrize("n_rows", [-1, 3, 2**62])
def test_rows_that_were_not_sent_are_not_read(n_rows: int) -> None:
    total = SparseSum(_sparse([0, 5]), op=int(Op.SUM), rank=0, names=[5, 6])
    theirs = total.sent.clone()
    theirs[:8].view(torch.int64)[0] = n_rows
    for sent in (theirs, theirs[:16]):
        with pytest.raises(DisagreementError, match="from rank 6 is damaged"):
            total.finish([total.sent, sent])


def test_shapes_of_any_number_of_dimensions_can_be_told() -> None:
    total = SparseSum(_sparse([0, 5]), op=int(Op.SUM), rank=0, names=[5, 6])
    theirs = total.sent.clone()
    theirs[8:24].view(torch.int64).fill_(2**62)
    with pytest.raises(DisagreementError, match="differ in shape"):
        total.finish([total.sent, theirs])


def _bring_rows(rank: int, size: int, gathers: bool) -> str:
    exchange = Exchange(dist.group.WORLD, Channel(dist.group.WORLD))
    rows, slot = _sparse([1, 800] if rank else [0, 5]), mock.Mock(view=None)
    bucket: Any = mock.Mock(slots=(slot,), **{"describe.return_value": "the gradient of 'table'"})
    try:
        if gathers:
            exchange.gather_sparse(rows, "the gradient of 'table'", lambda total: None)()
        else:
            exchange.start_sparse(bucket, rows, scale=1.0, is_last=True)()
    except DisagreementError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("gathers", [False, True])
def test_gradients_with_rows_of_no_parameter_are_refused(ranks: Ranks, gathers: bool) -> None:
    for told in ranks(_bring_rows, gathers, world_size=2, backend="gloo"):
        assert "for the gradient of 'table' are damaged" in told


def _bring_order(rank: int, size: int) -> str:
    channel = Channel(dist.group.WORLD)
    planner: Any = mock.MagicMock()
    planner._exchange.channel = channel
    planner._exchange.status_device.return_value = torch.device("cpu")
    try:
        return str(Planner._order_of_rank_0(planner, [1, 0] if rank else [0, 7]))
    except DisagreementError as error:
        return str(error)


def test_an_order_of_other_parameters_is_refused(ranks: Ranks) -> None:
    assert "does not have this module's parameters in it" in ranks(_bring_order, world_size=2, backend="gloo")[1]


# -- compiling ---------------------------------------------------------------------------------------------------


def _exchange(**words: Any) -> Any:
    """An exchange whose other rank brings these ``notes`` and ``bodies``."""
    exchange: Any = object.__new__(CompileExchange)
    exchange.__dict__.update(rank=0, size=2, timeout_s=1.0, has_ended=False, _n_exchanges=0)
    exchange.__dict__.update(_n_begun=collections.Counter(), _board=_board(), _wait=lambda *args, **options: None)
    for topic, word in words.items():
        line = mock.Mock()
        line.agree = lambda name, *mine, timeout_s, word=word: mock.Mock(words=(mine, word))
        setattr(exchange, f"_{topic}", line)
    return exchange


def test_a_text_that_was_not_announced_is_refused() -> None:
    head = (int(NoteKind.NODE), 0, hashlib.sha256(b"theirs").digest(), 6)
    notes = _exchange(notes=head, bodies=(b"theirs",)).gather(NoteKind.NODE, doing="it", body=b"mine")
    assert [note.body for note in notes] == [b"mine", b"theirs"]
    for other in (b"others", b"longer"):
        with pytest.raises(DisagreementError, match="rank 1 said about it"):
            _exchange(notes=head, bodies=(other,)).gather(NoteKind.NODE, doing="it", body=b"mine")


@pytest.mark.parametrize("n_bytes", [-2, 2**40, 2**62])
def test_artifacts_of_an_impossible_size_get_no_room(n_bytes: int) -> None:
    exchange = mock.Mock()
    exchange.gather_alike.return_value = [Note(NoteKind.ARTIFACTS, n_bytes, b"")]
    with pytest.raises(DisagreementError, match="would take"):
        shared_compile.SharedCompile(exchange)._announce(0, "f")


def test_only_a_frame_excuses_a_rank_that_does_not_come() -> None:
    exchange = _exchange()
    for word, excuses in (((), False), (("",), False), ((5,), False), (("f", "g"), False), (("f",), True)):
        exchange.put("compiling/1", *word)
        assert exchange._is_compiling(1) is excuses


@pytest.mark.parametrize("text", ["[]", '{"graph": 1}', '{"graph": ["x"]}', DEEP, json.dumps({"graph": "x" * 2000})])
def test_offers_are_texts_by_name(text: str) -> None:
    assert shapes.read_texts(b'{"graph": "x"}', 1) == {"graph": "x"}
    with pytest.raises(DisagreementError, match="rank 1"):
        shapes.read_texts(text.encode(), 1)


@pytest.mark.parametrize("nodes", ['["a", 1]', f'["a", {DEEP[:40] + DEEP[-40:]}]', '"ab"'])
def test_nodes_of_a_graph_are_texts(nodes: str) -> None:
    body = f'{{"failed": "", "nodes": {nodes}, "collectives": "c"}}'.encode()
    with pytest.raises(DisagreementError, match="rank 1"):
        compile_agreement._ending(Note(NoteKind.GRAPH, 0, body), 1)


@pytest.mark.parametrize(
    "head",
    [
        "[-1, []]",
        "[" + "9" * 4300 + ", []]",
        f'[0, [["ab/{"c" * 20}.so", "ctypes", {"9" * 4300}]]]',
        f"[0, [{DEEP[:900] + DEEP[-900:]}]]",
        f"[0, {DEEP}]",
    ],
)
def test_heads_of_artifacts_that_claim_too_much_are_refused(head: str) -> None:
    data = len(head).to_bytes(8, "little") + head.encode() + b"cache"
    with pytest.raises(DisagreementError, match="rank 0"):
        shared_compile.Artifacts.decode(data)
