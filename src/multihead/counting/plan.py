"""The plan of a census: model, statistics, texts and shards; written before the census runs, checked by processes.

The file of a shard is a function of the plan and of the shard's texts. One process, several processes, Ray and `--shard
i/n` therefore write the same bytes to the same file names. A run that was stopped is continued by counting the shards
that have no result file; a damaged file, or the file of another shard, counts as missing.

There is no queue between machines: a run with `--shard i/n` counts every n-th shard, or Ray distributes the shards.
Processes that coordinate through a shared directory would need leases, clocks and process numbers that agree, which
containers and network file systems do not have.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multihead.counting.corpus import FileVersion
from multihead.counting.formats import Shard
from multihead.errors import ArgumentError, InputError
from multihead.files import write_atomically
from multihead.models.loading import LoadedModel
from multihead.probes.catalogue import PROBES, probe_of_part
from multihead.probes.probe import Probe, Statistic

PLAN_VERSION = 2
"""Version of census files. Version 1 kept several examples per text; such a census can be read, but not continued."""

PLAN_FILE = "plan.json"
SHARDS_FOLDER = "shards"

_COMPARED_FIELDS = (
    "version", "model_id", "tokenizer_id", "probes", "seed", "texts", "column", "share", "tokens", "batch_tokens",
    "examples", "layers", "dtype",
)  # fmt: skip
_FIELD_LABELS = {"model_id": "model", "tokenizer_id": "tokenizer"}


@dataclass(frozen=True)
class Plan:
    """The plan of a census: the result of each shard is a function of the plan and of the shard's texts.

    Attributes:
        model: the MODEL argument, from which worker processes load the model; "" if the model was given as a module.
        model_id: hash of the model's configuration, parameters and buffers.
        title: short name of the model.
        dtype: dtype of the model's parameters.
        device: device on which the model runs.
        tokenizer_id: hash of the tokenizer's configuration and vocabulary.
        special_ids: the token ids that `special_mass` counts.
        probes: per probe a JSON description that identifies it: name, label and format, measured parts, token ids, and
            the hash of the function of a probe that is not built in.
        layers: numbers or names of the layers that are measured; None for all.
        texts: names and globs of the corpus files.
        column: column (tables) or key (JSON) that holds the texts.
        share: share of the texts that is read, from 0 to 1; each text is drawn at random.
        seed: seed of the random draw of texts.
        tokens: largest number of tokens of a text; longer texts are truncated.
        batch_tokens: largest number of tokens of a batch.
        examples: number of strongest examples that are kept per head and statistic.
        files: name of a corpus file -> its size in bytes; None if the file was missing.
        shards: shards of the corpus, in the order in which they are merged.
        versions: name of a corpus file that existed -> what identifies its content besides the size.
        special_tokens: the tokens with `special_ids`, which are set apart in examples; empty in plans of before.
        version: format version of the files of the census, see `PLAN_VERSION`.
    """

    model: str
    model_id: str
    title: str
    dtype: str
    device: str
    tokenizer_id: str
    special_ids: tuple[int, ...]
    probes: tuple[dict[str, Any], ...]
    layers: tuple[int | str, ...] | None
    texts: tuple[str, ...]
    column: str
    share: float
    seed: int
    tokens: int
    batch_tokens: int
    examples: int
    files: dict[str, int | None]
    shards: tuple[Shard, ...]
    versions: dict[str, FileVersion] = field(default_factory=dict)
    special_tokens: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    @cached_property
    def id(self) -> str:
        """Hash of the fields of the plan that change the result; the model's name and the device are left out."""
        left_out = ["model", "device", "title", "versions", "special_tokens"]
        left_out += ["version"] if self.version == 1 else []
        content = {name: value for name, value in asdict(self).items() if name not in left_out}
        return _hash_of_json(content)

    @property
    def statistics(self) -> dict[str, Statistic]:
        """Name of a statistic -> the statistic with its label, unit and number format."""
        return {each["name"]: Statistic(each["name"], **each["shown"]) for each in self.probes}

    def shard_file(self, folder: Path, index: int) -> Path:
        """Return the path of a shard's result file in the directory of the census."""
        return folder / SHARDS_FOLDER / f"{index:06d}.parquet"

    def problem_file(self, folder: Path, index: int) -> Path:
        """Return the path of the file that stores why a shard could not be counted."""
        return self.shard_file(folder, index).with_suffix(".txt")

    def built_in_probes(self) -> tuple[Probe, ...]:
        """Return the probes that the plan describes, for a process that has only the plan.

        Raises:
            ArgumentError: a probe is a Python function of a script.
        """
        found = []
        for each in self.probes:
            probe = _restore_probe(each)
            if probe is None or identity_of_probe(probe) != each:
                raise ArgumentError(
                    f"The probe {each['name']} is defined in a script, and other processes cannot load it.",
                    "Run the census with workers=1 and without ray, or give probes of multihead.",
                )
            found.append(probe)
        return tuple(found)

    def check_same_census(self, other: Plan) -> None:
        """Reject another plan if its census differs from this one.

        Raises:
            ArgumentError: the censuses differ; the error names the first difference.
        """
        for name in _COMPARED_FIELDS:
            mine, wanted = getattr(self, name), getattr(other, name)
            if name == "probes":
                mine, wanted = (tuple(map(_without_function, each)) for each in (mine, wanted))
            if mine != wanted:
                shown = (
                    (f", {_format_for_error(mine)}, not {_format_for_error(wanted)}")
                    if name not in _FIELD_LABELS
                    else ""
                )
                raise ArgumentError(
                    f"The directory holds a census with another {_FIELD_LABELS.get(name, name)}{shown}.",
                    "Give another directory with out=, or delete this one.",
                )
        for mine, wanted in zip(self.probes, other.probes, strict=True):
            known = mine.get("function"), wanted.get("function")
            if None not in known and known[0] != known[1]:
                raise ArgumentError(
                    f"The directory holds a census whose probe {mine['name']!r} has another function.",
                    "Give another directory with out=, or delete this one.",
                )
        for file in other.files:
            if (difference := self._difference_of_file(file, other)) is not None:
                finding, mend = difference
                raise ArgumentError(
                    f"{file} is not the file that the census in the directory was planned with: {finding}.",
                    f"Give another directory with out=, or delete this one{mend}.",
                )

    def _difference_of_file(self, file: str, other: Plan) -> tuple[str, str] | None:
        """Return how a corpus file differs in another plan, and another way to fix that; None if they are equal.

        A size or version that is unknown in one plan counts as equal, because the file may have been unavailable for a
        while.
        """
        if file not in self.files:
            return "the plan does not have it", ""
        before, after = self.files[file], other.files[file]
        if None not in (before, after) and before != after:
            return f"it has {after:,} bytes, not {before:,}", ""
        was, now = self.versions.get(file), other.versions.get(file)
        if was is None or now is None or was == now:
            return None
        if was.hash_of_ends != now.hash_of_ends:
            return "its first or its last bytes differ", ""
        if not (was.last_written and now.last_written):
            return None
        mend = (
            f"; if its content is the same, restore its time with touch -d {was.last_written}"
            if "://" not in file
            else ""
        )
        return f"it was written at {now.last_written}, not at {was.last_written}", mend

    def write_or_check(self, folder: Path) -> Plan:
        """Write the plan to a directory, or compare it with the plan that the directory already has.

        Returns:
            the plan of the directory.

        Raises:
            ArgumentError: the directory holds another census.
            InputError: the directory cannot be written.
        """
        try:
            (folder / SHARDS_FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{str(folder)!r} cannot be written: {error.strerror}.", "Choose another folder."
            ) from None
        file = folder / PLAN_FILE
        continued = file.exists()
        if not continued:
            # Several processes may write this file at once: with the same command they write the same bytes.
            content = {"id": self.id, **asdict(self)}
            written = json.dumps(content | {"hash": _hash_of_json(content)}, indent=1, ensure_ascii=False)
            write_atomically(file, written + "\n")
        found = read_plan(folder)
        found.check_same_census(self)
        unknown = [
            each["name"]
            for each, before in zip(self.probes, found.probes, strict=True)
            if "function" in each and None in (each["function"], before.get("function"))
        ]
        if continued and unknown:
            warnings.warn(
                f"The census in {str(folder)!r} is continued, and whether it was counted with the same function of "
                f"{' and '.join(unknown)} is unknown, because a value that the function reads cannot be compared. If "
                "the function has changed, give another directory with out=.",
                stacklevel=3,
            )
        return replace(found, model=self.model or found.model, device=self.device)


