"""`lab cluster --local N`: a Dask scheduler and N workers on this host, one a GPU where there are any, until Ctrl-C.

Dask's nannies start a worker again that ended. All of it ends with this process, however that ends; started again on
the same port it is the cluster that a client waits for.
"""

from __future__ import annotations

import os
import signal
import socket
from argparse import Namespace

from lab.base.errors import BadInput
from lab.bench import machine
from lab.bench.cluster import EXTRA


def run(arguments: Namespace) -> int:
    """The command: prints the address once every worker is there, and ends well at Ctrl-C or SIGTERM."""
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")  # read when it is imported, by workers too
    try:
        from distributed import Nanny, Scheduler, SpecCluster
    except ImportError as error:
        raise BadInput("lab cluster", f"needs Dask distributed ({error})", EXTRA) from None
    gpus = machine.gpus()
    if not 1 <= arguments.local <= (len(gpus) or 256):
        what = f"{arguments.local} workers for {len(gpus)} GPUs"
        raise BadInput("--local", what, "give each worker a GPU, and one at least")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", arguments.port))
        except (OSError, OverflowError) as error:
            what = f"{arguments.port} cannot be had ({getattr(error, 'strerror', 'ports are 0 to 65535')})"
            raise BadInput("--port", what, "0 takes a free one") from None
        port = probe.getsockname()[1]
    here = {"host": "127.0.0.1", "dashboard": False}
    workers = {
        gpu or number: {
            "cls": Nanny,
            "options": here | {"nthreads": 1, "memory_limit": 0, "env": {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}},
        }
        for number, gpu in enumerate(gpus[: arguments.local] or [""] * arguments.local)
    }
    for how in (signal.SIGTERM, signal.SIGINT):  # which a script's background job would ignore
        signal.signal(how, signal.default_int_handler)
    try:
        with SpecCluster(workers, {"cls": Scheduler, "options": here | {"port": port}}, silence_logs=False) as made:
            print(made.scheduler_address, flush=True)
            signal.pause()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return 0
