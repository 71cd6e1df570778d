"""Call functions before and after each step of a transformers Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multihead.errors.optional import require


def call_around_steps(trainer: Any, begin: Callable[[int], object], end: Callable[[], object]) -> None:
    """Call `begin` with the number of finished steps before each training step, and `end` after each step.

    Args:
        trainer: a `transformers.Trainer` or an instance of a subclass.
        begin: called before the first forward pass of a step.
        end: called after the optimizer's step.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    require("transformers", purpose="Observing the steps of a Trainer", extra="hf")
    from transformers import TrainerCallback

    class StepCallbacks(TrainerCallback):  # type: ignore[misc]  # the class is Any to mypy
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            begin(state.global_step)

        def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
            end()

    trainer.add_callback(StepCallbacks())
