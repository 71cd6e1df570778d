"""Compare attention of every model class of transformers with ours.

python -m tools.families [NAMES] [--write] [--mutate]

`python -m tools.families` compares every exported model class of transformers with eager attention; families.md is its
output. One set of rules shrinks every configuration by the names of its fields, and one table holds the exceptions
(`tools/families/overrides.py`). Classes that transformers does not export are parts of exported ones: they are compared
where the same rules build them, and not counted. A model that cannot be made tiny is judged by the layers of its
full-size configuration on the meta device, so that it may be rejected, but never equal. Where transformers' own eager
attention cannot be run or misreads its mask (three families), the reference is a plain softmax in the tool. timm,
torchvision and scipy, which some models need, are installed in a folder that only the sweep sees, because transformers
processes images in another way where torchvision can be imported. torchvision's wheel on PyPI is built for CUDA; next
to a torch without CUDA two of its operators are declared first, so that it can be imported
(`tools/families/packages.py`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

RESULTS = Path("build/families.jsonl")

EXAMPLES = """
\b
Examples:
  python -m tools.families                     every model class; continues where a run was interrupted
  python -m tools.families --again             every model class, from the start
  python -m tools.families llama BertModel     one family and one class
  python -m tools.families --mutate            break and bypass our attention on purpose: all must be found
  python -m tools.families --write             write the results to docs/families.md and docs/families.zh.md
"""


def stored(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return stored results by family, class and mutation; those of another version of transformers are left out."""
    import transformers

    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            each = json.loads(line)
            if each.pop("transformers") == transformers.__version__:
                found[each["family"], each["name"], each.get("mutation") or ""] = each
    return found


def add(path: Path, result: dict[str, Any]) -> None:
    """Append a result."""
    import transformers

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result | {"transformers": transformers.__version__}) + "\n")


def chosen(names: tuple[str, ...], console: Console) -> list[tuple[str, str]]:
    """Return the model classes, as (family, class), of some families or class names; of all if there are none."""
    from tools.families import catalogue

    found: list[tuple[str, str]] = []
    families = catalogue.families()
    for family in names if names and families.keys() >= {*names} else families:
        try:
            classes = [each.__name__ for each in catalogue.model_classes(family)]
        except ImportError as error:
            console.print(f"{family}: {error}", markup=False)
            continue
        found += [(family, each) for each in classes if not names or family in names or each in names]
    return found


@click.command(epilog=EXAMPLES)
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Write docs/families.md and its translation from the stored results.")
@click.option(
    "--mutate", is_flag=True, help="Break our attention in every way that a class can notice, and bypass it in Llama."
)
@click.option("--again", is_flag=True, help="Compare classes again that have a stored result.")
@click.option("--failed", is_flag=True, help="Compare classes again that differed or could not be built.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Where results are stored.")
def main(names: tuple[str, ...], results: Path, *, write: bool, mutate: bool, again: bool, failed: bool) -> None:
    """Compare attention of every model class of transformers with ours.

    Exits with 1 if a class differs, or if a mutation is not found.
    """
    from tools.families.detours import DETOURS
    from tools.families.worker import Worker

    console = Console() if sys.stdout.isatty() else Console(width=240)
    classes = chosen(names, Console(stderr=True))
    known = stored(results)
    work: list[tuple[str, str, str]]
    if mutate:
        work = [
            (family, name, feature)
            for family, name in classes
            for feature in known.get((family, name, ""), {}).get("features", ())
            if known[family, name, ""]["outcome"] == "equal"
        ]
        work = _one_per_family(work, known)
        work += [("llama", "LlamaModel", each) for each in DETOURS if ("llama", "LlamaModel") in classes]
    else:
        work = [(family, name, "") for family, name in classes]
    left = [
        each
        for each in work
        if again or names or each not in known or (failed and known[each]["outcome"] in ("different", "not built"))
    ]
    worker = Worker()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(left))
        for family, name, mutation in left:
            progress.update(task, description=f"{name} {mutation}".strip())
            result = worker.compare(family, name, mutation or None) | {"mutation": mutation}
            known[family, name, mutation] = result
            add(results, result)
            progress.advance(task)
    worker.close()
    found = [known[each] for each in work if each in known]
    wrong_results = False
    for each in found:
        broken = mutate and each["mutation"] not in DETOURS
        wrong = each["outcome"] != "different" if broken else each["outcome"] in ("different", "not built")
        wrong_results |= wrong and (mutate or each["outcome"] == "different")
        if wrong or names:
            line = f"{each['outcome']:12} {each['family']} {each['name']} {each.get('mutation', '')} {each['reason']}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = Counter(each["outcome"] for each in found)
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    if write:
        import transformers

        from tools.families.page import write_pages

        write_pages(stored(results).values(), transformers.__version__)
    sys.exit(1 if wrong_results else 0)


def _one_per_family(work: list[tuple[str, str, str]], known: dict[Any, dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Keep one class of each family for each mutation: the one with the sharpest attention."""
    best: dict[tuple[str, str], tuple[str, str, str]] = {}
    for family, name, mutation in work:
        entropy = known[family, name, ""]["entropy"]
        other = best.get((family, mutation))
        if other is None or entropy < known[family, other[1], ""]["entropy"]:
            best[family, mutation] = (family, name, mutation)
    return list(best.values())


if __name__ == "__main__":
    main()
