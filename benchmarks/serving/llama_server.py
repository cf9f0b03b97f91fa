# SPDX-License-Identifier: Apache-2.0
"""Run llama.cpp's HTTP server from the package xllamacpp: ``llama_server.py MODEL PORT [THREADS]``."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

ENDINGS = {signal.SIGTERM, signal.SIGINT}


def main(model: str, port: str, threads: str = "1") -> None:
    """Serve up to four requests at a time until SIGTERM or SIGINT."""
    # Threads that wait for each other sleep early: spinning wastes the CPU time that others on the host need.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # There are no type stubs for it.
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_ctx, params.n_parallel = 4096, 4
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.warmup = False
    # It serves in its own threads, none of which must receive the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    server = xllamacpp.Server(params)
    signal.sigwait(ENDINGS)
    del server


if __name__ == "__main__":
    main(*sys.argv[1:])
