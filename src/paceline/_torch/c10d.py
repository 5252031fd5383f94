"""Process groups, backends and functional collectives: what torch has no public name for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store, device_mesh
from torch.distributed import distributed_c10d as c10d


def group_store(group: ProcessGroup) -> Store:
    """The key-value store the group was made with: our control channel must not open a port of its own."""
    return c10d._get_process_group_store(group)


def default_group() -> ProcessGroup:
    """The default group as an object; ``dist.group.WORLD`` is its public name and is None before init."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group "
            "(or paceline.init())."
        )
    return group


def is_not_a_member(group: object) -> bool:
    """Whether ``group`` is the marker that ``new_group`` gives to ranks outside of the group."""
    return group is None or group == dist.GroupMember.NON_GROUP_MEMBER


def group_is_alive(group: ProcessGroup) -> bool:
    """Whether the group is still registered (not destroyed). ``is_initialized`` knows the default one only."""
    return group in c10d._world.pg_map


def group_timeout_s(group: ProcessGroup) -> float:
    """The group's own time-out; torch shows it only on the backend's options."""
    try:
        backend = c10d._world.pg_map[group][0].split(",")[0].split(":")[-1]
        device = torch.device("cpu") if backend in ("gloo", "mpi", "shm") else torch.accelerator.current_accelerator()
        options = group._get_backend(device or torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    except (AttributeError, KeyError, RuntimeError):
        return float(c10d.default_pg_timeout.total_seconds())


def is_joining(joinable: Any) -> bool:
    """Whether torch's ``Join`` is in force for it; ``Join`` says so only in this attribute."""
    return bool(joinable._join_config.enable)


def leave_join(joinable: Any) -> None:
    """Switch ``Join`` off. It stays in force after its end, which costs a collective in every later forward."""
    joinable._join_config = type(joinable._join_config).construct_disabled_join_config()


# What a c10d backend written in Python derives from. torch's stubs give their methods signatures that no
# implementation in Python can have (overloads on the options), hence Any.
PythonProcessGroup: Any = ProcessGroup


Work = c10d.Work


def new_gloo(store: Store, *, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo backend that is not registered anywhere: what the shared-memory transport uses between hosts."""
    gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    return gloo


def source_rank(work: Any) -> int:
    """Where a message came from, once it has been received. Only works of C++ have the public name."""
    return int(work._source_rank())


def new_backend(name: str, store: Store, *, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend by its name, not registered anywhere: gloo, or one that was added to c10d by its own package."""
    if name == dist.Backend.GLOO:
        return new_gloo(store, rank=rank, size=size, timeout=timeout)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or plugin.extended_api:
        raise ValueError(
            f"backend {name!r} cannot be used between hosts: it is neither gloo nor registered with "
            "torch.distributed.Backend.register_backend (without extended_api)"
        )
    return plugin.creator_fn(store, rank, size, timeout)


def adopt_backend(group: ProcessGroup, backend: Any) -> None:
    """Have ``group`` use ``backend`` for CPU tensors wherever it does not override something itself."""
    kind = ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)


def leave_unrecorded(backend: str) -> None:
    """Keep torch's flight recorder away from groups of this backend.

    torch 2.15 hangs a recorder on every group whose backend has none of its own. The recorder asks C++ for the group's
    backend, and a group that is a class in Python has none there. torch keeps the names of backends to leave alone in
    this set, which older releases do not have.
    """
    unrecorded: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    unrecorded.add(backend)


def settle_async_tensor(tensor: Tensor) -> Tensor:
    """The tensor behind the result of a functional collective that was not waited for yet; others as they are."""
    wait = getattr(tensor, "trigger_wait", None)
    return cast(Tensor, wait()) if wait is not None else tensor


def behind_real_view(tensor: Tensor) -> Tensor | None:
    """The complex tensor of which a sparse ``tensor`` may be ``torch.view_as_real``; None if it cannot be one.

    Only the base of a view is known, and not the views in between.
    """
    base = tensor._base
    is_of_pairs = tensor.dense_dim() > 0 and tensor.shape[-1] == 2 and not tensor.is_complex()
    return base if base is not None and base.is_complex() and is_of_pairs else None


def share_indices(one: Tensor, other: Tensor) -> bool:
    """Whether two sparse tensors have their indices in the same memory. The public name is for coalesced ones."""
    return one._indices().data_ptr() == other._indices().data_ptr()


def group_named(name: str) -> ProcessGroup:
    """The group a graph knows by its name; graphs hold names, since a group is not a value. No public equivalent."""
    try:
        return c10d._resolve_process_group(cast(Any, name))
    except RuntimeError:
        pass
    if dist.group.WORLD is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    raise ValueError(
        f"Process group {name!r} is not initialized in the world group map: it was destroyed after this code was "
        "compiled. Please initialize the group first."
    )


def register_work(tensor: Tensor, work: dist.Work) -> None:
    """Let ``wait_tensor`` on ``tensor`` wait for ``work``: how torch's own functional collectives do it."""
    torch._C._distributed_c10d._register_work(tensor, work)


wait_tensor = torch.ops._c10d_functional.wait_tensor
"""The operator that waits for a tensor of a functional collective; Inductor knows it by this name only."""


functional_collectives = torch.ops._c10d_functional
"""torch's functional collectives. They have no public name yet; Inductor lowers and overlaps these."""


def warn_not_a_member(function: str) -> None:
    """What torch says to a rank that calls a collective of a group it is not in."""
    c10d._warn_not_in_group(function)


def reduction_names() -> dict[Any, str]:
    """Reductions by the names that functional collectives have for them."""
    from torch.distributed import _functional_collectives as functional

    return dict(functional.REDUCE_OP_TO_STR)


coalescing_manager = c10d._coalescing_manager
"""What people coalesce with; it has no public name yet."""


traced_default_group = c10d._get_default_group
"""The default group, or torch's error if there is none; torch has a rule for tracing it."""


private_group_members = frozenset({"_device_types"})
"""What torch's own Python code reads of a group."""


resolve_group = c10d._resolve_process_group
"""How code that holds a group's name finds the group."""


def names_of_groups() -> dict[ProcessGroup, Any]:
    """All groups of this process and their names; traced."""
    return c10d._world.pg_names


make_premul_sum = dist._make_nccl_premul_sum
"""The reduction that multiplies first; public only by this name."""


def mesh_environment() -> Any:
    """Where ``with mesh:`` leaves the mesh, for each thread; traced."""
    return device_mesh._mesh_resources
