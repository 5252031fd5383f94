"""What the transport refuses, and in which words. It refuses what gloo refuses, and what makes gloo hang or crash.

gloo's errors are ``RuntimeError``; ours are that and ``ValueError``, so ``except`` clauses written for either work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.errors import BadCollectiveError, BadTypeError
from paceline.transport.shm.codes import DTYPES, Op

_BITWISE = (Op.BAND, Op.BOR, Op.BXOR)
_COMPLEX = (Op.SUM, Op.AVG)
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def reduction(reduce_op: Any, dtype: torch.dtype) -> Op:
    """The kernel's name for an operation that goes with ``dtype``."""
    # This is the only public way to get a ReduceOp's number.
    number = hash(reduce_op)
    reason = _refused(number, dtype)
    if reason is not None:
        raise BadCollectiveError(reason)
    return Op(number)


@cache
def _refused(number: int, dtype: torch.dtype) -> str | None:
    """Why an operation does not go with a dtype. c10d's last one, PREMUL_SUM, is one that the kernel does not have."""
    if number >= len(Op):
        return "Cannot use ReduceOp.PREMUL_SUM with shm: scale the tensor, then use ReduceOp.SUM"
    if dtype not in DTYPES:
        return f"Invalid scalar type: shm cannot reduce tensors of {dtype}"
    op, is_whole = Op(number), not dtype.is_floating_point and not dtype.is_complex
    if op in _BITWISE and not is_whole:
        return f"Cannot use ReduceOp.{op.name} with non-integral dtype ({dtype})"
    # The mean of other integers is rounded toward zero, as NCCL does it. gloo has none.
    if op is Op.AVG and dtype is torch.bool:
        return "Cannot use ReduceOp.AVG with torch.bool: a mean of truth values is none"
    if dtype.is_complex and op not in _COMPLEX:
        return f"Cannot use ReduceOp.{op.name} with complex dtype ({dtype})"
    return None


def tensor(found: object, what: str) -> Tensor:
    """A dense CPU tensor."""
    if not isinstance(found, Tensor):
        raise BadTypeError(f"shm {what}: expected a torch.Tensor, got {type(found).__name__}")
    if not found.is_cpu:
        raise BadCollectiveError(
            f"shm {what}: the tensor is on {found.device}, and shm carries CPU tensors; name a backend for that device"
        )
    if found.layout is not torch.strided or found.dtype in _QUANTIZED:
        raise BadCollectiveError(f"shm {what}: unsupported layout or dtype ({found.layout}, {found.dtype})")
    # Subclasses are not checked: some have no memory of their own, and can be read all the same.
    if type(found) is Tensor and not found.data_ptr() and found.numel():
        raise BadCollectiveError(
            f"shm {what}: the tensor has {found.numel()} elements and no memory (its storage was resized to nothing)"
        )
    return found


def single(tensors: Sequence[Tensor], what: str) -> Tensor:
    """The only tensor of a list: c10d passes one tensor as a list of one."""
    if len(tensors) != 1:
        raise BadCollectiveError(f"shm {what}: requires a single tensor, got {len(tensors)}")
    return tensors[0]


def one(tensors: Any, what: str) -> Tensor:
    """The tensor of a call that takes one, given as such or in a list."""
    return tensors if isinstance(tensors, Tensor) else single(tensors, what)


def list_of(tensors: Any, what: str) -> Sequence[Tensor]:
    """A list of tensors, given as such or inside a list of one."""
    inside: Sequence[Tensor] = tensors
    return inside if not inside or isinstance(inside[0], Tensor) else single(inside, what)


def root(rank: int, size: int, what: str) -> int:
    if not 0 <= rank < size:
        raise BadCollectiveError(f"shm {what}: invalid root rank: {rank} (the group has ranks 0 to {size - 1})")
    return rank


def peer(rank: int, *, me: int, size: int, what: str) -> int:
    if not 0 <= rank < size:
        raise BadCollectiveError(f"shm {what}: invalid rank: {rank} (the group has ranks 0 to {size - 1})")
    if rank == me:
        raise BadCollectiveError(f"shm {what}: rank {rank} is this process itself")
    return rank


def tag(number: int) -> int:
    if number < 0:
        raise BadCollectiveError(f"Tag must be nonnegative, got {number}")
    return number


