"""What the commands `ablate` and `importance` are given: the texts, what replaces the output of a head, the measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click

from multihead.cli.model_options import add_options, read_texts, split_list, text_options
from multihead.cli.progress import Steps
from multihead.errors import InputError
from multihead.locale.escaping import escape_controls

if TYPE_CHECKING:
    from torch import Tensor

    from multihead.interventions.ablate import AblationMethod
    from multihead.interventions.measures import Measure
    from multihead.models.loading import DescribedModel, EncodedText, LoadedModel

MAX_NAME_CHARACTERS = 30  # characters of a prompt in an error
DIFFERENCE = "logit-difference"
"""The value of --measure that needs --token and --other."""


@dataclass(frozen=True, eq=False)
class InterventionInputs:
    """A model, and what it reads while heads are switched off.

    Attributes:
        loaded: the model.
        heads: the keys of the heads that were named; None for all.
        texts: the name of each text, and the text.
        batches: what the model is called with: each text, or with --by resample all of them at once.
        reference: the same of the texts of --reference; None without any.
        measure: the number of each text.
    """

    loaded: LoadedModel
    heads: list[Any] | None
    texts: list[tuple[str, EncodedText]]
    batches: list[dict[str, Tensor]]
    reference: list[dict[str, Tensor]] | None
    measure: Measure


@dataclass(frozen=True)
class InterventionOptions:
    """The arguments and options that `ablate` and `importance` share, as the user gave them."""

    model: str
    heads: str | None
    files: tuple[str, ...]
    prompts: tuple[str, ...]
    tokens: int | None
    by: AblationMethod | None
    reference: tuple[str, ...]
    measure: str
    token: str | None
    other: str | None
    seed: int
    device: str
    dtype: str
    lang: str

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return len(self.files) + len(self.prompts)

    @property
    def replacement(self) -> AblationMethod:
        """What replaces the output of a head."""
        return self.by or "zero"

    @property
    def names_of_tokens(self) -> dict[str, str]:
        """The tokens that are compared, for sentences with {token} and {other}."""
        return {"token": escape_controls(self.token or ""), "other": escape_controls(self.other or "")}

    def check(self) -> None:
        """Reject options that contradict each other, or lack another."""
        if not self.num_texts:
            raise click.UsageError(
                "There is no text. Give texts as --text FILE or --prompt TEXT; both may be repeated."
            )
        if self.by == "mean" and not self.reference:
            raise click.UsageError(
                "--by mean takes the mean output of each head over texts. Give them as --reference FILE."
            )
        if self.by != "mean" and self.reference:
            raise click.UsageError("--reference is the texts of --by mean. Add --by mean, or leave it out.")
        if self.by == "resample" and self.num_texts < 2:
            raise click.UsageError(
                "--by resample takes the output of a head on another text, and there is one. Give several texts."
            )
        if self.measure == DIFFERENCE and (self.token is None or self.other is None):
            raise click.UsageError(f"--measure {DIFFERENCE} compares two tokens. Give --token and --other.")
        if self.measure != DIFFERENCE and (self.token is not None or self.other is not None):
            raise click.UsageError(f"--token and --other are for --measure {DIFFERENCE}. Add it, or leave them out.")

    def load(self, steps: Steps) -> InterventionInputs:
        """Read the texts and load the model.

        Raises:
            InputError, ModelError, ArgumentError: the model, a text, a token or a head is missing, or does not fit.
        """
        texts, reference = read_texts(self.files, self.prompts), read_texts(self.reference, ())

        # Imported here, so that --help does not load torch, and a wrong name is rejected before it is loaded.
        from multihead.models.source import find_model

        show_stage = steps.show_loading(self.model)
        found = find_model(self.model)
        import torch

        from multihead.interventions.heads import parse_head, resolve_heads
        from multihead.interventions.measures import logit_difference, measure_of
        from multihead.models.loading import describe, encode, load

        keys: Any = None if self.heads is None else [parse_head(each) for each in split_list(self.heads)]
        described = describe(found, stage=show_stage)
        encoded = [(name, encode(described, each, tokens=self.tokens)) for name, each in texts]
        encoded_reference = [encode(described, each, tokens=self.tokens) for _, each in reference]
        self._check_lengths(encoded)
        compared = self._compared_tokens(described)
        loaded = load(described, head="language", device=self.device, dtype=self.dtype, stage=show_stage)
        batches = [loaded.arguments(each) for _, each in encoded]
        if self.by == "resample":
            batches = [{name: torch.cat([each[name] for each in batches]) for name in batches[0]}]
        return InterventionInputs(
            loaded,
            None if keys is None else resolve_heads(loaded.model, keys),
            encoded,
            batches,
            [loaded.arguments(each) for each in encoded_reference] or None,
            measure_of(loaded.model, None if compared is None else logit_difference(*compared)),
        )

    def _check_lengths(self, texts: Sequence[tuple[str, EncodedText]]) -> None:
        """Reject texts without a token to predict, and of different lengths where they must be the same."""
        lengths = [encoded.ids.shape[1] for _, encoded in texts]
        for (name, _), length in zip(texts, lengths, strict=True):
            if length < 2 and self.measure == "loss":
                shown = shorten(name, MAX_NAME_CHARACTERS, placeholder=" …")
                raise InputError(
                    f"The text {shown!r} has 1 token, and the first token of a text is not predicted.",
                    "Give a longer text.",
                )
        if self.by == "resample" and min(lengths) < max(lengths):
            raise InputError(
                f"--by resample needs texts of one length, and they have {min(lengths):,} to {max(lengths):,} tokens.",
                f"Cut them with --tokens {min(lengths)}.",
            )

    def _compared_tokens(self, described: DescribedModel) -> tuple[int, int] | None:
        """Return the ids of --token and --other; None without them."""
        if self.token is None or self.other is None:
            return None
        token, other = (
            _id_of_token(described, name, given) for name, given in (("--token", self.token), ("--other", self.other))
        )
        if token == other:
            raise InputError(f"--token and --other are both {self.token!r}.", "Give two tokens.")
        return token, other


def intervention_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --text, --prompt, --tokens, --by, --reference, --measure, --token, --other and --seed to a command."""
    options = (
        text_options,
        click.option(
            "--tokens",
            type=click.IntRange(min=1),
            metavar="N",
            help="Cut each text to N tokens, special tokens included.",
        ),
        click.option(
            "--by",
            type=click.Choice(["zero", "mean", "resample"]),
            help="What replaces the output of a head: zero; its mean over --reference; its output on another of the "
            "texts, which need one length.  [default: zero]",
        ),
        click.option("--reference", multiple=True, metavar="FILE", help="A text for the means of --by mean."),
        click.option(
            "--measure",
            type=click.Choice(["loss", DIFFERENCE]),
            default="loss",
            show_default=True,
            help="The number of each text: the mean loss of its tokens but the first, or the logit of --token minus "
            "that of --other, as the next token after the text.",
        ),
        click.option("--token", metavar="TOKEN", help='A token, with the space that belongs to it: " Paris".'),
        click.option("--other", metavar="TOKEN", help="The token that it is compared with."),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            metavar="N",
            help="The seed of what is drawn: the other text of --by resample, and random heads.",
        ),
    )
    return add_options(command, options)


def _id_of_token(described: DescribedModel, name: str, token: str) -> int:
    """Return the id of a token, given as its text or as its entry in the vocabulary."""
    tokenizer = described.tokenizer
    ids: list[int] = tokenizer(token, add_special_tokens=False).input_ids
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        ids = [tokenizer.get_vocab()[token]] if token in tokenizer.get_vocab() else ids
    if len(ids) == 1 and (ids[0] != tokenizer.unk_token_id or token == tokenizer.unk_token):
        return ids[0]
    pieces = ", ".join(repr(each) for each in tokenizer.convert_ids_to_tokens(ids)[:4])
    found = f"{len(ids)} tokens of {described.title} ({pieces}{', …' if len(ids) > 4 else ''})"
    raise InputError(
        f"{name} {token!r} is {found if len(ids) > 1 else f'no token of {described.title}'}.",
        "Give one token of its vocabulary, with the space before a word: ' Paris'.",
    )
