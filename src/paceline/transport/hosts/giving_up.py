"""``GivingUp``: what a rank does when a group that spans hosts cannot go on.

A rank that fails, or sees an exchange fail, finds out why, tells its host and all other ranks (``peer_reports``), and
hangs up on them. So nobody waits for what cannot come, and all know the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.errors import PacelineError
from paceline.transport.hosts.peer_reports import PeerReports, Report
from paceline.transport.shm.codes import Outcome
from paceline.transport.shm.kernel import Endpoint

CAUSE_S = 1.2
"""How long a rank waits for others to say why the group failed. All ranks should know the reason within 2 s."""
_OUTCOMES = {
    "lost": Outcome.LOST,
    "failed": Outcome.POISONED,
    "disagreed": Outcome.DISAGREED,
    "closed": Outcome.LOST,
}


class Connection(Protocol):
    """A connection to other ranks."""

    def hang_up(self) -> None:
        """Have those who wait for this rank notice that nothing will come."""


class GivingUp:
    """How this rank, which others call ``me``, gives up a group. ``endpoint`` leads to the other ranks of its host."""

    def __init__(self, reports: PeerReports, endpoint: Endpoint, *, me: int) -> None:
        self._reports = reports
        self._endpoint = endpoint
        self._me = me
        self.connections: list[Connection] = []
        """The connections to other ranks that have been made so far."""

    def of_collective(self, name: str, error: Exception, *, leaders: Sequence[int]) -> Exception:
        """Give the group up after ``error`` in a collective, and return what this rank raises."""
        if isinstance(error, PacelineError):
            self.give_up(Report.of(error, name, rank=self._me))
            return error
        return self.of_exchange(leaders, f"{name}: the exchange with the other hosts failed: {error}")

    def of_exchange(self, suspects: Sequence[int], said: str) -> Exception:
        """Give up after a failed exchange with ``suspects``. If nobody reports a cause, a silent one is blamed."""
        # This comes first, as those who wait for this rank should find out as well, and may know the cause.
        self._hang_up()
        report = self._reports.find(CAUSE_S)
        if report is None:
            silent = self._reports.silent(suspects)
            if silent:
                said += f"; nothing is heard of rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
            report = Report(rank=silent[0] if len(silent) == 1 else None, why="lost", said=said)
        self.give_up(report)
        return report.error()

    def of_connecting(self, error: Exception) -> Exception:
        """Give up a group that is being made, and return ``error`` itself, unless another rank knows more."""
        if isinstance(error, PacelineError):
            self.give_up(Report.of(error, "the making of a process group", rank=self._me))
            return error
        self._hang_up()
        # An error about an argument was not caused by another rank.
        found = self._reports.find(CAUSE_S) if isinstance(error, RuntimeError) else None
        said = f"the making of a process group failed on rank {self._me}: {error}"
        self.give_up(found or self._own(said))
        return error if found is None else found.error()

    def of_this_rank(self, did: str) -> None:
        """Give the group up since this rank was interrupted or has aborted it."""
        self.give_up(self._own(f"rank {self._me} {did}"))

    def give_up(self, report: Report) -> None:
        """Tell everybody, and make all calls on the group fail, now and later."""
        self._reports.tell(report)
        self._hang_up()
        self._endpoint.poison(report.said, blamed=report.rank, outcome=_OUTCOMES[report.why])

    def _own(self, said: str) -> Report:
        return Report(rank=self._me, why="failed", said=said)

    def _hang_up(self) -> None:
        for connection in self.connections:
            connection.hang_up()
