"""What cannot be traced is refused with a reason; what is wrong in eager is wrong in the same words."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.tracing.row import Place
from tests.tracing.runner import ALLOWED_WARNINGS, LIMIT_S

# Refusing, the compiler warns too (once a process): the error is what is looked at.
ALLOWED = (*ALLOWED_WARNINGS, (r".*", UserWarning))


def _new_group(x):
    return x * dist.new_group([0, 1]).size()


def _new_subgroups(x):
    return x * dist.new_subgroups(1)[0].size()


def _new_subgroups_by_enumeration(x):
    return x * dist.new_subgroups_by_enumeration([[0], [1]])[0].size()


def _split_group(x):
    return x * dist.split_group(split_ranks=[[0, 1]]).size()


def _factor(x):
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    return x + 1


def _init_device_mesh(x):
    return x * init_device_mesh("cpu", (2,)).size()


def _device_mesh(x):
    return x * DeviceMesh("cpu", [0, 1]).size()


def _init_process_group(x):
    dist.init_process_group("gloo")
    return x + 1


def _destroy_process_group(x):
    dist.destroy_process_group()
    return x + 1


def _all_gather_object(x):
    out = [None, None]
    dist.all_gather_object(out, "an object")
    return x + len(out)


def _broadcast_object_list(x):
    dist.broadcast_object_list(["an object"], 0)
    return x + 1


def _gather_object(x):
    dist.gather_object("an object", [None, None] if dist.get_rank() == 0 else None, 0)
    return x + 1


def _scatter_object_list(x):
    dist.scatter_object_list([None], ["a", "b"], 0)
    return x + 1


def _send_object_list(x):
    dist.send_object_list(["an object"], 1)
    return x + 1


def _recv_object_list(x):
    dist.recv_object_list([None], 0)
    return x + 1


def _future(x):
    work = dist.all_reduce(x, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _source_rank(x):
    work = dist.irecv(x, 0)
    return x + work._source_rank()


def _with_mesh(x):
    with _refuse.mesh:
        return x + 1


# (function, words one of which the hint has: what to write instead).
REFUSED = {
    "dist.new_group": (_new_group, ("before", "outside", "argument")),
    "dist.new_subgroups": (_new_subgroups, ("before", "outside", "argument")),
    "dist.new_subgroups_by_enumeration": (_new_subgroups_by_enumeration, ("before", "outside", "argument")),
    "dist.split_group": (_split_group, ("before", "outside", "argument")),
    "dist._make_nccl_premul_sum": (_factor, ("multiply", "scale")),
    "init_device_mesh": (_init_device_mesh, ("before", "outside", "argument")),
    "DeviceMesh": (_device_mesh, ("before", "outside", "argument")),
    "with mesh": (_with_mesh, ("pass",)),
    "dist.init_process_group": (_init_process_group, ("before", "outside")),
    "dist.destroy_process_group": (_destroy_process_group, ("after", "outside", "before")),
    "dist.all_gather_object": (_all_gather_object, ("tensor", "outside")),
    "dist.broadcast_object_list": (_broadcast_object_list, ("tensor", "outside")),
    "dist.gather_object": (_gather_object, ("tensor", "outside")),
    "dist.scatter_object_list": (_scatter_object_list, ("tensor", "outside")),
    "dist.send_object_list": (_send_object_list, ("tensor", "outside")),
    "dist.recv_object_list": (_recv_object_list, ("tensor", "outside")),
    "work.get_future": (_future, ("wait", "outside")),
    "work._source_rank": (_source_rank, ("recv", "wait", "outside")),
}


def _refuse(rank, size):
    """The kind and text of every refusal; no group may have been made or lost."""
    _refuse.mesh = init_device_mesh("cpu", (size,))
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


def _breaks(rank, size):
    """Without fullgraph a refusal is a graph break, and the program works."""
    torch._dynamo.reset()
    compiled = torch.compile(_new_group, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    compiled = torch.compile(_all_gather_object, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]


def test_without_fullgraph_it_is_a_graph_break(ranks):
    ranks(_breaks, allow_warnings=ALLOWED)


def _flattened(x, mesh):
    return x * mesh._flatten("never before").size()


def _flatten(rank, size):
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


def test_flattening_for_the_first_time(ranks):
    ranks(_flatten, allow_warnings=ALLOWED)


# --- bad input: eager's error -----------------------------------------------------------------------------


def _too_short(x, at):
    out = x.new_empty(3)
    dist.all_gather_single(out, x)
    return out


def _too_few(x, at):
    out = [torch.empty_like(x)]
    dist.all_gather(out, x)
    return out[0]


def _wrong_dtype(x, at):
    out = [torch.empty_like(x, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(out, x)
    return out[0]


def _does_not_divide(x, at):
    out = x.new_empty(3)
    dist.reduce_scatter_single(out, x)
    return out


def _wrong_splits(x, at):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, output_split_sizes=[1, 1], input_split_sizes=[1, 1])
    return out


def _no_such_root(x, at):
    dist.broadcast(x, src=7)
    return x + 1


def _root_not_in_group(x, at):
    dist.broadcast(x, src=1 - at.rank, group=at.solo)
    return x + 1


def _to_itself(x, at):
    dist.send(x, dst=at.rank)
    return x + 1


def _no_list_at_root(x, at):
    dist.gather(x, None, dst=at.rank)
    return x + 1


def _rank_not_in_group(x, at):
    return x + dist.get_group_rank(at.solo, 1 - at.rank)


def _no_such_dimension(x, at):
    return x + at.grid["pp"].size()


def _group_of_no_dimension(x, at):
    return x + at.grid.get_group("pp").size()


def _ambiguous_dimension(x, at):
    return x + at.grid.get_local_rank()


def _empty_batch(x, at):
    dist.batch_isend_irecv([])
    return x + 1


def _not_an_op(x, at):
    dist.batch_isend_irecv([dist.P2POp(dist.all_reduce, x, 0)])
    return x + 1


def _not_a_tensor(x, at):
    dist.all_reduce([x])
    return x + 1


def _not_a_group(x, at):
    dist.all_reduce(x, group="world")
    return x + 1


def _no_root(x, at):
    dist.broadcast(x)
    return x + 1


def _two_roots(x, at):
    dist.broadcast(x, src=0, group_src=0)
    return x + 1


BAD = [
    _not_a_tensor,
    _not_a_group,
    _no_root,
    _two_roots,
    _too_short,
    _too_few,
    _wrong_dtype,
    _does_not_divide,
    _wrong_splits,
    _no_such_root,
    _root_not_in_group,
    _to_itself,
    _no_list_at_root,
    _rank_not_in_group,
    _no_such_dimension,
    _group_of_no_dimension,
    _ambiguous_dimension,
    _empty_batch,
    _not_an_op,
]


def _error(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _both_errors(rank, size, names):
    at, answers = Place(rank, size), {}
    for name in names:
        function = globals()[name]
        torch._dynamo.reset()
        eager = _error(function, torch.arange(4.0), at)
        compiled = _error(torch.compile(function, fullgraph=True, backend="aot_eager"), torch.arange(4.0), at)
        answers[name] = (eager, compiled)
    return answers


@pytest.fixture(scope="module")
def errors(rank_pool):
    """Eager's and the compiled function's error of every bad input, from one run."""
    return rank_pool.run(
        _both_errors, [f.__name__ for f in BAD], group_timeout_s=20, allow_warnings=ALLOWED, timeout=LIMIT_S
    )


@pytest.mark.parametrize("function", BAD)
def test_bad_input_is_refused_as_in_eager(errors, function):
    for answers in errors:
        (kind, message), (compiled_kind, compiled_message) = answers[function.__name__]
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


def _outside(_rank, _size):
    """For each call by a rank that is not in the group: (what came of it, was it warned), eager's and compiled."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    first, answers = dist.new_group([0]), {}
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
        answers[name] = both
    return answers


