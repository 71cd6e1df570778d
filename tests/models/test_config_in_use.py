"""A use concerns one model and the passes that begin during it, whatever other models and threads do meanwhile."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import combinations, cycle, product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ModelError
from multihead.models.config_in_use import configurations_of
from multihead.models.coverage import first_base_using_interface
from multihead.tensors.undo import Undo
from tests.families import DECODER, PADDED, TEXT, batch_of, family, of_one_layer

VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VISION |= {"image_size": 8, "patch_size": 4}


class LateUse:
    """`mh.use` that begins when its block begins, as the other contexts do."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.begin = lambda: mh.use(model, **options)

    def __enter__(self) -> None:
        self.used = self.begin()

    def __exit__(self, *_: object) -> None:
        self.used.undo()


CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "use": LateUse,
    "packed": lambda model: LateUse(model, packed=True),
    "observe": mh.observe,
    "ablate": lambda model: mh.ablate(model, "L0 H0"),
    "watch": lambda model: mh.Watch(model, every=1),
}


def in_another_thread(run: Callable[[], object]) -> None:
    """Run something in another thread to its end; what it says of a context in which nothing ran does not matter."""

    def run_quietly() -> None:
        with suppress(ModelError):
            run()

    thread = Thread(target=run_quietly)
    thread.start()
    thread.join()


@contextmanager
def once_before(module: nn.Module | None, run: Callable[[], object]) -> Iterator[None]:
    """Run something in another thread before the first call of a module in the block; None: before or after it."""
    ran: list[None] = []

    def hook(*_: object) -> None:
        if not ran:
            ran.append(None)
            in_another_thread(run)

    handle = module.register_forward_pre_hook(hook) if module is not None else None
    yield
    if handle is not None:
        handle.remove()
    hook()


def places_of(model: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """Return modules that run before the mask is made, before the first, and before the last attention layer."""
    ran: list[nn.Module] = []
    with Undo() as undo:
        for each in model.modules():
            undo.hook_before_forward(each, lambda module, _: ran.append(module))
        run()
    layers = [each for each in ran if first_base_using_interface(type(each).__mro__)]
    return [next(each for each in ran if not list(each.children())), layers[0], layers[-1]]


def state_of(model: nn.Module) -> list[object]:
    """Return what a use changes: each configuration, its attention, and the number of hooks of each module."""
    hooks: list[object] = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    return [*((id(each), each._attn_implementation) for each in configurations_of(model)), *hooks]


def check_that_no_other_thread_disturbs(model: Any, run: Callable[[], Tensor], contexts: Iterator[Any]) -> None:
    """Check that a run of a model has the same result however another thread enters and leaves contexts meanwhile."""
    expected, before = run(), state_of(model)
    places = [None, *places_of(model, run), None]  # None: before or after the run
    for enter, leave in combinations(places, 2):
        context = next(contexts)(model)
        if enter is None:
            in_another_thread(context.__enter__)
        with (
            once_before(leave, partial(context.__exit__, None, None, None)),
            once_before(enter, context.__enter__) if enter is not None else nullcontext(),
        ):
            found = run()
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert state_of(model) == before


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *product(["bert", "modernbert", "llama", "gemma2", "gpt_oss", "vit"], ["sdpa", "eager", "multihead"]),
        *product(["t5", "whisper"], ["sdpa", "eager"]),
    ],
)
def test_a_pass_computes_the_same_whatever_another_thread_enters_and_leaves_meanwhile(
    name: str, implementation: str
) -> None:
    model = family(name)
    mh.use()
    with suppress(ValueError):  # GPT-OSS has no sdpa
        model.set_attn_implementation(implementation)
    batch = batch_of(name, padding="right" if name in PADDED and implementation != "sdpa" else "none")
    kept = batch.get("decoder_attention_mask", batch.get("attention_mask"))

    def run() -> Tensor:
        output: Tensor = model(**batch)[0]
        return output if kept is None else output[kept.bool()]

    contexts = [each for kind, each in CONTEXTS.items() if kind != "packed" or name in ("bert", "llama", "t5")]
    with torch.no_grad():
        check_that_no_other_thread_disturbs(model, run, cycle(contexts))


