"""``ddp.reducer``: the methods of torch's C++ reducer that tests and tools call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import StateError
from paceline.messages import unfinished_message
from paceline.reducer import Reducer


class TorchReducer:
    """What code reaches for on ``ddp.reducer``."""

    def __init__(self, reducer: Reducer) -> None:
        self._ours = reducer

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each parameter in the last synchronised backward."""
        return torch.tensor(self._ours.ledger.counts, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        return self._ours.ledger.graph_is_static

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt at the start of the second synchronised backward, by themselves."""
        return False

    def prepare_for_forward(self) -> None:
        """For trainers that call the steps of a forward one by one: there is nothing to prepare."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """The same: a backward is noticed when it runs."""

    def _set_static_graph(self) -> None:
        self._ours.set_static_graph()

    def _remove_autograd_hooks(self) -> None:
        self._ours.stop_listening()

    def _check_reducer_finalized(self) -> None:
        check_finalized(self._ours)

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """Sum a bucket over the ranks, not divided; for hooks written on top of it."""
        work = dist.all_reduce(bucket.buffer(), group=self._ours.courier.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def _get_zeros_like_grad_buckets(self) -> list[Tensor]:
        """Flat zeros in the shape of each bucket."""
        return [
            torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype), device=spec.device)
            for spec in self._ours.plan.buckets
        ]


def check_finalized(reducer: Reducer) -> None:
    missing = reducer.unfinished()
    if missing:
        raise StateError(unfinished_message(missing, reducer.channel.rank))
