// The forward pass as an operator of PyTorch, torch.ops.multihead.attention, registered through torch's stable C
// functions. They are declared here, and Python passes their addresses, so building and linking need no torch, and one
// library serves every version of torch from 2.11 on.
//
// An operator checks its arguments, allocates its outputs and runs the kernel without going back to Python. `attention`
// has two overloads: the default one, which graphs record, takes every term of the scores; `eager` takes the masks that
// are arithmetic, and few arguments, because PyTorch spends time on each. `statistics` takes the same masks, and returns
// what the kernel measures in one pass without values.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <stdexcept>

#include "call.h"

namespace {

// ---------------------------------------------------------------- torch's stable C functions

// From torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h. All that return an int32_t and are no
// constants return 0 for success.
typedef struct TensorOpaque *TensorHandle;
typedef struct LibraryOpaque *LibraryHandle;
// A value on the stack of an operator: an int, a double, a handle of a tensor that the receiver owns, or for an
// optional argument null or the address of such a value.
typedef uint64_t StackValue;
typedef void (*BoxedFunction)(StackValue *stack, uint64_t arguments, uint64_t results);

#define TORCH_FUNCTIONS(FUNCTION)                                                                       \
  FUNCTION(int32_t, aoti_torch_library_init_fragment, const char *, const char *, uint32_t, LibraryHandle *) \
  FUNCTION(int32_t, aoti_torch_library_init_impl, const char *, const char *, const char *, uint32_t,   \
           LibraryHandle *)                                                                             \
  FUNCTION(int32_t, aoti_torch_library_def, LibraryHandle, const char *)                                \
  FUNCTION(int32_t, torch_library_impl, LibraryHandle, const char *, BoxedFunction, uint64_t)           \
  FUNCTION(int32_t, torch_call_dispatcher, const char *, const char *, StackValue *, uint64_t)          \
  FUNCTION(int32_t, torch_get_num_threads, uint32_t *)                                                  \
  FUNCTION(int32_t, aoti_torch_get_dim, TensorHandle, int64_t *)                                        \
  FUNCTION(int32_t, aoti_torch_get_sizes, TensorHandle, const int64_t **)                               \
  FUNCTION(int32_t, aoti_torch_get_strides, TensorHandle, const int64_t **)                             \
  FUNCTION(int32_t, aoti_torch_get_dtype, TensorHandle, int32_t *)                                      \
  FUNCTION(int32_t, aoti_torch_get_device_type, TensorHandle, int32_t *)                                \
  FUNCTION(int32_t, torch_get_const_data_ptr, TensorHandle, const void **)                              \
  FUNCTION(int32_t, aoti_torch_empty_strided, int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, \
           TensorHandle *)                                                                              \
  FUNCTION(int32_t, aoti_torch_delete_tensor_object, TensorHandle)                                      \
  FUNCTION(int32_t, aoti_torch_dtype_float32)                                                           \
  FUNCTION(int32_t, aoti_torch_dtype_bfloat16)                                                          \
  FUNCTION(int32_t, aoti_torch_dtype_float16)                                                           \
  FUNCTION(int32_t, aoti_torch_dtype_int64)                                                             \
  FUNCTION(int32_t, aoti_torch_dtype_bool)                                                              \
  FUNCTION(int32_t, aoti_torch_device_type_cpu)                                                         \
  FUNCTION(int32_t, aoti_torch_memory_format_contiguous_format)

struct Torch {
#define MEMBER(result, name, ...) result (*name)(__VA_ARGS__);
  TORCH_FUNCTIONS(MEMBER)
#undef MEMBER
  int32_t float32, bfloat16, float16, int64, boolean, cpu;  // numbers of dtypes, and of the device type
} torch;

constexpr uint64_t TORCH_2_11 = uint64_t(2) << 56 | uint64_t(11) << 48;  // whose conventions these functions follow

// Raise a RuntimeError in Python.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char *format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  throw std::runtime_error(text);
}

void check(int32_t code) {
  if (code) fail("A function of libtorch failed, which printed its reason.");
}

// ---------------------------------------------------------------- values on the stack

// A tensor of the stack, which owns it; or none.
class Tensor {
 public:
  Tensor() = default;
  Tensor(const char *name, StackValue handle) : name(name) { take(handle); }
  Tensor(const Tensor &) = delete;
  Tensor &operator=(const Tensor &) = delete;
  ~Tensor() { drop(); }

