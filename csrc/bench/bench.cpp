// Compare the speed of two builds of the native library: one process, the same data, their calls in turn.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <sstream>
#include <thread>

#include "../fuzz/results.h"

namespace {

const char USAGE[] = R"(Usage: bench OLD NEW [options]

Time two builds of libmultihead_native.so in one process, call by call in turn, on the same inputs and outputs.
Prints old time / new time for each case: the median of the pairs and their quartiles; above 1, NEW is faster.
First both results are compared, and a part of the result of NEW with plain loops in double precision.

Options:
  --set NAME     the instruction set  [default: the fastest that runs here]
  --quick        only the twelve cases of python -m benchmarks.native --quick
  --only TEXT    only the cases whose name contains TEXT; may be repeated
  --rounds N     at least N pairs per case  [default: 15]
  --seconds S    about S seconds per case  [default: 1]
  --threads N    threads of each call  [default: the cores of this machine]
  --cpu-time     measure the CPU time of one thread, which other processes disturb less; implies --threads 1
  --json         print one JSON object per line instead of a table
  --list         print the names of the cases, and run nothing
  --help         print this text

Examples:
  bench old/libmultihead_native.so build/editable/libmultihead_native.so
  bench OLD NEW --set avx2 --quick
  bench OLD NEW --set avx512 --only "backward" --only "16 queries" --rounds 101
  bench OLD NEW --cpu-time                 on a machine where other programs run

Exits with 1 if a result is wrong, and with 2 if it cannot run.
)";

[[noreturn]] void refuse(const std::string &message) {
  fprintf(stderr, "%s\n", message.c_str());
  exit(2);
}

// ---------------------------------------------------------------- the cases

enum class Mask { FULL, CAUSAL, WINDOW };

// All calls have one sample.
struct Case {
  std::string name;
  int64_t queries, keys, dim;
  Dtype dtype = Dtype::FLOAT32;
  Mask mask = Mask::FULL;
  Pass pass = Pass::FORWARD;
  int64_t heads = 8, kv_heads = 8;
  bool statistics = false, values = true;
  bool int8 = false, cells = false, bias = false;
  double softcap = 0, dropout = 0;
  bool quick = false;
};

// 2,048 for 2048.
std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (size_t end = digits.size(); end > 3; end -= 3) digits.insert(end - 3, ",");
  return digits;
}

const char *name_of(Dtype dtype) {
  return dtype == Dtype::FLOAT32 ? "fp32" : dtype == Dtype::BFLOAT16 ? "bf16" : "fp16";
}

