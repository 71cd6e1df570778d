"""The server of `multihead try`: its numbers are those of Python, and bad requests are one sentence."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from torch.nn.functional import cosine_similarity, cross_entropy

import multihead as mh
from multihead.errors import InputError, ModelError
from multihead.models.loading import LoadedModel, describe
from multihead.probes.blocks import CancelledError
from multihead.tensors.threads import set_torch_threads
from multihead.viewer import trial as trials
from multihead.viewer.trial import Trial, load_for_trial, open_trial
from multihead.viewer.trial_routes import TrialSite
from tests.viewer.serving import Answer, Served, serving_site
from tests.word_models import save_word_models

TEXT = "the key is under the door and nobody saw the key"
SENTENCES = "the key is under the door\nnobody saw it\nthe door is before a key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trial")
    save_word_models(made, words=64, layers=3)
    return made


@pytest.fixture(scope="module")
def language(folder: Path) -> Iterator[tuple[Trial, Served]]:
    """A tiny language model, and its server."""
    trial = open_trial(load_for_trial(describe(str(folder / "llama")), device="cpu", dtype="auto"), text=TEXT)
    with serving_site(TrialSite(trial)) as served:
        yield trial, served


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[tuple[Trial, Served]]:
    """A tiny encoder, and its server."""
    trial = open_trial(load_for_trial(describe(str(folder / "bert")), device="cpu", dtype="auto"), text=SENTENCES)
    with serving_site(TrialSite(trial)) as served:
        yield trial, served


BAD_VALUES = [
    "",
    "-1",
    "x",
    "1.5",
    "NaN",
    "inf",
    "1e3",
    "0x1",
    "null",
    "9999",
    "9" * 12,
    "9" * 5000,
    "\x00",
    "٣x",
    "1,2",
]
"""Values that no parameter of a request may have: of another type, out of range, empty, or huge."""


def ask(served: Served, what: str, **params: Any) -> Answer:
    return served.get(f"api/{what}?{urlencode(params)}")


def lines(answer: Answer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.body.splitlines()]


def logits_of(trial: Trial, text: str, **factors: float) -> torch.Tensor:
    """The logits of Python, with the output of heads such as L1H2 multiplied by factors."""
    model: Any = trial.loaded.model
    ids = trial.loaded.tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        if not factors:
            return model(ids).logits[0]  # type: ignore[no-any-return]
        with mh.scale_heads(model, factors):
            return model(ids).logits[0]  # type: ignore[no-any-return]


def losses_of(trial: Trial, text: str, logits: torch.Tensor) -> list[float]:
    ids = trial.loaded.tokenizer(text, return_tensors="pt").input_ids[0]
    found: list[float] = cross_entropy(logits[:-1].double(), ids[1:], reduction="none").tolist()
    return found


class TestALanguageModel:
    def test_the_losses_with_all_heads_on_are_those_of_python(self, language: tuple[Trial, Served]) -> None:
        trial, served = language
        read = ask(served, "text", text=TEXT).json
        assert [token["text"] for token in read["tokens"]] == TEXT.split()
        assert read["tokens"][0]["loss"] is None
        expected = losses_of(trial, TEXT, logits_of(trial, TEXT))
        assert [token["loss"] for token in read["tokens"][1:]] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert read["replay"] is True
        assert [layer["heads"] for layer in read["grid"]["layers"]] == [4, 4, 4]

    @pytest.mark.parametrize(
        ("heads", "factors", "layers"),
        [
            ("1.2", {"L1H2": 0.0}, [1, 2]),
            ("2.0", {"L2H0": 0.0}, [2, 2]),
            ("0.1:0.5,2.3:2", {"L0H1": 0.5, "L2H3": 2.0}, [0, 2]),
        ],
    )
    def test_a_change_is_that_of_scale_heads(
        self, language: tuple[Trial, Served], heads: str, factors: dict[str, float], layers: list[int]
    ) -> None:
        trial, served = language
        changed = ask(served, "change", text=TEXT, heads=heads).json
        before, after = logits_of(trial, TEXT), logits_of(trial, TEXT, **factors)
        expected = losses_of(trial, TEXT, after)
        assert changed["losses"] == [None, *(pytest.approx(loss, rel=1e-5, abs=1e-5) for loss in expected)]
        rises = [late - early for early, late in zip(losses_of(trial, TEXT, before), expected, strict=True)]
        assert (changed["predictions"], changed["worse"]) == (len(rises), sum(rise > 0.5 for rise in rises))
        p, q = before[-1].double().softmax(-1), after[-1].double().softmax(-1)
        assert changed["kl"] == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-5)
        shown = {each["id"]: (each["before"], each["after"]) for each in changed["next"]}
        assert set(shown) == {*p.topk(10).indices.tolist(), *q.topk(10).indices.tolist()}
        for id_, pair in shown.items():
            assert pair == (pytest.approx(float(p[id_]), abs=1e-6), pytest.approx(float(q[id_]), abs=1e-6))
        words = {trial.loaded.tokenizer.decode([each["id"]]): each["token"] for each in changed["next"]}
        assert all(token == word for word, token in words.items())  # no token of this vocabulary has a space
        assert changed["others"]["after"] == pytest.approx(1 - sum(after for _, after in shown.values()), abs=1e-9)
        assert (changed["layers"], changed["whole"], changed["why_whole"]) == (layers, False, None)

    def test_the_chosen_place_may_be_any_token(self, language: tuple[Trial, Served]) -> None:
        trial, served = language
        changed = ask(served, "change", text=TEXT, heads="1.2", at=3).json
        p, q = (each[3].double().softmax(-1) for each in (logits_of(trial, TEXT), logits_of(trial, TEXT, L1H2=0.0)))
        assert (changed["at"], changed["kl"]) == (3, pytest.approx(float((p * (p / q).log()).sum()), abs=1e-5))

    def test_no_head_off_changes_nothing(self, language: tuple[Trial, Served]) -> None:
        changed = ask(language[1], "change", text=TEXT, heads="").json
        assert (changed["kl"], changed["worse"], changed["changed"], changed["layers"]) == (0, 0, [], None)
        assert all(each["before"] == each["after"] for each in changed["next"])

    def test_the_changed_maps_are_those_of_observed_runs(self, language: tuple[Trial, Served]) -> None:
        trial, served = language
        changed = ask(served, "change", text=TEXT, heads="0.1").json
        model: Any = trial.loaded.model
        ids = trial.loaded.tokenizer(TEXT, return_tensors="pt").input_ids
        with torch.no_grad():
            with mh.observe(model) as before:
                model(ids)
            with mh.ablate(model, "L0H1"), mh.observe(model) as after:
                model(ids)
        weights = [[layer.sample(0).weights().double() for layer in each.layers] for each in (before, after)]
        assert [each["layer"] for each in changed["distances"]] == [1, 2]  # later layers only
        for layer in (1, 2):
            distance = ((weights[0][layer] - weights[1][layer]).abs().sum(-1) / 2).mean(-1)
            (found,) = (each["heads"] for each in changed["distances"] if each["layer"] == layer)
            assert found == pytest.approx(distance.tolist(), abs=1e-6)
        layer, head, most = changed["changed"][0]
        assert most == max(max(each["heads"]) for each in changed["distances"])
        maps = ask(served, "maps", text=TEXT, heads="0.1", layer=layer, head=head).floats
        for found, expected in zip(maps, weights, strict=True):
            np.testing.assert_allclose(np.nan_to_num(found), expected[layer][head].numpy(), atol=1e-6)

    def test_a_sweep_switches_each_head_off_once(self, language: tuple[Trial, Served]) -> None:
        trial, served = language
        *found, last = lines(ask(served, "sweep", text=TEXT, at=4))
        assert [(each["layer"], each["done"], each["total"]) for each in found] == [(0, 1, 3), (1, 2, 3), (2, 3, 3)]
        before = logits_of(trial, TEXT)
        best = int(before[4].argmax())
        for each in found:
            for head in range(4):
                after = logits_of(trial, TEXT, **{f"L{each['layer']}H{head}": 0.0})
                effect = after[4].double().log_softmax(-1)[best] - before[4].double().log_softmax(-1)[best]
                assert each["effects"][head] == pytest.approx(float(effect), abs=1e-5)
                rise = np.mean(losses_of(trial, TEXT, after)) - np.mean(losses_of(trial, TEXT, before))
                assert each["losses"][head] == pytest.approx(rise, abs=1e-5)
        assert last["seconds"] > 0

    def test_the_estimates_before_a_sweep_are_those_of_importance(self, language: tuple[Trial, Served]) -> None:
        trial, served = language
        found = json.loads(ask(served, "estimates", text=TEXT, at=4).body)
        best = int(logits_of(trial, TEXT)[4].argmax())
        measure = mh.Measure(lambda output, _: output.logits[:, 4].log_softmax(-1)[:, best], more_is_better=True)
        batch = trial.read_text(TEXT, lambda: False).batch
        estimates = mh.importance(trial.loaded.model, [batch], measure, method="gradient")
        assert found["effects"] == pytest.approx(estimates.effects.flatten().tolist(), abs=1e-5)
        assert max(map(abs, found["effects"])) > 1e-3

    def test_a_sweep_reports_no_peak_memory_where_the_system_does_not(
        self, language: tuple[Trial, Served], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("multihead.viewer.trial.peak_memory_of_process", lambda: None)
        *_, last = lines(ask(language[1], "sweep", text=TEXT, at=4))
        assert last["peak_mib"] is None

    def test_the_continuation_is_that_of_generate(self, language: tuple[Trial, Served]) -> None:
        trial, served = language
        found = lines(ask(served, "continuation", text=TEXT, heads="1.2,0.1"))
        assert found[-1] == {"done": True}
        said = {side: [token for each in found for token in each.get(side, [])] for side in ("before", "after")}
        model: Any = trial.loaded.model
        inputs = trial.loaded.tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
        expected = {"before": model.generate(**inputs, **options)}
        with mh.ablate(model, ["L1H2", "L0H1"]):
            expected["after"] = model.generate(**inputs, **options)
        for side, ids in expected.items():
            given, whole = (trial.loaded.tokenizer.decode(each[0]) for each in (inputs.input_ids, ids))
            assert "".join(said[side]) == whole.removeprefix(given)  # with the spaces between words
            assert len(said[side]) == ids.shape[1] - inputs.input_ids.shape[1]

    def test_heads_are_grouped_by_kind_the_strongest_first(self, language: tuple[Trial, Served]) -> None:
        trial, served = language
        kinds = ask(served, "text", text=TEXT).json["kinds"]
        expected: dict[str, list[list[int]]] = {}
        for each in trial.read_text(TEXT, lambda: False).record.kinds():
            expected.setdefault(each.kind, []).append([each.layer, each.head])
        assert kinds == expected

    @pytest.mark.parametrize(
        ("what", "params", "status", "said"),
        [
            ("text", {"text": "key"}, 400, "The text has 1 token, and the first token is not predicted. Give a longer"),
            ("text", {"text": " "}, 400, "The text is empty. Give at least one word."),
            ("change", {"heads": "7.1"}, 404, "There is no layer L7. Give one from L0 to L2."),
            ("change", {"heads": "1.9"}, 404, "There is no head L1 H9. L1 has heads H0 to H3."),
            ("change", {"heads": "1.2:inf"}, 400, "heads has '1.2:inf'. Give layer.head or layer.head:factor, such as"),
            ("change", {"heads": "1.2", "at": 99}, 400, "There is no token 99. Give one from 0 to 10."),
            (
                "change",
                {"heads": ",".join(f"{layer}.{head}" for layer in range(3) for head in range(4))},
                400,
                "All heads of the model are off. Leave some on.",
            ),
            ("maps", {"layer": 1, "head": 9}, 404, "There is no head L1 H9. L1 has heads H0 to H3."),
            ("maps", {"layer": 1}, 400, "The head is missing. Give a whole number from 0 to"),
            ("maps", {"layer": 1, "head": 0, "sentence": 3}, 404, "There is no sentence 3. Give one from 0 to 0."),
            ("text", {"lang": "fr"}, 400, 'lang is "fr", and must be "en" or "zh".'),
            ("sweep", {"text": "key"}, 400, "The text has 1 token"),
            ("sweep", {"at": 11}, 400, "There is no token 11. Give one from 0 to 10."),
            ("sweep", {"at": 5000}, 400, "There is no token 5000. Give a number from 0 to 1023."),
            ("continuation", {"heads": "9.9"}, 404, "There is no layer L9."),
        ],
    )
    def test_a_bad_request_is_one_sentence(
        self, language: tuple[Trial, Served], what: str, params: dict[str, Any], status: int, said: str
    ) -> None:
        answer = ask(language[1], what, **{"text": TEXT, **params})
        assert answer.status == status, answer.body
        assert answer.error.startswith(said)

    @pytest.mark.parametrize("of", ["language", "encoder"])
    def test_no_value_of_a_parameter_makes_the_server_fail(self, of: str, request: pytest.FixtureRequest) -> None:
        trial, served = request.getfixturevalue(of)
        known: dict[str, dict[str, Any]] = {
            "model": {"lang": "en"},
            "text": {"lang": "en"},
            "change": {"heads": "1.2", "at": "2", "lang": "en"},
            "maps": {"heads": "1.2", "layer": "1", "head": "2", "sentence": "0"},
            "estimates": {"at": "2"},
            "sweep": {"at": "2"},
            "continuation": {"heads": "1.2"},
        }
        valid = [("continuation", "heads", "")]  # no head
        valid += [(what, "heads", "") for what in ("change", "maps")]
        for what, params in known.items():
            for name in params:
                for value in BAD_VALUES:
                    if (what, name, value) not in valid:
                        answer = ask(served, what, **{"text": trial.first_text, **params, name: value})
                        assert answer.status in (400, 404), (what, name, value, answer.status)
                        assert answer.error.endswith(".")
            if what != "model":
                for text in ("", " ", "\x00", "the " * 20_000, "\n\n"):
                    answer = ask(served, what, **{**params, "text": text})
                    assert answer.status == 400, (what, text, answer.body)

    def test_a_text_longer_than_the_page_shows_is_one_sentence(
        self, language: tuple[Trial, Served], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trials, "MAX_TOKENS", 5)
        answer = ask(language[1], "text", text="nobody saw the key under the door")
        assert answer.error == "The text is 7 tokens long, and this page shows 5. Give a shorter text."

    def test_a_request_that_nobody_waits_for_stops_between_two_blocks(
        self, language: tuple[Trial, Served], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trial, served = language
        model: Any = trial.loaded.model
        begun, go_on, ran = threading.Event(), threading.Event(), []

        def wait(*_: object) -> None:
            ran.append(0)
            begun.set()
            go_on.wait(20)

        def count(*_: object) -> None:
            ran.append(2)

        hooks = [
            model.model.layers[0].self_attn.register_forward_hook(wait),
            model.model.layers[2].self_attn.register_forward_hook(count),
        ]
        query = urlencode({"text": TEXT, "heads": "0.0"})
        with served.requesting(f"api/change?{query}"):
            assert begun.wait(20)
        threading.Event().wait(0.3)  # until the server has seen that the client is gone
        go_on.set()
        assert ask(served, "change", text=TEXT, heads="").status == 200  # the thread is free again
        for hook in hooks:
            hook.remove()
        assert ran == [0]

    def test_a_text_whose_check_was_stopped_is_not_kept(
        self, language: tuple[Trial, Served], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone = threading.Event()
        monkeypatch.setattr(trials.Replay, "check_exactness", lambda *_: gone.set())
        with pytest.raises(CancelledError):
            language[0].read_text("nobody saw it", gone.is_set)
        assert "nobody saw it" not in language[0]._runs

    def test_a_model_that_cannot_be_replayed_runs_whole_and_says_so(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trials.Replay, "check_exactness", lambda *_: False)
        trial = Trial(load_for_trial(describe(str(folder / "llama")), device="cpu", dtype="auto"))
        trial.loaded.model.requires_grad_(False)
        run = trial.read_text(TEXT, lambda: False)
        found = trial.change_heads(run, {(2, 1): 0.0}, None, lambda: False)
        assert found["losses"][1:] == pytest.approx(losses_of(trial, TEXT, logits_of(trial, TEXT, L2H1=0.0)), rel=1e-5)
        assert (found["layers"], found["whole"]) == ([0, 2], True)
        assert found["why_whole"].startswith("its layers pass more to each other")


class TestAnEncoder:
    def test_the_similarities_are_cosines_of_mean_vectors(self, encoder: tuple[Trial, Served]) -> None:
        trial, served = encoder
        model: Any = trial.loaded.model

        def similarities() -> list[list[float]]:
            vectors = []
            for sentence in SENTENCES.split("\n"):
                inputs = trial.loaded.tokenizer(sentence, return_tensors="pt")
                with torch.no_grad():
                    vectors.append(model(inputs.input_ids, inputs.attention_mask).last_hidden_state[0].mean(0))
            return [[float(cosine_similarity(a, b, dim=0)) for b in vectors] for a in vectors]

        read = ask(served, "text", text=SENTENCES).json
        assert read["sentences"] == SENTENCES.split("\n")
        assert [token["sentence"] for token in read["tokens"]] == [0] * 6 + [1] * 3 + [2] * 6
        changed = ask(served, "change", text=SENTENCES, heads="1.2").json
        before = similarities()
        with mh.ablate(model, "L1H2"):
            after = similarities()
        for found, expected in ((read["similarity"], before), (changed["similarity"], after)):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        *swept, _ = lines(ask(served, "sweep", text=SENTENCES))
        change = np.array(after) - np.array(before)
        largest = change.flat[np.abs(change).argmax()]
        assert swept[1]["effects"][2] == pytest.approx(largest, abs=1e-5)
        assert swept[1]["losses"] is None

    def test_the_estimates_are_gradients_of_the_similarities(
        self, encoder: tuple[Trial, Served], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trial, served = encoder
        found = json.loads(ask(served, "estimates", text=SENTENCES).body)["effects"]
        model: Any = trial.loaded.model
        factors = [torch.ones(4, requires_grad=True) for _ in range(3)]
        vectors = []
        with mh.scale_heads(model, {f"L{layer}": each for layer, each in enumerate(factors)}):
            for sentence in SENTENCES.split("\n"):
                inputs = trial.loaded.tokenizer(sentence, return_tensors="pt")
                vectors.append(model(inputs.input_ids, inputs.attention_mask).last_hidden_state[0].mean(0))
        pairs = [cosine_similarity(vectors[a], vectors[b], dim=0) for a, b in ((0, 1), (0, 2), (1, 2))]
        changes = -torch.stack([torch.cat(torch.autograd.grad(each, factors, retain_graph=True)) for each in pairs])
        largest = changes.gather(0, changes.abs().argmax(0, keepdim=True))[0]  # (heads,)
        assert found == pytest.approx(largest.tolist(), abs=1e-6)
        assert max(map(abs, found)) > 1e-4
        monkeypatch.setattr(trials, "MAX_ESTIMATED_SENTENCES", 2)
        assert json.loads(ask(served, "estimates", text=SENTENCES).body)["effects"] is None

    def test_maps_are_those_of_the_sentence(self, encoder: tuple[Trial, Served]) -> None:
        found = [
            ask(encoder[1], "maps", text=SENTENCES, heads="0.1", layer=2, head=0, sentence=row).floats for row in (0, 1)
        ]
        assert [each.shape for each in found] == [(2, 6, 6), (2, 3, 3)]

    def test_fewer_than_three_sentences_and_a_continuation_are_one_sentence(
        self, encoder: tuple[Trial, Served]
    ) -> None:
        few = ask(encoder[1], "text", text="the key\n\nthe door")
        assert few.error.startswith("There are 2 sentences, and an encoder compares at least 3. Write each sentence in")
        with pytest.raises(ModelError, match="bert does not continue a text"):
            encoder[0].continue_text(encoder[0].read_text(SENTENCES, lambda: False), {}, lambda *_: None, lambda: False)


@pytest.mark.parametrize(("seconds", "best", "most"), [({1: 3, 2: 2, 4: 5}, 2, 7), ({1: 0.9, 2: 22, 4: 22}, 1, 2)])
def test_the_number_of_threads_is_that_of_the_fastest_click_and_a_slower_one_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], best: int, most: float
) -> None:
    trial = Trial(load_for_trial(describe(str(folder / "llama")), device="cpu", dtype="auto"), TEXT)
    clock = [0.0]
    trial.read_text(TEXT, lambda: False)
    monkeypatch.setattr(trials, "perf_counter", lambda: clock[0])

    def click(run: object, factors: dict[tuple[int, int], float], token: None, is_cancelled: Any) -> None:
        assert factors == {(1, 0): 0.0}  # a head of the middle layer
        for _ in range(100):
            clock[0] += seconds[torch.get_num_threads()] / 100
            trials.raise_if_cancelled(is_cancelled)

    monkeypatch.setattr(trial, "change_heads", click)
    with set_torch_threads(4):
        assert trial.fastest_threads() == best
        assert torch.get_num_threads() == 4
    assert clock[0] <= most + 0.5


def test_a_first_text_that_is_too_short_is_an_error_before_the_heads_are_measured(folder: Path) -> None:
    loaded = load_for_trial(describe(str(folder / "llama")), device="cpu", dtype="auto")
    steps: list[str] = []
    with pytest.raises(InputError, match="1 token"):
        open_trial(loaded, text="key", show=lambda step, *_: steps.append(step))
    assert steps == []


def test_look_observe_and_try_name_the_tokens_alike_and_a_predicted_byte_by_its_value() -> None:
    vocabulary = ["<unk>", "▁", "猫", "坐", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(
        BPE({piece: place for place, piece in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=len(vocabulary))).eval()
    text, names = "猫坐 é", ["", "猫", "坐", " ", "é", "⤷"]
    assert mh.look(model, text, tokenizer=tokenizer, textbook=False, show=False).texts[0].tokens == names
    with torch.no_grad(), mh.observe(model, tokenizer=tokenizer) as seen:
        model(**tokenizer(text, return_tensors="pt"))
    assert seen.texts[0].tokens == names
    trial = open_trial(LoadedModel("tiny", "tiny", model, tokenizer, head="language"), text=text)
    run = trial.read_text(text, lambda: False)
    described = trial.describe_text(run, "en")
    assert [each["text"] for each in described["tokens"]] == ["", "猫", "坐", " ", "é", ""]
    for byte in (0xE5, 0xBD):
        assert run.decode_next_token(vocabulary.index(f"<0x{byte:02X}>"), 1) == f"<0x{byte:02X}>"
