"""What a probe is."""

from __future__ import annotations

from multihead.probes.probe import Probe


def test_a_probe_shows_its_name_alone() -> None:
    assert repr(Probe("mine", lambda parts: parts["surprisal"], frozenset({"surprisal"}))) == "Probe(name='mine')"


def test_probes_are_told_apart_by_what_they_are_made_of_and_not_by_their_function() -> None:
    first = Probe("mine", lambda parts: parts["surprisal"], frozenset({"surprisal"}))
    assert first == Probe("mine", lambda parts: parts["surprisal"] * 1, frozenset({"surprisal"}))
    assert first != Probe("mine", first.of, frozenset({"sink"}))
