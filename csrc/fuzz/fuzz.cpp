// Fuzz the native kernel: random calls, every pass and instruction set, compared with plain loops in double precision.
//
//     fuzz [cases] [seed] [workers]
//
// Built with sanitizers by `make sanitize`. The workers run calls concurrently. Besides the numbers it checks that
// nothing is written into gaps between rows, that the bits do not depend on the number of threads, on concurrent calls,
// on statistics or on the way a call is computed, and that invalid calls are rejected. The first failing case is printed with the arguments that
// repeat it.
#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <thread>

#include "results.h"

namespace {

Status run_forward(const RandomCall &input, Call call, Results &results, bool statistics = true) {
  prepare_forward(input, call, results, statistics);
  return multihead_run(&call, Pass::FORWARD);
}

Status run_backward(const RandomCall &input, Call call, Results &results) {
  prepare_backward(input, call, results);
  return multihead_run(&call, Pass::BACKWARD);
}

Status run_key_sums(const RandomCall &input, Call call, Results &results) {
  prepare_key_sums(input, call, results);
  return multihead_run(&call, Pass::KEY_SUMS);
}

std::string run_all(const RandomCall &input, int64_t set, int64_t threads, Results &results) {
  Call call = input.call;
  call.instruction_set = set;
  call.threads = threads;
  if (run_forward(input, call, results) != Status::DONE) return "the forward pass was rejected";
  if (run_backward(input, call, results) != Status::DONE) return "the backward pass was rejected";
  if (run_key_sums(input, call, results) != Status::DONE) return "the pass of the key sums was rejected";
  return "";
}

std::string other_bits(const Results &one, const Results &other) {
  std::vector<const Tensor *> tensors;
  other.each([&](const char *, const Tensor &tensor) { tensors.push_back(&tensor); });
  std::string error;
  size_t index = 0;
  one.each([&](const char *name, const Tensor &tensor) {
    if (!tensor.same_bits(*tensors[index++]) && error.empty()) error = name;
  });
  return error;
}

// ---------------------------------------------------------------- a case

// The dropout factor of each weight, from a call without vector instructions whose values are the identity matrix.
std::string read_dropout(const RandomCall &input, const Naive &naive, Dense &kept) {
  Call call = input.call;
  kept = Dense(call.batch, call.heads, call.queries, call.keys, 1);
  if (call.dropout == 0) return "";
  const Type type = type_of(call);
  Tensor identity(type, 1, 1, call.keys, call.keys), output(type, call.batch, call.heads, call.queries, call.keys);
  identity.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { identity.set(c == d, a, b, c, d); });
  Tensor logsumexp(Type::FLOAT, call.batch, call.heads, call.queries, 1);
  call.v = identity.data();
  call.v_strides = {0, 0, call.keys};
  call.value_dim = call.keys;
  call.output = output.data();
  call.output_strides = row_strides(output);
  call.logsumexp = logsumexp.data<float>();
  call.instruction_set = 0;
  call.num_offsets = 0;
  if (multihead_run(&call, Pass::FORWARD) != Status::DONE) return "the forward pass over the identity was rejected";
  const double factor = 1 / (1 - call.dropout);
  int64_t cells = 0, left = 0;
  for (int64_t b = 0; b < call.batch; b++)
    for (int64_t h = 0; h < call.heads; h++)
      for (int64_t i = 0; i < call.queries; i++)
        for (int64_t j = 0; j < call.keys; j++) {
          const double p = naive.p(b, h, i, j);
          if (!(p > 1e-30)) continue;
          const bool stays = output.at(b, h, i, j) > p * factor / 2;
          kept(b, h, i, j) = stays ? factor : 0;
          cells++;
          left += stays;
        }
  const double share = static_cast<double>(left) / static_cast<double>(cells ? cells : 1);
  if (cells > 4000 && fabs(share - (1 - call.dropout)) > 0.05)
    return "dropout keeps " + std::to_string(share) + " of the weights";
  return "";
}

// Set the gradients of NaN rows to 0, as a loss does that does not use these rows.
void leave_out_nan_rows(RandomCall &input, const Naive &naive) {
  const Call &call = input.call;
  for (int64_t b = 0; b < call.batch; b++)
    for (int64_t h = 0; h < call.heads; h++)
      for (int64_t i = 0; i < call.queries; i++) {
        if (!row_is_nan(naive, b, h, i)) continue;
        for (int64_t x = 0; x < call.value_dim; x++) input.grad_output.set(0, b, h, i, x);
        if (input.grad_logsumexp) input.grad_logsumexp.set(0, b, h, i);
      }
}

// Invalid calls are rejected, and write nothing.
std::string not_rejected(const RandomCall &input) {
  Call call = input.call;
  if (input.stop.empty() || !call.queries) return "";
  Tensor outside = input.stop.copy();
  outside.set(static_cast<double>(call.keys + 1), outside.sizes[0] - 1, 0, 0, call.queries - 1);
  call.stop = outside.data<int64_t>();
  Results results;
  if (run_forward(input, call, results) != Status::BAD_BOUNDS) return "a stop after the last key is accepted";
  bool written = false;
  const Tensor &output = results.output;
  output.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { written |= !isnan(output.at(a, b, c, d)); });
  if (written) return "a rejected call writes";
  call = input.call;
  call.instruction_set = 99;
  if (multihead_run(&call, Pass::FORWARD) != Status::NO_SUCH_PASS || multihead_workspace(&call, Pass::FORWARD) != -1)
    return "an unknown instruction set is accepted";
  call.instruction_set = 0;
  if (input.k_scales) {
    call.k_scales = call.v_scales = input.k_scales.data<float>();
    if (multihead_run(&call, Pass::BACKWARD) != Status::NO_SUCH_PASS) return "a backward pass over int8 is accepted";
    call.k_scales = call.v_scales = nullptr;
  }
  if (multihead_run(&call, static_cast<Pass>(3)) != Status::NO_SUCH_PASS) return "an unknown pass is accepted";
  return "";
}

