"""The contract of a kernel on a GPU, run on the CPU: its expected values, and the errors that it must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import contract
from multihead.contract import CALLS, Call, ContractError
from multihead.kernels import reference
from multihead.kernels.call import AttentionResult
from multihead.kernels.dense_tile import working_dtype
from multihead.masks.base import Mask
from tests import oracle

CPU = torch.device("cpu")


def named(name: str, dtype: torch.dtype) -> Call:
    (found,) = [call for call in CALLS if (call.name, call.dtype) == (name, dtype)]
    return found


def test_the_expected_values_are_those_of_the_oracle() -> None:
    for call in {call.name: call for call in reversed(CALLS)}.values():  # one dtype of each kind
        (q, k, v), exact_output, exact_logsumexp = contract._attend_densely(call)
        sizes = (contract.BATCH, contract.HEADS, call.queries, call.keys)
        dense: dict[str, Any] = {"softcap": call.softcap}
        if call.term == "sinks":
            dense["sinks"] = contract._draw(call, "sinks", (4,)).double()
        elif call.term is not None:
            dense["bias"] = contract.arguments(call, CPU)[1]["bias"]
            dense["bias"] = (
                dense["bias"].double() if isinstance(dense["bias"], Tensor) else _cells(dense["bias"].values)
            )
        found = oracle.attend(q, k, v, oracle.shown(call.mask, sizes, call.keys - call.queries), **dense)
        torch.testing.assert_close(exact_output, found.output)
        torch.testing.assert_close(exact_logsumexp, found.logsumexp)


def _cells(values: Tensor) -> Tensor:
    """Spread a bias per distance (1, heads, queries + keys - 1) over the cells of a map."""
    count = (values.shape[-1] + 1) // 2
    return values.double()[:, :, torch.arange(count) - torch.arange(count)[:, None] + count - 1]


def test_a_kernel_that_is_right_passes_also_with_nan_behind_the_lengths() -> None:
    assert {"native", "sdpa"} >= set(contract.kernels_on(CPU)) >= {"sdpa"}
    for name in ("NaN in padding", "queries without keys", "one query"):
        assert 0 < contract.check("sdpa", named(name, torch.bfloat16), CPU) < 1


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda found: replace(found, output=found.output * 1.01), "output"),
        (lambda found: replace(found, kernel_logsumexp=found.logsumexp + 0.01), "logsumexp"),
        (lambda found: replace(found, output=found.output.detach() + 0 * found.output), "gradient of q"),
        (lambda found: replace(found, output=found.output.index_fill(2, torch.tensor([5]), torch.nan)), "output"),
    ],
)
def test_a_kernel_that_is_wrong_is_found(
    change: Callable[[AttentionResult], AttentionResult], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = reference.attend
    monkeypatch.setattr(reference, "attend", lambda request, bounds: change(attend(request, bounds)))
    with pytest.raises(ContractError, match=rf"^causal, float32: the {wrong} is \S+ off, and the tolerance"):
        contract.check("reference", named("causal", torch.float32), CPU)


def test_the_calls_have_names_of_their_own_and_every_kind_of_mask_in_every_dtype() -> None:
    assert len({str(call) for call in CALLS}) == len(CALLS)
    kinds: dict[Mask, set[torch.dtype]] = {}
    for call in CALLS:
        kinds.setdefault(call.mask, set()).add(call.dtype)
    assert sum(dtypes == set(contract.TOLERANCES) for dtypes in kinds.values()) == 6
    assert {working_dtype(call.dtype) for call in CALLS} == {torch.float32}
