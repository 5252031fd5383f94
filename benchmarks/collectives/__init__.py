"""How fast an all-reduce between the ranks of one host is, by size: gloo, shared memory, MPI, and the limit.

    python -m benchmarks.collectives              # 2 ranks, then 4; writes benchmarks/results/collectives.*
    python -m benchmarks.collectives --ranks 2 --budget 20
    python -m benchmarks.collectives --quick      # a smoke run of three small sizes

Files, in the order data flows through them:

    settings.py  what a run was asked to do
    turn.py      how calls are timed
    methods.py   how it is reduced: a registry; a method is opened once and then takes turns
    limit.py     the method that nobody can beat: the same sums and stores, and no waiting (limit.c); and the same
                 thing called as users call a backend
    mpi.py       the method that lives in processes of its own
    ranks.py     what a rank process does: all methods take turns
    judge.py     samples -> medians, paired ratios, and the goals
    report.py    table, picture, JSON

[Note: one turn] Gradients have just been written when they are reduced: each rank has its own in its cache, and nobody
else's. So before each call every rank writes its tensor anew, and all wait for each other at a gate that lets them
pass within a microsecond of each other; neither is counted. (`--warm` leaves both out, as MPI's benchmarks do: the same
call on the same memory again and again. Nothing then moves between the cores' caches but what the transport itself
moves there, and a transport that shares memory does not move anything.) A turn is one call to warm up and some that
count; it stands for the mean of its slowest rank. Within a round the sizes come in a random order, and the methods of
one size right after each other in a random order, so a ratio compares what happened within milliseconds of each other
([Note: why ratios]).

Everything goes through `dist.all_reduce`, Python overhead included, except MPI (mpi4py's buffer interface, without
torch) and the limit, which is there both ways ([Note: the limit, called]).
"""
