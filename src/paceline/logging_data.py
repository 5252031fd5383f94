"""``ddp._get_ddp_logging_data()``: one flat dictionary with torch's field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.options import environment

if TYPE_CHECKING:
    from paceline.module import DistributedDataParallel

ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
_NCCL = ("NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT")
# Names of dtypes as C++ has them, which is how torch's data shows them.
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


@dataclass
class Logbook:
    """What a wrapper writes down for this data alone."""

    hook_names: list[str] = field(default_factory=list)
    """Of the comm hooks that were registered."""
    last_error: str = ""
    sample_rate: int = 100
    sampled_iteration: int = 0
    """The last of those that torch would take a sample of: the first ten, then every ``sample_rate``-th."""
    _iterations: int = 0

    def count_iteration(self) -> None:
        n = self._iterations
        self._iterations += 1
        if n < 10 or n % self.sample_rate == 0:
            self.sampled_iteration = n


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What the wrapper was made with, what it has done, and how long that took."""
    data = _construction(ddp) | _environment(ddp) | _runtime(ddp)
    if ddp.logbook.hook_names:
        data["comm_hook"] = ddp.logbook.hook_names[-1]
    error = ddp.logbook.last_error or ddp._reducer.last_error
    if error:
        data["has_error"] = 1
        data["error"] = error
    return data


def _construction(ddp: DistributedDataParallel) -> dict[str, Any]:
    reducer = ddp._reducer
    params = [slot.local for slot in reducer.trainable()]
    dtypes = sorted({_CPP_NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in params})
    return {
        "world_size": reducer.channel.size,
        "rank": reducer.channel.rank,
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(map(str, ddp.device_ids or [])),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "backend_name": dist.get_backend(ddp.process_group),
        "dtypes": ", ".join(dtypes),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
        "bucket_sizes": ", ".join(str(b.size_bytes) for b in reducer.planner.first_plan.buckets),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())),
        "iteration": ddp.logbook.sampled_iteration,
    }


def _environment(ddp: DistributedDataParallel) -> dict[str, Any]:
    is_gloo = dist.get_backend(ddp.process_group) == dist.Backend.GLOO
    names = ENVIRONMENT + (_GLOO if is_gloo else _NCCL)
    data: dict[str, Any] = {name.lower(): environment(name) or "N/A" for name in names}
    if is_gloo:
        data["gloo_num_threads"] = 2
    return data


def _runtime(ddp: DistributedDataParallel) -> dict[str, Any]:
    reducer = ddp._reducer
    telemetry, times = reducer.telemetry, reducer.telemetry.last
    if not telemetry.steps:
        return {"join_uneven_inputs": True} if ddp.joining.has_run else {}
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
            " ".join(str(reducer.ledger.place_of[i]) for i in b.params) for b in buckets
        )
    if ddp.joining.has_run:
        data["join_uneven_inputs"] = True
    return data