  explicit operator bool() const { return handle_; }

  // Replace the tensor by another one.
  void take(StackValue handle) {
    drop();
    handle_ = reinterpret_cast<TensorHandle>(handle);
    int32_t device;
    check(torch.aoti_torch_get_dim(handle_, &dims));
    check(torch.aoti_torch_get_sizes(handle_, &sizes));
    check(torch.aoti_torch_get_strides(handle_, &strides));
    check(torch.aoti_torch_get_dtype(handle_, &dtype));
    check(torch.aoti_torch_get_device_type(handle_, &device));
    if (device != torch.cpu) fail("%s is not on the CPU, where q is. Move it there.", name);
    const void *elements;
    check(torch.torch_get_const_data_ptr(handle_, &elements));
    data = const_cast<void *>(elements);  // outputs are written
  }

  // Pass the ownership on.
  StackValue release() {
    const StackValue value = reinterpret_cast<StackValue>(handle_);
    handle_ = nullptr;
    return value;
  }

  // The shape as text.
  struct Text {
    char text[160];
  };
  Text shape() const {
    Text result = {"("};
    size_t at = 1;
    for (int64_t axis = 0; axis < dims && at + 24 < sizeof result.text; axis++)
      at += static_cast<size_t>(snprintf(result.text + at, sizeof result.text - at, axis ? ", %lld" : "%lld",
                                         static_cast<long long>(sizes[axis])));
    snprintf(result.text + at, sizeof result.text - at, dims == 1 ? ",)" : ")");
    return result;
  }

  const char *name = "";
  int64_t dims = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  void *data = nullptr;

 private:
  void drop() {
    if (handle_) torch.aoti_torch_delete_tensor_object(handle_);
    handle_ = nullptr;
  }
  TensorHandle handle_ = nullptr;
};

template <class Number>
Number number(StackValue value) {
  static_assert(sizeof(Number) == sizeof value, "a value of the stack has 64 bits");
  Number result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}

// Read an optional argument and free its memory; false where it is None.
bool read_optional(StackValue optional, StackValue &value) {
  auto *address = reinterpret_cast<StackValue *>(optional);
  if (!address) return false;
  value = *address;
  delete address;
  return true;
}
void read_optional(StackValue optional, const char *name, Tensor &tensor) {
  StackValue handle;
  tensor.name = name;
  if (read_optional(optional, handle)) tensor.take(handle);
}

// Replace a tensor by a contiguous one.
void make_contiguous(Tensor &tensor) {
  StackValue stack[] = {tensor.release(), static_cast<StackValue>(torch.aoti_torch_memory_format_contiguous_format())};
  check(torch.torch_call_dispatcher("aten::contiguous", "", stack, TORCH_2_11));
  tensor.take(stack[0]);
}

// Replace a tensor by one in float32.
void make_float32(Tensor &tensor) {
  if (tensor.dtype == torch.float32) return;
  StackValue stack[] = {tensor.release(), 0};  // self, non_blocking
  check(torch.torch_call_dispatcher("aten::_cast_Float", "", stack, TORCH_2_11));
  tensor.take(stack[0]);
}

// Two arrays of integers, freed at the end of a scope; on the stack where they are small.
class IntegerPair {
 public:
  IntegerPair() = default;
  IntegerPair(const IntegerPair &) = delete;
  IntegerPair &operator=(const IntegerPair &) = delete;
  ~IntegerPair() {
    if (first != small_) free(first);
  }

  // Make room for `count` integers in each; once.
  void allocate(int64_t count) {
    if (2 * count > SMALL) {
      first = static_cast<int64_t *>(malloc(sizeof(int64_t) * 2 * static_cast<size_t>(count)));
      if (!first) fail("There is no memory for %lld integers.", static_cast<long long>(2 * count));
    }
    second = first + count;
  }

 private:
  static constexpr int64_t SMALL = 256;
  int64_t small_[SMALL];

 public:
  int64_t *first = small_, *second = small_;
};

// ---------------------------------------------------------------- a call

thread_local int64_t forced_set = -1;  // the instruction set of this thread, or -1 for that of the process
int64_t process_set = -1;              // that of the process, or -1 for the fastest one

