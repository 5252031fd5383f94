"""Device meshes: what the compiler may read of one."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from paceline.tracing.registry import MembersRow

ROWS = (
    MembersRow(
        "mesh.get_all_groups()",
        "names of groups; torch's guard of the mesh",
        DeviceMesh,
        traced=frozenset({"get_all_groups"}),
    ),
)