// The cases, named as in benchmarks/native/cases.py where both have one.
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::string &kind, Case each) {
    const std::string size = each.queries == each.keys ? "N " + grouped(each.keys) : grouped(each.keys) + " keys";
    each.name = kind + ", " + size + ", D " + std::to_string(each.dim) + ", " + name_of(each.dtype);
    if (each.int8) each.name += ", int8 cache";
    cases.push_back(each);
  };
  const auto square = [](int64_t length, int64_t dim, Dtype dtype = Dtype::FLOAT32, Mask mask = Mask::FULL) {
    return Case{"", length, length, dim, dtype, mask};
  };
  const Dtype fp32 = Dtype::FLOAT32, bf16 = Dtype::BFLOAT16, fp16 = Dtype::FLOAT16;

  for (Mask mask : {Mask::FULL, Mask::CAUSAL})
    for (int64_t length : {16, 64, 128, 512, 2048, 4096})
      for (int64_t dim : {64, 128}) {
        Case each = square(length, dim, fp32, mask);
        each.quick = length == 2048 || (length == 128 && dim == 64 && mask == Mask::FULL);
        add(mask == Mask::FULL ? "full" : "causal", each);
      }
  for (int64_t length : {64, 512, 2048})
    for (int64_t dim : {64, 128}) {
      Case each = square(length, dim, bf16);
      each.quick = length == 2048 && dim == 64;
      add("full", each);
    }
  add("causal", square(2048, 64, bf16, Mask::CAUSAL));
  add("full", square(512, 64, fp16));

  for (int64_t queries : {16, 64})
    for (int64_t keys : {2048, 8192})
      for (int64_t dim : {64, 128}) {
        Case each{"", queries, keys, dim};
        each.quick = queries == 16 && keys == 2048 && dim == 64;
        add(grouped(queries) + " queries", each);
      }
  add("64 queries", Case{"", 64, 2048, 64, bf16});

  for (int64_t queries : {1, 16})
    for (int64_t keys : {4096, 16384})
      for (int kind = 0; kind < 4; kind++) {  // float32, bfloat16, and both over int8
        Case each{"", queries, keys, 64, kind % 2 ? bf16 : fp32, Mask::CAUSAL};
        each.heads = 32, each.int8 = kind > 1;
        each.quick = queries == 1 && keys == 4096 && kind < 2;
        add(queries == 1 ? "one query of 32/8 heads" : "16 queries of 32/8 heads", each);
      }
  for (Dtype dtype : {fp32, bf16}) {
    Case each{"", 1, 4096, 128, dtype};
    each.heads = 32;
    add("one query of 32/8 heads", each);
    each.heads = each.kv_heads = 4;
    add("one query of 4 heads", each);
  }

  const auto with_statistics = [&](Case each) {
    each.statistics = true;
    return each;
  };
  for (int64_t length : {16, 128, 512, 2048})
    for (Mask mask : {Mask::FULL, Mask::CAUSAL}) {
      Case each = with_statistics(square(length, 64, fp32, mask));
      each.quick = length == 512 && mask == Mask::FULL;
      add(mask == Mask::FULL ? "statistics, full" : "statistics, causal", each);
    }
  add("statistics, full", with_statistics(square(512, 128)));
  add("statistics, full", with_statistics(square(512, 64, bf16)));
  add("statistics, one query", with_statistics(Case{"", 1, 2048, 64}));
  add("statistics, 16 queries", with_statistics(Case{"", 16, 2048, 64}));
  for (int64_t length : {128, 512, 2048}) {
    Case each = with_statistics(square(length, 64));
    each.values = false;
    add("statistics without output, full", each);
  }

  const auto backward = [&](const std::string &kind, Case each) {
    each.pass = Pass::BACKWARD;
    add("backward, " + kind, each);
  };
  for (int64_t length : {16, 128, 512, 2048})
    for (int64_t dim : {64, 128}) {
      Case each = square(length, dim);
      each.quick = length == 512 && dim == 64;
      backward("full", each);
    }
  for (int64_t length : {512, 2048}) {
    Case each = square(length, 64, fp32, Mask::CAUSAL);
    each.quick = length == 2048;
    backward("causal", each);
  }
  backward("full", square(512, 64, bf16));
  backward("window 256", square(2048, 64, fp32, Mask::WINDOW));

  for (Mask mask : {Mask::FULL, Mask::CAUSAL})
    for (int64_t length : {512, 2048}) {
      Case each = square(length, 64, fp32, mask);
      each.pass = Pass::KEY_SUMS;
      add(mask == Mask::FULL ? "received, full" : "received, causal", each);
    }
  Case received = square(512, 128, bf16);
  received.pass = Pass::KEY_SUMS;
  add("received, full", received);

  for (int64_t dim : {64, 128}) add("window 256", square(2048, dim, fp32, Mask::WINDOW));
  Case with_cells = square(1024, 64), with_bias = with_cells, with_softcap = with_cells, with_dropout = with_cells;
  with_cells.cells = true, with_bias.bias = true, with_softcap.softcap = 30, with_dropout.dropout = 0.1;
  add("mask of cells", with_cells);
  add("bias", with_bias);
  backward("bias", with_bias);
  add("softcap", with_softcap);
  add("dropout", with_dropout);
  return cases;
}