def read_plan(folder: Path) -> Plan:
    """Read the plan of a directory.

    Raises:
        InputError: the directory has no plan, or the plan cannot be read.
    """
    file = folder / PLAN_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{str(folder)!r} holds no census.", "Run multihead census with --out first.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{str(file)!r} cannot be read: {error}.", "Delete the directory and run again.") from None
    if not isinstance(content, dict) or content.get("version") not in (1, PLAN_VERSION):
        raise InputError(f"{str(file)!r} is no plan of this version of multihead.", "Run the census again elsewhere.")
    # `id` covers only the fields that change the result. Files of earlier versions have no hash.
    found = content.pop("hash", None)
    if found not in (None, _hash_of_json(content)):
        raise _changed_plan_error(file)
    try:
        expected = content.pop("id")
        for name in ("special_ids", "probes", "texts"):
            content[name] = tuple(content[name])
        content["layers"] = None if content["layers"] is None else tuple(content["layers"])
        content["shards"] = tuple(Shard(*each) for each in content["shards"])
        content["special_tokens"] = tuple(content.get("special_tokens", ()))
        content["versions"] = {file: FileVersion(*each) for file, each in content.get("versions", {}).items()}
        plan = Plan(**content)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{str(file)!r} is incomplete: {error}.", "Delete the directory and run again.") from None
    if plan.id != expected:
        raise _changed_plan_error(file)
    return plan


