"""Which version of our code compiled a graph.

torch keeps compiled graphs on disk. Their key holds the names and the arguments of a graph's operators, but not what
the operators do, so that this Paceline could run code that an older one compiled. So the version of the code that gives
the operators their meaning is part of their names, or of their arguments.
"""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Iterator
from importlib import metadata
from importlib.abc import InspectLoader
from importlib.util import find_spec
from types import ModuleType


def code_version(*modules: ModuleType) -> str:
    """Return six hexadecimal digits that change whenever the name or the source of one of ``modules`` does.

    A package stands for all modules in it. If Paceline was installed without its source, its version number counts
    instead.
    """
    sources = {name: _source(name) for module in modules for name in _names(module)}
    if all(source is None for source in sources.values()):
        texts = [metadata.version("paceline")]
    else:
        missing = [name for name, source in sources.items() if source is None]
        if missing:
            raise ImportError(f"Only parts of Paceline's source are installed: the source of {missing} is missing.")
        texts = [f"{name}\n{source}" for name, source in sorted(sources.items())]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:6]


def _names(module: ModuleType) -> Iterator[str]:
    """The names of the module and of all modules in it."""
    if not isinstance(module, ModuleType):
        raise TypeError(f"code_version takes modules, and {module!r} is not a module.")
    yield module.__name__
    for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
        yield info.name


def _source(name: str) -> str | None:
    """The source of a module; None if it was installed without its source."""
    spec = find_spec(name)
    if spec is None or not isinstance(spec.loader, InspectLoader):
        raise ImportError(f"The code version of {name} cannot be determined: its loader does not provide the source.")
    return spec.loader.get_source(name)
