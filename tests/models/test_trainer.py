"""Functions that are called around each step of a transformers Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from multihead.models.trainer import call_around_steps


class Model(nn.Module):
    """One weight, and the loss that a Trainer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).square().sum()}


def test_they_are_called_before_and_after_each_step_with_accumulated_gradients(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model = Model()
    trainer = Trainer(model, arguments, train_dataset=[{"x": torch.ones(2)} for _ in range(4)])
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("forward"))
    call_around_steps(trainer, lambda step: calls.append(f"begin {step}"), lambda: calls.append("end"))
    trainer.train()
    assert calls == ["begin 0", "forward", "forward", "end", "begin 1", "forward", "forward", "end"]
