"""Consensus: ranks compile the same frames at the same time, on the same assumptions (docs/agreement.md).

- ``compile_agreement``: what ranks agree on, and when
- ``compile_exchange``: how they talk to each other
- ``shapes``: the sizes that a rank has seen, as a message; ``fingerprint``: which graph a rank has
- ``shared_compile``: one rank compiles for all
"""