def _changed_plan_error(file: Path) -> InputError:
    return InputError(f"{str(file)!r} was changed after it was written.", "Delete the directory and run again.")


def identity_of_probe(probe: Probe) -> dict[str, Any]:
    """Return the JSON description by which a plan identifies a probe, see `Plan.probes`.

    The functions of built-in probes do not change; those of other probes are identified by what they compute.
    """
    parts = sorted(json.dumps(part) for part in probe.parts)
    tokens = None if probe.tokens is None else sorted(probe.tokens)
    found = {"name": probe.name, "shown": probe.display(), "parts": parts, "tokens": tokens}
    return found if _restore_probe(found) == probe else {**found, "function": probe.function}


def _without_function(described: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name != "function"}


def _restore_probe(described: Mapping[str, Any]) -> Probe | None:
    """Return the probe of a JSON description if it is built in, or measures a single part; else None."""
    if described["name"] in PROBES:
        return PROBES[described["name"]]
    parts = [json.loads(part) for part in described["parts"]]
    is_one = len(parts) == 1 and isinstance(parts[0], list)
    return probe_of_part((parts[0][0], parts[0][1]), described["tokens"]) if is_one else None


def model_id(loaded: LoadedModel) -> str:
    """Return a hash of a model's configuration and of every parameter and buffer."""
    digest = hashlib.blake2b(digest_size=16)
    config: Any = getattr(loaded.model, "config", None)
    described: Mapping[str, Any] = config.to_dict() if config is not None else {}
    left_out = ("_name_or_path", "transformers_version", "_attn_implementation", "dtype", "torch_dtype")
    kept = {name: value for name, value in described.items() if name not in left_out}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, value in sorted(loaded.model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            whole = value.detach().cpu().contiguous().flatten()
            digest.update(whole.view(torch.uint8).numpy().data if whole.numel() else b"")
    return digest.hexdigest()


def tokenizer_id(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's configuration and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding are left out of the hash, because they are options of the tokenizer's last call.
        content = {
            name: each for name, each in json.loads(backend.to_str()).items() if name not in ("truncation", "padding")
        }
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return _hash_of_json([content, sorted(tokenizer.all_special_ids)])


def _hash_of_json(content: object) -> str:
    return _hash_of_content(json.dumps(content, sort_keys=True).encode())


def _hash_of_content(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _format_for_error(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(each["name"]) if isinstance(each, dict) else str(each) for each in value)
    return repr(value)
