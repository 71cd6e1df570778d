"""The options that `ablate` and `importance` share: the texts, what replaces the output of a head, and the measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import click

from multihead.cli.model_options import text_options
from multihead.errors import InputError

if TYPE_CHECKING:
    from multihead.interventions.measures import Measure
    from multihead.models.loading import DescribedModel, EncodedText

MAX_NAME_CHARACTERS = 30  # characters of a prompt in an error
DIFFERENCE = "logit-difference"
"""The value of --measure that needs --token and --other."""


def intervention_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --text, --prompt, --tokens, --by, --reference, --measure, --token and --other to a command."""
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
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_options(
    texts: int, by: str | None, reference: Sequence[str], measure: str, token: str | None, other: str | None
) -> None:
    """Reject options that contradict each other, or lack another."""
    if not texts:
        raise click.UsageError("There is no text. Give texts as --text FILE or --prompt TEXT; both may be repeated.")
    if by == "mean" and not reference:
        raise click.UsageError(
            "--by mean takes the mean output of each head over texts. Give them as --reference FILE."
        )
    if by != "mean" and reference:
        raise click.UsageError("--reference is the texts of --by mean. Add --by mean, or leave it out.")
    if by == "resample" and texts < 2:
        raise click.UsageError(
            "--by resample takes the output of a head on another text, and there is one. Give several texts."
        )
    if measure == DIFFERENCE and (token is None or other is None):
        raise click.UsageError(f"--measure {DIFFERENCE} compares two tokens. Give --token and --other.")
    if measure != DIFFERENCE and (token is not None or other is not None):
        raise click.UsageError(f"--token and --other are for --measure {DIFFERENCE}. Add it, or leave them out.")


def check_text_lengths(texts: Sequence[tuple[str, EncodedText]], measure: str, *, same: bool) -> None:
    """Reject texts without a token to predict, and of different lengths where they must be the same.

    Raises:
        InputError: a text has one token and the measure is the loss, or the lengths differ.
    """
    lengths = [encoded.ids.shape[1] for _, encoded in texts]
    for (name, _), length in zip(texts, lengths, strict=True):
        if length < 2 and measure == "loss":
            shown = shorten(name, MAX_NAME_CHARACTERS, placeholder=" …")
            raise InputError(
                f"The text {shown!r} has 1 token, and the first token of a text is not predicted.",
                "Give a longer text.",
            )
    if same and min(lengths) < max(lengths):
        raise InputError(
            f"--by resample needs texts of one length, and they have {min(lengths):,} to {max(lengths):,} tokens.",
            f"Cut them with --tokens {min(lengths)}.",
        )


def build_measure(described: DescribedModel, token: str | None, other: str | None) -> Measure | None:
    """Return the difference of the logits of two tokens; None without tokens, which is the mean loss.

    Raises:
        InputError: one of them is no single token of the model, or both are the same.
    """
    from multihead.interventions.measures import logit_difference

    if token is None or other is None:
        return None
    ids = [_id_of_token(described, name, given) for name, given in (("--token", token), ("--other", other))]
    if ids[0] == ids[1]:
        raise InputError(f"--token and --other are both {token!r}.", "Give two tokens.")
    return logit_difference(*ids)


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
