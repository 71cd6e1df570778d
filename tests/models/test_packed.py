"""Padding is left out of a Hugging Face model, and nothing but the time it takes changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import ModelError
from multihead.kernels.call import listen
from multihead.models import huggingface
from multihead.models.packed import PACKED_FAMILIES, _pack_inputs, leave_out_padding
from tests.families import DECODER, ENCODER, TEXT, VOCABULARY, family

BATCH, LENGTH = 4, 12
PADDING = "right", "left", "holes"
SUPPORTED = "BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA, ModernBERT, Llama, Mistral, Qwen2, Qwen3, T5"


def _distilbert() -> Any:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
    config = hf.DistilBertConfig(vocab_size=VOCABULARY, pad_token_id=0, initializer_range=0.4, **sizes)
    return hf.DistilBertForMaskedLM(config)


def _modernbert() -> Any:
    config = family("modernbert").config
    config.classifier_pooling = "mean"
    return hf.ModernBertForSequenceClassification(config)


# Each with a head and a loss that read tokens, not padding.
MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertForTokenClassification(hf.BertConfig(**ENCODER, **TEXT)),
    "roberta": lambda: hf.RobertaForTokenClassification(hf.RobertaConfig(**ENCODER, **TEXT)),
    "xlm_roberta": lambda: hf.XLMRobertaForMaskedLM(hf.XLMRobertaConfig(**ENCODER, **TEXT)),
    "distilbert": _distilbert,
    "electra": lambda: hf.ElectraForPreTraining(hf.ElectraConfig(**ENCODER, **TEXT, embedding_size=16)),
    "modernbert": _modernbert,
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, **TEXT)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, **TEXT, sliding_window=None)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER, **TEXT)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, **TEXT)),
    "t5": lambda: family("t5"),
}
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
POOLED = {"bert": hf.BertModel, "roberta": hf.RobertaModel, "xlm_roberta": hf.XLMRobertaModel}
IN_FLOAT32 = ("modernbert", *DECODERS)  # transformers rotates and normalises them in float32, whatever their dtype
BY_DISTANCE = ("modernbert", "t5")


def model_of(name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """Make a tiny model with dropout off; each time the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().to(dtype).eval()


def batch_of(name: str, padding: str, *, labels: bool = False) -> dict[str, Tensor]:
    """Make a padded batch of samples of 12, 5, 1 and 9 tokens, or with about half of the tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths, column = torch.tensor([12, 5, 1, 9])[:, None], torch.arange(LENGTH)
    holes = torch.rand(BATCH, LENGTH, generator=generator) < 0.6
    real = {"right": column < lengths, "left": column >= LENGTH - lengths, "holes": holes}[padding]
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator).masked_fill(~real, 0)
    batch = {"input_ids": ids, "attention_mask": real.long()}
    if name == "t5":
        batch["decoder_input_ids"] = ids.flip(1)[:, :7]
    if labels:
        batch |= _labels(name, real, generator)
    return batch


def _labels(name: str, real: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    if name == "modernbert":
        return {"labels": torch.tensor([0, 1, 1, 0])}
    most = VOCABULARY if name in ("xlm_roberta", "distilbert", "t5", *DECODERS) else 2
    labels = torch.randint(0, most, real.shape, generator=generator)
    if name == "t5":
        return {"labels": labels[:, :7].contiguous()}
    if name in DECODERS:
        real = real & real.roll(1, 1)  # the token before predicts it
    return {"labels": labels if name == "electra" else labels.masked_fill(~real, -100)}


def eager(name: str, batch: dict[str, Any], *, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Run the padded batch with transformers' own eager attention."""
    model = model_of(name, dtype=dtype)
    model.set_attn_implementation("eager")
    return model, model(**batch, **options)


