"""The types of what is sent to the script of the lab's page; see `multihead.viewer.page_types`."""

from __future__ import annotations

from typing import TypedDict


class LabLook(TypedDict):
    """A head at a step: its measures, and its weights in thousandths."""

    layer: int
    head: int
    measures: dict[str, float]
    picture: list[list[int]]


class LabMoment(TypedDict):
    """The heads of a model at a step of its training."""

    step: int
    looks: list[LabLook]


class LabCourse(TypedDict):
    """The training of a model with a number of heads."""

    heads: int
    moments: list[LabMoment]


class LabTask(TypedDict):
    """An experiment of the lab."""

    name: str
    note: str
    courses: list[LabCourse]


class LabData(TypedDict):
    """The data of the page of the lab."""

    tasks: list[LabTask]
