"""Benchmarks: Paceline side by side with torch's classes, in one run, as ratios.

    python -m benchmarks                  # everything; writes benchmarks/results/
    python -m benchmarks --quick          # a smoke run of a tiny model
    python -m benchmarks --suite step --model mlp --rounds 40
    python -m benchmarks --suite shm      # training through shared memory, and its goals
    python -m benchmarks --suite compile  # compiled steps, and their goals
    python -m benchmarks.buckets          # graphs, compile time, step and overlap against the bucket size
    python -m benchmarks.collectives      # all_reduce by size: gloo, shared memory, MPI, the limit

Files, in the order data flows through them:

    models.py    what is trained: a registry of cases (module, batches, loss, optimizer)
    modes.py     how it is trained: a registry of builders, case -> replica with a `step(index)`
    suites.py    what is measured: a registry of functions that run in the ranks and yield samples
    memory.py    live bytes of one replica, from the allocator's own events
    launch.py    starts the rank processes: once, all modes of a run live in the same ones
    ranks.py     what such a process does, and what a suite may use there
    stats.py     samples -> medians, paired ratios and how far they can be trusted
    report.py    table, picture, JSON
    settings.py  what a run was asked to do
    command.py   what commands have in common: options, ranks that end with them, where results go
    buckets.py, compiling.py, control.py, tracing.py, collectives/  commands of their own: see there

To add a transport, a compiled mode or a model, add one registration in `modes.py` or `models.py`; to
measure something new, add a function to `suites.py`. Nothing else lists names.

[Note: why ratios] Machines are shared and their clocks drift, so a step time by itself says little. All modes
take turns in the same processes, in short blocks whose order is reshuffled each round (same seed, hence
same order on each rank). A mode is compared with the better torch mode *of the same round*, and
the figure reported is the median of those paired ratios with a bootstrap interval. And ranks are started
several times: [Note: why launches] in stats.py.
"""
