"""Random training programs, run with the wrapper on live ranks and without one in a reference, and compared.

The files in the order of reading: ``program`` (what a program is), ``generate`` (a program from its seed), ``nets`` and
``replica`` (how a rank runs one), ``reference`` (what it should give), ``judge`` with ``expectations`` (what an outcome
is called), ``ranks`` (programs on live ranks), ``shrink`` (the smallest program that fails alike), ``__main__``.
"""
