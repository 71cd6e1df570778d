"""Write the results of the lab as one page that opens offline."""

from __future__ import annotations

import os
from pathlib import Path

from multihead.files import write_atomically
from multihead.viewer.page import installed_version, render_page
from multihead_lab.page_types import LabCourse, LabData, LabMoment, LabTask
from multihead_lab.report import build_chapters
from multihead_lab.run import LabResults
from multihead_lab.tasks import MAX_PICTURE_ROWS
from multihead_lab.text import Phrases, load_phrases
from multihead_lab.training import Experiment

__all__ = ["render_lab_page", "write_page"]

_KEYS_OF_SCRIPT_TEXTS = (
    "1 head", "heads", "choose heads", "layer head", "only head", "step", "at the end", "point", "hidden", "scale",
    "value lookup", "value induction",
)  # fmt: skip


def write_page(answers: LabResults, path: str | os.PathLike[str], *, lang: str = "en") -> Path:
    """Write the page of the lab atomically, in English ("en") or Chinese ("zh"), and return its path."""
    write_atomically(path, render_lab_page(answers, lang=lang))
    return Path(path)


def render_lab_page(answers: LabResults, *, lang: str = "en") -> str:
    """Render the page of the lab: one HTML file with its style, script and data, which makes no network requests."""
    phrases = load_phrases(lang)
    texts = phrases.texts_by_key
    return render_page(
        "multihead_lab/static/lab.html",
        "multihead_lab/static/lab.js",
        ("viewer/static/shared/base.css", "multihead_lab/static/lab.css"),
        texts={key: texts[key] for key in texts if key in _KEYS_OF_SCRIPT_TEXTS or key.startswith("measure.")},
        data=LabData(tasks=[_describe_experiment(experiment, answers, phrases) for experiment in answers.experiments]),
        lang=lang,
        words=texts,
        title=texts["page title"],
        lead=texts["lead"],
        quick=answers.quick,
        facts=_list_settings(answers, phrases),
        chapters=build_chapters(answers, phrases),
        foot=phrases.translate("foot", version=installed_version(), seed=answers.first_seed),
    )


def _list_settings(answers: LabResults, phrases: Phrases) -> list[tuple[str, str]]:
    experiments = (*answers.experiments, answers.experiment_with_copied_heads)
    trained = sum(len(experiment.models) for experiment in experiments if experiment is not None)
    facts = [(phrases.translate("fact.models"), str(trained))] if trained else []
    return [
        *facts,
        (phrases.translate("fact.seeds"), str(answers.models_per_head_count)),
        (phrases.translate("fact.time"), phrases.translate("seconds", n=f"{answers.seconds:.0f}")),
        (phrases.translate("fact.torch"), answers.torch_version),
    ]


def _describe_experiment(experiment: Experiment, answers: LabResults, phrases: Phrases) -> LabTask:
    """Return what the script draws of an experiment: the heads of the first seed at some steps of training."""
    courses: list[LabCourse] = []
    for num_heads in experiment.head_counts:
        watched = experiment.models_with_head_count(num_heads)[0]
        moments: list[LabMoment] = [
            {
                "step": moment.step,
                "looks": [
                    {
                        "layer": look.layer,
                        "head": look.head,
                        "measures": {name: round(value, 4) for name, value in look.measures.items()},
                        # A difference of weights below a thousandth is invisible.
                        "picture": [[round(1000 * weight) for weight in row] for row in look.weights],
                    }
                    for look in moment.head_measurements
                ],
            }
            for moment in watched.learning_curve
            if moment.head_measurements
        ]
        courses.append({"heads": num_heads, "moments": moments})
    if experiment.task.name == "induction":
        note = phrases.translate("looks.induction", seed=answers.first_seed)
    else:
        second = phrases.translate("looks.lookup second") if experiment.task.name == "two" else ""
        note = phrases.translate("looks.lookup", rows=MAX_PICTURE_ROWS, second=second, seed=answers.first_seed)
    return {"name": experiment.task.name, "note": note, "courses": courses}
