"""The control channel: what ranks tell each other besides gradients. Over the store, no pickle."""

from paceline.control.channel import Channel, Failure

__all__ = ["Channel", "Failure"]
