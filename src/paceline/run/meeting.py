"""Where the ranks of a job meet. They make the store, and check that all of them were started with one world size.

torch's ``env://`` makes no such check: ranks with different world sizes wait for each other until the time-out.

This is not an agreement (``control.agree``). Agreements are for ranks that know how many they are and that have the
same secret, and both are what ranks find out here.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline import settings
from paceline.control import seal
from paceline.errors import DisagreementError, RankLostError, StateError
from paceline.run.variables import Launch

TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other if nothing else was asked for; torch's own default."""
_TEXT_BYTES = 200


def meet(launch: Launch, *, timeout: timedelta | None) -> dist.Store:
    """The store for the default group, once all ranks are there."""
    rank, host, port = launch.rank, launch.host, launch.port
    timeout = timeout or TIMEOUT
    # A secret that cannot be used is an error before anybody waits for this rank.
    settings.secret()
    is_host = rank == 0 and not launch.store_is_served
    try:
        store = dist.TCPStore(  # public, but torch's stubs forget it
            host, port, is_master=is_host, wait_for_workers=False, multi_tenant=is_host, timeout=timeout
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise StateError(
                f"Port {port} of this host is in use, so that rank 0 cannot open the store there: end the job that "
                "uses it, or choose another MASTER_PORT."
            ) from None
        raise
    ours = dist.PrefixStore(launch.job, store)
    _gather(dist.PrefixStore("paceline/meeting", ours), rank, launch.world_size, timeout.total_seconds())
    return dist.PrefixStore("default_pg", ours)


def _gather(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Return when all ranks have come; raise if one of them has another world size, or another secret."""
    mine = f"rank {rank} has WORLD_SIZE {world_size}"
    # It tells secrets apart without giving them away.
    mark = seal.mark().hex()
    first = _text(store.compare_set("first", "", mine))
    if first.rpartition(" ")[2] != str(world_size):
        store.set("difference", f"{first} and {mine}")
    elif _text(store.compare_set("secret", "", mark)) != mark:
        store.set("other_secret", str(rank))
    else:
        store.add("came", 1)
    pause_s, deadline = 1e-3, time.monotonic() + timeout_s
    while True:
        if store.check(["difference"]):
            raise DisagreementError(
                f"Ranks were started with different world sizes: {_text(store.get('difference'))}. Start all ranks "
                "with the same WORLD_SIZE."
            )
        if store.check(["other_secret"]):
            told = _text(store.get("other_secret"))
            who = f"rank {told}" if told.isdecimal() and len(told) < 10 else "a rank"
            raise DisagreementError(
                f"Ranks were started with different secrets: {who} has another {settings.SECRET} than the first that "
                f"came, or one of them has none (this is rank {rank}). Set it to the same text on all ranks, or unset "
                "it on all of them."
            )
        came = store.add("came", 0)
        if came >= world_size:
            return
        if time.monotonic() > deadline:
            raise RankLostError(
                f"Only {came} of {world_size} ranks came within {timeout_s:.0f} s. Look at the output of the others, "
                "and at their MASTER_ADDR and MASTER_PORT."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _text(told: bytes) -> str:
    """What a rank has written into the store, to be shown: the store may hold anything of any length."""
    text = told[:_TEXT_BYTES].decode(errors="replace")
    return text if text.isprintable() else ascii(text)
