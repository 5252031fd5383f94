"""Groups that span hosts: right results, one exchange a host, and an end to waiting when a rank is lost.

Two hosts of two ranks, each host a network namespace and a mount namespace of its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import paceline
from paceline import _torch
from paceline.errors import BadCollectiveError, PacelineError
from tests.transport import conformance
from tests.transport._hosts import Hosts
from tests.transport.killing import NOTICED_WHEN_BUSY_S
from tests.transport.requirements import needs_hosts

# A rank keeps its groups here from one function to another.
_groups = {}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    needs_hosts()
    with Hosts(2, ranks_per_host=2) as made:
        yield made


def _describe(rank, world_size):
    return paceline.transport.describe(dist.group.WORLD)


def test_hosts_are_found_whatever_the_launcher_says(hosts: Hosts) -> None:
    for carried in hosts.run(__name__, "_describe"):
        assert carried.startswith("4 ranks on 2 hosts")
        assert "gloo" in carried


# The cases that one host passes (``conformance``), as far as they are of collectives and suit four ranks. Some integers
# have fewer operations here (see test_the_largest_of_uint64_is_refused), and pieces of a reduce_scatter have one size.
_HOST_CASES = [
    found
    for found in conformance.load()
    if {3, 4} & set(found.world_sizes)
    and not found.name.endswith(("other_integers", "uneven"))
    and found.name.partition(".")[0] in ("exchange", "forms", "layout", "point_to_point", "reduce", "work")
]


@pytest.mark.full
@pytest.mark.parametrize("found", _HOST_CASES, ids=lambda found: found.name)
def test_conformance(hosts: Hosts, found: conformance.Case) -> None:
    hosts.run(found.body.__module__, found.body.__name__)


def _uint64(rank, world_size):
    tensor = torch.full((3,), rank, dtype=torch.uint64)
    with pytest.raises(BadCollectiveError, match=r"AVG of torch\.uint64 cannot be taken between hosts"):
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    with pytest.raises(BadCollectiveError, match=r"MAX of torch.uint64 .* use torch.int64"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_the_largest_of_uint64_is_refused(hosts: Hosts) -> None:
    assert hosts.run(__name__, "_uint64") == [[6, 6, 6]] * 4


def _subgroups(rank, world_size):
    kinds = {}
    for members in ([0, 1], [2, 3], [1, 2], [0, 2, 3], [3]):
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.full((5,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [sum(members)] * 5
            kinds[str(members)] = paceline.transport.describe(group)
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    gc.collect()
    return kinds


def test_subgroups_use_what_their_ranks_share(hosts: Hosts) -> None:
    kinds = {}
    for found in hosts.run(__name__, "_subgroups"):
        kinds |= found
    assert kinds == {
        "[0, 1]": "2 ranks on one host, collectives through shared memory",
        "[2, 3]": "2 ranks on one host, collectives through shared memory",
        "[1, 2]": "2 ranks, collectives over gloo",
        "[0, 2, 3]": "3 ranks on 2 hosts, collectives through shared memory inside hosts and over gloo between them",
        "[3]": "1 ranks on one host, collectives through shared memory",
    }
    assert [hosts.segments(host) for host in range(2)] == [[], []]


def _gloo_by_another_name(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _between(rank, world_size):
    dist.Backend.register_backend("another", _gloo_by_another_name, devices=["cpu"])
    said = {}
    for members in ([1, 2], [0, 2, 3]):
        group = dist.new_group(members, pg_options=paceline.transport.Options(between="another"))
        if rank in members:
            tensor = torch.full((5,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [sum(members)] * 5
            said[str(members)] = paceline.transport.describe(group)
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    return said


def test_another_backend_between_hosts_with_one_rank_a_host_too(hosts: Hosts) -> None:
    said = hosts.run(__name__, "_between")[2]
    assert said["[1, 2]"] == "2 ranks, collectives over another"
    assert "over another between them" in said["[0, 2, 3]"]


def _a_leader_is_late(rank, world_size):
    """Rank 0 is connecting to the other leader, and would see it if somebody came back from the call meanwhile."""
    store, connect = c10d._get_default_store(), _torch.new_backend

    def connect_late(*args, **kwargs):
        with pytest.raises(RuntimeError):
            store.wait(["back"], timedelta(seconds=0.5))
        return connect(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(_torch, "new_backend", connect_late)
        group = dist.new_group()
    if rank == 3:
        store.set("back", "")
        group.abort()
    error = None if rank == 3 else _error_of(lambda: dist.barrier(group=group))
    dist.destroy_process_group(group)
    return error


def test_a_group_is_made_when_it_is_made_on_all_ranks(hosts: Hosts) -> None:
    # Otherwise a rank that is done with it breaks the connections that others are about to make.
    for name, said, blamed, _ in hosts.run(__name__, "_a_leader_is_late")[:3]:
        assert (name, said, blamed) == ("PeerFailedError", "rank 3 has aborted the group", 3)


def _no_backend(store, rank, size, timeout):
    raise RuntimeError("no network")


def _leaders_without_a_backend(rank, world_size, between):
    if between == "none":
        dist.Backend.register_backend(between, _no_backend, devices=["cpu"])
    gc.collect()
    before = _shared_files()
    with pytest.raises((ValueError, RuntimeError)) as raised:
        dist.new_group(pg_options=paceline.transport.Options(between=between))
    assert _shared_files() <= before
    return type(raised.value).__name__, str(raised.value)


def _shared_files() -> int:
    """How many descriptors of shared memory this process has."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith("/dev/shm/") for link in links)


