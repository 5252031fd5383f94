"""The control channel: what ranks tell each other besides gradients. Over the store, no pickle.

- ``wire``: messages, typed and sealed; ``board``: where they are put up and read
- ``agreement``: everybody contributes, everybody learns the same
- ``failure``: news of a rank that failed, with the line of ``user_code``
- ``channel``: agreement, news of failure and watchful waits (``vigil``), for one wrapped module
- ``census``: which process each rank is; ``errands``: asking a store that may never answer
- ``last_words``: telling the others of an exception that ends the program
"""

from paceline.control.agreement import VALUE_LIMIT_BYTES, Agreement
from paceline.control.census import sign_in
from paceline.control.channel import Channel
from paceline.control.difference import OPTION
from paceline.control.failure import Failure

__all__ = ["OPTION", "VALUE_LIMIT_BYTES", "Agreement", "Channel", "Failure", "sign_in"]
