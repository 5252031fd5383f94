"""What goes wrong while ranks compile together: all of them hear of it, and which rank it was."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch

from paceline import errors
from paceline.compiler import agreement
from paceline.testing import RankError
from tests.compiler._compare import eager, fresh
from tests.on_ranks import on_ranks


@on_ranks()
def test_a_rank_that_cannot_compile_is_an_error_on_all(rank, size):
    def backend(gm, example_inputs):
        if rank == 1:
            raise RuntimeError("no such instruction")
        return gm.forward

    fresh()
    f = torch.compile(lambda x: x.sum(), backend=backend)
    expected = (errors.PeerFailedError, torch._dynamo.exc.BackendCompilerFailed)[rank]
    with agreement(True):
        with pytest.raises(expected, match="no such instruction"):
            f(torch.ones(4))

        @torch.compile(backend="eager", fullgraph=True)
        def g(x):
            if rank == 1:
                x = x + 1
                torch._dynamo.graph_break()
            return x.sum()

        # A break that is not allowed is an error of rank 1, and of rank 0 since rank 1 had it.
        expected = (errors.PeerFailedError, torch._dynamo.exc.Unsupported)[rank]
        with pytest.raises(expected, match="graph_break"):
            g(torch.ones(4))
        if rank == 0:
            # It has left an exchange that rank 1 never came to: the next would be taken for that one.
            with pytest.raises(errors.StateError, match="an exchange before it failed"):
                f(torch.ones(4))


@on_ranks()
def test_a_frame_that_all_gave_up_before_is_not_given_up_by_one_that_is_slow(rank, size):
    """No rank can compile a frame, and then all can: rank 1 late."""

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def f(x, breaks):
        if breaks:
            torch._dynamo.graph_break()
        return x.sum()

    fresh()
    with agreement(True) as found:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            f(torch.ones(4), True)
        exchange = found._exchange
        number = exchange._n_exchanges + 1
        while rank == 1 and exchange.read("waiting/0") != (number,):
            pass
        f(torch.ones(4), False)
        assert len(found.compilations) == 1


@on_ranks()
def test_ranks_that_compile_different_functions_are_told_so(rank, size):
    first = eager(lambda x: x.sum())
    second = eager(lambda x: x.prod())
    fresh()
    with agreement(True), pytest.raises(errors.DisagreementError, match=r"(?s)different functions.*rank 0.*rank 1"):
        (first if rank == 0 else second)(torch.ones(4))


@on_ranks()
def test_a_rank_that_stays_away_is_named(rank, size):
    f = eager(lambda x: x.sum())
    fresh()
    with agreement(True) as found:
        f(torch.ones(4))
        if rank == 0:
            # This is not set before, because compiling may take any time.
            found._exchange.timeout_s = 1.0
            # Compiled code runs here, where an exception would end the process: it comes out all the same.
            with pytest.raises(errors.RankLostError, match=r"waited 1 s .* for rank 1, which is not compiling"):
                f(torch.ones(4))


def _killed(rank, size):
    def backend(gm, example_inputs):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return gm.forward

    fresh()
    with agreement(True):
        torch.compile(lambda x: x.sum(), backend=backend)(torch.ones(4))


def test_a_rank_that_is_killed_while_it_compiles_is_news(ranks):
    with pytest.raises(RankError) as caught:
        ranks(_killed)
    assert caught.value.failures[0].error_type == "RankLostError"
    assert "rank 1" in caught.value.failures[0].message