def test_a_group_this_rank_is_not_in(ranks):
    (answers,) = ranks(_outside, world_size=1, backend=None, allow_warnings=ALLOWED)
    for name, (eager, compiled) in answers.items():
        assert eager == compiled, name
        assert eager[3] or eager[0] == "ValueError" or name.startswith("get"), f"{name} works"


def _destroyed(rank, size, backend):
    """Compiled for a group, called after the group was destroyed: a clear error, no hang and no crash."""
    group = dist.new_group([0, 1])
    torch._dynamo.reset()
    compiled = torch.compile(_reduced, fullgraph=True, backend=backend)
    assert compiled(torch.ones(2), group).tolist() == [3, 3]
    dist.destroy_process_group(group)
    # Of what eager asks about it, this is what it says of a group that is gone.
    return _error(dist.get_backend, group), _error(compiled, torch.ones(2), group), group.group_name


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_destroyed_group_in_a_cached_graph(ranks, backend):
    for (kind, message), (compiled_kind, compiled_message), name in ranks(_destroyed, backend, allow_warnings=ALLOWED):
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


def _destroyed_before_it_is_asked(_rank, _size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    answers = []
    for function in ASKED:
        torch._dynamo.reset()
        group = dist.new_group([0, 1])
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert torch.equal(compiled(torch.ones(2), group), function(torch.ones(2), group))
        dist.destroy_process_group(group)
        answers.append((_error(function, torch.ones(2), group)[0], *_error(compiled, torch.ones(2), group)))
    return answers


def test_what_is_asked_of_a_destroyed_group_in_a_cached_graph(ranks):
    (answers,) = ranks(_destroyed_before_it_is_asked, world_size=1, backend=None, allow_warnings=ALLOWED)
    for eager, kind, message in answers:
        assert (eager in ("ValueError", "KeyError"), kind) == (True, "ValueError"), message
        assert "destroyed" in message


def _world_is_gone(rank, size):
    torch._dynamo.reset()
    compiled = torch.compile(_reduced, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2), None).tolist() == [3, 3]
    dist.destroy_process_group()
    return _error(_reduced, torch.ones(2), None), _error(compiled, torch.ones(2), None)


def test_a_destroyed_default_group_in_a_cached_graph(ranks):
    for (_, message), (kind, compiled_message) in ranks(_world_is_gone, allow_warnings=ALLOWED):
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
    # Not before: ranks may take long to compile, and do not end at the same time.
    dist.barrier()
    c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    return _error(function, torch.ones(2 + 2 * rank))


def test_sizes_that_differ_between_ranks(ranks):
    eager = ranks(_sizes_differ, None, allow_warnings=ALLOWED)
    compiled = ranks(_sizes_differ, "aot_eager", allow_warnings=ALLOWED)
    # The rank that expects more hears of it; gloo leaves the other one in peace.
    assert compiled[1][0] == eager[1][0] == "RuntimeError"
    assert "Timed out" in compiled[1][1]