// The inputs of a case, contiguous.
RandomCall drawn(const Case &each, uint64_t seed, int64_t threads) {
  Random random(seed);
  RandomCall input;
  Call &call = input.call;
  call.batch = 1, call.heads = each.heads, call.kv_heads = each.kv_heads;
  call.queries = each.queries, call.keys = each.keys;
  call.head_dim = each.dim, call.value_dim = each.values ? each.dim : 0;
  call.dtype = each.dtype, call.threads = threads;
  call.scale = 1 / sqrt(static_cast<double>(each.dim)), call.softcap = each.softcap, call.dropout = each.dropout;
  call.pool_rows = (call.queries + 63) / 64, call.pool_keys = (call.keys + 63) / 64;
  const Type type = type_of(call);
  input.q = numbers(random, Tensor(type, 1, call.heads, call.queries, each.dim), 1);
  if (each.int8) {
    for (auto [product, int8, scales] : {std::tuple(&input.k, &input.k_int8, &input.k_scales),
                                         std::tuple(&input.v, &input.v_int8, &input.v_scales)}) {
      *int8 = integers(random, Tensor(Type::INT8, 1, call.kv_heads, call.keys, each.dim), -127, 127);
      *scales = integers(random, Tensor(Type::FLOAT, 1, call.kv_heads, 1, call.keys), 1, 2);
      scales->each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
        scales->set(scales->at(a, b, c, d) / 128, a, b, c, d);  // a power of two: the product is exact in bfloat16
      });
      *product = product_of_int8(type, *int8, *scales);
    }
  } else {
    input.k = numbers(random, Tensor(type, 1, call.kv_heads, call.keys, each.dim), 1);
    input.v = numbers(random, Tensor(type, 1, call.kv_heads, call.keys, call.value_dim), 1);
  }
  input.start = Tensor(Type::INT64, 1, 1, 1, call.queries), input.stop = Tensor(Type::INT64, 1, 1, 1, call.queries);
  for (int64_t i = 0; i < call.queries; i++) {
    const int64_t stop = each.mask == Mask::FULL ? call.keys : call.keys - call.queries + i + 1;
    input.start.set(static_cast<double>(each.mask == Mask::WINDOW && stop > 256 ? stop - 256 : 0), 0, 0, 0, i);
    input.stop.set(static_cast<double>(stop), 0, 0, 0, i);
  }
  if (each.cells) {
    input.visible = Tensor(Type::BYTE, 1, call.heads, call.queries, call.keys);
    input.visible.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { input.visible.set(d % 3 > 0, a, b, c, d); });
  }
  if (each.bias) input.bias = numbers(random, Tensor(Type::FLOAT, 1, call.heads, call.queries, call.keys), 1);
  input.dbias = each.bias;
  if (each.statistics) {
    for (bool *wanted : {&input.entropy, &input.largest_weight, &input.largest_key, &input.mean_distance,
                         &input.distance_spread, &input.offset_weights, &input.target_key_weight, &input.near_weight})
      *wanted = true;
    call.num_offsets = 3;
    call.reach = 3;
    input.offsets = Tensor(Type::INT64, 3, 1, 1, 1);
    for (int64_t i = 0; i < 3; i++) input.offsets.set(static_cast<double>(i - 1), i, 0, 0);
    input.target_key = integers(random, Tensor(Type::INT64, 1, 1, 1, 1), 0, 0);
    input.query_start = integers(random, Tensor(Type::INT64, 1, 1, 1, 1), 0, 0);
  }
  if (each.pass == Pass::BACKWARD)
    input.grad_output = numbers(random, Tensor(type, 1, call.heads, call.queries, each.dim), 1);
  input.pooled_map = each.pass == Pass::KEY_SUMS;
  set_addresses(input);
  return input;
}

// ---------------------------------------------------------------- the libraries

// The C functions of one build.
struct Library {
  std::string path;
  int64_t set = 0;  // the index of the instruction set
  decltype(&multihead_layout) layout;
  decltype(&multihead_instruction_set) name;
  decltype(&multihead_compiled) compiled;
  decltype(&multihead_runs) runs;
  decltype(&multihead_fastest) fastest;
  decltype(&multihead_run) run;

