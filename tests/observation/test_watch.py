"""One training step in many is observed; the others run the model's own code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ArgumentError, ModelError, ProbeError
from multihead.kernels.call import active_listeners


class Model(nn.Module):
    """Two causal layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mh.MultiHeadAttention(embed_dim=16, num_heads=2) for _ in range(2))
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, mask=mh.masks.Causal())
        return self.out(x)


def train(model: nn.Module, watch: mh.Watch | None, steps: int) -> list[Tensor]:
    """Train, in the watch if there is one, and return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(2, 6, 16, generator=generator)
        optimizer.zero_grad()
        if watch is None:
            model(x).square().mean().backward()
        else:
            with watch:
                model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def model_of_seed() -> Model:
    torch.manual_seed(0)
    return Model()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)).eval()


def test_every_third_step_is_observed_and_training_is_the_same_bit_for_bit() -> None:
    unwatched, model = train(model_of_seed(), None, 7), model_of_seed()
    watch = mh.Watch(model, every=3)
    watched = train(model, watch, 7)
    assert all(map(torch.equal, watched, unwatched))
    assert watch.series.steps == [0, 3, 6]
    assert watch.step == 7
    assert watch.series.layers == {0: "blocks.0", 1: "blocks.1"}


def test_a_watch_shows_its_steps_and_the_table_of_its_series() -> None:
    watch = mh.Watch(model := model_of_seed(), every=3, probes=("entropy", "first_mass"))
    assert repr(watch) == "<Watch of Model: 0 of 0 steps observed (every=3), entropy, first_mass>"
    assert "nothing was observed yet" in watch._repr_html_()
    train(model, watch, 7)
    assert repr(watch) == "<Watch of Model: 3 of 7 steps observed (every=3), entropy, first_mass>"
    title, shown = "Watch of Model</strong>: 3 of 7 steps observed (every=3), entropy, first_mass.", watch._repr_html_()
    assert title in shown
    assert watch.series._repr_html_() in shown


def test_the_numbers_are_those_of_the_weights() -> None:
    model = model_of_seed()
    watch = mh.Watch(model, probes=("entropy", "largest_score"), layers="blocks.0", per_head=True)
    x = torch.randn(2, 6, 16)
    with watch:
        model(x)
    layer = model.blocks[0].double().requires_grad_(False)
    q, k = (proj(x.double()).view(2, 6, 2, 8).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj))
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    entropy = -torch.xlogy(weights, weights).sum(-1).mean((0, 2))
    largest = scores.amax((0, 2, 3))
    assert watch.numbers == {
        name: pytest.approx(float(value), abs=1e-5)
        for each, values in (("entropy", entropy), ("largest_score", largest))
        for name, value in {
            f"heads/{each}/L00/mean": values.mean(),
            f"heads/{each}/L00/min": values.min(),
            f"heads/{each}/L00/max": values.max(),
            f"heads/{each}/L00/H00": values[0],
            f"heads/{each}/L00/H01": values[1],
        }.items()
    }
    np.testing.assert_allclose(watch.series.values("entropy", layer=0), entropy[None], atol=1e-5)


class Reader(nn.Module):
    """A causal layer over embedded tokens, which copies the embeddings of the tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(32, 16)
        self.layer = mh.MultiHeadAttention(embed_dim=16, num_heads=2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        return self.layer(x, mask=mh.masks.Causal())


def test_a_watch_stores_the_kinds_that_a_record_of_the_same_step_has() -> None:
    torch.manual_seed(0)
    model = Reader()
    with torch.no_grad():  # head 0 looks at the first place, head 1 spreads evenly
        model.places.weight[0].mul_(40)
        model.layer.q_proj.weight[8:] = 0
        model.layer.q_proj.bias[8:] = 0
    watch = mh.Watch(model, every=1, kinds=True, special_ids=[3])
    ids = torch.randint(20, (5, 32))
    unwatched = model(ids)
    with mh.observe(model, probes=watch.probes, special_ids=[3], keep="statistics") as seen:
        model(ids)
    with watch:
        watched = model(ids)
    kinds = seen.layers[0].kinds
    assert watch.series.kinds(layer=0) == [kinds]
    assert "broad" in kinds[1]
    heads = [name for of_head in kinds for name in of_head]
    counts = {name: number for name, number in watch.numbers.items() if name.startswith("heads/kind/")}
    assert counts == {f"heads/kind/{each.name}": heads.count(each.name) for each in watch.kinds}
    assert torch.equal(watched, unwatched)


def test_the_kinds_of_a_watch_are_the_built_in_ones_or_those_given() -> None:
    in_pictures = {"one_way", "neighbours"}
    given = [kind.name for kind in mh.kinds.KINDS if kind.texts == "given" and kind.name not in in_pictures]
    own = mh.kinds.Kind("own", mh.probes.offset_mass(-2))
    for kinds, special, names in (
        (False, (), []),
        (True, (), [name for name in given if name != "separator"]),
        (True, (1,), given),
        ("induction", (), ["induction"]),
        (own, (1,), [*given, "own"]),
        ([mh.kinds.KINDS[0], "broad", own], (), ["previous", "broad", "own"]),
    ):
        watch = mh.Watch(model := Reader(), kinds=kinds, special_ids=special, probes="entropy")
        assert [kind.name for kind in watch.kinds] == names
        measured = [kind.probe.name for kind in watch.kinds if kind.probe is not None]
        assert [probe.name for probe in watch.probes] == [*dict.fromkeys(["entropy", *measured])]
        with watch:
            model(torch.randint(20, (5, 32)))
        decided = [kind.name for kind in watch.kinds if watch.series.decides(kind)]
        assert decided == names
    assert repr(watch).startswith("<Watch of Reader: 1 of 1 step observed (every=100), 3 kinds, entropy, previous_mass")


def test_kinds_whose_inputs_are_missing_are_not_decided() -> None:
    watch = mh.Watch(model := model_of_seed(), kinds=("induction", "first"))  # the model reads no token ids
    train(model, watch, 1)
    assert [name for name in watch.numbers if "kind" in name] == ["heads/kind/first"]
    assert watch.series.changes("induction") == []
    nothing = mh.Watch(model, kinds="induction", probes="largest_score")
    train(model, nothing, 1)
    with pytest.raises(ArgumentError) as caught:
        nothing.series.kinds(layer=0)
    sentence = "There are no kinds of the heads of layer 0. No layer had what its kinds are measured from."
    assert str(caught.value) == sentence


def test_a_log_gets_the_numbers_of_each_observed_step() -> None:
    written: list[tuple[str, float, int]] = []
    calls: list[int] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            written.append((tag, scalar_value, global_step))

    model = model_of_seed()
    watch = mh.Watch(model, every=2, probes="entropy", log=Writer())
    train(model, watch, 3)
    assert [step for name, _, step in written if name == "heads/entropy/L01/mean"] == [0, 2]
    assert {name: number for name, number, step in written if step == 2} == watch.numbers
    train(model, mh.Watch(model, every=2, log=lambda _, step: calls.append(step)), 3)
    assert calls == [0, 2]


def test_a_step_that_fails_is_not_counted_and_leaves_no_listener() -> None:
    watch = mh.Watch(model := model_of_seed())
    with pytest.raises(ZeroDivisionError), watch:
        raise ZeroDivisionError
    assert (watch.step, watch.series.steps, active_listeners()) == (0, [], ())
    train(model, watch, 1)
    assert watch.series.steps == [0]


def test_a_hugging_face_model_computes_its_own_attention_in_the_other_steps() -> None:
    model = gpt2()
    ids = torch.randint(3, 100, (2, 8))
    stock = model(ids).logits
    watch = mh.Watch(model, every=2, probes="entropy")
    implementation = model.config._attn_implementation
    logits = []
    for _ in range(3):
        with watch:
            logits.append(model(ids).logits)
    assert torch.equal(logits[1], stock)
    torch.testing.assert_close(logits[0], stock)
    assert model.config._attn_implementation == implementation
    assert watch.series.steps == [0, 2]


def test_a_transformers_trainer_logs_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = gpt2()
    ids = torch.randint(3, 100, (8, 8))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    watch = mh.Watch(model, every=2, probes="entropy")
    watch.attach(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "heads/entropy/L00/mean" in entry]
    assert watch.series.steps == [0, 2]
    assert len(logged) == 2
    assert {name: logged[1][name] for name in watch.numbers} == watch.numbers


def test_a_compiled_model_is_not_compiled_again_by_an_observed_step() -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    model = torch.compile(model_of_seed(), backend=counter)
    watch = mh.Watch(model, every=3, probes="entropy")
    x = torch.randn(2, 6, 16)
    with watch:
        model(x)
    assert counter.frame_count == 0
    for _ in range(2):
        with watch:
            model(x)
    compiled = counter.frame_count
    assert compiled > 0
    for _ in range(4):
        with watch:
            model(x)
    assert (counter.frame_count, watch.series.steps) == (compiled, [0, 3, 6])


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"every": 0}, ArgumentError, "every is 0."),
        ({"probes": "received"}, ProbeError, "received has no mean over the queries of a head."),
        ({"probes": "largest_key"}, ProbeError, "largest_key has no mean over the queries of a head."),
        ({"probes": "entropie"}, ProbeError, "There is no statistic 'entropie'."),
        ({"kinds": "verbs"}, ArgumentError, "There is no kind 'verbs'."),
        ({"kinds": None}, ArgumentError, "kinds is None, and must be True, False, or a list of kinds of heads."),
        ({"kinds": 3}, ArgumentError, "kinds is a value of type int, and must be True, False, or a list of kinds"),
        ({"kinds": []}, ArgumentError, "kinds is empty. Give some kinds, True for all built-in ones, or False."),
        ({"kinds": [3]}, ArgumentError, "3 is not a kind of head. Give values of multihead.kinds.Kind."),
        ({"kinds": "separator"}, ArgumentError, "The kind separator needs special tokens. Give special_ids, such as"),
        (
            {"kinds": ["repeated_first"]},
            ArgumentError,
            "The kind repeated_first needs texts of repeated random tokens. Measure it with mh.look",
        ),
        (
            {"kinds": "one_way"},
            ArgumentError,
            "The kind one_way needs pictures, which the model does not take as pixel_values. Leave it out.",
        ),
        (
            {"kinds": mh.kinds.Kind("own", mh.probes.Statistic("mine"))},
            ArgumentError,
            "The kind own has a statistic without a function. Give it a probe.",
        ),
        ({"special_ids": "[CLS]"}, ArgumentError, "special_ids is a string, and must be a list of token ids."),
    ],
)
def test_an_option_that_does_not_exist_is_rejected(options: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(sentence)}"):
        mh.Watch(Model(), **options)


