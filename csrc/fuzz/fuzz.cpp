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
#include <string>
#include <thread>

#include "naive.h"

namespace {

// The results of one run.
struct Results {
  Tensor output, logsumexp;
  Tensor entropy, largest_weight, largest_key, mean_distance, distance_spread;
  Tensor offset_weights, target_key_weight, special_keys_weight;
  Tensor delta, dq, dk, dv, dbias, key_sums, pooled_map;

  template <class Visit>
  void each(Visit visit) const {
    const std::pair<const char *, const Tensor *> named[] = {
        {"output", &output}, {"logsumexp", &logsumexp}, {"entropy", &entropy},
        {"largest_weight", &largest_weight}, {"largest_key", &largest_key}, {"mean_distance", &mean_distance},
        {"distance_spread", &distance_spread}, {"offset_weights", &offset_weights},
        {"target_key_weight", &target_key_weight}, {"special_keys_weight", &special_keys_weight},
        {"delta", &delta}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv},
        {"dbias", &dbias}, {"key_sums", &key_sums}, {"pooled_map", &pooled_map}};
    for (const auto &[name, tensor] : named)
      if (*tensor) visit(name, *tensor);
  }
};

// Run the forward pass. The other passes read its logsumexp and output from `results`.
Status run_forward(const RandomCall &input, Call call, Results &results, bool statistics = true) {
  Random random(input.strides_seed);
  results.output = Tensor(random, type_of(call), call.batch, call.heads, call.queries, call.value_dim, false);
  call.output_strides = row_strides(results.output);
  call.output = results.output.data();
  if (input.k_scales) {
    const auto scale_strides = [](const Tensor &scales) { return RowStrides{scales.strides[0], scales.strides[1], 1}; };
    call.k = input.k_int8.data(), call.v = input.v_int8.data();
    call.k_strides = row_strides(input.k_int8), call.v_strides = row_strides(input.v_int8);
    call.k_scales = input.k_scales.data<float>(), call.v_scales = input.v_scales.data<float>();
    call.k_scales_strides = scale_strides(input.k_scales), call.v_scales_strides = scale_strides(input.v_scales);
  }
  results.logsumexp = Tensor(Type::FLOAT, call.batch, call.heads, call.queries, 1);
  call.logsumexp = results.logsumexp.data<float>();
  if (!statistics) {
    call.num_offsets = 0;
    return multihead_run(&call, Pass::FORWARD);
  }
  const auto allocate = [&](bool wanted, Tensor &tensor, float *&address, int64_t copies = 1) {
    if (!wanted) return;
    tensor = Tensor(Type::FLOAT, copies * call.batch, call.heads, call.queries, 1);
    address = tensor.data<float>();
  };
  allocate(input.entropy, results.entropy, call.entropy);
  allocate(input.largest_weight, results.largest_weight, call.largest_weight);
  allocate(input.mean_distance, results.mean_distance, call.mean_distance);
  allocate(input.distance_spread, results.distance_spread, call.distance_spread);
  allocate(input.offset_weights, results.offset_weights, call.offset_weights, call.num_offsets);
  allocate(input.target_key_weight, results.target_key_weight, call.target_key_weight);
  allocate(input.special_keys_weight, results.special_keys_weight, call.special_keys_weight);
  if (input.largest_key) {
    results.largest_key = Tensor(Type::INT64, call.batch, call.heads, call.queries, 1);
    call.largest_key = results.largest_key.data<int64_t>();
  }
  return multihead_run(&call, Pass::FORWARD);
}

Status run_backward(const RandomCall &input, Call call, Results &results) {
  Random random(input.strides_seed + 1);
  const Type type = type_of(call);
  results.dq = Tensor(random, type, call.batch, call.heads, call.queries, call.head_dim, false);
  results.dk = Tensor(random, type, call.batch, call.kv_heads, call.keys, call.head_dim, false);
  results.dv = Tensor(random, type, call.batch, call.kv_heads, call.keys, call.value_dim, false);
  results.delta = Tensor(Type::FLOAT, call.batch, call.heads, call.queries, 1);
  call.output_strides = row_strides(results.output);
  call.dq_strides = row_strides(results.dq);
  call.dk_strides = row_strides(results.dk);
  call.dv_strides = row_strides(results.dv);
  call.output = results.output.data(), call.logsumexp = results.logsumexp.data<float>();
  call.delta = results.delta.data<float>();
  call.dq = results.dq.data(), call.dk = results.dk.data(), call.dv = results.dv.data();
  if (input.dbias) {  // summed over the axes along which the bias repeats; added to its contents, which are 0
    const auto size = [](int64_t size, int64_t stride) { return stride ? size : int64_t{1}; };
    const CellStrides &bias = call.bias_strides;
    Tensor &dbias = results.dbias;
    dbias = Tensor(Type::FLOAT, size(call.batch, bias.batch), size(call.heads, bias.head), size(call.queries, bias.row),
                   size(call.keys, bias.key));
    dbias.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { dbias.set(0, a, b, c, d); });
    const CellStrides strides = cell_strides(dbias);
    call.dbias_strides = {bias.batch ? strides.batch : 0, bias.head ? strides.head : 0, bias.row ? strides.row : 0,
                          bias.key ? strides.key : 0};
    call.dbias = dbias.data<float>();
  }
  return multihead_run(&call, Pass::BACKWARD);
}

