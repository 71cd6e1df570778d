// Fuzz the native kernel: calls drawn at random, every pass on every instruction set, compared with plain loops in double.
//
//     fuzz [cases] [seed] [workers]
//
// Built with sanitizers by `make sanitize`. The workers call at the same time. Beside the numbers it checks that nobody
// writes between the rows, that any number of threads and any two callers at once get the same bits, and that a call
// that must not run is refused. The first case that fails is printed with the arguments that repeat it.
#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <string>
#include <thread>

#include "naive.h"

namespace {

constexpr int64_t FORWARD = 0, BACKWARD = 1, RECEIVED = 2;

// One run's answers.
struct Answers {
  Tensor output, logsumexp;
  Tensor entropy, squares, largest_weight, largest_key, mean_distance, distance_spread, at_offsets, on_given_key, on_special_keys;
  Tensor delta, dq, dk, dv, dbias, received, pooled;

  template <class Visit>
  void each(Visit visit) const {
    const std::pair<const char *, const Tensor *> named[] = {
        {"output", &output}, {"logsumexp", &logsumexp}, {"entropy", &entropy}, {"squares", &squares},
        {"largest_weight", &largest_weight}, {"largest_key", &largest_key}, {"mean_distance", &mean_distance},
        {"distance_spread", &distance_spread}, {"at_offsets", &at_offsets}, {"on_given_key", &on_given_key},
        {"on_special_keys", &on_special_keys}, {"delta", &delta}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv},
        {"dbias", &dbias}, {"received", &received}, {"pooled", &pooled}};
    for (const auto &[name, tensor] : named)
      if (*tensor) visit(name, *tensor);
  }
};

void set_strides(const Tensor &tensor, int64_t &batch, int64_t &head, int64_t &row) {
  batch = tensor.strides[0], head = tensor.strides[1], row = tensor.strides[2];
}

// The forward pass; the other passes take its logsumexp and output from `answers`.
int64_t run_forward(const Drawn &drawn_call, Call call, Answers &answers) {
  Random random(drawn_call.strides_seed);
  const Type type = call.dtype ? Type::BFLOAT16 : Type::FLOAT;
  answers.output = Tensor(random, type, call.batch, call.heads, call.queries, call.value_dim, false);
  set_strides(answers.output, call.output_batch, call.output_head, call.output_row);
  call.output = answers.output.data();
  const auto asked = [&](bool wanted, Type its_type, Tensor &tensor, const void *&address, int64_t copies = 1) {
    if (!wanted) return;
    tensor = Tensor(its_type, copies * call.batch, call.heads, call.queries, 1);
    address = tensor.data();
  };
  asked(true, Type::FLOAT, answers.logsumexp, call.logsumexp);
  asked(drawn_call.entropy, Type::FLOAT, answers.entropy, call.entropy);
  asked(drawn_call.squares, Type::FLOAT, answers.squares, call.squares);
  asked(drawn_call.largest_weight, Type::FLOAT, answers.largest_weight, call.largest_weight);
  asked(drawn_call.largest_key, Type::INT64, answers.largest_key, call.largest_key);
  asked(drawn_call.mean_distance, Type::FLOAT, answers.mean_distance, call.mean_distance);
  asked(drawn_call.distance_spread, Type::FLOAT, answers.distance_spread, call.distance_spread);
  asked(drawn_call.at_offsets, Type::FLOAT, answers.at_offsets, call.at_offsets, call.num_offsets);
  asked(drawn_call.on_given_key, Type::FLOAT, answers.on_given_key, call.on_given_key);
  asked(drawn_call.on_special_keys, Type::FLOAT, answers.on_special_keys, call.on_special_keys);
  return multihead_run(&call, FORWARD);
}

