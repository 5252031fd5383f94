"""torch's own test suite of DistributedDataParallel, run on the CPU with torch's class and then with ours.

    python -m tests.conformance            both columns
    python -m tests.conformance --help     filters

The suite is `torch.testing._internal.distributed.distributed_test`, as the installed wheel ships it. No
test is edited. From outside we change only what a machine without GPUs needs:

    selection   which tests use DistributedDataParallel (read from the source), and on how many ranks
    lifting     the skip decorators become no-ops, so that every selected test runs
    devices     whatever names a CUDA device names the CPU
    swap        torch's classes are replaced by ours (second column only)
    ranks       forks the ranks of one test from this process, collects what happened, ends what hangs
    known       the differences we accept, each with its reason
    report      the table, the summary line, the exit code
    collectives the other suite (--suite collectives): all tests that do not use DistributedDataParallel and are
                written for the CPU, over gloo and over shm, with the table for docs/
"""
