"""The worker process that `counting.work` starts: it counts shards and prints a line of JSON after each batch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from multihead.counting.work import count_shards, load_counter
from multihead.errors import MultiheadError


def main(argument: str) -> int:
    """Count shards.

    Args:
        argument: a JSON object: folder, model, device, threads.

    Returns:
        the exit status.
    """
    # Standard output is for messages alone: what a model's libraries print goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as messages:
        os.dup2(2, 1)
        try:
            return _count_and_report(json.loads(argument), messages)
        except BrokenPipeError:  # the process that started this one has ended
            return 1


def _count_and_report(options: dict[str, Any], messages: TextIO) -> int:
    """Count shards, print progress and results as JSON, and return the exit status."""

    def send(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    torch.set_num_threads(options["threads"])
    folder = Path(options["folder"])
    try:
        counter = load_counter(folder, options["model"], options["device"])
        send(loaded=True)
        order = range(len(counter.plan.shards))
        found = count_shards(counter, folder, order, lambda texts, tokens: send(texts=texts, tokens=tokens))
        for index, problem in found:
            send(shard=index, problem=problem)
    except MultiheadError as error:
        send(error=error.finding, mend=error.mend, kind=type(error).__name__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