int64_t run_backward(const Drawn &drawn_call, Call call, Answers &answers) {
  Random random(drawn_call.strides_seed + 1);
  const Type type = call.dtype ? Type::BFLOAT16 : Type::FLOAT;
  answers.dq = Tensor(random, type, call.batch, call.heads, call.queries, call.head_dim, false);
  answers.dk = Tensor(random, type, call.batch, call.kv_heads, call.keys, call.head_dim, false);
  answers.dv = Tensor(random, type, call.batch, call.kv_heads, call.keys, call.value_dim, false);
  answers.delta = Tensor(Type::FLOAT, call.batch, call.heads, call.queries, 1);
  set_strides(answers.output, call.output_batch, call.output_head, call.output_row);
  set_strides(answers.dq, call.dq_batch, call.dq_head, call.dq_row);
  set_strides(answers.dk, call.dk_batch, call.dk_head, call.dk_row);
  set_strides(answers.dv, call.dv_batch, call.dv_head, call.dv_row);
  call.output = answers.output.data(), call.logsumexp = answers.logsumexp.data(), call.delta = answers.delta.data();
  call.dq = answers.dq.data(), call.dk = answers.dk.data(), call.dv = answers.dv.data();
  if (drawn_call.dbias) {  // an axis along which the bias repeats is summed over; what is there is added to
    const auto axis = [](int64_t size, int64_t stride) { return stride ? size : int64_t{1}; };
    answers.dbias = Tensor(Type::FLOAT, axis(call.batch, call.bias_batch), axis(call.heads, call.bias_head),
                           axis(call.queries, call.bias_row), axis(call.keys, call.bias_key));
    Tensor &dbias = answers.dbias;
    dbias.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { dbias.put(0, a, b, c, d); });
    set_strides(dbias, call.dbias_batch, call.dbias_head, call.dbias_row);
    call.dbias_key = dbias.strides[3];
    if (!call.bias_batch) call.dbias_batch = 0;
    if (!call.bias_head) call.dbias_head = 0;
    if (!call.bias_row) call.dbias_row = 0;
    if (!call.bias_key) call.dbias_key = 0;
    call.dbias = dbias.data();
  }
  return multihead_run(&call, BACKWARD);
}

int64_t run_received(const Drawn &drawn_call, Call call, Answers &answers) {
  answers.received = Tensor(Type::FLOAT, call.batch, call.heads, call.keys, 1);
  call.logsumexp = answers.logsumexp.data();
  call.received = answers.received.data();
  if (drawn_call.pooled) {
    answers.pooled = Tensor(Type::FLOAT, call.batch, call.heads, (call.queries + call.pool_rows - 1) / call.pool_rows,
                            (call.keys + call.pool_keys - 1) / call.pool_keys);
    call.pooled = answers.pooled.data();
  }
  return multihead_run(&call, RECEIVED);
}

std::string run_all(const Drawn &drawn_call, int64_t set, int64_t threads, Answers &answers) {
  Call call = drawn_call.call;
  call.instruction_set = set;
  call.threads = threads;
  if (run_forward(drawn_call, call, answers)) return "the forward pass was refused";
  if (run_backward(drawn_call, call, answers)) return "the backward pass was refused";
  if (run_received(drawn_call, call, answers)) return "the received pass was refused";
  return "";
}

// ---------------------------------------------------------------- comparison

std::string differs(const char *name, const Tensor &got, const Dense &wanted, double tolerance) {
  double size = 1;
  for (double value : wanted.values)
    if (isfinite(value)) size = fmax(size, fabs(value));
  std::string found;
  got.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
    const double x = got.at(a, b, c, d), y = wanted(a, b, c, d);
    if (!found.empty() || x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= tolerance * size) return;
    char line[200];
    snprintf(line, sizeof line, "%s[%ld, %ld, %ld, %ld] is %g, and should be %g", name, static_cast<long>(a),
             static_cast<long>(b), static_cast<long>(c), static_cast<long>(d), x, y);
    found = line;
  });
  return found;
}

// The key with the largest weight, or one whose weight is as large within rounding, but the first of equal ones;
// -1 where there is none.
std::string wrong_key(const Tensor &got, const Naive &naive) {
  std::string found;
  got.each([&](int64_t b, int64_t h, int64_t i, int64_t) {
    const auto key = static_cast<int64_t>(got.at(b, h, i));
    bool right = key == -1;
    if (isfinite(naive.logsumexp(b, h, i))) {
      right = key >= 0 && key < naive.p.sizes[3] && naive.seen(b, h, i, key) != 0;
      right = right && naive.p(b, h, i, key) >= 0.999 * naive.largest_weight(b, h, i);
      for (int64_t j = 0; right && j < key; j++) right = naive.p(b, h, i, j) != naive.p(b, h, i, key);
    }
    if (!right) found = "largest_key is " + std::to_string(key) + " for query " + std::to_string(i) + " of head " + std::to_string(h);
  });
  return found;
}

