"""``Carrier``: what moves tensors between the ranks of a group.

It is all that differs between a group on one host and a group that spans hosts.

There are two implementations: :class:`~paceline.transport.shm.one_host.OneHost`, where all ranks share memory, and
:class:`~paceline.transport.hosts.several_hosts.SeveralHosts`. Both take *plain* tensors (``packing``) of arguments that
have been checked (``checks``). A verb begins a collective and returns what to wait for; every rank calls the same verbs
in the same order. With ``terms.inline`` the collective has usually ended when the verb returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.transport.shm.codes import Kind, Op
from paceline.transport.shm.terms import Terms


class Pending(Protocol):
    """Something that a carrier has begun."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has ended; raise its error, or ``RankLostError`` if time runs out first."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    @property
    def source(self) -> int:
        """The rank that a message came from."""
        ...


class Carrier(Protocol):
    """This rank's connection to the others of its group."""

    names: Sequence[int]
    """What error messages call the ranks: their numbers among all processes."""
    about: str
    """How collectives travel, for people."""

    def all_reduce_here(self, tensor: Tensor, op: int, timeout_s: float) -> bool:
        """All-reduce a tensor that nobody has checked, at once and on this thread; false if nothing was done."""
        ...

    def all_reduce(self, tensor: Tensor, op: Op, terms: Terms) -> Pending:
        """Fold everybody's ``tensor``, in rank order, into each of them."""
        ...

    def reduce(self, tensor: Tensor, root: int, op: Op, terms: Terms) -> Pending:
        """Fold everybody's ``tensor`` into that of ``root``; the others stay as they are."""
        ...

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor] | Tensor, op: Op, terms: Terms) -> Pending:
        """Fold piece ``r`` of everybody's ``inputs`` into the output of rank ``r``. A tensor's rows are pieces, too."""
        ...

    def broadcast(self, tensor: Tensor, root: int, terms: Terms) -> Pending:
        """Copy the tensor of ``root`` to everybody's."""
        ...

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, terms: Terms) -> Pending:
        """Copy the tensor of rank ``r`` to piece ``r`` of everybody's ``outputs``. A tensor's rows are pieces, too."""
        ...

    def exchange(
        self,
        sends: Sequence[Tensor | None],
        recvs: Sequence[Tensor | None],
        terms: Terms,
        *,
        kind: Kind,
        root: int = -1,
    ) -> Pending:
        """Send ``sends[d]`` to each rank ``d`` and receive ``recvs[s]`` from each rank ``s``; None means nothing."""
        ...

    def gather_unequal(
        self, sent: Tensor, dtype: torch.dtype, terms: Terms, *, most_bytes: int
    ) -> tuple[Pending, Callable[[], Sequence[Tensor]]]:
        """Send the bytes ``sent`` to everybody. When it has ended, the function gives what came from each rank.

        Ranks that do not agree on ``dtype`` get an error. ``most_bytes`` is how long what a rank sends can be. A
        carrier that makes room for what others announce refuses more.
        """
        ...

    def barrier(self, terms: Terms) -> Pending:
        """Wait until every rank has come this far."""
        ...

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> Pending:
        """Send a message to one rank. It has ended when the tensor may be changed."""
        ...

    def recv(self, tensor: Tensor, frm: int | None, tag: int, timeout_s: float) -> Pending:
        """Receive the next message with this tag from one rank, or from any if ``frm`` is None."""
        ...

    def allocate(self, nbytes: int, *, timeout_s: float, wait: Callable[[Any], None] | None) -> Tensor | None:
        """Memory that all ranks have mapped, or None if the carrier has none. ``wait`` waits for the other ranks."""
        ...

    def abort(self) -> None:
        """Make everything that is under way fail, here and on the other ranks."""

    def close(self) -> None:
        """Finish what was begun and leave the group."""

    def unmap(self) -> None:
        """Let go of shared memory, after :meth:`close` or in a fork of the process that used it."""
