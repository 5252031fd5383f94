"""What cannot be traced is refused with a reason; what is wrong in eager is wrong in the same words."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.on_ranks import on_ranks
from tests.tracing.refused import BAD, REFUSED, all_gather_object, new_group, with_mesh
from tests.tracing.row import Place, join_fake_group
from tests.tracing.runner import ALLOWED_WARNINGS, LIMIT_S

# Refusing, the compiler warns too (once a process): the error is what is looked at.
ALLOWED = (*ALLOWED_WARNINGS, (r".*", UserWarning))


def _refuse(rank, size):
    """The kind and text of every refusal; no group may have been made or lost."""
    with_mesh.mesh = init_device_mesh("cpu", (size,))
    answers, groups = {}, dist.get_pg_count()
    for name, (function, _) in REFUSED.items():
        torch._dynamo.reset()
        answers[name] = _error(torch.compile(function, fullgraph=True, backend="eager"), torch.ones(2))
        assert dist.get_pg_count() == groups, name
    return answers


@pytest.fixture(scope="module")
def refusals(rank_pool):
    return rank_pool.run(_refuse, group_timeout_s=20, allow_warnings=ALLOWED, timeout=LIMIT_S)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_context_explanation_and_hint(refusals, name):
    for answers in refusals:
        kind, text = answers[name]
        assert kind == "Unsupported", f"{kind}: {text}"
        explanation, hint, context = (_part(text, part) for part in ("Explanation", "Hint", "Developer debug context"))
        assert len(explanation) > 20
        assert context
        assert any(word in hint.lower() for word in REFUSED[name][1]), hint
        # Nobody is told to report a bug of torch's, or to write a tracing rule.
        assert "report an issue" not in text
        assert name.rpartition(".")[2] in text


def _part(text, name):
    """All that the error says under ``name``."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line.removeprefix(f"{name}:").strip() for line in lines if line.startswith(f"{name}:"))


