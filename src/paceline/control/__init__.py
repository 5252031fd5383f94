"""The conversation of ranks: what they tell each other besides gradients. Nothing is pickled.

The data flows from bytes to meaning: ``wire`` encodes messages, typed and with a ``seal``; a ``store_thread`` asks the
store, which may never answer; on a ``board`` messages are put up and read; over a line (``store_line``,
``tensor_line``) ranks ``agree``; a ``channel`` gives one wrapped module agreements, news of ``failure`` and waits for
peers (``peer_wait``); ``last_words`` tells the others of an exception that ends the program. A ``waiter`` is what a
line waits with.

Beside that, ranks can be found: ``census`` says which process each of them is, ``processes`` whether it runs;
``progress`` and ``jobs`` keep files of what ranks did last, and ``hang`` asks where they are (``whereabouts``,
``stacks``, ``user_code``); ``diagnosis`` says who waits for whom, and why. ``digest`` and ``replicas`` compare tensors.
A process that a rank forks hears of it in ``forks``, and takes part in none of this.
"""

from paceline.control.agree import Agreement
from paceline.control.census import sign_in
from paceline.control.channel import Channel
from paceline.control.difference import OPTION
from paceline.control.failure import Failure

__all__ = ["OPTION", "Agreement", "Channel", "Failure", "sign_in"]
