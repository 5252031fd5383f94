"""What the server that ranks are forked from has in memory: all that ranks import, looked at by the collector once.

A module and not a function, since a fork server runs imports only.
"""

from __future__ import annotations

import paceline.transport.creation  # noqa: F401
from paceline.testing._rank import freeze

freeze()
