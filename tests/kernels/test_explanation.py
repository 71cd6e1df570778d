"""What a call says of itself before it runs."""

from __future__ import annotations

import html

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.functional import request_of
from multihead.kernels import explanation
from multihead.kernels.call import WorkEstimate
from multihead.kernels.explanation import Explanation, explain_request

Q = torch.zeros(2, 4, 100, 16)


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")],
)
def test_memory_is_said_in_units_one_can_read(count: int, said: str) -> None:
    assert explanation.readable_bytes(count) == said


def test_each_line_says_one_thing() -> None:
    told = Explanation(
        "sdpa", {"native": "it is away"}, 0.5, 0.25, dense_remainder=True, work=WorkEstimate(1, 1024), waits="it waits"
    )
    assert str(told).splitlines() == [
        "kernel   sdpa",
        "refused  native: it is away",
        (
            "skipped  25.0% of the score matrix; its intervals hide 50.0%, and part of the mask is no interval: "
            "it is read cell by cell"
        ),
        "memory   about 1.0 KiB besides q, k and v",
        "waits    it waits",
    ]


def test_a_request_is_explained_as_the_function_explains_its_tensors() -> None:
    request = request_of(Q, Q, Q, masks.Causal())
    assert explain_request(request) == mh.explain(Q, Q, Q, mask=masks.Causal())
    assert explain_request(request, kernel="reference").kernel == "reference"


def test_a_transform_is_explained_from_within() -> None:
    told: list[Explanation] = []

    def asking(q: torch.Tensor) -> torch.Tensor:
        told.append(mh.explain(q, q, q))
        return mh.attention(q, q, q)

    torch.func.vmap(asking)(torch.zeros(2, 1, 1, 4, 8))
    assert told[0].kernel == "reference"
    assert told[0].refusals == {
        "native": "it reads memory, and the tensors of a torch.func transform have none",
        "sdpa": "it reads tensor values, which is impossible in a graph or a transform of torch.func",
        "ragged": "it needs CUDA, and the tensors are on cpu",
        "flex": "it needs CUDA, and the tensors are on cpu",
    }


class TestALayer:
    layer = mh.MultiHeadAttention(16, 4)

    def test_it_explains_the_call_as_it_would_run(self) -> None:
        told = self.layer.explain(torch.zeros(2, 100, 16), mask=masks.Causal(), lengths=(100, 50))
        assert told.hidden_share == pytest.approx(1 - (100 * 101 + 50 * 51) / 2 / 150**2)
        assert told.waits is None

    def test_it_attends_to_nothing_and_a_cache_stays_as_it_is(self) -> None:
        cache = mh.KeyValueCache()
        self.layer(torch.zeros(1, 5, 16), mask=masks.Causal(), cache=cache)
        self.layer.explain(torch.zeros(1, 1, 16), mask=masks.Causal(), cache=cache)
        assert cache.length == 5


def test_an_explanation_prints_as_one_line_and_is_whole_in_a_notebook() -> None:
    q = torch.randn(1, 2, 64, 8)
    explanation = mh.explain(q, q, q, mask=mh.masks.Window(4), kernel="reference")
    assert repr(explanation) == "<Explanation: kernel reference, 0.0% of the score matrix skipped>"
    assert explanation._repr_html_() == f"<pre>{html.escape(str(explanation))}</pre>"
