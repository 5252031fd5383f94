"""Proof of the shared-memory transport: what gloo does, ``cpu:shm`` does, and what gloo does not promise too.

- ``conformance``: the list of cases that both pass; ``cases/`` has them, one module a subject
- ``inputs``: numbers whose reduction is exact, and the reduction computed without a process group
- ``fuzz``, ``fuzz_program``: random programs of collectives, run on both (``python -m tests.transport.fuzz``)
- ``programs``: what ranks do at the C kernel's own interface
- ``killing``: ranks forked from a warm process that die at a scripted point (``python -m tests.transport.killing``)
"""
