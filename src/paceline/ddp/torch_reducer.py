"""``ddp.reducer``: the methods of torch's C++ reducer that tests and tools call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.reduction.reducer import Reducer


class TorchReducer:
    """The methods that code calls on ``ddp.reducer``."""

    def __init__(self, reducer: Reducer) -> None:
        self._ours = reducer

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each parameter in the last synchronised backward."""
        return torch.tensor(self._ours.ledger.counts, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        return self._ours.ledger.graph_is_static

    def _rebuild_buckets(self) -> bool:
        """Do nothing: buckets are rebuilt by themselves at the start of the second synchronised backward."""
        return False

    def prepare_for_forward(self) -> None:
        """Do nothing; trainers that run the parts of a forward one by one call it."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """Do nothing: a backward is noticed when it runs."""

    def _set_static_graph(self) -> None:
        self._ours.set_static_graph()

    def _remove_autograd_hooks(self) -> None:
        self._ours.stop_listening()

    def _check_reducer_finalized(self) -> None:
        self._ours.check_finished()

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """Sum a bucket over the ranks without dividing it. Some hooks are written on top of this one."""
        work = dist.all_reduce(bucket.buffer(), group=self._ours.exchange.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def _get_zeros_like_grad_buckets(self) -> list[Tensor]:
        """A flat tensor of zeros for each bucket, as large as the bucket."""
        return [
            torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype), device=spec.device)
            for spec in self._ours.plan.buckets
        ]
