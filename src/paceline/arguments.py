"""What the wrapper was asked for, checked as far as one rank can by itself."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline import _torch
from paceline.control import OPTION
from paceline.options import BufferPolicy, Caps, Delay, check_mixed_precision, check_verify_every
from paceline.plan import MB
from paceline.portion import describe_placement
from paceline.step import ReducerOptions


@dataclass(frozen=True)
class Arguments:
    """Those of the constructor that change what is communicated, or when."""

    caps: Caps
    delay: Delay
    buffer_policy: BufferPolicy
    find_unused_parameters: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    gradient_as_bucket_view: bool
    batched_grad_copy: bool
    mixed_precision: Any
    verify_every: int

    def check(self) -> None:
        """Refuse what cannot be; to be called by the constructor, whose caller is warned of what is not needed."""
        check_mixed_precision(self.mixed_precision)
        check_verify_every(self.verify_every)
        if self.static_graph and self.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True is not needed with static_graph=True, which finds unused parameters by "
                "itself.",
                UserWarning,
                stacklevel=3,
            )

    def reducer_options(self) -> ReducerOptions:
        return ReducerOptions(
            caps_bytes=None if self.caps.is_default else self.caps.caps_bytes,
            static_graph=self.static_graph,
            skip_unused=self.skip_all_reduce_unused_params,
            rebuild=self.static_graph or not self.find_unused_parameters,
            stable_storage=self.gradient_as_bucket_view,
            copy_in_batches=self.batched_grad_copy,
        )

    def rows(self, buffers: Mapping[str, Tensor]) -> list[Sequence[Any]]:
        """For ranks to compare, with the buffers of the module."""
        parts = [
            [name, list(_torch.local_tensor(buffer).shape), describe_placement(buffer)]
            for name, buffer in buffers.items()
            if self.buffer_policy.ever and _torch.is_dtensor(buffer)
        ]
        options = {
            "bucket_cap_mb": [cap / MB for cap in self.caps.caps_bytes],
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers": self.buffer_policy.before_forward,
            "broadcast_buffers": self.buffer_policy.at_start,
            "mixed_precision": repr(self.mixed_precision).rpartition("(")[2],
            "verify_every": self.verify_every,
            "buffers": [[name, list(b.shape), str(b.dtype)] for name, b in buffers.items()],
            "parts of buffers": parts,
        }
        return [[OPTION + name, value] for name, value in options.items()]
