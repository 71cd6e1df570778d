"""Count shards with actors of Ray, on this machine or on a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multihead.counting.plan import Plan
from multihead.counting.shard import ShardCounter
from multihead.counting.work import ShardResults, count_shard, load_counter
from multihead.counting.workers import count_in_workers
from multihead.errors import InputError
from multihead.errors.optional import require
from multihead.locale.escaping import escape_controls

LOCAL_RAY = "local"
"""The value of `ray` that starts Ray on this machine for the duration of the call."""


class CountingActor:
    """Counts one shard at a time with a model that is loaded once; `place` is the working directory of the caller."""

    _counter: ShardCounter

    def __init__(self, folder: str, place: str, threads: int) -> None:
        with suppress(OSError):  # a machine without this directory needs absolute file names
            os.chdir(place)
        torch.set_num_threads(threads)
        self._folder = Path(folder)

    def load(self, model: str, device: str) -> None:
        """Load the model."""
        self._counter = load_counter(self._folder, model, device)

    def count(self, index: int) -> tuple[str, int, int]:
        """Count a shard; return why it failed ("" if it did not), and its numbers of texts and tokens."""
        batches: list[tuple[int, int]] = []
        problem = count_shard(self._counter, self._folder, index, lambda *batch: batches.append(batch))
        return problem, sum(texts for texts, _ in batches), sum(tokens for _, tokens in batches)


class RayWorker:
    """An actor of Ray as a `Worker`; it reserves a CPU per thread of torch, and starts when the cluster has them."""

    def __init__(self, plan: Plan, folder: Path, threads: int) -> None:
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError

        self.errors_of_ended_process: tuple[type[Exception], ...] = (RayActorError, OutOfMemoryError)
        self._plan, self._kill = plan, ray.kill
        gpus = 1 if torch.device(plan.device).type == "cuda" else 0
        remote = ray.remote(CountingActor).options(num_cpus=threads, num_gpus=gpus)
        self._actor: Any = remote.remote(str(folder.resolve()), str(Path.cwd()), threads)

    def load_model(self) -> Future[Any]:
        """See `Worker`."""
        future: Future[Any] = self._actor.load.remote(self._plan.model, self._plan.device).future()
        return future

    def count_shard(self, index: int) -> Future[tuple[str, int, int]]:
        """See `Worker`."""
        future: Future[tuple[str, int, int]] = self._actor.count.remote(index).future()
        return future

    def counted_batches(self) -> Iterator[tuple[int, int]]:
        """See `Worker`: an actor reports whole shards."""
        return iter(())

    def end_process(self) -> str:
        """See `Worker`: Ray does not keep how the process ended."""
        self._kill(self._actor)
        return ""


def count_on_ray(address: str, shards: Sequence[int], workers: int, threads: int, results: ShardResults) -> None:
    """Count shards with Ray, started here (`LOCAL_RAY`) or at the address of a cluster, in at most `workers` actors."""
    require("ray", purpose="Running on Ray", extra="ray")
    import ray

    started = not ray.is_initialized()
    if started:
        options: dict[str, Any] = {"num_cpus": workers * threads} if address == LOCAL_RAY else {}
        options |= {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
        try:
            ray.init(address=address, **options)
        except Exception as error:  # Ray raises no specific error class if a start takes too long
            reason = str(error).splitlines()[0].rstrip(".")
            raise InputError(
                f"Ray at {escape_controls(address)} cannot be used: {escape_controls(reason)}.",
                "Check the address, and that this machine may join the cluster (RAY_AUTH_MODE).",
            ) from error
    try:
        count_in_workers(partial(RayWorker, results.plan, results.folder, threads), shards, workers, results)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    finally:
        if started:
            ray.shutdown()