@on_ranks(allow_warnings=ALLOWED)
def test_without_fullgraph_it_is_a_graph_break(rank, size):
    """Without fullgraph a refusal is a graph break, and the program works."""
    torch._dynamo.reset()
    compiled = torch.compile(new_group, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    compiled = torch.compile(all_gather_object, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]


def _flattened(x, mesh):
    return x * mesh._flatten("never before").size()


@on_ranks(allow_warnings=ALLOWED)
def test_flattening_for_the_first_time(rank, size):
    """Flattening for the first time makes a group: that works, or is refused like any making of groups."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    torch._dynamo.reset()
    compiled = torch.compile(_flattened, fullgraph=True, backend="eager")
    kind, text = _error(compiled, torch.ones(2), mesh)
    if kind != "nothing":
        assert "outside" in text, text
        assert kind == "Unsupported"
        mesh._flatten("never before")
    assert compiled(torch.ones(2), mesh).tolist() == [size, size]


# --- bad input: eager's error -----------------------------------------------------------------------------


def _error(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _both_errors(rank, size):
    at, answers = Place(rank, size), {}
    for name, function in BAD.items():
        torch._dynamo.reset()
        eager = _error(function, torch.arange(4.0), at)
        compiled = _error(torch.compile(function, fullgraph=True, backend="aot_eager"), torch.arange(4.0), at)
        answers[name] = (eager, compiled)
    return answers


@pytest.fixture(scope="module")
def errors(rank_pool):
    """Eager's and the compiled function's error of every bad input, from one run."""
    return rank_pool.run(_both_errors, group_timeout_s=20, allow_warnings=ALLOWED, timeout=LIMIT_S)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_as_in_eager(errors, name):
    for answers in errors:
        (kind, message), (compiled_kind, compiled_message) = answers[name]
        assert kind != "nothing", "eager has no objection: not a bad input"
        assert compiled_kind not in ("nothing", "InternalTorchDynamoError"), compiled_message
        # The same words: the compiler may put its own around them.
        assert _gist(message) in compiled_message.replace("\n", " "), f"{compiled_message!r} does not say {message!r}"


def _gist(message):
    """What of eager's message any way of saying it has: no prefix of a log's, no address, no quotes."""
    line = message.splitlines()[0].rpartition("] ")[2]
    return line.partition("<")[0].partition("', '")[0].partition('", ')[0].strip("\"'() ")


# --- a group this rank is not in, a group that is gone ----------------------------------------------------


def _reduced(x, group):
    dist.all_reduce(x, group=group)
    return x + 1


def _two(x):
    return [torch.empty_like(x) for _ in range(2)]


CALLED_FROM_OUTSIDE = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "all_reduce, async": lambda x, group: dist.all_reduce(x, group=group, async_op=True),
    "all_gather": lambda x, group: dist.all_gather(_two(x), x, group=group),
    "all_gather_single": lambda x, group: dist.all_gather_single(x.new_empty(8), x, group=group),
    "reduce_scatter": lambda x, group: dist.reduce_scatter(x, _two(x), group=group),
    "reduce_scatter_single": lambda x, group: dist.reduce_scatter_single(x.new_empty(2), x, group=group),
    "all_to_all": lambda x, group: dist.all_to_all(_two(x), _two(x), group=group),
    "all_to_all_single": lambda x, group: dist.all_to_all_single(x.clone(), x, group=group),
    "broadcast": lambda x, group: dist.broadcast(x, 0, group=group),
    "reduce": lambda x, group: dist.reduce(x, 0, group=group),
    "gather": lambda x, group: dist.gather(x, None, 0, group=group),
    "scatter": lambda x, group: dist.scatter(x, None, 0, group=group),
    "barrier": lambda x, group: dist.barrier(group),
    "send": lambda x, group: dist.send(x, 0, group=group),
    "recv": lambda x, group: dist.recv(x, 0, group=group),
    "isend": lambda x, group: dist.isend(x, 0, group=group),
    "irecv": lambda x, group: dist.irecv(x, 0, group=group),
    "batch_isend_irecv": lambda x, group: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0, group)]),
    "nn.functional.all_reduce": lambda x, group: dist.nn.functional.all_reduce(x, group=group),
    "get_backend": lambda x, group: dist.get_backend(group),
    "get_process_group_ranks": lambda x, group: dist.get_process_group_ranks(group),
}


@on_ranks(world_size=1, backend=None, allow_warnings=ALLOWED)
def test_a_group_this_rank_is_not_in(rank, size):
    """What comes of each call, and whether the rank is warned, is the same in eager mode and compiled."""
    join_fake_group(1, 2)
    first = dist.new_group([0])
    for name, call in CALLED_FROM_OUTSIDE.items():
        torch._dynamo.reset()
        both = []
        for function in (call, torch.compile(call, fullgraph=True, backend="eager")):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results = []
                kind, message = _error(lambda x, group: results.append(function(x, group)), torch.ones(4), first)  # noqa: B023 (called at once)
            told = any("does not belong to" in str(warning.message) for warning in caught)
            both.append((kind, message, repr(results), told))
        eager, compiled = both
        assert eager == compiled, name
        assert eager[3] or eager[0] == "ValueError" or name.startswith("get"), f"{name} works"


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@on_ranks(allow_warnings=ALLOWED)
def test_a_destroyed_group_in_a_cached_graph(rank, size, backend):
    """Compiled for a group, called after the group was destroyed: a clear error, no hang and no crash."""
    group = dist.new_group([0, 1])
    torch._dynamo.reset()
    compiled = torch.compile(_reduced, fullgraph=True, backend=backend)
    assert compiled(torch.ones(2), group).tolist() == [3, 3]
    # The other rank may still be in the collective.
    dist.barrier()
    dist.destroy_process_group(group)
    # Eager asks several things about a group. This is what it says of one that is gone.
    name = group.group_name
    kind, message = _error(dist.get_backend, group)
    compiled_kind, compiled_message = _error(compiled, torch.ones(2), group)
    assert (kind, compiled_kind) == ("ValueError", "ValueError"), (message, compiled_message)
    assert "is not initialized in the world group map" in compiled_message
    assert repr(name) in compiled_message


ASKED = (
    lambda x, group: x + dist.get_rank(group),
    lambda x, group: x + len(dist.get_backend(group)),
    lambda x, group: x + len(dist.get_process_group_ranks(group)),
    lambda x, group: x + dist.get_global_rank(group, 0),
    lambda x, group: x + dist.get_group_rank(group, 0),
    lambda x, group: x + len(dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1, group)])),
)


@on_ranks(world_size=1, backend=None, allow_warnings=ALLOWED)
def test_what_is_asked_of_a_destroyed_group_in_a_cached_graph(rank, size):
    join_fake_group(0, 2)
    for function in ASKED:
        torch._dynamo.reset()
        group = dist.new_group([0, 1])
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert torch.equal(compiled(torch.ones(2), group), function(torch.ones(2), group))
        dist.destroy_process_group(group)
        assert _error(function, torch.ones(2), group)[0] in ("ValueError", "KeyError")
        kind, message = _error(compiled, torch.ones(2), group)
        assert (kind, "destroyed" in message) == ("ValueError", True), message


@on_ranks(allow_warnings=ALLOWED)
def test_a_destroyed_default_group_in_a_cached_graph(rank, size):
    torch._dynamo.reset()
    compiled = torch.compile(_reduced, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2), None).tolist() == [3, 3]
    dist.destroy_process_group()
    _, message = _error(_reduced, torch.ones(2), None)
    kind, compiled_message = _error(compiled, torch.ones(2), None)
    assert kind not in ("nothing", "InternalTorchDynamoError"), compiled_message
    assert _gist(message) in compiled_message, (message, compiled_message)


def _mismatched(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1


def _sizes_differ(rank, size, backend):
    """Other sizes on other ranks: what gloo says in eager, the compiled function says."""
    torch._dynamo.reset()
    function = torch.compile(_mismatched, fullgraph=True, backend=backend) if backend else _mismatched
    for length in (2, 4):
        function(torch.ones(length))
    # This is not set before, because ranks may take long to compile, and do not end at the same time.
    dist.barrier()
    c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    return _error(function, torch.ones(2 + 2 * rank))


def test_sizes_that_differ_between_ranks(ranks):
    eager = ranks(_sizes_differ, None, allow_warnings=ALLOWED)
    compiled = ranks(_sizes_differ, "aot_eager", allow_warnings=ALLOWED)
    # The rank that expects more hears of it; gloo leaves the other one in peace.
    assert compiled[1][0] == eager[1][0] == "RuntimeError"
    assert "Timed out" in compiled[1][1]
