"""A Hugging Face model runs on our kernels by one argument, computes what eager attention computes, and is restored."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ArgumentError, ModelError, SlowPathError
from multihead.models import huggingface
from multihead.models.config_in_use import configurations_of
from tests.families import DECODER, LENGTH, TEXT, batch_of, family, of_one_layer
from tests.watched import eager

NAMES = ("bert", "modernbert", "gpt2", "llama", "gemma2", "gpt_oss", "t5", "whisper")
mh.use()


def used(name: str) -> Any:
    """Make a tiny model that runs on our kernels."""
    model = family(name)
    model.set_attn_implementation("multihead")
    return model


def choices(model: nn.Module) -> list[str]:
    return [config._attn_implementation for config in configurations_of(model)]


def at_tokens(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Slice the outputs at tokens out of a batch: those at padding are undefined."""
    kept = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    return output if kept is None else output[kept.bool()]


def without_dropout(model: nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_those_of_eager_attention(name: str, padding: str) -> None:
    batch = batch_of(name, padding="none" if name == "whisper" else padding)
    expected = eager(family(name), batch)[0]
    with torch.no_grad():
        output = used(name)(**batch)[0]
    torch.testing.assert_close(at_tokens(output, batch), at_tokens(expected, batch), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_plain_calls_and_padding_on_the_right_need_no_plan(
    name: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    plain = huggingface.attend
    monkeypatch.setattr(huggingface, "attend", lambda request: planned.append(request) or plain(request))
    with torch.no_grad():
        used(name)(**batch_of(name, padding=padding))
    assert len(planned) == (6 if name == "t5" else 0)  # the bias of T5 needs one


class TestGeneration:
    """Tokens are those of eager attention, with padding on the left and any cache."""

    WAYS: dict[str, dict[str, Any]] = {  # noqa: RUF012
        "greedy": {"do_sample": False},
        "sampling": {"do_sample": True},
        "beams": {"do_sample": False, "num_beams": 3},
        "static cache": {"do_sample": False, "cache_implementation": "static"},
        "no cache": {"do_sample": False, "use_cache": False},
    }

    def tokens(self, model: Any, **options: Any) -> Tensor:
        torch.manual_seed(0)
        found: Tensor = model.generate(
            **batch_of("llama", padding="left"), max_new_tokens=10, min_new_tokens=10, pad_token_id=0, **options
        )
        return found

    @pytest.mark.parametrize(
        ("name", "way"),
        [
            *product(("llama", "gemma2"), ("greedy", "sampling", "beams", "static cache", "no cache")),
            *product(("gpt2", "gpt_oss"), ("beams", "static cache")),
        ],
    )
    def test_in_every_way(self, name: str, way: str) -> None:
        """gemma2 and gpt_oss have sliding windows of 5 tokens, and caches that drop older keys."""
        model = family(name)
        model.set_attn_implementation("eager")
        expected = self.tokens(model, **self.WAYS[way])
        assert torch.equal(self.tokens(used(name), **self.WAYS[way]), expected)

    @pytest.mark.parametrize("compiled_by", ["generate", "user"])
    def test_one_graph_serves_all_steps_with_a_static_cache(self, compiled_by: str) -> None:
        """`generate` makes the mask outside of the compiled forward; a user's graph of the prompt is another one."""
        torch.compiler.reset()
        expected = self.tokens(of_one_layer(used("llama")), **self.WAYS["static cache"])
        graphs: list[Any] = []

        def backend(graph: Any, _: list[Tensor], **options: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        model, options = of_one_layer(used("llama")), dict(self.WAYS["static cache"])
        how: Any = hf.CompileConfig(fullgraph=True, dynamic=False, backend=backend)
        if compiled_by == "generate":
            how._compile_all_devices = True  # else `generate` compiles on accelerators only
            options["compile_config"] = how
        else:
            model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=backend)
            options["disable_compile"] = True
        assert torch.equal(self.tokens(model, **options), expected)
        assert len(graphs) == (1 if compiled_by == "generate" else 2)

    def test_assisted_by_another_model(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            assistant = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, **TEXT)).eval()
        model, one = family("llama"), {"input_ids": batch_of("llama")["input_ids"][:1], "pad_token_id": 0}
        model.set_attn_implementation("eager")
        expected = model.generate(**one, max_new_tokens=10, min_new_tokens=10, do_sample=False)
        with mh.use(model), mh.use(assistant):
            found = model.generate(
                **one, max_new_tokens=10, min_new_tokens=10, do_sample=False, assistant_model=assistant
            )
        assert torch.equal(found, expected)

    def test_from_an_encoder(self) -> None:
        ids = {name: batch_of("t5", padding="right")[name] for name in ("input_ids", "attention_mask")}
        model = family("t5")
        model.set_attn_implementation("eager")
        expected = model.generate(**ids, max_new_tokens=8, num_beams=2)
        assert torch.equal(used("t5").generate(**ids, max_new_tokens=8, num_beams=2), expected)


class TestTraining:
    """Gradients are those of eager attention."""

    def gradients(self, model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        output = at_tokens(model(**batch)[0], batch)
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum().backward()
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    @pytest.mark.parametrize("checkpointing", [False, True])
    @pytest.mark.parametrize(
        ("name", "oracle", "dtype", "tolerance"),
        [
            ("bert", "sdpa", torch.float64, 1e-9),
            ("llama", "sdpa", torch.float64, 1e-9),
            ("t5", "sdpa", torch.float64, 1e-9),
            ("gemma2", "eager", torch.float32, 1e-3),  # transformers' SDPA has no softcap, and eager no float64
        ],
    )
    def test_with_and_without_gradient_checkpointing(
        self, name: str, oracle: str, dtype: torch.dtype, tolerance: float, checkpointing: bool
    ) -> None:
        batch, model = batch_of(name, padding="right"), without_dropout(family(name).to(dtype))
        model.set_attn_implementation(oracle)
        expected = self.gradients(model, batch)
        model.set_attn_implementation("multihead")
        runs: list[str] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *_: runs.append("forward"))
        self.gradients(model, batch)
        once = len(runs)
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable()
            model.train()
        runs.clear()
        found = self.gradients(model, batch)
        assert (len(runs) > 1.5 * once) == checkpointing
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_with_adapters_of_peft(self) -> None:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model, batch = peft.get_peft_model(family("llama").double(), config), batch_of("llama", padding="right")
        expected = self.gradients(model, batch)
        with mh.use(model):
            assert choices(model) == ["multihead"]
            found = self.gradients(model, batch)
        assert found.keys() == expected.keys()
        assert all("lora" in name for name in found)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)

    @pytest.mark.parametrize("name", ["bert", "llama"])
    def test_under_autocast_in_bfloat16(self, name: str) -> None:
        """Rotary embedding leaves q and k in float32 next to v in bfloat16."""
        batch, exact = batch_of(name), eager(family(name).double(), batch_of(name))[0]
        errors = {}
        for choice in ("eager", "multihead"):
            model = family(name)
            model.set_attn_implementation(choice)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(**batch)[0]
            output.float().square().mean().backward()
            assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)
            errors[choice] = (output.double() - exact).square().mean().sqrt()
        assert errors["multihead"] <= 1.5 * errors["eager"]


