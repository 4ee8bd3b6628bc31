"""torch.distributed next to MPI: its processes find each other through MPI."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mpisparse.comm.exchange import Exchange
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.comm.watchdog.transport import own_names
from mpisparse.comm.world import started_by
from mpisparse.errors import ConfigurationError

PROBING = 3.0  # seconds to try each address of rank 0


def init_torch_distributed(backend: str = "gloo", *, comm: Any = None, **options: Any) -> None:
    """Initialise torch.distributed with the ranks of MPI, in the same order; collective.

    Sets MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Under torchrun, which has set them
    already, only initialises. Options are those of torch.distributed.init_process_group.
    """
    if dist.is_initialized():
        raise ConfigurationError("torch.distributed is initialised already; call init_torch_distributed() once, and first")
    if comm is None and started_by() == "torchrun":
        dist.init_process_group(backend, **options)
        return
    end_job_on_uncaught_exception(comm)  # a rank that cannot go on would leave the others waiting
    exchange = Exchange(comm)
    hosts = exchange.gather_texts(_host())
    store, address = _meet(exchange, len(set(hosts)) == 1)
    numbers = {
        "MASTER_PORT": store.port, "RANK": exchange.rank, "WORLD_SIZE": exchange.size,
        "LOCAL_RANK": hosts[: exchange.rank].count(_host()), "LOCAL_WORLD_SIZE": hosts.count(_host()),
    }  # fmt: skip
    os.environ.update({"MASTER_ADDR": address, **{name: str(number) for name, number in numbers.items()}})
    dist.init_process_group(backend, store=store, rank=exchange.rank, world_size=exchange.size, **options)
    exchange.close()


def _meet(exchange: Exchange, one_host: bool) -> tuple[Any, str]:
    """Open rank 0's store and connect to it, at an address that all ranks reach; collective."""
    rank, size = exchange.rank, exchange.size
    outside = [name for name in own_names() if not name.startswith("127.")]
    names = [*(["127.0.0.1"] if one_host else []), *outside, socket.gethostname()]
    open_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = open_store("localhost", 0, size, True, wait_for_workers=False) if rank == 0 else None
    offer = json.dumps([names, store.port]) if store is not None else ""
    names, port = json.loads(exchange.gather_texts(offer)[0])
    reached = [json.loads(text) for text in exchange.gather_texts(json.dumps(_reachable(names, port) if rank else names))]
    common = [name for name in names if all(name in one for one in reached)]
    if not common:
        lost = next(r for r, one in enumerate(reached) if len(one) < len(names))
        raise ConfigurationError(
            f"r{rank} | rank {lost} reaches rank 0 at none of {', '.join(names)}, port {port}: is there a firewall between?"
        )
    return store if store is not None else open_store(common[0], port, size, False), common[0]


def _host() -> str:
    """Name this host. Containers may share a name, so the kernel's start counts too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _reachable(names: list[str], port: int) -> list[str]:
    """List the addresses at which something listens."""
    found = []
    for name in names:
        with contextlib.suppress(OSError), socket.create_connection((name, port), PROBING):
            found.append(name)
    return found
