"""The control channel: what ranks tell each other besides gradients. Over the store, no pickle."""

from paceline.control.channel import OPTION, Channel, Failure

__all__ = ["OPTION", "Channel", "Failure"]
