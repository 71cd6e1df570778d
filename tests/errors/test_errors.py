"""The errors: two sentences, one tree."""

from __future__ import annotations

import pickle

import pytest

from multihead import errors
from multihead.errors import (
    ArgumentError,
    DtypeError,
    MissingPackageError,
    MultiheadError,
    RankError,
    SlowPathError,
    SlowPathWarning,
)
from multihead.errors.arguments import check_fraction, check_integer

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MultiheadError)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_message_is_the_finding_and_then_the_mend(kind: type[MultiheadError]) -> None:
    error = kind("q has 3 axes.", "Give four.")
    assert str(error) == "q has 3 axes. Give four."
    assert (error.finding, error.mend) == ("q has 3 axes.", "Give four.")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind: type[MultiheadError]) -> None:
    back = pickle.loads(pickle.dumps(kind("One.", "Two.")))
    assert type(back) is kind
    assert (back.finding, back.mend, str(back)) == ("One.", "Two.", "One. Two.")


def test_errors_are_caught_as_what_python_would_raise() -> None:
    others = set(KINDS) - {MultiheadError, DtypeError, MissingPackageError, RankError, SlowPathError}
    assert issubclass(DtypeError, TypeError)
    assert issubclass(MissingPackageError, ImportError)
    assert issubclass(RankError, RuntimeError)
    assert issubclass(SlowPathError, RuntimeError)
    assert issubclass(SlowPathWarning, UserWarning)
    assert all(issubclass(kind, ValueError) for kind in others)
    assert issubclass(ArgumentError, MultiheadError)


def test_the_tree_at_the_top_of_the_file_names_every_error() -> None:
    assert errors.__doc__ is not None
    assert [kind.__name__ for kind in KINDS if kind.__name__ not in errors.__doc__] == []


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), True, "0.1", None])
def test_what_is_not_a_share_is_rejected(value: object) -> None:
    with pytest.raises(ArgumentError) as refusal:
        check_fraction("dropout", value)
    assert str(refusal.value) == f"dropout is {value!r}. Give a number from 0 to 1."


@pytest.mark.parametrize(("value", "least"), [(0, 1), (-1, 0), (1.0, 1), (True, 1), ("2", 1), (None, 0)])
def test_what_is_not_an_integer_of_that_size_is_rejected(value: object, least: int) -> None:
    with pytest.raises(ArgumentError) as refusal:
        check_integer("size", value, least=least)
    assert str(refusal.value) == f"size is {value!r}. Give an integer of at least {least}."
