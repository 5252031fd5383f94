"""Imports all that ranks import, in the server process from which ranks are forked.

The garbage collector looks at it only once. This is a module and not a function, since a fork server only imports.
"""

from __future__ import annotations

import paceline.transport.creation  # noqa: F401
from paceline.testing._rank import freeze

freeze()
