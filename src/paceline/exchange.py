"""How a bucket's gradients cross the ranks: plain all-reduce, a comm hook, or a sparse all-reduce.

Each ``start_*`` begins the communication in the calling thread and returns a *finish*: a function that waits
and leaves the result in place. What happens between the two is the overlap.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import transport
from paceline.bucket import CommHook, GradBucket
from paceline.control import Channel
from paceline.errors import BadTypeError

Finish = Callable[[], None]


def start_all_reduce(
    tensor: Tensor, *, group: dist.ProcessGroup, channel: Channel, what: str, reduce_dtype: torch.dtype | None
) -> Finish:
    """Sum ``tensor`` over the ranks, in ``reduce_dtype`` if given."""
    sent = tensor if reduce_dtype in (None, tensor.dtype) else tensor.to(reduce_dtype)
    channel.progress.start("all-reduce", what, sent)
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None

    def finish() -> None:
        channel.wait(work, f"the all-reduce of {what}")
        if sent is not tensor:
            tensor.copy_(sent)

    return finish


def start_hook(
    hook: CommHook,
    state: object,
    bucket: GradBucket,
    target: Tensor,
    *,
    channel: Channel,
    what: str,
    overlaps: bool,
) -> Finish:
    """Let a comm hook communicate ``bucket``; its result ends up in ``target``."""
    channel.progress.start(f"comm hook {hook_name(hook)}", what, target)
    future = hook(state, bucket)
    # Duck-typed: futures of a backend are of a C++ class that torch.futures.Future derives from.
    if not callable(getattr(future, "wait", None)):
        raise BadTypeError(
            f"The comm hook {hook_name(hook)} returned a {type(future).__name__} for {what}; it must return a "
            "torch.futures.Future that will hold one tensor. A hook that has nothing to wait for returns a "
            "future with set_result(bucket.buffer()) called on it."
        )
    doing = f"the comm hook {hook_name(hook)} for {what}"
    if not overlaps:
        # It may start further collectives from its callbacks, on a communication thread: with a second
        # bucket under way, ranks would issue them in different orders.
        channel.wait_future(future, doing)

    def finish() -> None:
        result = channel.wait_future(future, doing)
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, Tensor):
            raise BadTypeError(
                f"The future of comm hook {hook_name(hook)} holds a {type(result).__name__} for {what}; "
                "it must hold one tensor."
            )
        if target.is_complex() and not result.is_complex() and result.numel() == 2 * target.numel():
            # Backends send complex numbers as pairs of real ones, and hand those to a future.
            result = torch.view_as_complex(result.view(*target.shape, 2))
        if result.numel() < target.numel():
            raise BadTypeError(
                f"Comm hook {hook_name(hook)} returned {result.numel()} elements for {what}, which has "
                f"{target.numel()}: return the whole bucket."
            )
        # Some hooks pad the buffer they return; the gradients are its beginning.
        result = result.view(-1)[: target.numel()]
        if result.data_ptr() != target.data_ptr() or result.dtype != target.dtype:
            target.copy_(result)

    return finish


def start_sparse_all_reduce(
    tensor: Tensor,
    *,
    group: dist.ProcessGroup,
    channel: Channel,
    what: str,
    deliver: Callable[[Tensor], None],
) -> Finish:
    """Sum a sparse tensor over the ranks; rows may differ from rank to rank."""
    tensor = tensor.coalesce()
    if dist.get_backend(group) == dist.Backend.GLOO or transport.adds_sparse(group):
        # Not its size, which may differ: rows do not.
        channel.progress.start("sparse all-reduce", what, tensor.values()[:0])
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None

        def finish() -> None:
            channel.wait(work, f"the sparse all-reduce of {what}")
            deliver(tensor)

        return finish
    return gather_sparse(tensor, group=group, channel=channel, what=what, deliver=deliver)


def gather_sparse(
    tensor: Tensor, *, group: dist.ProcessGroup, channel: Channel, what: str, deliver: Callable[[Tensor], None]
) -> Finish:
    """The same for backends that cannot sum sparse tensors: gather everybody's rows, padded, and add them up."""
    size = dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.long, device=tensor.device)
    lengths[dist.get_rank(group)] = len(tensor.values())
    start_all_reduce(lengths, group=group, channel=channel, what=f"the row counts of {what}", reduce_dtype=None)()
    longest = int(lengths.max())

    def padded(part: Tensor) -> Tensor:
        full = part.new_zeros((longest, *part.shape[1:]))
        full[: len(part)] = part
        return full

    indices, values = padded(tensor.indices().t()), padded(tensor.values())
    all_indices, all_values = (
        indices.new_empty((size, *indices.shape)),
        values.new_empty((size, *values.shape)),
    )
    channel.progress.start("sparse gather", what, values)
    works = [
        dist.all_gather(list(all_indices), indices, group=group, async_op=True),
        dist.all_gather(list(all_values), values, group=group, async_op=True),
    ]

    def finish_gathered() -> None:
        for work in works:
            assert work is not None
            channel.wait(work, f"the sparse gather of {what}")
        rows = lengths.tolist()
        index = torch.cat([part[:n] for part, n in zip(all_indices, rows, strict=True)]).t()
        value = torch.cat([part[:n] for part, n in zip(all_values, rows, strict=True)])
        deliver(torch.sparse_coo_tensor(index, value, tensor.shape, check_invariants=False).coalesce())

    return finish_gathered


def hook_name(hook: object) -> str:
    """The name of a comm hook, also of a ``functools.partial`` or an object with ``__call__``."""
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
