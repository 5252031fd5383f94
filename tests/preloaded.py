"""What ranks of the tests have imported from their start: Paceline first, as in most programs, then the compiler."""

import paceline  # noqa: F401, I001
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401