std::string wrong(const Drawn &drawn_call, const Answers &answers, const Naive &naive) {
  // Weights are rounded to bfloat16 before they meet values where the CPU multiplies bfloat16.
  const double exact = 5e-4, rounded = drawn_call.call.dtype ? 6e-2 : exact;
  std::string found;
  answers.each([&](const std::string &name, const Tensor &tensor) {
    if (!found.empty()) return;
    if (!tensor.gaps_whole()) found = name + " was written to between its rows";
    else if (name == "largest_key") found = wrong_key(tensor, naive);
  });
  const auto compare = [&](const char *name, const Tensor &got, const Dense &wanted, double tolerance) {
    if (found.empty() && got) found = differs(name, got, wanted, tolerance);
  };
  compare("output", answers.output, naive.output, rounded);
  compare("logsumexp", answers.logsumexp, naive.logsumexp, exact);
  compare("entropy", answers.entropy, naive.entropy, exact);
  compare("squares", answers.squares, naive.squares, exact);
  compare("largest_weight", answers.largest_weight, naive.largest_weight, exact);
  compare("mean_distance", answers.mean_distance, naive.mean_distance, exact);
  compare("distance_spread", answers.distance_spread, naive.distance_spread, 10 * exact);
  compare("at_offsets", answers.at_offsets, naive.at_offsets, exact);
  compare("on_given_key", answers.on_given_key, naive.on_given_key, exact);
  compare("on_special_keys", answers.on_special_keys, naive.on_special_keys, exact);
  compare("delta", answers.delta, naive.delta, rounded);
  compare("dq", answers.dq, naive.dq, rounded);
  compare("dk", answers.dk, naive.dk, rounded);
  compare("dv", answers.dv, naive.dv, rounded);
  compare("dbias", answers.dbias, naive.dbias, rounded);
  compare("received", answers.received, naive.received, exact);
  compare("pooled", answers.pooled, naive.pooled, exact);
  return found;
}

std::string other_bits(const Answers &one, const Answers &other) {
  std::vector<const Tensor *> tensors;
  other.each([&](const char *, const Tensor &tensor) { tensors.push_back(&tensor); });
  std::string found;
  size_t index = 0;
  one.each([&](const char *name, const Tensor &tensor) {
    if (!tensor.same_bits(*tensors[index++]) && found.empty()) found = name;
  });
  return found;
}

// ---------------------------------------------------------------- a case

// What dropout multiplies each weight by, read off a call in plain instructions whose values are the identity.
std::string read_dropout(const Drawn &drawn_call, const Naive &naive, Dense &kept) {
  const Call &given = drawn_call.call;
  kept = Dense(given.batch, given.heads, given.queries, given.keys, 1);
  if (given.dropout == 0) return "";
  Call call = given;
  const Type type = call.dtype ? Type::BFLOAT16 : Type::FLOAT;
  Tensor identity(type, 1, 1, call.keys, call.keys), output(type, call.batch, call.heads, call.queries, call.keys);
  identity.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { identity.put(c == d, a, b, c, d); });
  Tensor logsumexp(Type::FLOAT, call.batch, call.heads, call.queries, 1);
  call.v = identity.data(), call.v_batch = call.v_head = 0, call.v_row = call.keys;
  call.value_dim = call.keys;
  call.output = output.data();
  call.logsumexp = logsumexp.data();
  set_strides(output, call.output_batch, call.output_head, call.output_row);
  call.instruction_set = 0;
  call.num_offsets = 0;
  if (multihead_run(&call, FORWARD)) return "the forward pass over the identity was refused";
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
  if (cells > 4000 && fabs(share - (1 - call.dropout)) > 0.05) return "dropout keeps " + std::to_string(share) + " of the weights";
  return "";
}

// Gradients of rows that are NaN are 0, as those of a loss that leaves such rows out.
void leave_out_nan_rows(Drawn &drawn_call, const Naive &naive) {
  const Call &call = drawn_call.call;
  for (int64_t b = 0; b < call.batch; b++)
    for (int64_t h = 0; h < call.heads; h++)
      for (int64_t i = 0; i < call.queries; i++) {
        if (!row_is_nan(naive, b, h, i)) continue;
        for (int64_t x = 0; x < call.value_dim; x++) drawn_call.of_output.put(0, b, h, i, x);
        if (drawn_call.of_logsumexp) drawn_call.of_logsumexp.put(0, b, h, i);
      }
}

