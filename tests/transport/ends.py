"""Programs about waits that end in another way than by what was waited for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.transport.shm.kernel import Job

from .processes import TIMEOUT_S, Rank
from .programs import all_reduce

# Long enough for the main thread to be asleep in its wait; what is tested does not depend on it.
ALARM_S = 0.15


def _recv(rank: Rank, into: torch.Tensor, frm: int, tag: int) -> Job:
    return rank.endpoint.recv(into.data_ptr(), into.nbytes, frm, tag, timeout_s=TIMEOUT_S, keep=into)


def _send(rank: Rank, tensor: torch.Tensor, to: int, tag: int) -> Job:
    return rank.endpoint.send(tensor.data_ptr(), tensor.nbytes, to, tag, timeout_s=TIMEOUT_S, keep=tensor)


def _raise(*_: object) -> None:
    raise KeyboardInterrupt


def _during(wait: Callable[[], Any], handler: Callable[..., None] = _raise) -> str:
    """What comes out of ``wait`` when a signal arrives in it."""
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, ALARM_S)
    try:
        wait()
    except (KeyboardInterrupt, PacelineError) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return "nothing"


def is_interrupted(rank: Rank) -> list[str]:
    """Rank 0 is called away from all kinds of waits. Only the last of them, inside a collective, ends the group."""
    go, message, reduced = torch.ones(1), torch.zeros(1), torch.ones(100_000)
    if rank.rank == 1:
        _recv(rank, go, 0, 1).wait()
        all_reduce(rank, reduced).wait()
        rank.settle()
        _send(rank, torch.full((1,), 7.0), 0, 2).wait()
        _recv(rank, go, 0, 3).wait()
        rank.settle()
        return [_during(_recv(rank, go, 0, 4).wait, lambda *_: None)]

    receiving = _recv(rank, message, 1, 2)
    said = [_during(receiving.wait)]
    reducing = all_reduce(rank, reduced, inline=False)
    # With a limit, as without one this thread would do the work itself, if it came first.
    said.append(_during(lambda: reducing.wait(TIMEOUT_S)))
    # It waits its turn behind the other.
    said.append(_during(rank.settle))
    assert not receiving.done()
    assert not reducing.done()
    _send(rank, go, 1, 1).wait()
    receiving.wait()
    reducing.wait()
    assert message.item() == 7.0
    assert reduced.unique().tolist() == [2.0]
    # A handler that returns runs in the middle of the wait, which goes on.
    said.append(_during(rank.settle, lambda *_: _send(rank, go, 1, 3).wait()))
    return [*said, _during(rank.settle)]


def is_aborted_while_it_closes(rank: Rank) -> str:
    """Rank 0 closes, which waits for rank 1 in a collective; aborting ends that."""
    if rank.rank == 1:
        rank.settle()
        _recv(rank, torch.zeros(1), 0, 0).wait()
        return "nothing"
    rank.settle()
    job = all_reduce(rank, torch.ones(10), inline=False)
    closing = threading.Thread(target=rank.endpoint.close)
    closing.start()
    while rank.endpoint._endpoint is not None:
        time.sleep(0)
    assert not job.done()
    rank.endpoint.abort()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    # Whoever gives up late finds nobody to tell, and that is no error.
    rank.endpoint.poison("too late", blamed=None)
    rank.endpoint.abort()
    job.wait()
    return "nothing"