def pieces(found: Sequence[Tensor], like: Tensor, *, size: int, what: str, list_name: str) -> Sequence[Tensor]:
    """One tensor for each rank, with the shape and dtype of ``like``."""
    if len(found) != size:
        raise BadCollectiveError(
            f"shm {what}: invalid {list_name} tensor list (expected length {size}, got {len(found)})"
        )
    for index, piece in enumerate(found):
        tensor(piece, what)
        if piece.dtype != like.dtype:
            raise BadCollectiveError(
                f"shm {what}: invalid tensor type at index {index} (expected {like.dtype}, got {piece.dtype})"
            )
        if piece.shape != like.shape:
            raise BadCollectiveError(
                f"shm {what}: invalid tensor size at index {index} (expected {tuple(like.shape)}, "
                f"got {tuple(piece.shape)})"
            )
    return found


def root_list(
    given: Sequence[object], like: Tensor, *, is_root: bool, size: int, what: str, list_name: str
) -> Sequence[Tensor]:
    """One tensor for each rank on the root, none elsewhere."""
    found: Any = given
    if found and not isinstance(found[0], Tensor):
        found = single(found, what)
    if is_root:
        return pieces(found, like, size=size, what=what, list_name=list_name)
    if len(found):
        raise BadCollectiveError(f"shm {what}: requires empty {list_name} on non-root")
    return []


def gathered(output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *, size: int) -> list[list[Tensor]]:
    """For each tensor of an all_gather_coalesced, the outputs for what comes from each rank."""
    what = "all_gather_coalesced"
    if len(output_lists) != size or any(len(outputs) != len(inputs) for outputs in output_lists):
        raise BadCollectiveError(f"shm {what}: expected {size} output lists of {len(inputs)} tensors each")
    if not inputs:
        raise BadCollectiveError(f"shm {what}: requires non-empty input tensor list")
    by_tensor = [[of_rank[index] for of_rank in output_lists] for index in range(len(inputs))]
    for outputs, one in zip(by_tensor, inputs, strict=True):
        pieces(outputs, tensor(one, what), size=size, what=what, list_name="output")
    return by_tensor


def whole(large: Tensor, small: Tensor, *, size: int, what: str) -> None:
    """Check that ``large`` is ``size`` times as large as ``small``."""
    tensor(large, what)
    tensor(small, what)
    if large.dtype != small.dtype:
        raise BadCollectiveError(f"shm {what}: tensors differ in dtype ({large.dtype} and {small.dtype})")
    if large.numel() != small.numel() * size:
        raise BadCollectiveError(
            f"shm {what}: invalid tensor size: {tuple(large.shape)} is not {size} times {tuple(small.shape)}, "
            "one for each rank"
        )


def wholes(larges: Sequence[Tensor], smalls: Sequence[Tensor], *, size: int, what: str) -> None:
    """Check pairs of tensors, in each of which one is ``size`` times as large as the other."""
    if len(larges) != len(smalls) or not smalls:
        raise BadCollectiveError(f"shm {what}: {len(larges)} whole tensors and {len(smalls)} parts, not in pairs")
    for large, small in zip(larges, smalls, strict=True):
        whole(large, small, size=size, what=what)


def same_type(tensors: Sequence[Tensor], what: str) -> None:
    if not tensors:
        raise BadCollectiveError(f"shm {what}: requires non-empty tensor list")
    for found in tensors:
        tensor(found, what)
        if found.dtype != tensors[0].dtype:
            raise BadCollectiveError(
                f"shm {what}: tensors must all have the same type, got {tensors[0].dtype} and {found.dtype}"
            )


def split(tensor: Tensor, counts: Sequence[int], *, size: int) -> list[Tensor]:
    """The rows that go to (or come from) each rank: equally many, if no ``counts`` are given."""
    rows = tensor if tensor.dim() else tensor.view(1)
    if not counts:
        if len(rows) % size:
            raise BadCollectiveError(
                f"Tensor's dim 0 does not divide equally across group size: {len(rows)} rows, {size} ranks"
            )
        counts = [len(rows) // size] * size
    if len(counts) != size:
        raise BadCollectiveError(f"Number of tensor splits not equal to group size: {len(counts)} and {size}")
    if sum(counts) != len(rows) or min(counts) < 0:
        raise BadCollectiveError(f"Split sizes doesn't match total dim 0 size: {list(counts)} and {len(rows)}")
    return list(rows.split(list(counts)))