int64_t instruction_set() {
  if (forced_set >= 0) return forced_set;
  return process_set >= 0 ? process_set : multihead_fastest();
}

bool equal(const int64_t *sizes, int64_t a, int64_t b, int64_t c) {
  return sizes[0] == a && sizes[1] == b && sizes[2] == c;
}

// Set the sizes, dtype and strides of q, k and v, whose features are contiguous afterwards.
void set_inputs(Call &call, Tensor &q, Tensor &k, Tensor &v) {
  for (Tensor *tensor : {&q, &k, &v}) {
    if (tensor->dims != 4)
      fail("%s has shape %s. Give (batch, heads, queries or keys, features).", tensor->name, tensor->shape().text);
    if (tensor->dtype != q.dtype) fail("q and %s have different dtypes. Convert them to one.", tensor->name);
    if (tensor->strides[3] != 1 && tensor->sizes[3] != 1) make_contiguous(*tensor);
  }
  if (q.dtype == torch.float32) call.dtype = Dtype::FLOAT32;
  else if (q.dtype == torch.bfloat16) call.dtype = Dtype::BFLOAT16;
  else if (q.dtype == torch.float16) call.dtype = Dtype::FLOAT16;
  else fail("q, k and v are not float32, bfloat16 or float16. Convert them, or call multihead.attention.");
  call.batch = q.sizes[0];
  call.heads = q.sizes[1];
  call.queries = q.sizes[2];
  call.head_dim = q.sizes[3];
  call.kv_heads = k.sizes[1];
  call.keys = k.sizes[2];
  call.value_dim = v.sizes[3];
  const bool empty = !call.heads || !call.kv_heads || !call.head_dim || !call.value_dim;
  if (empty || !equal(k.sizes, call.batch, call.kv_heads, call.keys) || k.sizes[3] != call.head_dim ||
      !equal(v.sizes, call.batch, call.kv_heads, call.keys) || call.heads % call.kv_heads)
    fail("q has shape %s, k %s and v %s. Give (batch, heads, queries, head_dim), (batch, kv_heads, keys, head_dim) and "
         "(batch, kv_heads, keys, value_dim), with heads a multiple of kv_heads.",
         q.shape().text, k.shape().text, v.shape().text);
  call.q = q.data;
  call.k = k.data;
  call.v = v.data;
  call.q_strides = {q.strides[0], q.strides[1], q.strides[2]};
  call.k_strides = {k.strides[0], k.strides[1], k.strides[2]};
  call.v_strides = {v.strides[0], v.strides[1], v.strides[2]};
  call.instruction_set = instruction_set();
  uint32_t threads;
  check(torch.torch_get_num_threads(&threads));
  call.threads = threads;
}

// The strides of torch.empty_like(q): those of q if it is dense, else dense ones in the order of q's. So the heads of a
// split projection stay interleaved, and merging them copies nothing.
void strides_like(const Tensor &q, int64_t (&strides)[4]) {
  int order[4] = {3, 2, 1, 0};  // from the innermost axis outwards
  for (int i = 1; i < 4; i++)
    for (int j = i; j > 0; j--) {
      const int inner = order[j - 1], outer = order[j];
      const int64_t a = q.strides[inner], b = q.strides[outer];
      if (a == 0 || b == 0) continue;  // the order of a repeated axis is undecided
      if (a < b || (a == b && q.sizes[inner] <= q.sizes[outer])) break;
      order[j - 1] = outer;
      order[j] = inner;
    }
  int64_t step = 1;
  for (const int axis : order) {
    strides[axis] = step;
    if (q.sizes[axis] > 1) step *= q.sizes[axis];
  }
}

StackValue empty(int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype) {
  TensorHandle handle;
  check(torch.aoti_torch_empty_strided(dims, sizes, strides, dtype, torch.cpu, 0, &handle));
  return reinterpret_cast<StackValue>(handle);
}

// How many samples have bounds of their own: all of them, or one that stands for all; none in an empty batch.
int64_t samples_with_bounds(const Call &call, bool differ) { return differ || !call.batch ? call.batch : 1; }

