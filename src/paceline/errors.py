"""The exception tree.

::

    PacelineError
    +-- MisuseError            the caller asked for something that cannot work; nothing was lost
    |   +-- BadArgumentError   (ValueError)   an argument has a wrong value
    |   |   +-- BadCollectiveError (RuntimeError, too) tensors, ranks or an operation that do not fit
    |   +-- BadTypeError       (TypeError)    an argument has a wrong type
    |   +-- StateError         (RuntimeError) right call, wrong moment: after an error, mid-backward, ...
    |   |   +-- NoRoomError                   the shared-memory file system is too small
    +-- DisagreementError      (RuntimeError) ranks differ where they must be alike
    |   +-- ParameterMismatchError            parameter sets, shapes, dtypes, strides or requires_grad
    |   +-- ReplicaMismatchError              parameters, buffers or optimizer state have come apart
    |   +-- ContractError                     a promise (static_graph, ...) was broken
    +-- PeerError              (RuntimeError) another rank is the cause; this group cannot go on
    |   +-- PeerFailedError                   another rank raised
    |   +-- RankLostError                     another rank is gone or silent past the deadline
    |   |   +-- LoneForwardError              one rank called the wrapper's forward, and others did not
    +-- StoreSilentError       (DistError)    the group's store does not answer

A class with an exception in brackets, or below one, is also that exception. torch's class raises it in the same place,
so ``except`` clauses written for torch keep working.
"""

from __future__ import annotations

import torch.distributed as dist


class PacelineError(Exception):
    """Base of everything Paceline raises."""


class MisuseError(PacelineError):
    """The caller asked for something that cannot work; nothing was started, nothing is lost."""


class BadArgumentError(MisuseError, ValueError):
    """An argument has a wrong value."""


class BadTypeError(MisuseError, TypeError):
    """An argument has a wrong type."""


class StateError(MisuseError, RuntimeError):
    """The call is right but the moment is wrong: after an error, in the middle of backward, ..."""


class BadCollectiveError(BadArgumentError, RuntimeError):
    """A collective was called with tensors, ranks or an operation that do not fit."""


class NoRoomError(StateError):
    """The shared-memory file system is too small for what was asked of it."""


class DisagreementError(PacelineError, RuntimeError):
    """Ranks differ where they must be alike."""

    def __init__(self, message: str, *, shown_by: int | None = None) -> None:
        super().__init__(message)
        self.shown_by = shown_by
        """If all ranks raise this error and it ends their programs, this rank shows it, and the others refer to it."""


class ParameterMismatchError(DisagreementError):
    """Ranks were given different parameters: names, order, shapes, dtypes, strides or requires_grad."""


class ReplicaMismatchError(DisagreementError):
    """The ranks' copies of the parameters, the buffers or the optimizer's state are no longer the same."""


class ContractError(DisagreementError):
    """A promise given to the constructor (``static_graph`` and the like) was broken by some rank."""


class PeerError(PacelineError, RuntimeError):
    """Another rank is the cause of this error; the process group cannot go on."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerFailedError(PeerError):
    """Another rank raised an exception while this one was waiting for it."""


class RankLostError(PeerError):
    """Another rank is gone, or stayed silent past the deadline."""


class LoneForwardError(RankLostError):
    """One rank called the wrapper's forward, which broadcasts buffers, and the others did something else.

    Nobody is lost. It is a ``RankLostError`` because the group is out of step, as it is after a loss.
    """


class StoreSilentError(PacelineError, dist.DistError):
    """The process group's store does not answer: its host is stopped or cut off. It may come back."""
