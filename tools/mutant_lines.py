"""Broken lines for mutation testing: what each one breaks, and the tests that must fail."""

from __future__ import annotations

from typing import NamedTuple

LAYER = "tests/layer/test_agreement.py"


class Mutant(NamedTuple):
    """One broken line of the library.

    Attributes:
        part: the part of the library.
        breaks: what no longer works.
        file: its path in src/multihead.
        text: the original text, which occurs in the file exactly once.
        replacement: the text that replaces it.
        tests: the tests that must fail, as arguments of pytest.
    """

    part: str
    breaks: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


def _layer(which: str) -> tuple[str, ...]:
    return (LAYER, "-k", which)


_FUSED = ("tests/kernels/test_agreement.py", "-k", "fused")

# fmt: off
MUTANTS = (
    Mutant("native kernel", "sums over blocks of queries are overwritten", "kernels/native/kernel.py",
           "added = dk.to(torch.float32, copy=True), dv.to(torch.float32, copy=True)", "added = dk.float(), dv.float()",
           ("tests/kernels/native/test_kernel.py", "-k", "blocks_of_rows")),
    Mutant("native kernel", "one seed for every dropout", "kernels/native/kernel.py",
           'int(torch.randint(1 << 62, (), device="cpu")) if request.dropout else 0', "1",
           ("tests/layer/test_attention.py", "-k", "dropout")),
    Mutant("native kernel", "features are read as contiguous if they are not", "kernels/native/call.py",
           "return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()", "return tensor",
           ("tests/kernels/native/test_call.py",)),
    Mutant("native kernel", "a block of rows uses the bias of the first rows", "kernels/native/call.py",
           "(queries - 1 - (rows.rows.start or 0))", "(queries - 1)", ("tests/kernels/native/test_bias_gradient.py",)),
    Mutant("sdpa kernel", "rectangles over the same rows are not joined", "kernels/sdpa.py",
           "joined = torch.logaddexp(logsumexp[place], part_logsumexp)",
           "joined = torch.maximum(logsumexp[place], part_logsumexp)",
           ("tests/kernels/test_agreement.py", "-k", "rectangles")),
    Mutant("sdpa kernel", "a scale of 0 or below reaches the fused call", "kernels/sdpa.py",
           "if request.scale <= 0:", "if request.scale < -9:", ("tests/kernels/test_sdpa.py", "-k", "scale")),
    Mutant("sdpa kernel", "gradients of empty rows", "kernels/sdpa.py",
           "finite = logsumexp.masked_fill(logsumexp == -torch.inf, 0)", "finite = logsumexp", _FUSED),
    Mutant("sdpa kernel", "the gradient of the logsumexp", "kernels/sdpa.py",
           "dq += g * weighted_keys", "dq += weighted_keys", _FUSED),
    Mutant("reference kernel", "a sink takes no weight", "kernels/reference.py",
           "total = total + (sink - largest).exp()", "total = total + 0",
           ("tests/kernels/test_agreement.py", "-k", "reference")),
    Mutant("reference kernel", "a block leaves out its last key", "kernels/reference.py",
           "return slice(int(start[seeing].min()), int(stop.max())) if",
           "return slice(int(start[seeing].min()), int(stop.max()) - 1) if",
           ("tests/kernels/test_reference.py", "-k", "blocks")),
    Mutant("reference kernel", "empty rows divide by 0", "kernels/reference.py",
           "total = total.masked_fill(empty, 1)", "total = total * 1",
           ("tests/kernels/test_contract.py", "-k", "reference")),
    Mutant("non-finite values", "NaN in hidden values", "kernels/nonfinite.py",
           "v=v.masked_fill(bad_keys[..., None], 0)", "v=v", ("tests/kernels/test_nonfinite.py",)),
    Mutant("non-finite values", "a query that is NaN returns a number", "kernels/nonfinite.py",
           "(bad_queries & sees_any) | _sees(", "_sees(", ("tests/kernels/test_nonfinite.py",)),
    Mutant("bounds", "Causal hides the query's own key", "masks/causal.py",
           "return torch.zeros_like(queries), queries + 1", "return torch.zeros_like(queries), queries",
           ("tests/plan/test_bounds.py",)),
    Mutant("bounds", "a gap between two intervals is filled", "masks/base.py",
           "joined = bool(touching.all()) if extent.readable else self.starts_at_first_key", "joined = True",
           ("tests/plan/test_bounds.py",)),
    Mutant("bounds", "a window of one query is a key wider", "masks/window.py",
           "return position - self.size + 1, position + self.after + 1",
           "return position - self.size, position + self.after + 1",
           ("tests/plan/test_bounds.py",)),
    Mutant("dense masks", "a window is a key wider", "masks/window.py",
           "keys > queries - self.size", "keys >= queries - self.size",
           ("tests/masks/test_tile.py",)),
    Mutant("dense masks", "positions after all documents see everything", "masks/documents.py",
           " & (of_query >= 0)", "", ("tests/masks/test_tile.py",)),
    Mutant("packing", "padding is restored as 1", "packing.py",
           "padded = x.new_zeros(", "padded = x.new_ones(", _layer("padded")),
    Mutant("packing", "positions under left padding", "packing.py",
           "place = place - (self.length - self.lengths[self.index // self.length])", "place = place + 0",
           ("tests/test_packing.py",)),
    Mutant("packing", "left padding is treated as right padding", "packing.py",
           'if self.side == "right":', 'if self.side != "":', _layer("padded or packed")),
    Mutant("packing", "every mask is used as it is on packed tokens", "masks/base.py",
           "return all(part.translation_invariant for part in self.parts)", "return True", _layer("padded or packed")),
    Mutant("rotary", "the sign of the rotation", "rotary/waves.py",
           "cosine, sine = np.concatenate([cosine, cosine], -1), np.concatenate([-sine, sine], -1)",
           "cosine, sine = np.concatenate([cosine, cosine], -1), np.concatenate([sine, -sine], -1)",
           ("tests/rotary/test_value.py",)),
    Mutant("rotary", "frequencies", "rotary/scalings.py",
           "base ** (-column / dim)", "base ** (-column / (dim + 2))", _layer("alone")),
    Mutant("rotary", "neighbouring pairs rotate in the opposite direction", "rotary/waves.py",
           "torch.view_as_real(pairs * waves)", "torch.view_as_real(pairs * waves.conj())",
           ("tests/rotary/test_value.py",)),
    Mutant("rotary", "the gradient rotates forward, not back", "rotary/waves.py",
           "_Rotation.apply(gradient, cosine, -sine)", "_Rotation.apply(gradient, cosine, sine)", _layer("alone")),
    Mutant("rotary", "YaRN scales no attention", "rotary/scalings.py",
           "return stretched + 1.0", "return 1.0", _layer("alone")),
    Mutant("qk norm", "eps is left out", "qk_norm.py",
           "weight.to(x.dtype), eps)", "weight.to(x.dtype), 1e-9)", ("tests/test_qk_norm.py",)),
    Mutant("qk norm", "weights are left out", "qk_norm.py",
           "return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)",
           "return F.rms_norm(x, x.shape[-1:], None, eps)", _layer("alone")),
    Mutant("qk norm", "keys are not unit vectors", "qk_norm.py",
           "self._unit(k, 1.0, self.head_dim**-0.5)", "self._unit(k, 1.0, 1.0)", _layer("alone")),
    Mutant("ALiBi", "nearer keys count less", "scores/alibi.py",
           "distance[:, None] * -slopes[:, None]", "distance[:, None] * slopes[:, None]", _layer("alone")),
    Mutant("ALiBi", "slopes of head counts that are no power of 2", "scores/alibi.py",
           "range(1, 2 * below + 1, 2)", "range(2, 2 * below + 1, 2)", ("tests/scores/test_alibi.py",)),
    Mutant("T5 buckets", "the query itself counts as after itself", "scores/t5.py",
           "(distances > 0).long()", "(distances >= 0).long()", ("tests/scores/test_t5.py",)),
    Mutant("T5 buckets", "wide buckets", "scores/t5.py",
           "math.log(max_distance / single)", "math.log(max_distance)", ("tests/scores/test_t5.py",)),
    Mutant("learned bias", "a later query uses the rows of the first", "scores/learned.py",
           "return weight[None, :, query_start : query_start + queries, :keys]",
           "return weight[None, :, :queries, :keys]",
           ("tests/scores/test_learned.py",)),
    Mutant("learned bias", "samples with different starts are swapped", "scores/learned.py",
           "rows = query_start.to(weight.device)[:, None]", "rows = query_start.to(weight.device).flip(0)[:, None]",
           ("tests/scores/test_learned.py",)),
    Mutant("softcap", "scores are not scaled back", "scores/softcap.py",
           "else softcap * (scores / softcap).tanh()", "else (scores / softcap).tanh()",
           ("tests/scores/test_softcap.py",)),
    Mutant("sinks", "a sink adds weight instead of taking it", "scores/sinks.py",
           "share = (finite - sink).sigmoid()", "share = (sink - finite).sigmoid()", ("tests/scores/test_sinks.py",)),
    Mutant("sinks", "a key of 0 replaces the learned sink", "layer/attention.py",
           "sinks = zero if sinks is None else torch.logaddexp(sinks, zero.to(sinks.dtype))", "sinks = zero",
           _layer("alone")),
    Mutant("gates", "one gate per head has no effect", "layer/gates.py",
           "return output * gates[:, None, None].to(output.dtype)", "return output", ("tests/layer/test_gates.py",)),
    Mutant("gates", "gates per query are used on packed tokens", "layer/attention.py",
           "(head_gates is None or head_gates.dim() == 1)", "True", _layer("padded or packed")),
    Mutant("extra keys", "positions are not shifted by the learned key", "layer/attention.py",
           "mask, start = LeadingKeys(1, mask), start + 1", "mask, start = LeadingKeys(1, mask), start",
           ("tests/layer/test_options.py",)),
    Mutant("extra keys", "a bias is one key off", "scores/bias.py",
           "torch.nn.functional.pad(whole.expand(-1, -1, -1, keys), (1, 0))",
           "torch.nn.functional.pad(whole.expand(-1, -1, -1, keys), (0, 1))",
           _layer("alone or across")),
    Mutant("cache", "positions do not count dropped keys", "cache/cache.py",
           "return 0 if self._progress is None else self._progress.position",
           "return 0 if self._progress is None else self._progress.start",
           ("tests/cache/test_cache.py", "tests/cache/test_decoding.py")),
    Mutant("cache", "padding of a ragged step is stored", "cache/buffer_ops.py",
           "slots = slots.where(real, buffer.shape[2] - 1)", "slots = slots + 0",
           ("tests/cache/test_buffers.py",)),
    Mutant("cache", "a window drops a key too early", "cache/buffers.py",
           "max(0, start + 1 - self.window)", "max(0, start + 2 - self.window)", ("tests/cache/test_buffers.py",)),
    Mutant("cache", "a prefix is not shortened when keys are dropped", "masks/prefix.py",
           "return Prefix(max(0, self.length - count)) if count else self", "return self",
           ("tests/cache/test_masks_after_dropping.py",)),
    Mutant("cache", "cropping overwrites tensors that were returned", "cache/buffers.py",
           "self.change(lambda tensor: copy_slots(tensor, 0, count, slots=slots))",
           "del slots",
           ("tests/cache/test_buffers.py", "tests/cache/test_cache.py")),
    Mutant("relative bias", "before and after are swapped", "scores/relative.py",
           "column - row[:, None] + queries - 1", "row[:, None] - column + queries - 1",
           ("tests/scores/test_relative.py",)),
    Mutant("relative bias", "gradients of a block are added to other distances", "kernels/native/bias_gradient.py",
           "first = self.request.shape.query_length - (rows.rows.start or 0) - count",
           "first = self.request.shape.query_length - count",
           ("tests/kernels/native/test_bias_gradient.py",)),
    Mutant("second derivatives", "they are constants", "kernels/double_backward.py",
           "create_graph=True, materialize_grads=True", "materialize_grads=True",
           ("tests/kernels/test_double_backward.py",)),
    Mutant("operator", "the shape of its output in a graph", "kernels/native/operator.py",
           "q.new_empty((batch, queries, heads, value_dim))", "q.new_empty((batch, queries, heads, head_dim))",
           ("tests/kernels/native/test_operator.py", "-k", "compiled_once or checks_of_torch")),
    Mutant("operator", "the gradient of a bias", "kernels/native/operator.py",
           "(dbias if wanted[6] else None,", "(None,",
           ("tests/kernels/native/test_operator.py", "-k", "every_gradient")),
    Mutant("listeners", "observing changes the output", "functional.py",
           "request = replace(request, wanted=listeners.wanted())",
           "request = replace(request, wanted=listeners.wanted(), scale=request.scale * 1.0001)",
           ("tests/layer/test_attention.py", "-k", "listening")),
    Mutant("listeners", "a checkpointed call is recorded twice", "listeners.py",
           "    if runs_backward():\n        return\n", "",
           ("tests/ecosystem/test_checkpointing.py", "-k", "listener")),
    Mutant("autocast", "a kernel computes in half precision", "functional.py",
           "with without_autocast(request.shape.device):", "if True:", ("tests/ecosystem/test_autocast.py",)),
)
# fmt: on