Status run_key_sums(const RandomCall &input, Call call, Results &results) {
  results.key_sums = Tensor(Type::FLOAT, call.batch, call.heads, call.keys, 1);
  call.logsumexp = results.logsumexp.data<float>();
  call.key_sums = results.key_sums.data<float>();
  if (input.pooled_map) {
    const int64_t row_cells = (call.queries + call.pool_rows - 1) / call.pool_rows;
    const int64_t key_cells = (call.keys + call.pool_keys - 1) / call.pool_keys;
    results.pooled_map = Tensor(Type::FLOAT, call.batch, call.heads, row_cells, key_cells);
    call.pooled_map = results.pooled_map.data<float>();
  }
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

// ---------------------------------------------------------------- comparison

std::string differs(const char *name, const Tensor &got, const Dense &wanted, double tolerance) {
  double size = 1;
  for (double value : wanted.values)
    if (isfinite(value)) size = fmax(size, fabs(value));
  std::string error;
  got.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
    const double x = got.at(a, b, c, d), y = wanted(a, b, c, d);
    if (!error.empty() || x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= tolerance * size) return;
    char line[200];
    snprintf(line, sizeof line, "%s[%ld, %ld, %ld, %ld] is %g, and should be %g", name, static_cast<long>(a),
             static_cast<long>(b), static_cast<long>(c), static_cast<long>(d), x, y);
    error = line;
  });
  return error;
}

// The largest key must have the largest weight within rounding, and be the first of exactly equal ones; -1 for no key.
std::string wrong_key(const Tensor &got, const Naive &naive) {
  std::string error;
  got.each([&](int64_t b, int64_t h, int64_t i, int64_t) {
    const auto key = static_cast<int64_t>(got.at(b, h, i));
    bool right = key == -1;
    if (isfinite(naive.logsumexp(b, h, i))) {
      right = key >= 0 && key < naive.p.sizes[3] && naive.visible(b, h, i, key) != 0;
      right = right && naive.p(b, h, i, key) >= 0.999 * naive.largest_weight(b, h, i);
      for (int64_t j = 0; right && j < key; j++) right = naive.p(b, h, i, j) != naive.p(b, h, i, key);
    }
    const std::string where = " for query " + std::to_string(i) + " of head " + std::to_string(h);
    if (!right) error = "largest_key is " + std::to_string(key) + where;
  });
  return error;
}

std::string wrong(const RandomCall &input, const Results &results, const Naive &naive) {
  // Weights are rounded to bfloat16 before the product with the values where the CPU multiplies bfloat16.
  const Dtype dtype = input.call.dtype;
  const double exact = 5e-4, rounded = dtype == Dtype::BFLOAT16 ? 6e-2 : dtype == Dtype::FLOAT16 ? 1.5e-2 : exact;
  std::string error;
  results.each([&](const std::string &name, const Tensor &tensor) {
    if (!error.empty()) return;
    if (!tensor.gaps_untouched()) error = name + " was written to in a gap between its rows";
    else if (name == "largest_key") error = wrong_key(tensor, naive);
  });
  const auto compare = [&](const char *name, const Tensor &got, const Dense &wanted, double tolerance) {
    if (error.empty() && got) error = differs(name, got, wanted, tolerance);
  };
  compare("output", results.output, naive.output, rounded);
  compare("logsumexp", results.logsumexp, naive.logsumexp, exact);
  compare("entropy", results.entropy, naive.entropy, exact);
  compare("largest_weight", results.largest_weight, naive.largest_weight, exact);
  compare("mean_distance", results.mean_distance, naive.mean_distance, exact);
  compare("distance_spread", results.distance_spread, naive.distance_spread, 10 * exact);
  compare("offset_weights", results.offset_weights, naive.offset_weights, exact);
  compare("target_key_weight", results.target_key_weight, naive.target_key_weight, exact);
  compare("special_keys_weight", results.special_keys_weight, naive.special_keys_weight, exact);
  compare("delta", results.delta, naive.delta, rounded);
  compare("dq", results.dq, naive.dq, rounded);
  compare("dk", results.dk, naive.dk, rounded);
  compare("dv", results.dv, naive.dv, rounded);
  // A number of dbias adds up the rounding of delta over all queries and heads that share it.
  const double cells = static_cast<double>(naive.p.values.size()) / fmax(1, static_cast<double>(naive.dbias.values.size()));
  compare("dbias", results.dbias, naive.dbias, rounded * fmax(1, sqrt(cells) / 4));
  compare("key_sums", results.key_sums, naive.key_sums, exact);
  compare("pooled_map", results.pooled_map, naive.pooled_map, exact);
  return error;
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
  printf("fuzz: %llu cases from seed %llu agree on", static_cast<unsigned long long>(cases),
         static_cast<unsigned long long>(seed));
  for (int64_t set = 0; const char *name = multihead_instruction_set(set); set++)
    if (multihead_runs(set) && (only_set < 0 || set == only_set)) printf(" %s", name);
  printf("; the fastest set is %s.\n", multihead_instruction_set(multihead_fastest()));
  return 0;
}
