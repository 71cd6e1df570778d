"""Gloo processes that are started once for all test files and compute what the tests send them."""

from __future__ import annotations

import io
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 90  # seconds until a test fails that waits for a process
# What the tests of ranks import, imported once by the process from which all others fork. Packages that import their
# modules lazily are not enough: each process would import the modules.
IMPORTED = (
    "multihead.compat",
    "multihead.interventions.ablate",
    "multihead.models.use",
    "multihead.parallel",
    "multihead.probes.streaming",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "transformers.models.llama.modeling_llama",
)


def forking_context() -> Any:
    """Return a context whose processes fork from one that has imported what the tests of ranks import."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


class Processes:
    """Four processes; groups of 2 and of all 4 of them are there from the start."""

    def __init__(self, connections: list[Connection], children: list[Any]) -> None:
        self.connections, self.children = connections, children

    def run(self, function: Callable[..., Any], *args: Any, ranks: int = 4) -> list[Any]:
        """Call function(group, rank, *args) in the first processes, and return what each returns.

        An exception of a process is returned, and not raised.
        """
        for connection in self.connections[:ranks]:
            send(connection, (function, args, ranks))
        found = []
        for connection in self.connections[:ranks]:
            if not connection.poll(PATIENCE):
                raise TimeoutError(f"A process did not answer within {PATIENCE} seconds.")
            found.append(receive(connection))
        return found

    def results(self, function: Callable[..., Any], *args: Any, ranks: int = 4) -> list[Any]:
        """Return the results of `run`; raise the first exception."""
        found = self.run(function, *args, ranks=ranks)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found


@contextmanager
def processes(*, timeout: float = 60) -> Iterator[Processes]:
    """Start four processes, and end them.

    Args:
        timeout: seconds that a collective waits.
    """
    context = forking_context()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(4)]
        children = [
            context.Process(target=_serve, args=(rank, pairs[rank][1], folder, timeout), daemon=True)
            for rank in range(4)
        ]
        for child, (_, end) in zip(children, pairs, strict=True):
            child.start()
            end.close()  # so that a process that ends closes its pipe
        try:
            yield Processes([pair[0] for pair in pairs], children)
        finally:
            for child in children:
                child.kill()
                child.join()


def _serve(rank: int, connection: Connection, folder: str, timeout: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 4)  # a port could be taken
    # On a busy machine one process may start seconds after another.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=PATIENCE))
    groups = {ranks: dist.new_group(list(range(ranks)), timeout=timedelta(seconds=timeout)) for ranks in (2, 4)}
    while True:
        try:
            function, args, ranks = receive(connection)
        except EOFError:
            os._exit(0)
        try:
            send(connection, function(groups[ranks], rank, *args))
        except Exception as error:  # noqa: BLE001 - the test decides what it means
            error.add_note(traceback.format_exc())
            send(connection, error)


def send(connection: Connection, each: Any) -> None:
    """Send bytes: a connection would open a file of shared memory for every tensor."""
    written = io.BytesIO()
    torch.save(each, written)
    connection.send_bytes(written.getbuffer())


def receive(connection: Connection) -> Any:
    """Return what `send` sent."""
    return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
