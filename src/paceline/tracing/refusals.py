"""What is not traced, why, and what to write instead."""

from __future__ import annotations

from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.tracing.collectives import refuse_reduction
from paceline.tracing.registry import EnterRefusalRow, RefusalRow
from paceline.tracing.work import refuse_future, refuse_source

_MAKES_GROUPS = (
    "Making a process group is a collective of the whole world that gives a new group at every call. In a graph it "
    "would be made anew at every step, and no rank would know before that step which collectives it is in."
)
_OBJECTS = (
    "Objects are pickled when the call runs, and their sizes are known only then: there is nothing a graph could hold."
)
_OBJECT_HINTS = (
    "Exchange objects before compiled code is called, and pass what is in them as tensors or arguments.",
    "If it must happen in the middle, put it in a function marked with torch.compiler.disable, without fullgraph=True.",
)


def _group_maker(name: str, example: str) -> RefusalRow:
    return RefusalRow(
        f"dist.{name}",
        "refused: make it outside",
        getattr(c10d, name),
        _MAKES_GROUPS,
        (
            f"Make the group once, before compiled code is called: `group = {example}`, and pass it as an argument, "
            "or keep it in a module or a global: groups trace.",
        ),
    )


def _objects(name: str) -> RefusalRow:
    return RefusalRow(f"dist.{name}", "refused: not tensors", getattr(c10d, name), _OBJECTS, _OBJECT_HINTS)


def _lifecycle(name: str) -> RefusalRow:
    return RefusalRow(
        f"dist.{name}",
        "refused: belongs around the program",
        getattr(c10d, name),
        "It starts or ends the process groups that graphs refer to.",
        ("Call it before, or after, compiled code.",),
    )


ROWS = (
    _group_maker("new_group", "dist.new_group(ranks)"),
    _group_maker("new_subgroups", "dist.new_subgroups(size)"),
    _group_maker("new_subgroups_by_enumeration", "dist.new_subgroups_by_enumeration(lists)"),
    _group_maker("split_group", "dist.split_group(parent, lists)"),
    RefusalRow(
        "init_device_mesh",
        "refused: make it outside",
        device_mesh.init_device_mesh,
        "A mesh makes the process groups of its dimensions. " + _MAKES_GROUPS,
        (
            'Make the mesh once, before compiled code is called: `mesh = init_device_mesh("cpu", (2, 2), '
            'mesh_dim_names=("dp", "tp"))`, and pass it as an argument, or keep it in a module or a global: meshes, '
            "their slices and their groups trace.",
        ),
    ),
    EnterRefusalRow(
        "with mesh",
        "refused: pass it on",
        device_mesh.DeviceMesh,
        "It makes the mesh the default of what is called inside, for the whole thread: a graph has no such state.",
        (
            "Pass the mesh to what needs it: `DTensor.from_local(x, mesh, placements)`.",
            "Or write `with mesh:` around the call of the compiled function.",
        ),
    ),
    *(
        _objects(name)
        for name in (
            "all_gather_object",
            "broadcast_object_list",
            "gather_object",
            "scatter_object_list",
            "send_object_list",
            "recv_object_list",
        )
    ),
    _lifecycle("init_process_group"),
    _lifecycle("destroy_process_group"),
    RefusalRow(
        "work.get_future()",
        "refused: write it after wait()",
        refuse_future,
        "What is chained to a future runs on a thread of the backend, at a moment that no graph can describe.",
        ("Call wait() on the handle, and write what was chained to the future after it.",),
    ),
    RefusalRow(
        "work.source_rank(), work._source_rank()",
        "refused: give src",
        refuse_source,
        "The sender is known only when the call runs.",
        ("Name the sender, dist.irecv(tensor, src=rank), or use dist.recv, which returns it.",),
    ),
    *(
        RefusalRow(
            subject,
            "refused: scale by hand",
            original,
            "This reduction carries a value (PREMUL_SUM), which the graph's operators have no place for.",
            ("Multiply the tensor by the factor and reduce with ReduceOp.SUM.",),
        )
        for subject, original in (
            ("dist._make_nccl_premul_sum", _torch.make_premul_sum),
            ("a reduction with a factor", refuse_reduction),
        )
    ),
)