// Calls that must not run are refused, and write nothing.
std::string not_refused(const Drawn &drawn_call) {
  const Call &given = drawn_call.call;
  if (drawn_call.stop.empty() || !given.queries) return "";
  Tensor outside = drawn_call.stop.copy();
  outside.put(static_cast<double>(given.keys + 1), outside.sizes[0] - 1, outside.sizes[1] - 1, 0, given.queries - 1);
  Call call = given;
  call.stop = outside.data();
  Answers answers;
  if (run_forward(drawn_call, call, answers) != 2) return "a bound behind the last key is taken";
  bool written = false;
  answers.output.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { written |= !isnan(answers.output.at(a, b, c, d)); });
  if (written) return "a refused call writes";
  call = given;
  call.instruction_set = 99;
  if (multihead_run(&call, FORWARD) != 3 || multihead_workspace(&call, FORWARD) != -1) return "an unknown instruction set is taken";
  call.instruction_set = 0;
  if (multihead_run(&call, 3) != 3) return "an unknown pass is taken";
  return "";
}

std::string check(uint64_t seed, int64_t only_set) {
  Drawn drawn_call = draw(seed);
  Random random(seed ^ 0x5eed);
  Naive naive;
  Dense kept;
  weigh(drawn_call, naive);
  std::string found = read_dropout(drawn_call, naive, kept);
  if (!found.empty()) return found;
  attend(drawn_call, kept, naive);
  leave_out_nan_rows(drawn_call, naive);
  backward(drawn_call, kept, naive);
  receive(drawn_call, naive);
  for (int64_t set = 0; const char *name = multihead_instruction_set(set); set++) {
    if (!multihead_runs(set) || (only_set >= 0 && set != only_set)) continue;
    const auto said = [&](const std::string &what) { return std::string(name) + ": " + what; };
    Answers answers, again;
    found = run_all(drawn_call, set, drawn_call.call.threads, answers);
    if (found.empty()) found = wrong(drawn_call, answers, naive);
    if (!found.empty()) return said(found);
    std::string others;  // the same inputs, at the same time where chance says so
    const int64_t threads = drawn(random, 1, 3);
    if (chance(random, 0.3)) {
      Answers beside;
      std::thread other([&] { others = run_all(drawn_call, set, 2, beside); });
      found = run_all(drawn_call, set, threads, again);
      other.join();
      if (found.empty()) found = others;
      if (found.empty() && !(found = other_bits(answers, beside)).empty()) found += " has other bits for two callers at once";
    } else {
      found = run_all(drawn_call, set, threads, again);
    }
    if (!found.empty()) return said(found);
    found = other_bits(answers, again);
    if (!found.empty())
      return said(found + " has other bits with " + std::to_string(threads) + " threads than with " + std::to_string(drawn_call.call.threads));
  }
  return not_refused(drawn_call);
}

void describe(uint64_t seed) {
  const Drawn drawn_call = draw(seed);
  const Call &call = drawn_call.call;
  fprintf(stderr, "  batch %ld, heads %ld of %ld, queries %ld, keys %ld, dims %ld and %ld, %s, threads %ld, softcap %g, dropout %g%s%s%s\n",
          static_cast<long>(call.batch), static_cast<long>(call.heads), static_cast<long>(call.kv_heads),
          static_cast<long>(call.queries), static_cast<long>(call.keys), static_cast<long>(call.head_dim),
          static_cast<long>(call.value_dim), call.dtype ? "bfloat16" : "float32", static_cast<long>(call.threads), call.softcap,
          call.dropout, call.seen ? ", seen" : "", call.bias ? ", bias" : "", call.sinks ? ", sinks" : "");
}

}  // namespace

int main(int count, char **given) {
  const uint64_t cases = count > 1 ? strtoull(given[1], nullptr, 10) : 200;
  const uint64_t seed = count > 2 ? strtoull(given[2], nullptr, 10) : 1;
  const uint64_t workers = count > 3 ? strtoull(given[3], nullptr, 10) : 2;
  const int64_t only_set = count > 4 ? strtoll(given[4], nullptr, 10) : -1;
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  for (uint64_t worker = 0; worker < workers; worker++)
    threads.emplace_back([&, worker] {
      for (uint64_t i = worker; i < cases && !failed; i += workers) {
        const std::string found = check(seed + i, only_set);
        if (found.empty() || failed.exchange(true)) continue;
        fprintf(stderr, "%s\n", found.c_str());
        describe(seed + i);
        fprintf(stderr, "Again: %s 1 %llu 1\n", given[0], static_cast<unsigned long long>(seed + i));
      }
    });
  for (std::thread &thread : threads) thread.join();
  if (failed) return 1;
  printf("fuzz: %llu cases from seed %llu are right.\n", static_cast<unsigned long long>(cases), static_cast<unsigned long long>(seed));
  return 0;
}
