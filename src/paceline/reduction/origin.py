"""Where a backward comes from: from the wrapper's forward, or from the bare module.

[Note: backwards that meet]
Collectives are matched by their order. So if one rank runs a backward of its own, through ``ddp.module`` for example,
that backward meets one of another kind on the other ranks, and the gradients of both would be averaged as if they
belonged together. To rule that out, each rank says with its status which wrapper its backward belongs to, and where it
came from. All ranks raise if these differ.

A backward has come from the wrapper if it has reached an output of the wrapper's forward. A rank without a valid
sample may run its forward and then a backward of something else, such as a sum of zeros over all parameters. It is in
step with the others, and it has no opinion on where its backward came from.
"""

from __future__ import annotations

import enum
import warnings


class Origin(enum.Enum):
    """Where a backward comes from. Each value is what a message says."""

    WRAPPER = "through the wrapper"
    MODULE = "without the wrapper's forward (through ddp.module, for example)"
    UNKNOWN = "that did not reach the output of the wrapper's forward"


class Origins:
    """Where the backwards of one wrapper come from."""

    def __init__(self) -> None:
        self.forward_ran = False
        """Whether the wrapper's forward has run since the last synchronised backward."""
        self._output_reached = False
        self._warned_of_eval = False

    def begin_backward(self, *, output_reached: bool) -> None:
        self._output_reached = output_reached

    def output_reached(self) -> None:
        """The backward that runs has reached an output of the wrapper's forward."""
        self._output_reached = True

    def end_backward(self) -> None:
        """A synchronised backward has ended."""
        self.forward_ran = False

    def of_backward(self) -> Origin:
        """Where the backward that runs comes from, as far as it is known by now."""
        if self._output_reached:
            return Origin.WRAPPER
        return Origin.UNKNOWN if self.forward_ran else Origin.MODULE

    def warn_of_eval(self) -> None:
        """Say once that a backward is not synchronised, because the bare module is in eval mode.

        One rank alone may use the bare module in eval mode, for example for a saliency map or an adversarial attack.
        Synchronising would wait for ranks that do no such thing.
        """
        if not self._warned_of_eval:
            self._warned_of_eval = True
            warnings.warn(
                "Backward through the bare module in eval mode is not synchronised across ranks. If it should "
                "be, call the wrapper instead of its module, or use train() mode.",
                stacklevel=2,
            )