  // RTLD_LOCAL keeps the functions of two builds apart; the OpenMP library that both name is loaded once.
  explicit Library(const char *given) : path(given) {
    const std::string file = path.find('/') == std::string::npos ? "./" + path : path;
    void *handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) refuse("The library cannot be loaded: " + std::string(dlerror()));
    const auto find = [&](auto &function, const char *symbol) {
      void *address = dlsym(handle, symbol);
      if (!address) refuse(path + " has no function " + symbol + ". Give a build of libmultihead_native.so.");
      memcpy(&function, &address, sizeof address);
    };
    find(layout, "multihead_layout"), find(name, "multihead_instruction_set"), find(compiled, "multihead_compiled");
    find(runs, "multihead_runs"), find(fastest, "multihead_fastest"), find(run, "multihead_run");
    check_layout();
  }

  void check_layout() const {
    std::istringstream theirs(layout()), ours(MULTIHEAD_LAYOUT);
    std::string their_field, our_field;
    do {
      their_field = our_field = "no further field";
      theirs >> their_field, ours >> our_field;
    } while (their_field == our_field && ours);
    if (their_field != our_field)
      refuse(path + " has another struct Call: " + their_field + " where this benchmark has " + our_field +
             ". Build both libraries and the benchmark from commits with the same fields in csrc/call.h.");
  }

  void choose(const std::string &wanted) {
    std::string known;
    for (set = 0; const char *each = name(set); set++) {
      if (wanted == each && runs(set)) return;
      if (wanted == each) refuse(path + (compiled(set) ? " cannot run on this CPU: " : " was built without ") + wanted + ".");
      known += (known.empty() ? "" : ", ") + std::string(each);
    }
    refuse(path + " has no instruction set `" + wanted + "`. Give one of " + known + ".");
  }
};

// Compute a case with its results in `results`. Returns the call of the pass that is timed.
Call computed(const Library &library, const Case &each, const RandomCall &input, Results &results) {
  Call call = input.call;
  call.instruction_set = library.set;
  const auto run = [&](Pass pass) {
    const Status status = library.run(&call, pass);
    if (status != Status::DONE)
      refuse(library.path + " rejects " + each.name + ": status " + std::to_string(static_cast<int64_t>(status)) + ".");
  };
  prepare_forward(input, call, results, each.statistics);
  if (!each.values) call.v = nullptr, call.output = nullptr;
  run(Pass::FORWARD);
  if (each.pass == Pass::BACKWARD) prepare_backward(input, call, results);
  if (each.pass == Pass::KEY_SUMS) prepare_key_sums(input, call, results);
  if (each.pass != Pass::FORWARD) run(each.pass);
  return call;
}

// ---------------------------------------------------------------- comparison

// The results of both builds agree. The largest key depends on rounding where two weights are nearly equal.
std::string disagree(const Case &each, const Results &old_results, const Results &new_results) {
  std::vector<Dense> expected;
  old_results.each([&](const char *, const Tensor &tensor) { expected.push_back(Dense::of(tensor)); });
  std::string error;
  size_t index = 0;
  new_results.each([&](const std::string &name, const Tensor &tensor) {
    const Dense &wanted = expected[index++];
    if (!error.empty() || name == "largest_key") return;
    error = differs(name, tensor, wanted, tolerance_of(name, each.dtype), 0);
  });
  return error;
}

// A copy of the elements from these indices on.
Tensor tail(const Tensor &whole, int64_t a, int64_t b, int64_t c, int64_t d) {
  if (!whole) return {};
  Tensor result(whole.type, whole.sizes[0] - a, whole.sizes[1] - b, whole.sizes[2] - c, whole.sizes[3] - d);
  result.each([&](int64_t i, int64_t j, int64_t k, int64_t l) {
    result.set(whole.at(a + i, b + j, c + k, d + l), i, j, k, l);
  });
  return result;
}

