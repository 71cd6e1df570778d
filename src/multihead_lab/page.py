"""Write the results of the lab as one page that opens offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from multihead.files import write_atomically
from multihead.viewer.page import installed_version, render_page
from multihead_lab.report import build_chapters
from multihead_lab.run import Answers
from multihead_lab.tasks import ROWS
from multihead_lab.text import Phrases, language
from multihead_lab.training import Experiment

__all__ = ["page", "write_page"]

_IN_SCRIPT = (
    "1 head", "heads", "choose heads", "layer head", "only head", "step", "at the end", "point", "hidden", "scale",
    "value lookup", "value induction",
)  # fmt: skip


def write_page(answers: Answers, path: str | os.PathLike[str], *, lang: str = "en") -> Path:
    """Write the page atomically, in English ("en") or Chinese ("zh"), and return its path."""
    write_atomically(path, page(answers, lang=lang))
    return Path(path)


def page(answers: Answers, *, lang: str = "en") -> str:
    """Render the page: one HTML file with its style, script and data, which makes no network requests."""
    phrases = language(lang)
    return render_page(
        "multihead_lab/static/lab.html",
        "multihead_lab/static/lab.js",
        ("viewer/static/shared/base.css", "multihead_lab/static/lab.css"),
        texts=_texts_of_script(phrases),
        data=_data_of_script(answers, phrases),
        lang=lang,
        words=phrases.words,
        title=phrases.words["page title"],
        lead=phrases.words["lead"],
        quick=answers.quick,
        facts=_facts_of_answers(answers, phrases),
        chapters=build_chapters(answers, phrases),
        foot=phrases.translate("foot", version=installed_version(), seed=answers.seed),
    )


def _facts_of_answers(answers: Answers, phrases: Phrases) -> list[tuple[str, str]]:
    experiments = [*answers.experiments, *([answers.copies] if answers.copies is not None else [])]
    trained = sum(len(experiment.trainings) for experiment in experiments)
    facts = [(phrases.translate("fact.models"), str(trained))] if trained else []
    return [
        *facts,
        (phrases.translate("fact.seeds"), str(answers.seeds)),
        (phrases.translate("fact.time"), phrases.translate("seconds", n=f"{answers.seconds:.0f}")),
        (phrases.translate("fact.torch"), answers.torch_version),
    ]


def _data_of_script(answers: Answers, phrases: Phrases) -> dict[str, Any]:
    """Return the data of the script: the heads of the first seed at some steps of training."""
    return {"tasks": [_draw_experiment(experiment, answers, phrases) for experiment in answers.experiments]}


def _texts_of_script(phrases: Phrases) -> dict[str, str]:
    return {key: text for key, text in phrases.words.items() if key in _IN_SCRIPT or key.startswith("measure.")}


def _draw_experiment(experiment: Experiment, answers: Answers, phrases: Phrases) -> dict[str, Any]:
    courses = []
    for num_heads in experiment.heads:
        watched = experiment.of(num_heads)[0]
        moments = [
            {
                "step": moment.step,
                "looks": [
                    {
                        "layer": look.layer,
                        "head": look.head,
                        "measures": {name: round(value, 4) for name, value in look.measures.items()},
                        # Differences below a thousandth are invisible.
                        "picture": [[round(1000 * weight) for weight in row] for row in look.picture],
                    }
                    for look in moment.looks
                ],
            }
            for moment in watched.moments
            if moment.looks
        ]
        courses.append({"heads": num_heads, "moments": moments})
    if experiment.task == "induction":
        note = phrases.translate("looks.induction", seed=answers.seed)
    else:
        second = phrases.translate("looks.lookup second") if experiment.task == "two" else ""
        note = phrases.translate("looks.lookup", rows=ROWS, second=second, seed=answers.seed)
    return {"name": experiment.task, "note": note, "courses": courses}