def test_none_masks_of_another_attention_keep_their_meaning() -> None:
    hf.AttentionInterface.register("without_masks", hf.AttentionInterface()["sdpa"])
    hf.AttentionMaskInterface.register("without_masks", lambda **_: None)
    model, batch = family("llama"), batch_of("llama")
    model.set_attn_implementation("without_masks")
    with torch.no_grad():
        check_that_no_other_thread_disturbs(model, lambda: model(**batch).logits, cycle(CONTEXTS.values()))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_text_is_continued_the_same_whatever_another_thread_enters_and_leaves_meanwhile(name: str) -> None:
    model, ids = family(name), batch_of(name)["input_ids"]

    def run() -> Tensor:
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        found = model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
        return torch.stack(found.logits)

    check_that_no_other_thread_disturbs(model, run, cycle([CONTEXTS["use"], CONTEXTS["observe"]]))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_part_of_a_model_is_recorded_with_the_mask_that_the_whole_model_makes(implementation: str) -> None:
    text = {**DECODER, **TEXT, "sliding_window": 4}
    config = hf.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation(implementation)
    ids = batch_of("llama")["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with mh.observe(model.model.language_model) as record:
            found = model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    assert [bool(layer.sample().visible()[future].any()) for layer in record.layers] == [False, False]


def test_the_block_of_a_pass_that_raised_an_error_restores_the_model() -> None:
    model = family("llama")
    before = state_of(model)
    used = mh.use(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[TEXT["vocab_size"]]]))
    in_another_thread(used.undo)
    assert state_of(model) == before


class TestModelsOfOneConfiguration:
    def test_are_used_one_by_one(self) -> None:
        config = hf.SiglipVisionConfig(**VISION)
        teacher, student = hf.SiglipVisionModel(config), hf.SiglipVisionModel(config)
        with mh.use(teacher):
            assert teacher.config._attn_implementation == "multihead"
            assert student.config is config
            assert config._attn_implementation == "sdpa"
            with mh.use(student):
                assert student.config._attn_implementation == "multihead"
            assert student.config is config
        assert teacher.config is config
        assert all(each.config is config for each in teacher.modules() if "config" in vars(each))

    def test_may_be_made_of_the_configuration_of_a_used_model(self, tmp_path: Path) -> None:
        config = hf.SiglipVisionConfig(**VISION)
        model = hf.SiglipVisionModel(config)
        model.save_pretrained(tmp_path)
        mh.use(model)
        made = hf.SiglipVisionModel(model.config)
        assert configurations_of(made) == [config]
        assert made.config is config
        for other in (
            hf.SiglipVisionModel.from_pretrained(tmp_path, config=model.config),
            hf.AutoModel.from_config(model.config),
        ):
            assert {each._attn_implementation for each in configurations_of(other)} == {"sdpa"}
        assert copy.deepcopy(model.config)._attn_implementation == "sdpa"
        assert model.config._attn_implementation == "multihead"

    def test_share_what_is_set_in_it_during_a_use(self) -> None:
        model = family("llama")
        config = model.config
        with mh.use(model):
            model.config.use_cache = False
            config.pad_token_id = 7
            model.resize_token_embeddings(50)
            assert model.config == config
            assert model.config.pad_token_id == 7
        assert (config.use_cache, config.vocab_size, model.config is config) == (False, 50, True)

    def test_and_of_its_parts_are_used_one_by_one(self) -> None:
        config = hf.Gemma3Config(text_config={**DECODER, **TEXT}, vision_config=VISION, mm_tokens_per_image=4)
        model, text = hf.Gemma3ForConditionalGeneration(config), hf.Gemma3ForCausalLM(config.text_config)
        with mh.use(model):
            assert {each._attn_implementation for each in configurations_of(model)} == {"multihead"}
            assert model.config.get_text_config() is model.model.language_model.config
            assert text.config._attn_implementation == "sdpa"
        assert model.config.text_config is text.config

    def test_a_used_model_is_saved_and_copied_as_itself(self, tmp_path: Path) -> None:
        model, batch = family("llama"), batch_of("llama")
        with torch.no_grad(), mh.use(model):
            expected = model(**batch).logits
            model.save_pretrained(tmp_path)
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert type(other.config) is hf.LlamaConfig
                assert other.config is other.model.config
                assert other.config._attn_implementation == "multihead"
                torch.testing.assert_close(other(**batch).logits, expected)
        loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path)
        assert loaded.config._attn_implementation == "sdpa"
        assert "multihead" not in (tmp_path / "config.json").read_text()

    def test_a_model_that_is_used_for_good_is_deleted_with_its_last_reference(self) -> None:
        model = family("llama")
        mh.use(model)
        model(**batch_of("llama"))
        parameter = model.model.norm.weight
        gc.collect()
        del model
        gc.collect()
        assert len(gc.get_referrers(parameter)) <= 1


def test_a_compiled_model_is_compiled_once_for_all_uses() -> None:
    from torch._dynamo.testing import CompileCounter

    model, batch, counter = of_one_layer(family("llama")), batch_of("llama"), CompileCounter()
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        expected = compiled(**batch).logits
        for _ in range(3):
            with mh.use(model):
                torch.testing.assert_close(compiled(**batch).logits, expected, atol=2e-5, rtol=2e-5)
            assert torch.equal(compiled(**batch).logits, expected)
    assert counter.frame_count == 2