// Run the forward pass.
void run_kernel(const Call &call) {
  switch (multihead_run(&call, Pass::FORWARD)) {
    case Status::DONE: break;
    case Status::NO_MEMORY: fail("There is no memory for the workspace of the native kernel.");
    case Status::BAD_BOUNDS:
      fail("The bounds of some query lie outside the %lld keys. Give bounds from 0 to %lld.",
           static_cast<long long>(call.keys), static_cast<long long>(call.keys));
    default: fail("The native kernel has no instruction set %lld here.", static_cast<long long>(call.instruction_set));
  }
}

// Allocate the outputs, run the kernel, and return them on the stack.
void attend(Call &call, const Tensor &q, StackValue *stack) {
  const int64_t sizes[] = {call.batch, call.heads, call.queries, call.value_dim};
  int64_t strides[] = {call.queries * call.heads * call.value_dim, call.value_dim, call.heads * call.value_dim, 1};
  if (call.value_dim == call.head_dim) strides_like(q, strides);
  const int64_t rows[] = {call.heads * call.queries, call.queries, 1};
  Tensor output("output", empty(4, sizes, strides, q.dtype));
  Tensor logsumexp("logsumexp", empty(3, sizes, rows, torch.float32));
  call.output = output.data;
  call.output_strides = {strides[0], strides[1], strides[2]};
  call.logsumexp = static_cast<float *>(logsumexp.data);
  run_kernel(call);
  stack[0] = output.release();
  stack[1] = logsumexp.release();
}

// ---------------------------------------------------------------- eager calls with arithmetic masks

const char EAGER[] =
    "attention.eager(Tensor q, Tensor k, Tensor v, Tensor? lengths, int before, int after, int query_start, "
    "float? scale, float? softcap) -> (Tensor, Tensor)";

const char STATISTICS[] =
    "statistics(Tensor q, Tensor k, Tensor? lengths, int before, int after, int query_start, float? scale, "
    "float? softcap) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";

// The arguments of these operators from `lengths` on. They are read before anything is checked, so that nothing stays
// behind on the stack where a check fails.
//
// The position of query i is query_start + i. It sees the keys from `before` keys before its position to `after` keys
// after it, and of them those before the length of its sample. A negative `before` or `after` sets no limit on its
// side. A negative query_start is 0, and wants as many queries as keys.
struct BandArguments {
  Tensor lengths;
  int64_t before, after, query_start;
  StackValue scale, softcap;
  bool scaled, capped;

  explicit BandArguments(const StackValue *stack)
      : before(number<int64_t>(stack[1])), after(number<int64_t>(stack[2])), query_start(number<int64_t>(stack[3])) {
    read_optional(stack[0], "lengths", lengths);
    scaled = read_optional(stack[4], scale);
    capped = read_optional(stack[5], softcap);
  }

  void set_fields(Call &call, IntegerPair &bounds);
};

// Set the scale, the softcap and the bounds of each query.
void BandArguments::set_fields(Call &call, IntegerPair &bounds) {
  call.scale = scaled ? number<double>(scale) : 1 / sqrt(static_cast<double>(call.head_dim));
  if (!isfinite(call.scale)) fail("scale is %g. Give a finite number.", call.scale);
  if (capped) call.softcap = number<double>(softcap);
  // Sums of larger numbers could overflow; see `masks/counts.py`.
  constexpr int64_t FURTHEST = int64_t(1) << 40;
  if (query_start > FURTHEST || before > FURTHEST || after > FURTHEST)
    fail("before is %lld, after %lld and query_start %lld. Give numbers up to 2^40.", static_cast<long long>(before),
         static_cast<long long>(after), static_cast<long long>(query_start));
  if (query_start < 0) {
    if (call.queries != call.keys) fail("There are more or fewer queries than keys. Give query_start.");
    query_start = 0;
  }
  const int64_t *length = static_cast<const int64_t *>(lengths.data);
  if (lengths && (lengths.dims != 1 || lengths.dtype != torch.int64 ||
                  (lengths.sizes[0] != call.batch && lengths.sizes[0] != 1)))
    fail("lengths has shape %s. Give (batch or 1,) int64.", lengths.shape().text);
  const int64_t samples = samples_with_bounds(call, lengths && lengths.sizes[0] > 1);
  bounds.allocate(samples * call.queries);
  int64_t *start = bounds.first, *stop = bounds.second;
  for (int64_t sample = 0; sample < samples; sample++) {
    const int64_t keys = lengths ? length[sample * lengths.strides[0]] : call.keys;
    if (keys < 0 || keys > call.keys) fail("A length lies outside the %lld keys.", static_cast<long long>(call.keys));
    for (int64_t row = 0; row < call.queries; row++) {
      const int64_t position = query_start + row;
      *start++ = before < 0 || position < before ? 0 : position - before < keys ? position - before : keys;
      *stop++ = after < 0 || position + after >= keys ? keys : position + after + 1;
    }
  }
  call.start = bounds.first;
  call.stop = bounds.second;
  call.bounds_batch_stride = samples > 1 ? call.queries : 0;
}

