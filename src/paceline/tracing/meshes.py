"""Device meshes: what the compiler may read of one."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from paceline import _torch
from paceline.tracing.import_hook import when_imported
from paceline.tracing.registry import MembersRow, SpecialRow

ROWS = (
    MembersRow(
        "mesh.get_all_groups()",
        "names of groups; torch's guard of the mesh",
        DeviceMesh,
        traced=frozenset({"get_all_groups"}),
    ),
    SpecialRow(
        "mesh[name] as a result",
        "torch's operator, which Inductor would not know",
        lambda: when_imported(_torch.INDUCTOR, _torch.lower_slices),
    ),
)
