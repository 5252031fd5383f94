"""Calls a function when somebody else imports a module, and not before.

``import paceline`` must not import the compiler (more than a second for programs that never compile), yet its rows
must be in place before the first trace. ``torch.compile`` imports ``torch._dynamo`` when it is first called, so the
rows are put in place at the end of that import. Python's documented hook for this is a finder on ``sys.meta_path``.
Ours finds nothing itself: it asks the other finders, and wraps the loader of the module that is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_waiting: dict[str, list[Callable[[], None]]] = {}


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` once, right after the module ``name`` was imported; at once if it already is."""
    module = sys.modules.get(name)
    if module is not None and not _is_being_imported(module):
        action()
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(action)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _Finder(MetaPathFinder):
    """A finder that wraps the loader of a module that is waited for, and finds no other."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        actions = _waiting.pop(fullname, None)
        if actions is None:
            return None
        # The name is no longer waited for, so this call does not come back here.
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Loader(spec.loader, actions)
        return spec


class _Loader(Loader):
    """The module's own loader, followed by the actions."""

    def __init__(self, loader: Loader, actions: list[Callable[[], None]]) -> None:
        self._loader = loader
        self._actions = actions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            # Tools that ask a module for its loader (its source, its resources) should meet the real one.
            spec.loader = self._loader
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in self._actions:
            action()