void attention_eager(StackValue *stack, uint64_t, uint64_t) {
  Tensor q("q", stack[0]), k("k", stack[1]), v("v", stack[2]);
  BandArguments band(stack + 3);
  Call call = {};
  set_inputs(call, q, k, v);
  IntegerPair bounds;
  band.set_fields(call, bounds);
  attend(call, q, stack);
}

// Return the first key that some query of a sample sees, or -1.
int64_t first_key(const Call &call, int64_t sample) {
  int64_t first = -1;
  const int64_t *start = call.start + sample * call.bounds_batch_stride;
  const int64_t *stop = call.stop + sample * call.bounds_batch_stride;
  for (int64_t row = 0; row < call.queries; row++)
    if (start[row] < stop[row] && (first < 0 || start[row] < first)) first = start[row];
  return first;
}

// Return the logsumexp, the entropy, the largest weight and its key, the mean distance and its spread, the weights at
// OFFSETS (offsets, batch, heads, queries), and the weight on the first key; the others (batch, heads, queries).
void statistics(StackValue *stack, uint64_t, uint64_t) {
  static const int64_t OFFSETS[] = {0, -1, 1};  // as in src/multihead/kernels/native/statistics.py
  constexpr int64_t NUM_OFFSETS = sizeof OFFSETS / sizeof OFFSETS[0];
  Tensor q("q", stack[0]), k("k", stack[1]);
  BandArguments band(stack + 2);
  Call call = {};
  set_inputs(call, q, k, k);
  call.v = nullptr;
  call.value_dim = 0;
  IntegerPair bounds, samples;
  band.set_fields(call, bounds);
  samples.allocate(call.batch);
  for (int64_t sample = 0; sample < call.batch; sample++) {
    samples.first[sample] = sample && !call.bounds_batch_stride ? samples.first[0] : first_key(call, sample);
    samples.second[sample] = band.query_start;
  }
  call.target_key = samples.first;
  call.query_start = samples.second;
  call.offsets = OFFSETS;
  call.num_offsets = NUM_OFFSETS;
  const int64_t sizes[] = {NUM_OFFSETS, call.batch, call.heads, call.queries};
  const int64_t rows = call.heads * call.queries, strides[] = {call.batch * rows, rows, call.queries, 1};
  const auto of_queries = [&](const char *name, int32_t dtype) {
    return Tensor(name, empty(3, sizes + 1, strides + 1, dtype));
  };
  Tensor outputs[] = {
      of_queries("logsumexp", torch.float32),      of_queries("entropy", torch.float32),
      of_queries("largest_weight", torch.float32), of_queries("largest_key", torch.int64),
      of_queries("mean_distance", torch.float32),  of_queries("distance_spread", torch.float32),
      Tensor("offset_weights", empty(4, sizes, strides, torch.float32)),
      of_queries("target_key_weight", torch.float32),
  };
  float **const addresses[] = {&call.logsumexp,     &call.entropy,         &call.largest_weight, nullptr,
                               &call.mean_distance, &call.distance_spread, &call.offset_weights, &call.target_key_weight};
  for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++)
    if (addresses[i]) *addresses[i] = static_cast<float *>(outputs[i].data);
    else call.largest_key = static_cast<int64_t *>(outputs[i].data);
  run_kernel(call);
  for (Tensor &output : outputs) *stack++ = output.release();
}

// ---------------------------------------------------------------- the overload for graphs

const char GENERAL[] =
    "attention(Tensor q, Tensor k, Tensor v, Tensor start, Tensor stop, Tensor? visible, Tensor? bias, "
    "Tensor? relative, Tensor? sinks, float scale, float? softcap, float dropout, Tensor? seed, int batch_start=0, "
    "int head_start=0, int total_heads=0, int query_start=0, int key_start=0) -> (Tensor, Tensor)";

