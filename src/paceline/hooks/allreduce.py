"""Plain averaging as a hook: it does what happens without a hook."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.hooks.contract import HookBucket, group_of, own_hook


@own_hook(takes_group=True)
def allreduce(state: Any, bucket: HookBucket) -> Future[Tensor]:
    """Average the bucket over the ranks of ``state``, a process group or None for all.

    Example::

        ddp.register_comm_hook(None, paceline.hooks.allreduce)
    """
    group = group_of(state)
    return start_sum(bucket.buffer().div_(group.size()), group)


def start_sum(tensor: Tensor, group: dist.ProcessGroup) -> Future[Tensor]:
    """Sum ``tensor`` over the ranks in place; the future is done when it holds the sum."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None

    def result(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises if the exchange failed
        # The future holds something else for complex tensors: the real view of the sum.
        return tensor

    return work.get_future().then(result)
