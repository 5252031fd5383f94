"""Device meshes."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.tracing.row import Rows

row = Rows(2)


row.add("mesh.ndim", lambda at: [1, 2], lambda mesh, grid: [mesh.ndim, grid.ndim])
row.add("mesh.shape", lambda at: (at.size // 2, 2), lambda x, grid: (x + grid.shape[1], grid.shape), inductor=True)
row.add("mesh.size()", lambda at: [at.size, at.size], lambda mesh, grid: [mesh.size(), grid.size()])
row.add("mesh.size(dim)", lambda at: [at.size // 2, 2], lambda grid: [grid.size(0), grid.size(mesh_dim=1)])


@row("mesh.device_type", lambda at: "cpu")
def device_type(x, mesh):
    return (x + 1 if mesh.device_type == "cpu" else x - 1), mesh.device_type


@row("mesh.mesh_dim_names", lambda at: ("dp", "tp"))
def names(x, grid):
    return (x + 1 if "tp" in grid.mesh_dim_names else x - 1), grid.mesh_dim_names


row.add("mesh.mesh_dim_names of an unnamed mesh", lambda at: None, lambda unnamed: unnamed.mesh_dim_names)


@row("mesh.get_coordinate()", lambda at: [at.rank // 2, at.rank % 2], ranks=4)
def coordinate(x, grid):
    return x + grid.get_coordinate()[1], list(grid.get_coordinate())


@row("mesh.get_local_rank(dim)", lambda at: [at.rank // 2, at.rank % 2], ranks=4)
def local_rank(grid):
    return [grid.get_local_rank(0), grid.get_local_rank(mesh_dim=1)]


@row("mesh.get_local_rank(name)", lambda at: [at.rank // 2, at.rank % 2], ranks=4)
def local_rank_by_name(grid):
    return [grid.get_local_rank("dp"), grid.get_local_rank("tp")]


row.add("mesh.get_local_rank()", lambda at: at.rank, lambda mesh: mesh.get_local_rank())
row.add("mesh.get_rank()", lambda at: at.rank, lambda grid: grid.get_rank())


@row("mesh['tp']", lambda at: [2, at.rank % 2, ("tp",)], ranks=4)
def slice_by_name(x, grid):
    tp = grid["tp"]
    return x + tp.size(), [tp.size(), tp.get_local_rank(), tp.mesh_dim_names]


@row("mesh['dp', 'tp']", lambda at: [(at.size // 2, 2), ("dp", "tp")], ranks=4)
def slice_by_names(x, grid):
    both = grid["dp", "tp"]
    return x + both.size(), [both.shape, both.mesh_dim_names]


row.add("mesh['tp'] returned from the graph", lambda at: at.grid["tp"], lambda grid: grid["tp"])
row.add("mesh.get_group()", lambda at: at.mesh.get_group(), lambda mesh: mesh.get_group())


@row("mesh.get_group(dim)", lambda at: [at.size // 2, 2], ranks=4)
def group_of_dimension(grid):
    return [grid.get_group(0).size(), grid.get_group(mesh_dim=1).size()]


@row("mesh.get_group(name)", lambda at: [at.grid.get_group("dp"), at.grid.get_group("tp")], ranks=4)
def group_by_name(x, grid):
    return x + grid.get_group("tp").rank(), [grid.get_group("dp"), grid.get_group("tp")]


row.add("mesh['tp'].get_group()", lambda at: at.grid.get_group("tp"), lambda grid: grid["tp"].get_group(), ranks=4)


@row("mesh.get_all_groups()", lambda at: [at.grid.get_group(0), at.grid.get_group(1)], ranks=4)
def all_groups(x, grid):
    return x + len(grid.get_all_groups()), grid.get_all_groups()


@row("for group in mesh.get_all_groups()", lambda at: [at.size // 2, 2], ranks=4)
def loop_over_groups(grid):
    return [group.size() for group in grid.get_all_groups()]


@row("mesh._flatten()", lambda at: [at.size, 1, at.rank], ranks=4)
def flatten(x, grid):
    flat = grid._flatten()
    return x + flat.size(), [flat.size(), flat.ndim, flat.get_local_rank()]


@row("mesh._flatten(name)", lambda at: [at.size, ("all",)], ranks=4)
def flatten_with_name(grid):
    flat = grid["dp", "tp"]._flatten("all")
    return [flat.size(), flat.mesh_dim_names]


@row("mesh == mesh", lambda at: [True, False, True])
def equality(grid, grid_again, mesh):
    return [grid == grid_again, grid == mesh, grid != mesh]


@row("mesh is mesh", lambda at: [True, False])
def identity(grid, grid_again):
    same = grid
    return [grid is same, grid is grid_again]


@row("hash(mesh)", lambda at: [True, False])
def hash_of_mesh(grid, grid_again, mesh):
    return [hash(grid) == hash(grid_again), hash(grid) == hash(mesh)]


@row("{mesh: ...}[mesh]", lambda at: [1, 2])
def dictionary_key(grid, grid_again, mesh):
    table = {grid: 1, mesh: 2}
    return [table[grid_again], table[mesh]]


@row("mesh in [meshes]", lambda at: [True, False])
def membership_in_list(grid, grid_again, mesh):
    return [grid in [grid_again], mesh in [grid, grid_again]]


row.add("mesh.mesh", lambda at: list(range(at.size)), lambda x, mesh: (x + mesh.mesh.sum(), mesh.mesh.tolist()))
row.add("mesh.mesh returned from the graph", lambda at: at.grid.mesh, lambda grid: grid.mesh, ranks=4)


@row("isinstance(mesh, DeviceMesh)", lambda at: [True, False])
def is_instance(x, mesh):
    return x + 1, [isinstance(mesh, DeviceMesh), isinstance(x, DeviceMesh)]


@row("a mesh as a default, keyword and list argument", lambda at: [2, at.size])
def as_arguments(grid, mesh):
    def helper(meshes, *, axis=None):
        return [meshes[0].size(axis), meshes[1].size()]

    return helper([grid, mesh], axis=1)


row.add("a mesh returned from the graph", lambda at: [at.mesh, at.grid], lambda mesh, grid: [mesh, grid])


@row("a collective over a dimension's group", ranks=4)
def collective_over_dimension(x, grid):
    y = x.clone()
    dist.all_reduce(y, group=grid.get_group("tp"))
    z = x.clone()
    dist.all_reduce(z, group=grid["dp"].get_group())
    return y, z


class Holder(nn.Module):
    """A module that keeps its mesh."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        return x * self.mesh.size() + self.mesh.get_local_rank("tp"), self.mesh["tp"].get_group()


row.add("module.mesh", None, lambda grid: (Holder(grid), None), builds=True, ranks=4)


@row("mesh.get_group(name).group_name", lambda at: at.grid.get_group("tp").group_name, ranks=4)
def name_of_dimensions_group(grid):
    return grid.get_group("tp").group_name


@row("dist.get_rank(mesh.get_group(name))", lambda at: at.rank % 2, ranks=4)
def rank_in_dimension(grid):
    return dist.get_rank(grid.get_group("tp"))