// Copy one edge of the bounds, (batch or 1, queries), for `samples` samples.
void copy_edge(const Call &call, const Tensor &edge, int64_t samples, int64_t *to) {
  if (edge.dtype != torch.int64 || edge.dims != 2 || (edge.sizes[0] != 1 && edge.sizes[0] != call.batch) ||
      edge.sizes[1] != call.queries)
    fail("%s has shape %s. Give (batch or 1, queries) = (%lld or 1, %lld) int64.", edge.name, edge.shape().text,
         static_cast<long long>(call.batch), static_cast<long long>(call.queries));
  const auto *from = static_cast<const int64_t *>(edge.data);
  for (int64_t sample = 0; sample < samples; sample++)
    for (int64_t row = 0; row < call.queries; row++)
      *to++ = from[(edge.sizes[0] > 1 ? sample * edge.strides[0] : 0) + row * edge.strides[1]];
}

// Read the strides of a tensor that broadcasts to (batch, heads, queries, keys).
CellStrides broadcast_strides(const Call &call, const Tensor &tensor) {
  const int64_t sizes[] = {call.batch, call.heads, call.queries, call.keys};
  int64_t strides[4];
  bool fits = tensor.dims == 4;
  for (int axis = 0; axis < 4 && fits; axis++) {
    fits = tensor.sizes[axis] == sizes[axis] || tensor.sizes[axis] == 1;
    strides[axis] = tensor.sizes[axis] > 1 ? tensor.strides[axis] : 0;
  }
  if (!fits)
    fail("%s has shape %s. Give a tensor that broadcasts to (batch, heads, queries, keys) = (%lld, %lld, %lld, %lld).",
         tensor.name, tensor.shape().text, static_cast<long long>(sizes[0]), static_cast<long long>(sizes[1]),
         static_cast<long long>(sizes[2]), static_cast<long long>(sizes[3]));
  return {strides[0], strides[1], strides[2], strides[3]};
}

// Set the bias to one number per diagonal: a tensor whose row stride is -1.
void set_relative(Call &call, Tensor &relative) {
  make_float32(relative);
  const int64_t *sizes = relative.sizes, diagonals = call.queries + call.keys - 1;
  if (relative.dims != 3 || (sizes[0] != 1 && sizes[0] != call.batch) || (sizes[1] != 1 && sizes[1] != call.heads) ||
      (sizes[2] != diagonals && call.queries + call.keys > 0))
    fail("relative has shape %s. Give (batch or 1, heads or 1, queries + keys - 1) = (%lld or 1, %lld or 1, %lld).",
         relative.shape().text, static_cast<long long>(call.batch), static_cast<long long>(call.heads),
         static_cast<long long>(diagonals));
  if (!call.queries || !call.keys) return;
  make_contiguous(relative);
  call.bias = static_cast<const float *>(relative.data) + call.queries - 1;
  call.bias_strides = {relative.sizes[0] > 1 ? relative.strides[0] : 0, relative.sizes[1] > 1 ? relative.strides[1] : 0,
                       -1, 1};
}