_NO_BACKENDS = {
    "unheard of": ("ValueError", "'unheard of' cannot be used between hosts"),
    "none": ("RuntimeError", "no network"),
}


@pytest.mark.parametrize("between", _NO_BACKENDS)
def test_ranks_that_do_not_lead_are_told_that_leaders_cannot_connect(hosts: Hosts, between: str) -> None:
    own, why = _NO_BACKENDS[between]
    found = hosts.run(__name__, "_leaders_without_a_backend", between)
    assert all(why in said for _, said in found)
    # A leader that is late may have been told by the other.
    assert own in (found[0][0], found[2][0])
    for name, said in found:
        assert name == own or (name, said[:45]) == ("PeerFailedError", "the making of a process group failed on rank ")
    assert [found[rank][0] for rank in (1, 3)] == ["PeerFailedError"] * 2


def _one_fails(rank, world_size):
    """Ranks of one host do not agree: told there, and reported to the other host."""
    group = dist.new_group([0, 1, 2, 3])
    error = _error_of(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32 if rank == 3 else None), group=group))
    dist.destroy_process_group(group)
    return error


def test_a_failure_is_told_on_the_other_host(hosts: Hosts) -> None:
    for name, said, _, took_s in hosts.run(__name__, "_one_fails"):
        assert name == "DisagreementError"
        assert "rank 2 in reduce(SUM, 3 x float32) root 0, rank 3 in reduce(SUM, 3 x int32) root 0" in said
        assert took_s < NOTICED_WHEN_BUSY_S


def _dtypes_of_hosts(group, rank):
    dist.all_reduce(torch.ones(3, dtype=torch.float32 if rank < 2 else torch.int32), group=group)


