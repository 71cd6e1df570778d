"""The example of a text over several processes runs, here for a few steps."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import Any

from tests.parallel.processes import Processes


def printed(group: Any, rank: int) -> str:
    from examples import ranks

    ranks.STEPS = 20
    with redirect_stdout(io.StringIO()) as text:
        ranks.main()
    return text.getvalue()


def test_it_prints_the_loss_and_the_heads_on_one_rank(four: Processes) -> None:
    first, *others = four.results(printed)
    assert others == ["", "", ""]
    assert re.match(r"step 20: loss \d\.\d{3} nats\n *layer +head +kind +previous \(%\) +induction \(%\)", first)
    assert len(first.splitlines()) == 2 + 2 * 4 + 1  # the chance of each share comes last
