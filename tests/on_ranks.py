"""``@on_ranks()``: a test whose whole body runs on every rank of a group."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any


def on_ranks(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run ``test(rank, world_size, *args)`` on live ranks; ``options`` are those of the ``ranks`` fixture.

    All other arguments are pytest's, as those of any test::

        @pytest.mark.parametrize("view", [False, True])
        @on_ranks(world_size=3)
        def test_ranks_have_the_same_gradients(rank, world_size, view):
            ...
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        arguments = list(inspect.signature(body).parameters)[2:]

        def test(ranks: Callable[..., Any], **given: Any) -> None:
            ranks(_run, body.__module__, body.__qualname__, [given[name] for name in arguments], **options)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, keyword) for name in ("ranks", *arguments)]
        vars(test).update(__signature__=inspect.Signature(parameters), __doc__=body.__doc__, body=body)
        test.__name__, test.__qualname__, test.__module__ = body.__name__, body.__qualname__, body.__module__
        return test

    return decorate


def _run(rank: int, world_size: int, module: str, name: str, arguments: list[Any]) -> None:
    # A rank is sent functions by name, and this name is the test's, so the body has to be found there.
    getattr(importlib.import_module(module), name).body(rank, world_size, *arguments)