void attention(StackValue *stack, uint64_t, uint64_t) {
  Tensor q("q", stack[0]), k("k", stack[1]), v("v", stack[2]), start("start", stack[3]), stop("stop", stack[4]);
  Tensor visible, bias, relative, sinks, seed;
  read_optional(stack[5], "visible", visible);
  read_optional(stack[6], "bias", bias);
  read_optional(stack[7], "relative", relative);
  read_optional(stack[8], "sinks", sinks);
  StackValue softcap;
  const bool capped = read_optional(stack[10], softcap);
  read_optional(stack[12], "seed", seed);
  Call call = {};
  set_inputs(call, q, k, v);
  call.scale = number<double>(stack[9]);
  if (!isfinite(call.scale)) fail("scale is %g. Give a finite number.", call.scale);
  if (capped) {
    call.softcap = number<double>(softcap);
    if (!(call.softcap > 0) || isinf(call.softcap)) fail("softcap is %g. Give a positive number, or None.", call.softcap);
  }
  if (bias && relative) fail("Both `bias` and `relative` are given. Pass one of them, or their sum.");
  if (visible) {
    if (visible.dtype != torch.boolean) fail("visible is no bool tensor. Give True where a key is visible.");
    call.visible_strides = broadcast_strides(call, visible);
    call.visible = static_cast<const uint8_t *>(visible.data);
  }
  if (bias) {
    make_float32(bias);
    call.bias_strides = broadcast_strides(call, bias);
    call.bias = static_cast<const float *>(bias.data);
  }
  if (relative) set_relative(call, relative);
  if (sinks) {
    if (sinks.dims != 1 || sinks.sizes[0] != call.heads)
      fail("sinks has shape %s. Give (heads,) = (%lld,).", sinks.shape().text, static_cast<long long>(call.heads));
    make_float32(sinks);
    make_contiguous(sinks);
    call.sinks = static_cast<const float *>(sinks.data);
  }
  call.dropout = number<double>(stack[11]);
  if (!(call.dropout >= 0 && call.dropout <= 1)) fail("dropout is %g. Give a number from 0 to 1.", call.dropout);
  if (call.dropout > 0) {
    bool one = seed && seed.dtype == torch.int64;
    for (int64_t axis = 0; one && axis < seed.dims; axis++) one = seed.sizes[axis] == 1;
    if (!one) fail("dropout is %g and seed is no int64 tensor of one integer.", call.dropout);
    call.seed = *static_cast<const int64_t *>(seed.data);
  }
  call.batch_start = number<int64_t>(stack[13]);
  call.head_start = number<int64_t>(stack[14]);
  call.total_heads = number<int64_t>(stack[15]);
  call.first_row = number<int64_t>(stack[16]);
  call.key_start = number<int64_t>(stack[17]);
  const int64_t samples =
      samples_with_bounds(call, (start.dims && start.sizes[0] > 1) || (stop.dims && stop.sizes[0] > 1));
  IntegerPair bounds;
  bounds.allocate(samples * call.queries);
  copy_edge(call, start, samples, bounds.first);
  copy_edge(call, stop, samples, bounds.second);
  call.start = bounds.first;
  call.stop = bounds.second;
  call.bounds_batch_stride = samples > 1 ? call.queries : 0;
  attend(call, q, stack);
}

}  // namespace

// ---------------------------------------------------------------- the functions of the library

#define EXPORT extern "C" __attribute__((visibility("default")))

// The names of the functions of libtorch that the operator calls, separated by spaces.
EXPORT const char *multihead_torch_functions() {
#define NAME(result, name, ...) #name " "
  static const char names[] = TORCH_FUNCTIONS(NAME);
  return names;
}

// Define the operators, with the addresses of these functions in their order. Returns 1 if torch accepts them, else 0.
EXPORT int64_t multihead_register(void *const *functions) {
  static bool registered = false;
  if (registered) return 1;
#define TAKE(result, name, ...) torch.name = reinterpret_cast<result (*)(__VA_ARGS__)>(*functions++);
  TORCH_FUNCTIONS(TAKE)
  torch.float32 = torch.aoti_torch_dtype_float32();
  torch.bfloat16 = torch.aoti_torch_dtype_bfloat16();
  torch.float16 = torch.aoti_torch_dtype_float16();
  torch.int64 = torch.aoti_torch_dtype_int64();
  torch.boolean = torch.aoti_torch_dtype_bool();
  torch.cpu = torch.aoti_torch_device_type_cpu();
  LibraryHandle definitions, cpu;  // never deleted: the operator stays as long as the process
  if (torch.aoti_torch_library_init_fragment("multihead", __FILE__, __LINE__, &definitions) ||
      torch.aoti_torch_library_def(definitions, GENERAL) || torch.aoti_torch_library_def(definitions, EAGER) ||
      torch.aoti_torch_library_def(definitions, STATISTICS) ||
      torch.aoti_torch_library_init_impl("multihead", "CPU", __FILE__, __LINE__, &cpu) ||
      torch.torch_library_impl(cpu, "attention", attention, TORCH_2_11) ||
      torch.torch_library_impl(cpu, "attention.eager", attention_eager, TORCH_2_11) ||
      torch.torch_library_impl(cpu, "statistics", statistics, TORCH_2_11))
    return 0;
  registered = true;
  return 1;
}

// Choose the instruction set of the operators in this process.
EXPORT void multihead_choose(int64_t set) { process_set = set; }

// Choose that of this thread; -1 for that of the process.
EXPORT void multihead_choose_in_thread(int64_t set) { forced_set = set; }