def test_a_step_inside_a_step_and_a_model_without_attention_are_rejected() -> None:
    watch = mh.Watch(Model(), every=2)
    watch.step = 1
    with watch, pytest.raises(ArgumentError) as caught:
        watch.__enter__()
    assert str(caught.value) == "The watch is already in a step. End one step before the next one begins."
    plain = mh.Watch(nn.Linear(2, 2))
    with pytest.raises(ModelError), plain:
        plain.model(torch.zeros(1, 2))
    unknown = mh.Watch(Model(), layers="decoder")
    for _ in range(2):  # the second step is not told that the first one is still running
        with pytest.raises(ModelError, match="matches no module"), unknown:
            pass


def test_factors_bring_the_largest_score_down_to_the_threshold(tmp_path: Path) -> None:
    layer = mh.MultiHeadAttention(embed_dim=16, num_heads=2, bias=False).double()
    with torch.no_grad():
        layer.q_proj.weight[:8] *= 50
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    watch = mh.Watch(layer)
    with mh.observe(layer, probes="largest_score") as seen, watch:
        layer(x)
    before = seen.layers[0].summary("max")["largest_score"]
    threshold = float(before[0]) / 4
    factors = mh.qk_clip_factors(seen, threshold)["MultiHeadAttention"]
    assert factors.tolist() == [pytest.approx(0.25), 1]
    with mh.observe(layer, probes="largest_score", keep="summary") as summed:
        layer(x)
    summed.save(tmp_path / "summed.safetensors")
    for same in (watch, summed, mh.Record.load(tmp_path / "summed.safetensors")):
        torch.testing.assert_close(mh.qk_clip_factors(same, threshold)["MultiHeadAttention"], factors)
    with torch.no_grad():
        layer.q_proj.weight *= factors.double().repeat_interleave(8)[:, None]
    with mh.observe(layer, probes="largest_score") as after:
        layer(x)
    assert float(after.layers[0].summary("max")["largest_score"][0]) == pytest.approx(threshold, rel=1e-6)


def test_factors_need_the_largest_score_and_a_positive_threshold() -> None:
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    with mh.observe(layer, probes="entropy") as seen:
        layer(torch.zeros(1, 3, 8))
    sentence = 'The statistic \'largest_score\' was not observed. Observe with probes=("entropy", "largest_score").'
    with pytest.raises(ProbeError) as caught:
        mh.qk_clip_factors(seen)
    assert str(caught.value) == sentence
    with pytest.raises(ArgumentError, match=r"^threshold is 0\."):
        mh.qk_clip_factors(seen, 0)
    with pytest.raises(ArgumentError, match=r"^Nothing was observed\."):
        mh.qk_clip_factors(mh.Watch(layer))
