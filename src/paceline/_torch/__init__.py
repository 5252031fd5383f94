"""Every private torch name that Paceline uses, in one place, each with its reason.

Nothing else imports a private torch module (tests/test_layers.py checks this), so a new torch release can be checked by
reading the files of this package. The rest of Paceline writes ``_torch.name``.

Where releases of torch differ, the code here asks what torch has, and not which version it is. What the compiler needs
is looked up when the compiler is there; ``renamed`` finds things that have another name in some releases.
"""

from paceline._torch.autograd import *  # noqa: F403
from paceline._torch.c10d import *  # noqa: F403
from paceline._torch.compilation import *  # noqa: F403
from paceline._torch.data import *  # noqa: F403
from paceline._torch.dtensor import *  # noqa: F403
from paceline._torch.dynamo_frames import *  # noqa: F403
from paceline._torch.inductor import *  # noqa: F403
from paceline._torch.modules import *  # noqa: F403
from paceline._torch.splitting import *  # noqa: F403
from paceline._torch.tracing import *  # noqa: F403