class Rows:
    """Record how many rows and tokens the first layer of a model computes."""

    def __init__(self, model: Any) -> None:
        self.sizes: list[tuple[int, ...]] = []
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        layers[0].register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self.sizes.append(tuple(x.shape[:2]))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Compare relative to the largest number."""
    scale = max(1.0, float(wanted.detach().abs().max()))
    torch.testing.assert_close(found, wanted, atol=tolerance * scale, rtol=0)


def states_of(output: Any) -> tuple[Tensor, ...]:
    found = output.get("hidden_states")
    return output.encoder_hidden_states if found is None else found


@pytest.mark.parametrize("padding", PADDING)
class TestEveryFamily:
    @pytest.mark.parametrize("name", MODELS)
    def test_outputs_and_gradients_of_all_parameters_are_those_of_the_padded_batch(
        self, name: str, padding: str
    ) -> None:
        dtype, tolerance = (torch.float32, 1e-5) if name in IN_FLOAT32 else (torch.float64, 1e-9)
        batch = batch_of(name, padding, labels=True)
        real = batch["attention_mask"].bool()
        of_expected, expected = eager(name, batch, dtype=dtype, output_hidden_states=True)
        expected.loss.backward()
        model = model_of(name, dtype=dtype)
        rows = Rows(model)
        # The gradient of T5's bias needs the reference kernel in float64; below, T5 has no gradient.
        fast: AbstractContextManager[object] = nullcontext() if name == "t5" else mh.strict()
        with leave_out_padding(model), fast:
            output = model(**batch, output_hidden_states=True)
            output.loss.backward()
        runs_padded = padding == "holes" and name in BY_DISTANCE
        assert rows.sizes[0] == ((BATCH, LENGTH) if runs_padded else (1, int(real.sum())))
        assert_close(output.loss, expected.loss, tolerance)
        assert output.keys() == expected.keys()
        states = states_of(output)
        for found, wanted in zip(states, states_of(expected), strict=True):
            assert_close(found[real], wanted[real], tolerance)
            assert runs_padded or not found[~real].any()
        at_tokens = real if output.logits.shape[:2] == real.shape else slice(None)
        assert_close(output.logits[at_tokens], expected.logits[at_tokens], tolerance)
        gradients = {key: parameter.grad for key, parameter in of_expected.named_parameters()}
        assert any(grad is not None and grad.any() for grad in gradients.values())
        for key, parameter in model.named_parameters():
            if gradients[key] is None:
                assert parameter.grad is None, key
            else:
                assert_close(parameter.grad, gradients[key], 2 * tolerance)

    @pytest.mark.parametrize("name", [name for name in MODELS if name not in IN_FLOAT32])  # above, these are
    def test_float32_is_computed_by_the_native_kernel_within_rounding(self, name: str, padding: str) -> None:
        batch = batch_of(name, padding)
        with torch.no_grad():
            model, expected = eager(name, batch)
            with leave_out_padding(model), mh.strict():
                output = model(**batch)
        real = batch["attention_mask"].bool()
        at_tokens = real if output.logits.shape[:2] == real.shape else slice(None)
        assert_close(output.logits[at_tokens], expected.logits[at_tokens], 1e-5)


class TestWhatTheCallerGives:
    """Whatever form the inputs have, the result is that of the same call without packing."""

    @torch.no_grad()
    def compare(self, model: Any, *args: Any, **batch: Any) -> None:
        real = batch["attention_mask"].bool()
        with huggingface.install(model):
            expected = model(*args, **batch)
        rows = Rows(model)
        with leave_out_padding(model):
            output = model(*args, **batch)
        assert rows.sizes == [(1, int(real.sum()))]
        assert type(output) is type(expected)
        torch.testing.assert_close(output[0][real], expected[0][real], atol=1e-9, rtol=0)
        assert not output[0][~real].any()

    @pytest.mark.parametrize("name", POOLED)
    @torch.no_grad()
    def test_a_pooler_reads_the_first_token_of_each_sample(self, name: str) -> None:
        batch = batch_of(name, "right")
        config = model_of(name).config
        model = POOLED[name](config).double().eval()
        with huggingface.install(model):
            expected = model(**batch)
        with leave_out_padding(model):
            output = model(**batch)
        torch.testing.assert_close(output.pooler_output, expected.pooler_output, atol=1e-9, rtol=0)

    @pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "llama"])
    @pytest.mark.parametrize("rows", [1, BATCH])
    def test_position_ids_belong_to_their_tokens(self, name: str, rows: int) -> None:
        positions = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:LENGTH].expand(rows, LENGTH)
        model = model_of(name, dtype=torch.float64).base_model
        self.compare(model, **batch_of(name, "left"), position_ids=positions)

    def test_token_types_belong_to_their_tokens(self) -> None:
        types = torch.randint(0, 2, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
        self.compare(
            model_of("bert", dtype=torch.float64).base_model, **batch_of("bert", "holes"), token_type_ids=types
        )

    @pytest.mark.parametrize("name", ["bert", "roberta", "llama"])
    def test_embeddings_take_the_place_of_token_ids(self, name: str) -> None:
        model = model_of(name, dtype=torch.float64).base_model
        batch = batch_of(name, "right")
        embedded = model.get_input_embeddings()(batch.pop("input_ids"))
        self.compare(model, **batch, inputs_embeds=embedded)

    def test_arguments_may_be_positional(self) -> None:
        batch = batch_of("bert", "right")
        self.compare(model_of("bert", dtype=torch.float64).base_model, batch.pop("input_ids"), **batch)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_a_mask_may_have_any_dtype(self, dtype: torch.dtype) -> None:
        batch = batch_of("bert", "right")
        batch["attention_mask"] = batch["attention_mask"].to(dtype)
        self.compare(model_of("bert", dtype=torch.float64).base_model, **batch)

    def test_outputs_may_be_tuples(self) -> None:
        self.compare(model_of("bert", dtype=torch.float64).base_model, **batch_of("bert", "right"), return_dict=False)

    def test_a_sample_may_be_padding_alone(self) -> None:
        batch = batch_of("bert", "right")
        batch["attention_mask"][2] = 0
        self.compare(model_of("bert", dtype=torch.float64).base_model, **batch)

    @torch.no_grad()
    def test_some_of_the_hidden_states_may_be_chosen(self) -> None:
        model, batch = model_of("bert").base_model, batch_of("bert", "right")
        with leave_out_padding(model):
            states = model(**batch, output_hidden_states=[1]).hidden_states
        assert [None if each is None else tuple(each.shape) for each in states[:2]] == [None, (BATCH, LENGTH, 32)]

    @pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
    @pytest.mark.parametrize("is_causal", [True, False])
    @pytest.mark.parametrize("window", [None, 3])
    def test_a_decoder_sees_a_window_or_both_ways_in_a_row(
        self,
        name: str,
        is_causal: bool,
        window: int | None,
    ) -> None:
        config = model_of(name).config
        config.sliding_window, config.is_causal = window, is_causal
        if name == "qwen3":
            config.layer_types = ["full_attention" if window is None else "sliding_attention", "full_attention"]
        model = hf.AutoModel.from_config(config, dtype=torch.float64).eval()
        self.compare(model, **batch_of(name, "left"), use_cache=False)


class TestCallsThatRunPadded:
    """What cannot run as a row runs as without packing, with the same result to the last bit."""

    @torch.no_grad()
    def compare(self, model: Any, batch: dict[str, Any]) -> None:
        with huggingface.install(model):
            expected = model(**batch)
        rows = Rows(model)
        with leave_out_padding(model):
            output = model(**batch)
        assert rows.sizes == [(BATCH, LENGTH)]
        assert torch.equal(output[0], expected[0])

    @pytest.mark.parametrize("name", MODELS)
    def test_batches_without_padding(self, name: str) -> None:
        batch = batch_of(name, "right")
        self.compare(model_of(name), {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])})
        del batch["attention_mask"]
        self.compare(model_of(name), batch)

    def test_padding_alone(self) -> None:
        batch = batch_of("bert", "right")
        self.compare(model_of("bert"), {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])})

    def test_masks_of_four_dimensions(self) -> None:
        batch = batch_of("bert", "right")
        mask = batch["attention_mask"].bool()[:, None, None].expand(BATCH, 1, LENGTH, LENGTH)
        self.compare(model_of("bert"), {**batch, "attention_mask": mask})

    def test_feed_forward_layers_in_chunks(self) -> None:
        model = model_of("bert")
        for module in model.modules():
            if hasattr(module, "chunk_size_feed_forward"):
                module.chunk_size_feed_forward = 4
        model.config.chunk_size_feed_forward = 4
        self.compare(model, batch_of("bert", "right"))

    def test_rotary_frequencies_that_depend_on_the_length(self) -> None:
        config = model_of("llama").config
        config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        self.compare(hf.LlamaForCausalLM(config).eval(), batch_of("llama", "right"))

    def test_padding_between_tokens_of_a_window(self) -> None:
        config = hf.MistralConfig(**DECODER, **TEXT, sliding_window=3)
        self.compare(hf.MistralForCausalLM(config).eval(), {**batch_of("mistral", "holes"), "use_cache": False})

    def test_caches_with_windows(self) -> None:
        config = hf.MistralConfig(**DECODER, **TEXT, sliding_window=3)
        self.compare(hf.MistralForCausalLM(config).eval(), batch_of("mistral", "left"))

    def test_decoders(self) -> None:
        config = hf.BertConfig(**ENCODER, **TEXT, is_decoder=True)
        self.compare(hf.BertLMHeadModel(config).eval(), batch_of("bert", "right"))

    def test_a_model_whose_attention_was_changed_afterwards(self) -> None:
        model, batch = model_of("bert"), batch_of("bert", "right")
        rows = Rows(model)
        with leave_out_padding(model), torch.no_grad():
            model.set_attn_implementation("eager")
            model(**batch, output_attentions=True)
        assert rows.sizes == [(BATCH, LENGTH)]

    def test_compiled_graphs(self) -> None:
        model, batch = model_of("bert").base_model, batch_of("bert", "right")

        def runs_padded(batch: dict[str, Tensor]) -> Tensor:
            return batch["input_ids"].new_tensor(_pack_inputs(PACKED_FAMILIES["BertModel"], model, (), batch) is None)

        with huggingface.install(model):
            assert not runs_padded(batch)
            assert torch.compile(runs_padded, backend="eager", fullgraph=True)(batch)


class TestCaches:
    """A prompt is packed; its keys and values are padded for the steps that follow."""

    @torch.no_grad()
    def test_the_cache_of_a_prompt_is_padded(self) -> None:
        model, batch = model_of("llama"), batch_of("llama", "left")
        real = batch["attention_mask"].bool()
        with huggingface.install(model):
            expected = model(**batch).past_key_values
        with leave_out_padding(model):
            found = model(**batch).past_key_values
        for layer, wanted in zip(found.layers, expected.layers, strict=True):
            for x, y in ((layer.keys, wanted.keys), (layer.values, wanted.values)):
                assert x.shape == y.shape
                assert_close(x.transpose(1, 2)[real], y.transpose(1, 2)[real], 1e-5)
                assert not x.transpose(1, 2)[~real].any()

    @pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
    @torch.no_grad()
    def test_a_generated_text_is_that_of_eager_attention(self, options: dict[str, Any]) -> None:
        batch = batch_of("llama", "left")
        model = model_of("llama")
        model.set_attn_implementation("eager")
        options = {"max_new_tokens": 6, "do_sample": False, **options}
        expected = model.generate(**batch, **options)
        rows = Rows(model)
        with leave_out_padding(model):
            output = model.generate(**batch, **options)
        assert torch.equal(output, expected)
        beams = options.get("num_beams", 1)
        tokens = beams * int(batch["attention_mask"].sum())
        assert rows.sizes[0] == ((BATCH, LENGTH) if "cache_implementation" in options else (1, tokens))

    @torch.no_grad()
    def test_a_text_generated_from_a_packed_encoder_is_that_of_eager_attention(self) -> None:
        batch = {key: value for key, value in batch_of("t5", "right").items() if "decoder" not in key}
        model = model_of("t5", dtype=torch.float64)
        model.set_attn_implementation("eager")
        expected = model.generate(**batch, max_new_tokens=6)
        with leave_out_padding(model):
            output = model.generate(**batch, max_new_tokens=6)
        assert torch.equal(output, expected)


class TestTraining:
    @pytest.mark.parametrize("name", MODELS)
    def test_checkpointed_layers_have_the_same_gradients(self, name: str) -> None:
        batch, grads = batch_of(name, "right", labels=True), []
        for checkpointed in (False, True):
            model = model_of(name)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.0
                if isinstance(getattr(module, "dropout", None), float):
                    module.dropout = 0.0
            model.config.attention_probs_dropout_prob = 0.0
            model.train()
            if checkpointed:
                getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            rows = Rows(model)
            with leave_out_padding(model), mh.strict():
                model(**batch).loss.backward()
            assert rows.sizes[0] == (1, int(batch["attention_mask"].sum()))
            grads.append([parameter.grad for parameter in model.parameters()])
        for found, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("name", MODELS)
    def test_autocast_computes_in_bfloat16(self, name: str) -> None:
        batch = batch_of(name, "right", labels=True)
        model = model_of(name)
        with leave_out_padding(model), torch.autocast("cpu", torch.bfloat16):
            output = model(**batch)
        output.loss.backward()
        _, expected = eager(name, batch)
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
        torch.testing.assert_close(output.loss.float(), expected.loss, atol=0.1, rtol=0.1)

    def test_the_bias_of_t5_takes_memory_linear_in_the_tokens(self) -> None:
        requests = []

        def see(query: Tensor, key: Tensor, value: Tensor, *terms: Any, **options: Any) -> Any:
            requests.append(made(query, key, value, *terms, **options))
            return requests[-1]

        made, model = huggingface.request_of, model_of("t5")
        with pytest.MonkeyPatch.context() as patch, leave_out_padding(model):
            patch.setattr(huggingface, "request_of", see)
            model.encoder(**{key: batch_of("t5", "right")[key] for key in ("input_ids", "attention_mask")})
        assert [tuple(request.bias.values.shape) for request in requests] == [(1, 4, 2 * 27 - 1)] * 2


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_an_observed_model_is_recorded_sample_by_sample(name: str, padding: str) -> None:
    model, batch = model_of(name), batch_of(name, padding)
    with torch.no_grad():
        with mh.observe(model) as expected:
            model(**batch)
        with leave_out_padding(model), mh.observe(model) as seen:
            model(**batch)
    assert [layer.name for layer in seen.layers] == [layer.name for layer in expected.layers]
    for layer, wanted in zip(seen.layers, expected.layers, strict=True):
        assert layer.num_samples == BATCH
        for sample in range(BATCH):
            assert torch.equal(layer.weights(sample=sample), wanted.weights(sample=sample))


@torch.no_grad()
def test_a_listener_that_does_not_observe_hears_the_row() -> None:
    shapes = []

    class Ear:
        requested_statistics: frozenset[str] = frozenset()

        def receive(self, call: Any) -> None:
            shapes.append((call.request.mask, call.request.q.shape[::2]))

    model, batch = model_of("llama"), batch_of("llama", "left")
    with leave_out_padding(model), listen(Ear()):
        model(**batch)
    assert shapes == [(masks.Causal() & masks.Documents((12, 5, 1, 9)), (1, 27))] * 2


class TestTheModelIsPutBack:
    def hooks(self, model: Any) -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    @pytest.mark.parametrize("name", MODELS)
    def test_after_the_context(self, name: str) -> None:
        model, batch = model_of(name), batch_of(name, "right")
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = model(**batch)[0]
            with leave_out_padding(model):
                assert self.hooks(model)
                model(**batch)
            assert not self.hooks(model)
            assert torch.equal(model(**batch)[0], expected)

    def test_after_an_exception_in_the_model(self) -> None:
        model, batch = model_of("bert"), batch_of("bert", "right")
        with leave_out_padding(model), pytest.raises(IndexError):
            model(**{**batch, "input_ids": batch["input_ids"] + VOCABULARY})
        assert not self.hooks(model)
        with leave_out_padding(model), torch.no_grad():
            assert model(**batch).logits.shape == (BATCH, LENGTH, 2)

    @torch.no_grad()
    def test_when_the_result_is_closed(self) -> None:
        model = model_of("bert")
        undo = leave_out_padding(model)
        assert self.hooks(model)
        undo.close()
        assert not self.hooks(model)

    @torch.no_grad()
    def test_packing_twice_is_packing_once(self) -> None:
        model, batch = model_of("bert"), batch_of("bert", "right")
        with leave_out_padding(model):
            expected = model(**batch).logits
            with leave_out_padding(model):
                assert torch.equal(model(**batch).logits, expected)
            assert torch.equal(model(**batch).logits, expected)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    @torch.no_grad()
    def test_a_copy_of_a_packed_model_is_packed(self, copied: Callable[[Any], Any]) -> None:
        model, batch = model_of("bert"), batch_of("bert", "right")
        with leave_out_padding(model):
            expected = model(**batch).logits
            other = copied(model)
        rows = Rows(other)
        assert torch.equal(other(**batch).logits, expected)
        assert rows.sizes == [(1, 27)]


class TestModelsThatCannotBePacked:
    @pytest.mark.parametrize("name", ["gpt2", "whisper", "vit"])
    def test_other_families_are_rejected(self, name: str) -> None:
        model = family(name)
        with pytest.raises(ModelError) as raised, leave_out_padding(model):
            pass
        assert str(raised.value) == (
            f"{type(model).__name__} cannot leave out padding. "
            f"Give a model of one of these families: {SUPPORTED}; or use packed=False."
        )

    def test_a_model_next_to_a_supported_one_is_rejected(self) -> None:
        both = torch.nn.ModuleDict({"text": model_of("bert"), "image": family("vit")})
        with pytest.raises(ModelError, match=r"^ViTModel cannot leave out padding\. "), leave_out_padding(both):
            pass

    def test_other_modules_are_rejected(self) -> None:
        with pytest.raises(ModelError) as raised, leave_out_padding(torch.nn.Linear(2, 2)):
            pass
        assert str(raised.value) == (
            f"Linear contains no model of transformers. "
            f"Give a model of one of these families: {SUPPORTED}; or use packed=False."
        )

    def test_a_subclass_with_a_forward_pass_of_its_own_is_rejected(self) -> None:
        class Same(hf.BertModel):
            pass

        class Other(hf.BertModel):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return super().forward(*args, **kwargs)

        config = hf.BertConfig(**ENCODER, **TEXT)
        with leave_out_padding(Same(config)):
            pass
        with pytest.raises(ModelError, match=r"^Other cannot leave out padding\. "), leave_out_padding(Other(config)):
            pass


def test_the_families_are_those_that_the_errors_list() -> None:
    assert ", ".join(each.name for each in PACKED_FAMILIES.values()) == SUPPORTED