@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_a_compiled_model_is_one_graph(name: str) -> None:
    """tests/models/test_config_in_use.py compiles a batch without padding."""
    torch._dynamo.reset()
    batch = batch_of(name, padding="right")
    cut = (lambda model: model) if name == "gemma2" else of_one_layer  # its second layer has no window
    expected = eager(cut(family(name)), batch)[0]
    compiled = torch.compile(cut(used(name)), backend="eager", fullgraph=True)
    with torch.no_grad():
        output = compiled(**batch)[0]
    torch.testing.assert_close(at_tokens(output, batch), at_tokens(expected, batch), atol=5e-5, rtol=5e-5)


def test_a_compiled_model_takes_a_mask_of_four_dimensions() -> None:
    torch._dynamo.reset()
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(2, 1, -1, -1).clone()
    hidden[1, :, 6:, 2] = True
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    batch = {"input_ids": batch_of("llama")["input_ids"], "attention_mask": mask}
    expected = eager(of_one_layer(family("llama")), batch)[0]
    with torch.no_grad():
        output = torch.compile(of_one_layer(used("llama")), backend="eager", fullgraph=True)(**batch)[0]
    torch.testing.assert_close(output, expected, atol=5e-5, rtol=5e-5)


def test_a_module_without_models_is_rejected() -> None:
    with pytest.raises(ModelError) as caught:
        mh.use(nn.Linear(2, 2))
    assert str(caught.value) == (
        "Linear contains no model of transformers. Give one, or build layers with mh.MultiHeadAttention."
    )