// Compare the heads of the last kv head with plain loops: all their queries, or the last eight of a long call.
std::string wrong_at_the_end(const RandomCall &input, const Results &results) {
  const Call &call = input.call;
  if (call.dropout > 0) return "";  // which weights are dropped is tested by the fuzzer
  const int64_t group = call.heads / call.kv_heads, head = call.heads - group, kv = call.kv_heads - 1;
  const bool whole = call.queries * call.keys <= int64_t{1} << 18;
  const int64_t rows = whole ? call.queries : std::min<int64_t>(call.queries, 8), row = call.queries - rows;
  RandomCall part;
  part.call = call;
  part.call.heads = group, part.call.kv_heads = 1, part.call.queries = rows, part.call.first_row += row;
  part.q = tail(input.q, 0, head, row, 0), part.k = tail(input.k, 0, kv, 0, 0), part.v = tail(input.v, 0, kv, 0, 0);
  part.start = tail(input.start, 0, 0, 0, row), part.stop = tail(input.stop, 0, 0, 0, row);
  part.visible = tail(input.visible, 0, head, row, 0), part.bias = tail(input.bias, 0, head, row, 0);
  part.query_start = input.query_start.copy(), part.offsets = input.offsets.copy();
  part.target_key = input.target_key.copy(), part.grad_output = tail(input.grad_output, 0, head, row, 0);
  set_addresses(part);
  Results found;
  const std::pair<Tensor *, const Tensor *> of_rows[] = {
      {&found.output, &results.output}, {&found.logsumexp, &results.logsumexp}, {&found.entropy, &results.entropy},
      {&found.largest_weight, &results.largest_weight}, {&found.largest_key, &results.largest_key},
      {&found.mean_distance, &results.mean_distance}, {&found.distance_spread, &results.distance_spread},
      {&found.offset_weights, &results.offset_weights}, {&found.target_key_weight, &results.target_key_weight},
      {&found.near_weight, &results.near_weight}, {&found.delta, &results.delta}, {&found.dq, &results.dq},
      {&found.dbias, &results.dbias}};
  for (auto [copy, original] : of_rows) *copy = tail(*original, 0, head, row, 0);
  if (whole) {  // sums over all queries
    found.dk = tail(results.dk, 0, kv, 0, 0), found.dv = tail(results.dv, 0, kv, 0, 0);
    found.key_sums = tail(results.key_sums, 0, head, 0, 0), found.pooled_map = tail(results.pooled_map, 0, head, 0, 0);
  }
  Naive naive;
  const Dense kept(1, group, rows, call.keys, 1);
  compute_weights(part, naive);
  attend(part, kept, naive);
  if (results.dq) backward(part, kept, naive);
  if (found.key_sums) sum_keys(part, naive);
  return wrong(part, found, naive, 0);
}

// ---------------------------------------------------------------- time

struct Ratio {
  double low, median, high;
};

// The median and the quartiles, as Python's statistics.quantiles computes them.
Ratio quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    const double last = static_cast<double>(values.size()) - 1;
    const double place = fmin(fmax(share * (last + 2) - 1, 0), last), below = floor(place);
    const double low = values[static_cast<size_t>(below)], high = values[static_cast<size_t>(fmin(below + 1, last))];
    return low + (place - below) * (high - low);
  };
  return {at(0.25), at(0.5), at(0.75)};
}

struct Options {
  std::string set;
  std::vector<std::string> only;
  int64_t rounds = 15, threads = std::max<int64_t>(1, std::thread::hardware_concurrency());
  double seconds = 1;
  clockid_t clock = CLOCK_MONOTONIC;
  bool quick = false, json = false, list = false;

  bool selects(const Case &each) const {
    const auto contained = [&](const std::string &text) { return each.name.find(text) != std::string::npos; };
    return (!quick || each.quick) && (only.empty() || std::any_of(only.begin(), only.end(), contained));
  }
};

double now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Time pairs of calls; the order within a pair changes from pair to pair.
void measure(const Case &each, const Library &old_build, const Library &new_build, Call call, const Options &options) {
  Call old_call = call, new_call = call;  // the same addresses, so that both find the same data in the caches
  old_call.instruction_set = old_build.set, new_call.instruction_set = new_build.set;
  const auto seconds_of = [&](const Library &library, const Call &timed) {
    const double begin = now(options.clock);
    library.run(&timed, each.pass);
    return now(options.clock) - begin;
  };
  seconds_of(old_build, old_call), seconds_of(new_build, new_call);
  std::vector<double> ratios, old_seconds, new_seconds;
  double spent = 0;
  for (int64_t pair = 0; pair < options.rounds || (spent < options.seconds && pair < 10000); pair++) {
    double of_old, of_new;
    if (pair % 2) of_new = seconds_of(new_build, new_call), of_old = seconds_of(old_build, old_call);
    else of_old = seconds_of(old_build, old_call), of_new = seconds_of(new_build, new_call);
    ratios.push_back(of_old / of_new), old_seconds.push_back(of_old), new_seconds.push_back(of_new);
    spent += of_old + of_new;
  }
  const Ratio ratio = quartiles(ratios);
  const double old_ms = 1e3 * quartiles(old_seconds).median, new_ms = 1e3 * quartiles(new_seconds).median;
  const char *const format =
      options.json
          ? "{\"name\": \"%s\", \"old_ms\": %.6g, \"new_ms\": %.6g, "
            "\"median\": %.6g, \"low\": %.6g, \"high\": %.6g, \"pairs\": %zu}\n"
          : "%-66s %10.4g %10.4g %8.3f (%.3f-%.3f) %6zu\n";
  printf(format, each.name.c_str(), old_ms, new_ms, ratio.median, ratio.low, ratio.high, ratios.size());
  fflush(stdout);
}

}  // namespace

