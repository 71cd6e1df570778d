"""Count shards with Ray Data: actors that load the model once, started as they are needed, and replaced if they die."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from multihead.counting.merge import missing_shards
from multihead.counting.plan import Plan
from multihead.counting.work import Outcome, Progress, Report, count_shards, load_counter
from multihead.errors import InputError
from multihead.errors.optional import require
from multihead.locale.escaping import visible

EMBEDDED = "local"
"""The address that starts a Ray on this machine, for this call alone."""


class CountingActor:
    """Counts one shard at a time with a model that it loads once.

    Args:
        folder: the directory of the census, which all machines share.
        place: the working directory of the caller; relative file names start from it.
        model: the MODEL argument.
        device: where the model runs.
        threads: threads of torch.
    """

    def __init__(self, folder: str, place: str, model: str, device: str, threads: int) -> None:
        with suppress(OSError):  # a machine without this directory needs absolute file names
            os.chdir(place)
        torch.set_num_threads(threads)
        self._folder = Path(folder)
        self._counter = load_counter(self._folder, model, device)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Count the shards of a batch.

        Args:
            batch: "shard" -> their indices.

        Returns:
            per shard its index, why it failed ("" if it did not), and the numbers of its texts and tokens.
        """
        found: dict[str, list[Any]] = {"shard": [], "problem": [], "texts": [], "tokens": []}
        for index in batch["shard"].tolist():
            texts = tokens = 0

            def add_counts(more_texts: int, more_tokens: int) -> None:
                nonlocal texts, tokens
                texts, tokens = texts + more_texts, tokens + more_tokens

            problem = next(
                (problem for _, problem in count_shards(self._counter, self._folder, [index], add_counts)), ""
            )
            for name, value in (("shard", index), ("problem", problem), ("texts", texts), ("tokens", tokens)):
                found[name].append(value)
        return found


def count_on_ray(
    plan: Plan, folder: Path, address: str, workers: int, threads: int, report: Report, *, gpus: float = 0
) -> Outcome:
    """Count shards with Ray Data.

    Args:
        plan: the plan.
        folder: the directory of the census; on a cluster, one that all its machines share.
        address: `EMBEDDED`, or the address of a cluster: "auto", "ray://host:10001".
        workers: the most actors.
        threads: threads of torch in each actor, and the CPUs that it reserves.
        report: called when a shard is finished.
        gpus: the GPUs that an actor reserves.

    Raises:
        InputError: the cluster cannot be reached.
        MissingPackageError: Ray is not installed.
    """
    require("ray", purpose="Running on Ray", extra="ray")
    import ray

    started = not ray.is_initialized()
    if started:
        options: dict[str, Any] = {"num_cpus": workers * threads} if address == EMBEDDED else {}
        options |= {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(
                f"Ray at {visible(address)} cannot be used: {visible(str(error).splitlines()[0])}.",
                "Check the address, and that this machine may join the cluster (RAY_AUTH_MODE).",
            ) from error
    try:
        return _count_in_actors(plan, folder, workers, threads, report, gpus)
    finally:
        if started:
            ray.shutdown()


def _count_in_actors(plan: Plan, folder: Path, workers: int, threads: int, report: Report, gpus: float) -> Outcome:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    outcome, began, total = Outcome(), time.monotonic(), len(plan.shards)
    missing = missing_shards(folder, plan)
    progress = Progress(total - len(missing), total)
    report(progress)
    if not missing:
        return outcome
    data = ray.data.from_items([{"shard": index} for index in missing], override_num_blocks=len(missing))
    counted = data.map_batches(
        CountingActor,
        fn_constructor_args=(str(folder.resolve()), str(Path.cwd()), plan.model, plan.device, threads),
        batch_size=1,
        concurrency=(1, min(workers, len(missing))),
        num_cpus=threads,
        num_gpus=gpus or None,
    )
    for row in counted.iter_rows():
        outcome.add_shard(int(row["shard"]), str(row["problem"]))
        progress.shards += not row["problem"]
        progress.texts += int(row["texts"])
        progress.tokens += int(row["tokens"])
        progress.seconds = time.monotonic() - began
        report(progress)
    return outcome