class TestLoading:
    """The name is an argument like any other of transformers."""

    def test_from_pretrained(self, tmp_path: Path) -> None:
        saved = family("bert")
        saved.save_pretrained(tmp_path)
        model = hf.AutoModel.from_pretrained(tmp_path, attn_implementation="multihead")
        assert choices(model) == ["multihead"]
        batch = batch_of("bert", padding="right")
        with torch.no_grad():
            output = model(**batch)[0]
        expected = eager(saved, batch)[0]
        torch.testing.assert_close(at_tokens(output, batch), at_tokens(expected, batch), atol=5e-5, rtol=5e-5)
        assert "multihead" not in (tmp_path / "config.json").read_text()


class TestUndo:
    """What `use` changes, `undo` and the end of a `with` block restore."""

    def test_at_the_end_of_a_block(self) -> None:
        model = family("t5")
        before = choices(model)
        with mh.use(model) as handle:
            assert set(choices(model)) == {"multihead"}
            assert repr(handle) == "<Used: T5ForConditionalGeneration>"
        assert choices(model) == before

    def test_by_the_handle_and_only_once(self) -> None:
        model = family("bert")
        model.set_attn_implementation("eager")
        handle = mh.use(model)
        handle.undo()
        assert choices(model) == ["eager"]
        model.set_attn_implementation("sdpa")
        handle.undo()
        assert choices(model) == ["sdpa"]

    def test_without_the_handle_the_change_is_permanent(self) -> None:
        model = family("bert")
        mh.use(model)
        assert choices(model) == ["multihead"]

    def test_a_block_within_a_block(self) -> None:
        model = family("bert")
        with mh.use(model):
            with mh.use(model), mh.observe(model):
                model(**batch_of("bert"))
            assert choices(model) == ["multihead"]
        assert choices(model) == ["sdpa"]

    def test_parameters_and_hooks_are_untouched(self) -> None:
        model = family("llama")
        before = {name: (id(each), each._version) for name, each in model.named_parameters()}
        with mh.use(model), torch.no_grad():
            model(**batch_of("llama"))
        assert {name: (id(each), each._version) for name, each in model.named_parameters()} == before
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class TestPacking:
    """`packed=True` leaves out padding, in addition."""

    def test_outputs_are_those_of_eager_attention_and_0_at_padding(self) -> None:
        model, batch = family("bert"), batch_of("bert", padding="right")
        expected = eager(model, batch)[0]
        with torch.no_grad(), mh.use(model, packed=True):
            output = model(**batch)[0]
        torch.testing.assert_close(at_tokens(output, batch), at_tokens(expected, batch), atol=5e-5, rtol=5e-5)
        assert not output[~batch["attention_mask"].bool()].any()

    def test_undo_removes_it(self) -> None:
        model, batch = family("llama"), batch_of("llama", padding="right")
        with torch.no_grad():
            expected = model(**batch)[0]
            mh.use(model, packed=True).undo()
            assert torch.equal(model(**batch)[0], expected)
        assert choices(model) == ["sdpa"]

    def test_its_calls_are_explained(self) -> None:
        with mh.use(family("bert"), packed=True) as used:
            found = used.explain(**batch_of("bert", padding="right"))
        assert [each.kernel for each in found.values()] == ["native", "native"]

    def test_a_model_is_needed(self) -> None:
        with pytest.raises(ArgumentError) as caught:
            mh.use(packed=True)  # type: ignore[call-overload]
        assert str(caught.value) == (
            "packed=True was given without a model. Give the model: mh.use(model, packed=True)."
        )


class TestExplanations:
    """`explain`, `strict()` and `observe` work through it."""

    def test_each_layer_is_explained_by_its_name(self) -> None:
        model = family("llama")
        with mh.use(model) as handle:
            found = handle.explain(**batch_of("llama", padding="right"))
        assert list(found) == [f"model.layers.{index}.self_attn" for index in range(2)]
        for each in found.values():
            assert each.kernel == "native"
            assert each.hidden_share > 0.4
            assert not each.dense_remainder

    def test_strict_lets_fast_calls_pass_and_raises_for_slow_ones(self) -> None:
        model, batch = family("gemma2"), batch_of("gemma2", padding="left")
        with mh.use(model), torch.no_grad():
            with mh.strict():
                model(**batch)
            model.double()
            with pytest.raises(SlowPathError, match="The reference kernel would run, which"), mh.strict():
                model(**batch)

    def test_observing_changes_no_output(self) -> None:
        model, batch = used("llama"), batch_of("llama", padding="right")
        with torch.no_grad():
            expected = model(**batch)[0]
            with mh.observe(model) as record:
                output = model(**batch)[0]
        assert torch.equal(output, expected)
        assert [layer.sample(1).num_queries for layer in record.layers] == [LENGTH - 5] * 2
