"""PowerSGD: gradients as products of two thin matrices.

After Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization" (arXiv:1905.13727). For every gradient seen as a matrix M of n x m, with Q of m x r from the
step before:

    P = mean over ranks of M Q;  P = an orthonormal basis of its columns
    Q = mean over ranks of M^T P
    the averaged gradient is taken to be P Q^T; what M holds beyond it is added to M of the next step

so that r (n + m) numbers travel instead of n m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.errors import BadArgumentError, BadTypeError, StateError
from paceline.hooks.allreduce import allreduce, start_sum
from paceline.hooks.contract import HookBucket, group_of, own_hook

_SETTINGS = ("rank", "start_iter", "min_compression_rate", "error_feedback", "warm_start", "epsilon", "seed")


@dataclass
class Memory:
    """What one parameter carries from step to step."""

    shape: tuple[int, ...]
    # The place in the order in which parameters were first seen, which is the same on every rank.
    number: int
    error: Tensor | None = None
    q: Tensor | None = None


class PowerSGDState:
    """Settings and memory of the ``powersgd`` hook. Each rank has its own and saves its own.

    ``process_group``: None means all ranks; it is not saved.
    ``rank``: r above; 1 to 4 are usual.
    ``start_iter``: how many steps average plainly at first, as early gradients compress badly.
    ``min_compression_rate``: gradients that would not shrink by this factor travel whole, as vectors do.
    ``error_feedback``, ``warm_start``: parts of the method; switch them off only to see what they do.
    ``epsilon``: added to lengths before something is divided by them.
    ``seed``: the seed of the first Q, the same on every rank.

    >>> state = PowerSGDState(rank=2, start_iter=100)
    >>> resumed = PowerSGDState()
    >>> resumed.load_state_dict(state.state_dict())
    >>> resumed.rank
    2
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        rank: int = 1,
        start_iter: int = 1000,
        min_compression_rate: float = 2.0,
        error_feedback: bool = True,
        warm_start: bool = True,
        epsilon: float = 1e-8,
        seed: int = 0,
    ) -> None:
        if rank < 1:
            raise BadArgumentError(f"rank must be at least 1, got {rank}")
        if start_iter < 0:
            raise BadArgumentError(f"start_iter must not be negative, got {start_iter}")
        if min_compression_rate <= 0:
            raise BadArgumentError(f"min_compression_rate must be positive, got {min_compression_rate}")
        if epsilon < 0:
            raise BadArgumentError(f"epsilon must not be negative, got {epsilon}")
        self.process_group = process_group
        self.rank = rank
        self.start_iter = start_iter
        self.min_compression_rate = min_compression_rate
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.epsilon = epsilon
        self.seed = seed
        self.iter = 0
        # How many elements compressed steps had, and how many travelled.
        self.numel_before = 0
        self.numel_after = 0
        self._loaded: list[Memory] = []
        self._forget()

    @property
    def compression_rate(self) -> float:
        """How many times fewer elements travelled since compression started; 1 before that."""
        return self.numel_before / self.numel_after if self.numel_after else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Everything but the process group, as plain values and tensors, which ``weights_only`` can load."""
        return {
            **{name: getattr(self, name) for name in _SETTINGS},
            "iter": self.iter,
            "numel_before": self.numel_before,
            "numel_after": self.numel_after,
            "memories": [
                {"shape": list(memory.shape), "error": memory.error, "q": memory.q}
                for memory in (self._memories.values() if self._seen else self._loaded)
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``. This is to be called before the first backward.

        Parameters have no names here: they get their memory in the order of the first backward's buckets,
        which is the same for the same module wrapped in the same way.
        """
        if self._seen:
            raise StateError(
                "load_state_dict of a PowerSGDState that has seen gradients: make a new state, load it and "
                "register that"
            )
        missing = {*_SETTINGS, "iter", "numel_before", "numel_after", "memories"} - state_dict.keys()
        if missing:
            raise BadArgumentError(f"not the state dict of a PowerSGDState: {sorted(missing)} missing")
        for name in (*_SETTINGS, "iter", "numel_before", "numel_after"):
            setattr(self, name, state_dict[name])
        self._loaded = [
            Memory(tuple(saved["shape"]), number, _copied(saved["error"]), _copied(saved["q"]))
            for number, saved in enumerate(state_dict["memories"])
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"state_dict": self.state_dict(), "had_group": self.process_group is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = None
        self._forget()
        self.load_state_dict(state["state_dict"])
        self._group_lost = state["had_group"]

    def group(self) -> dist.ProcessGroup:
        """The process group to average in."""
        if self._group_lost and self.process_group is None:
            raise StateError(
                "this PowerSGDState was pickled with a process group, which cannot be pickled: set its "
                "process_group (to torch.distributed.group.WORLD for all ranks)"
            )
        return group_of(self.process_group)

    def memory(self, parameter: Tensor) -> Memory:
        """The memory of ``parameter``, which is made when the parameter is first seen."""
        memory: Memory | None = self._memories.get(parameter)
        if memory is None:
            memory = self._memories[parameter] = self._new_memory(tuple(parameter.shape))
            self._seen += 1
        return memory

    def random_q(self, memory: Memory, rows: int, columns: int) -> Tensor:
        """Normal random numbers that are equal on all ranks and leave torch's generator alone."""
        generator = torch.Generator().manual_seed(self.seed)
        step = 0 if self.warm_start else self.iter
        # One stream for all parameters would tie the numbers of one to the sizes of those before it.
        base = int(torch.randint(2**31, (), generator=generator))
        generator.manual_seed(base + 1_000_003 * step + memory.number)
        return torch.randn(rows, columns, generator=generator)

    def _forget(self) -> None:
        # The key is the parameter and not its place in a bucket, since buckets are rebuilt.
        self._memories = WeakTensorKeyDictionary()
        self._seen = 0
        self._loaded = []
        self._group_lost = False

    def _new_memory(self, shape: tuple[int, ...]) -> Memory:
        number = self._seen
        if not self._loaded:
            return Memory(shape, number)
        if number >= len(self._loaded) or self._loaded[number].shape != shape:
            raise BadArgumentError(
                f"the loaded PowerSGDState does not fit this module: parameter {number} in the order of the "
                f"first backward has shape {shape}, the saved ones have "
                f"{[memory.shape for memory in self._loaded]}"
            )
        return self._loaded[number]


@own_hook(takes_group=False)
def powersgd(state: PowerSGDState, bucket: HookBucket) -> Future[Tensor]:
    """Average the bucket with PowerSGD; ``state`` is a ``PowerSGDState``.

    Example::

        state = paceline.hooks.PowerSGDState(rank=2, start_iter=500)
        ddp.register_comm_hook(state, paceline.hooks.powersgd)
    """
    if not isinstance(state, PowerSGDState):
        raise BadTypeError(
            f"the state of the powersgd hook must be a paceline.hooks.PowerSGDState, got {type(state).__name__}"
        )
    group = state.group()
    buffer = bucket.buffer()
    gradients = bucket.gradients() if buffer.layout is torch.strided else [buffer]
    memories = [state.memory(parameter) for parameter in bucket.parameters()]
    compress = state.iter >= state.start_iter
    low_rank: list[LowRank] = []
    whole: list[Tensor] = []
    for gradient, memory in zip(gradients, memories, strict=True):
        if compress and _shrinks(gradient, state):
            low_rank.append(LowRank(gradient, memory, state))
        else:
            whole.append(gradient)
    if compress:
        state.numel_before += buffer.numel()
        state.numel_after += sum(g.numel() for g in whole) + sum(m.p.numel() + m.q.numel() for m in low_rank)
    # This comes after the last use of this step's number and before the first use of the next.
    if bucket.is_last():
        state.iter += 1
    if not low_rank:
        return allreduce(group, bucket)
    return average_low_rank(low_rank, whole, buffer, group)


def average_low_rank(
    low_rank: list[LowRank], whole: list[Tensor], buffer: Tensor, group: dist.ProcessGroup
) -> Future[Tensor]:
    """Average ``low_rank`` as products and ``whole`` as they are, into ``buffer``, which the future holds."""
    # The first exchange is waited for here, since a callback would start the second one at another moment on each rank;
    # see [Note: order of collectives]. The first one is the smaller, and the second still overlaps.
    ps = _packed([matrix.p for matrix in low_rank], buffer.dtype, group.size())
    dist.all_reduce(ps, group=group)
    for matrix, p in zip(low_rank, _unpacked(ps, [m.p for m in low_rank]), strict=True):
        matrix.project_on(p)
    travelling = [*(matrix.q for matrix in low_rank), *whole]

    def decompress(done: Future[Tensor]) -> Tensor:
        averages = _unpacked(done.value(), travelling)
        for matrix, q in zip(low_rank, averages, strict=False):
            matrix.take(q)
        for gradient, average in zip(whole, averages[len(low_rank) :], strict=True):
            gradient.copy_(average)
        return buffer

    return start_sum(_packed(travelling, buffer.dtype, group.size()), group).then(decompress)


def _shrinks(gradient: Tensor, state: PowerSGDState) -> bool:
    if gradient.layout is not torch.strided or gradient.is_complex():
        return False
    if gradient.dim() < 2 or gradient.numel() == 0:
        return False
    rows = gradient.size(0)
    columns = gradient.numel() // rows
    rank = min(state.rank, rows, columns)
    return (rows + columns) * rank * state.min_compression_rate <= gradient.numel()


class LowRank:
    """One gradient on its way through the two exchanges."""

    def __init__(self, gradient: Tensor, memory: Memory, state: PowerSGDState) -> None:
        self._gradient, self._memory, self._state = gradient, memory, state
        # Half precision cannot hold a small error beside a large gradient, and cannot be factorised.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        self.matrix = gradient.reshape(gradient.size(0), -1).to(wide)
        if memory.error is not None:
            memory.error = memory.error.to(self.matrix)
            self.matrix = self.matrix + memory.error
        rows, columns = self.matrix.shape
        q = memory.q if state.warm_start else None
        if q is None:
            q = state.random_q(memory, columns, min(state.rank, rows, columns))
        q = q.to(self.matrix)
        # Only directions count. Lengths would be squared in every step and soon leave the range of the dtype.
        self.q = q / (torch.linalg.vector_norm(q, dim=0) + state.epsilon)
        self.p = self.matrix @ self.q

    def project_on(self, p: Tensor) -> None:
        """The first exchange is done: ``p`` is the average over the ranks."""
        self.p = torch.linalg.qr(p.to(self.matrix)).Q
        self.q = self.matrix.T @ self.p

    def take(self, q: Tensor) -> None:
        """The second exchange is done: leave the average in the gradient and remember what it lacks."""
        q = q.to(self.matrix)
        average = self.p @ q.T
        # A GradScaler skips a step with an overflow. The overflow must not stay in the memory for ever.
        if self._state.error_feedback:
            self._memory.error = torch.nan_to_num(self.matrix - average, 0.0, 0.0, 0.0)
        if self._state.warm_start:
            self._memory.q = torch.nan_to_num(q, 0.0, 0.0, 0.0)
        self._gradient.copy_(average.view(self._gradient.shape))


def _packed(tensors: list[Tensor], dtype: torch.dtype, ranks: int) -> Tensor:
    # The division comes before the cast, as the sum must fit into the dtype.
    return torch.cat([tensor.reshape(-1).div(ranks) for tensor in tensors]).to(dtype)


def _unpacked(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
