"""``ddp._get_ddp_logging_data()``: one flat dictionary with torch's field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.ddp.arguments import Arguments, Placement
from paceline.reduction.reducer import Reducer
from paceline.settings import environment

ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
_NCCL = ("NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT")
# torch shows dtypes under the names that they have in C++.
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


@dataclass
class Logbook:
    """What a wrapper remembers only for this data."""

    hook_names: list[str] = field(default_factory=list)
    """The names of the comm hooks that were registered."""
    last_error: str = ""
    sample_rate: int = 100
    sampled_iteration: int = 0
    """The last iteration that torch would sample. It samples the first ten, then every ``sample_rate``-th."""
    _iterations: int = 0

    def count_iteration(self) -> None:
        n = self._iterations
        self._iterations += 1
        if n < 10 or n % self.sample_rate == 0:
            self.sampled_iteration = n


def logging_data(
    module: nn.Module,
    reducer: Reducer,
    *,
    arguments: Arguments,
    placement: Placement,
    logbook: Logbook,
    has_joined: bool,
) -> dict[str, Any]:
    """What the wrapper was made with, what it has done, and how long that took."""
    data = _construction(module, reducer, arguments, placement) | _environment(reducer) | _runtime(reducer)
    data["iteration"] = logbook.sampled_iteration
    if has_joined:
        data["join_uneven_inputs"] = True
    if logbook.hook_names:
        data["comm_hook"] = logbook.hook_names[-1]
    error = logbook.last_error or reducer.last_error
    if error:
        data["has_error"] = 1
        data["error"] = error
    return data


def _construction(module: nn.Module, reducer: Reducer, arguments: Arguments, placement: Placement) -> dict[str, Any]:
    params = [slot.local for slot in reducer.trainable()]
    dtypes = sorted({_CPP_NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in params})
    return {
        "world_size": reducer.channel.size,
        "rank": reducer.channel.rank,
        "module_name": type(module).__name__,
        "device_ids": ", ".join(map(str, placement.device_ids or [])),
        "output_device": -1 if placement.output_device is None else placement.output_device,
        "broadcast_buffers": int(arguments.buffer_policy.before_forward),
        "bucket_cap_bytes": arguments.caps.main_bytes,
        "find_unused_parameters": int(arguments.find_unused_parameters),
        "gradient_as_bucket_view": int(arguments.gradient_as_bucket_view),
        "static_graph": int(arguments.static_graph),
        "is_multi_device_module": int(placement.is_multi_device),
        "backend_name": dist.get_backend(reducer.channel.group),
        "dtypes": ", ".join(dtypes),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
        "bucket_sizes": ", ".join(str(b.size_bytes) for b in reducer.planner.first_plan.buckets),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())),
    }


def _environment(reducer: Reducer) -> dict[str, Any]:
    is_gloo = dist.get_backend(reducer.channel.group) == dist.Backend.GLOO
    names = ENVIRONMENT + (_GLOO if is_gloo else _NCCL)
    data: dict[str, Any] = {name.lower(): environment(name) or "N/A" for name in names}
    if is_gloo:
        data["gloo_num_threads"] = 2
    return data


def _runtime(reducer: Reducer) -> dict[str, Any]:
    telemetry, times = reducer.telemetry, reducer.telemetry.last
    if not telemetry.steps:
        return {}
    data: dict[str, Any] = {
        "forward_compute_time": times.forward_compute_ns,
        "backward_compute_time": times.backward_compute_ns,
        "backward_comm_time": times.comm_ns,
        "backward_compute_comm_overlap_time": times.overlap_ns,
        "forward_compute_time_start": times.forward_start_ns,
        "backward_compute_time_start": times.backward_start_ns,
        "backward_compute_time_end": times.backward_end_ns,
        "backward_comm_time_start": times.comm_start_ns,
        "backward_comm_time_end": times.comm_end_ns,
        **{f"avg_{name}": value for name, value in telemetry.averages().items()},
        "num_buckets_reduced": telemetry.buckets_reduced,
        "has_rebuilt_buckets": int(reducer.planner.has_rebuilt),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.ledger.ready_order)),
        "unused_parameter_size": reducer.ledger.unused_bytes(),
    }
    if reducer.planner.has_rebuilt:
        buckets = reducer.plan.buckets
        data["rebuilt_bucket_sizes"] = ", ".join(str(b.size_bytes) for b in buckets)
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(reducer.ledger.position_of[i]) for i in b.params) for b in buckets
        )
    return data