// Whether the bits of the output depend on the way in which a call is computed: without statistics, or, as the rows of
// tiles, with a mask that hides nothing.
std::string other_bits_by_another_way(const RandomCall &input, int64_t set, const Results &results) {
  const auto same = [](const Tensor &one, const Tensor &other) {  // but for the sign of NaN
    bool equal = true;
    one.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
      const double x = one.at(a, b, c, d), y = other.at(a, b, c, d);
      equal &= x == y || (isnan(x) && isnan(y));
    });
    return equal;
  };
  const auto compare = [&](Call call, const std::string &way) -> std::string {
    call.instruction_set = set;
    Results found;
    if (run_forward(input, call, found, false) != Status::DONE) return "the forward pass " + way + " was rejected";
    if (!same(found.output, results.output)) return "output has other bits " + way;
    if (!same(found.logsumexp, results.logsumexp)) return "logsumexp has other bits " + way;
    return "";
  };
  const std::string error = compare(input.call, "without statistics");
  if (!error.empty() || input.call.visible) return error;
  const uint8_t one = 1;
  Call masked = input.call;
  masked.visible = &one;
  masked.visible_strides = {0, 0, 0, 0};
  return compare(masked, "with a mask that hides nothing");
}

std::string check(uint64_t seed, int64_t only_set) {
  RandomCall input = draw(seed);
  Random random(seed ^ 0x5eed);
  Naive naive;
  Dense kept;
  compute_weights(input, naive);
  std::string error = read_dropout(input, naive, kept);
  if (!error.empty()) return error;
  attend(input, kept, naive);
  leave_out_nan_rows(input, naive);
  backward(input, kept, naive);
  sum_keys(input, naive);
  for (int64_t set = 0; const char *name = multihead_instruction_set(set); set++) {
    if (!multihead_runs(set) || (only_set >= 0 && set != only_set)) continue;
    const auto in_set = [&](const std::string &message) { return std::string(name) + ": " + message; };
    Results results, again;
    error = run_all(input, set, input.call.threads, results);
    if (error.empty()) error = wrong(input, results, naive);
    if (error.empty()) error = other_bits_by_another_way(input, set, results);
    if (!error.empty()) return in_set(error);
    std::string others;  // the same inputs again, sometimes by two threads at the same time
    const int64_t threads = uniform(random, 1, 3);
    if (chance(random, 0.3)) {
      Results concurrent;
      std::thread other([&] { others = run_all(input, set, 2, concurrent); });
      error = run_all(input, set, threads, again);
      other.join();
      if (error.empty()) error = others;
      if (error.empty() && !(error = other_bits(results, concurrent)).empty())
        error += " has other bits in two concurrent calls";
    } else {
      error = run_all(input, set, threads, again);
    }
    if (!error.empty()) return in_set(error);
    error = other_bits(results, again);
    if (!error.empty())
      return in_set(error + " has other bits with " + std::to_string(threads) + " threads than with " +
                    std::to_string(input.call.threads));
  }
  return not_rejected(input);
}

void describe(uint64_t seed) {
  const RandomCall input = draw(seed);
  const Call &call = input.call;
  const auto number = [](int64_t value) { return static_cast<long>(value); };
  fprintf(stderr, "  batch %ld, heads %ld, kv_heads %ld, queries %ld, keys %ld, head_dim %ld, value_dim %ld, %s, threads %ld",
          number(call.batch), number(call.heads), number(call.kv_heads), number(call.queries), number(call.keys),
          number(call.head_dim), number(call.value_dim), type_of(call) == Type::FLOAT ? "float32" : type_of(call) == Type::FLOAT16 ? "float16" : "bfloat16",
          number(call.threads));
  fprintf(stderr, ", softcap %g, dropout %g%s%s%s%s\n", call.softcap, call.dropout, call.visible ? ", visible" : "",
          call.bias ? ", bias" : "", call.sinks ? ", sinks" : "", input.k_scales ? ", int8" : "");
}

}  // namespace

int main(int count, char **arguments) {
  const uint64_t cases = count > 1 ? strtoull(arguments[1], nullptr, 10) : 200;
  const uint64_t seed = count > 2 ? strtoull(arguments[2], nullptr, 10) : 1;
  const uint64_t workers = count > 3 ? strtoull(arguments[3], nullptr, 10) : 2;
  const int64_t only_set = count > 4 ? strtoll(arguments[4], nullptr, 10) : -1;
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  for (uint64_t worker = 0; worker < workers; worker++)
    threads.emplace_back([&, worker] {
      for (uint64_t i = worker; i < cases && !failed; i += workers) {
        const std::string error = check(seed + i, only_set);
        if (error.empty() || failed.exchange(true)) continue;
        fprintf(stderr, "%s\n", error.c_str());
        describe(seed + i);
        fprintf(stderr, "Again: %s 1 %llu 1\n", arguments[0], static_cast<unsigned long long>(seed + i));
      }
    });
  for (std::thread &thread : threads) thread.join();
  if (failed) return 1;
  printf("fuzz: %llu cases from seed %llu agree.\n", static_cast<unsigned long long>(cases),
         static_cast<unsigned long long>(seed));
  return 0;
}