def _sizes_of_hosts(group, rank):
    dist.all_gather_single(torch.ones(4 * (3 + rank // 2)), torch.ones(3 + rank // 2), group=group)


def _kinds_of_hosts(group, rank):
    dist.barrier(group=group) if rank < 2 else dist.broadcast(torch.ones(1), 0, group=group)


def _splits_of_ranks(group, rank):
    pieces = [torch.ones(2 if (rank, other) == (0, 3) else 1) for other in range(4)]
    dist.all_to_all([torch.ones(1) for _ in range(4)], pieces, group=group)


def _sparse_dtypes_of_hosts(group, rank):
    dtype = torch.float32 if rank < 2 else torch.float64
    dist.all_reduce(torch.sparse_coo_tensor([[0]], torch.ones(1, dtype=dtype), (4,)), group=group)


_DISAGREEMENTS = {
    _dtypes_of_hosts: "rank 0 in all_reduce(SUM, 3 x float32), rank 2 in all_reduce(SUM, 3 x int32)",
    _sizes_of_hosts: "rank 0 in all_gather(3 x float32), rank 2 in all_gather(4 x float32)",
    _kinds_of_hosts: "rank 0 in barrier, rank 2 in broadcast(1 x float32) root 0",
    _splits_of_ranks: "all_to_all: rank 0 sends 8 bytes to rank 3, which expects 4",
    _sparse_dtypes_of_hosts: "rank 0 in sparse all_reduce(float32), rank 2 in sparse all_reduce(float64)",
}


def _hosts_differ(rank, world_size):
    errors = []
    for case in _DISAGREEMENTS:
        group = dist.new_group()
        errors.append(_error_of(lambda case=case, group=group: case(group, rank))[:2])
        dist.destroy_process_group(group)
    return errors


def test_hosts_in_different_collectives_are_told_so(hosts: Hosts) -> None:
    for errors in hosts.run(__name__, "_hosts_differ"):
        for (name, said), expected in zip(errors, _DISAGREEMENTS.values(), strict=True):
            assert name == "DisagreementError", said
            assert expected in said


def _one_goes(rank, world_size, going, how):
    """Called by their numbers among all processes, not in the group, whose ranks 0, 1 and 2 they are."""
    group = dist.new_group([1, 2, 3])
    error = None
    if rank == going:
        getattr(group, how)()
    elif rank > 0:
        error = _error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
    if rank > 0:
        dist.destroy_process_group(group)
    return error


@pytest.mark.parametrize(
    ("going", "how", "expected", "said"),
    [
        (3, "abort", "PeerFailedError", "rank 3 has aborted the group"),
        (3, "shutdown", "RankLostError", "rank 3 closed the group"),
        # It is alone on its host, so that nobody there can tell of it.
        (1, "shutdown", "RankLostError", "rank 1 closed the group"),
    ],
)
def test_a_rank_that_goes_is_named_on_every_host(hosts: Hosts, going: int, how: str, expected: str, said: str) -> None:
    errors = hosts.run(__name__, "_one_goes", going, how)
    for rank in {1, 2, 3} - {going}:
        name, why, blamed, _ = errors[rank]
        assert (name, blamed) == (expected, going)
        assert said in why


def _group_with_little_time(rank, world_size):
    _groups["little time"] = group = dist.new_group()
    # This is not set from the start, because ranks may be late to the making of the group.
    group.set_timeout(timedelta(seconds=2))


def _wait_for_the_stopped(rank, world_size):
    return _error_of(lambda: dist.all_reduce(torch.ones(3), group=_groups["little time"]))


def test_a_stopped_rank_is_named_on_every_host(hosts: Hosts) -> None:
    hosts.run(__name__, "_group_with_little_time")
    hosts.stop(3)
    try:
        for name, said, blamed, _ in hosts.run(__name__, "_wait_for_the_stopped", ranks=[0, 1, 2]):
            assert (name, blamed) == ("RankLostError", 3), said
            assert "until the timeout of 2 s for rank 3, which did not arrive" in said
    finally:
        hosts.resume(3)


def _train(rank, world_size):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    ddp = paceline.DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return [parameter.double().sum().item() for parameter in model.parameters()]


def test_training(hosts: Hosts) -> None:
    results = hosts.run(__name__, "_train")
    assert results == [results[0]] * 4


def _all_reduce(rank, world_size, nbytes):
    tensor = torch.ones(nbytes // 4)
    dist.all_reduce(tensor)
    assert tensor[0].item() == tensor[-1].item() == world_size


def test_a_host_sends_what_one_rank_would(hosts: Hosts) -> None:
    nbytes = 16 << 20
    before = [hosts.sent_bytes(host) for host in range(2)]
    hosts.run(__name__, "_all_reduce", nbytes)
    sent = [hosts.sent_bytes(host) - was for host, was in zip(range(2), before, strict=True)]
    # Two leaders that exchange halves and results send each element once; four ranks of gloo would send it
    # one and a half times a rank, most of it over the link. The rest is headers.
    assert 0.95 < max(sent) / nbytes < 1.15


def _error_of(call):
    """What it is called, what it says, whom it blames, and how long it took to come."""
    began = time.monotonic()
    try:
        call()
    except PacelineError as error:
        return type(error).__name__, str(error), getattr(error, "rank", None), time.monotonic() - began
    return "nothing", "", None, 0.0


def _calls(lost):
    """What waits for a lost rank, by whom it is done: every one of the others."""
    one = (lost + 1) % 4

    def gather(rank, group):
        parts = [torch.ones(3) for _ in range(4)]
        dist.gather(torch.ones(3), parts if rank == one else None, dst=one, group=group)

    def scatter(rank, group):
        parts = [torch.ones(3) for _ in range(4)]
        dist.scatter(torch.ones(3), parts if rank == one else None, src=one, group=group)

    def along(rank, group):
        # Only one waits for the lost rank; the others wait for that one.
        dist.recv(torch.ones(3), lost if rank == one else one, group=group)

    return {
        "all_reduce": lambda rank, group: dist.all_reduce(torch.ones(1000), group=group),
        "gather": gather,
        "scatter": scatter,
        "all_to_all": lambda rank, group: dist.all_to_all_single(torch.ones(4), torch.ones(4), group=group),
        "sparse": lambda rank, group: dist.all_reduce(torch.eye(4).to_sparse(), group=group),
        "send": lambda rank, group: dist.send(torch.ones(3), lost, group=group),
        "recv": lambda rank, group: dist.recv(torch.ones(3), lost, group=group),
        "recv from anybody": lambda rank, group: dist.recv(torch.ones(3), group=group),
        "recv along": along,
    }


def _make_groups(rank, world_size, lost):
    for name in _calls(lost):
        _groups[name] = dist.new_group()


def _wait_for_the_lost(rank, world_size, lost):
    return {
        name: _error_of(lambda call=call, name=name: call(rank, _groups[name])) for name, call in _calls(lost).items()
    }


# In the fast lane, test_hosts_killing has a lost rank that is named on every host.
@pytest.mark.full
@pytest.mark.parametrize("lost", [3, 0], ids=["a rank", "a leader, with the store"])
def test_a_lost_rank_is_named_on_every_host(lost: int) -> None:
    needs_hosts()
    with Hosts(2, ranks_per_host=2) as hosts:
        hosts.run(__name__, "_make_groups", lost)
        hosts.kill(lost)
        rest = [rank for rank in range(4) if rank != lost]
        for answers in hosts.run(__name__, "_wait_for_the_lost", lost, ranks=rest):
            for call, (name, said, blamed, took_s) in answers.items():
                assert (name, blamed) == ("RankLostError", lost), (call, said)
                assert f"rank {lost} is gone" in said, call
                assert took_s < NOTICED_WHEN_BUSY_S, call
        assert [hosts.segments(host) for host in range(2)] == [[], []]
