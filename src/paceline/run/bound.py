"""Runs a rank on its own cores: ``python bound.py command ...``, in the place of the command itself.

The launcher starts ranks through this file (`paceline.run.torchrun`). It is run by its path, and imports nothing of the
package, so that it takes a few milliseconds. The rank is the same process afterwards.
"""

import os
import sys

CPUS_OF_RANKS = "PACELINE_CPUS_OF_RANKS"
"""The variable with the CPUs of each rank of this host: ``0,2;1,3`` for two ranks with two CPUs each."""


def main(command: list[str]) -> None:
    shares = os.environ.get(CPUS_OF_RANKS, "").split(";")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank < len(shares) and shares[rank]:
        try:
            os.sched_setaffinity(0, {int(cpu) for cpu in shares[rank].split(",")})
        except (OSError, ValueError) as error:
            print(f"paceline: rank {rank} of this host is not bound to cores {shares[rank]}: {error}", file=sys.stderr)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