int main(int count, char **arguments) {
  Options options;
  std::vector<const char *> paths;
  for (int i = 1; i < count; i++) {
    const std::string word = arguments[i];
    const auto value = [&]() -> const char * {
      if (i + 1 == count) refuse(word + " needs a value. `bench --help` shows the options.");
      return arguments[++i];
    };
    const auto number = [&](int least) {
      const char *const text = value();
      char *end = nullptr;
      const double given = strtod(text, &end);
      if (*end || !(given >= least))
        refuse(word + " is `" + text + "`. Give a number that is at least " + std::to_string(least) + ".");
      return given;
    };
    if (word == "--help" || word == "-h") return printf("%s", USAGE), 0;
    else if (word == "--set") options.set = value();
    else if (word == "--only") options.only.push_back(value());
    else if (word == "--rounds") options.rounds = static_cast<int64_t>(number(1));
    else if (word == "--seconds") options.seconds = number(0);
    else if (word == "--threads") options.threads = static_cast<int64_t>(number(1));
    else if (word == "--cpu-time") options.clock = CLOCK_THREAD_CPUTIME_ID, options.threads = 1;
    else if (word == "--quick") options.quick = true;
    else if (word == "--json") options.json = true;
    else if (word == "--list") options.list = true;
    else if (word.rfind("--", 0) == 0) refuse("There is no option " + word + ". `bench --help` shows the options.");
    else paths.push_back(arguments[i]);
  }
  const std::vector<Case> cases = all_cases();
  if (std::none_of(cases.begin(), cases.end(), [&](const Case &each) { return options.selects(each); }))
    refuse("No case is selected. `bench --list` prints the names.");
  if (options.list) {
    for (const Case &each : cases)
      if (options.selects(each)) printf("%s\n", each.name.c_str());
    return 0;
  }
  if (paths.size() != 2)
    refuse("Give two libraries, OLD and NEW; " + std::to_string(paths.size()) + " given. `bench --help` shows examples.");
  Library old_build(paths[0]), new_build(paths[1]);
  if (options.set.empty()) options.set = new_build.name(new_build.fastest());
  for (Library *each : {&old_build, &new_build}) each->choose(options.set);
  if (!options.json)
    printf("%s, %ld threads\n%-66s %10s %10s %8s %13s %6s\n", options.set.c_str(), static_cast<long>(options.threads),
           "case", "old ms", "new ms", "old/new", "quartiles", "pairs");
  for (size_t index = 0; index < cases.size(); index++) {
    const Case &each = cases[index];
    if (!options.selects(each)) continue;
    const RandomCall input = drawn(each, index, options.threads);
    Results old_results, new_results;
    computed(old_build, each, input, old_results);
    const Call call = computed(new_build, each, input, new_results);
    std::string error = disagree(each, old_results, new_results);
    if (!error.empty()) error = "NEW differs from OLD: " + error;
    else if (!(error = wrong_at_the_end(input, new_results)).empty()) error = "NEW is wrong: " + error;
    if (!error.empty()) {
      fprintf(stderr, "%s: %s\n", each.name.c_str(), error.c_str());
      return 1;
    }
    measure(each, old_build, new_build, call, options);
  }
  return 0;
}
