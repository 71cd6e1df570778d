// The passes as operators of PyTorch, torch.ops.multihead.*, registered through torch's stable C functions. They are
// declared here, and Python passes their addresses, so building and linking need no torch, and one library serves every
// version of torch from 2.11 on.
//
// Every operator reads its arguments into one struct, Arguments, whose `prepare` is the only place that checks them and
// makes them readable; then it allocates its outputs and runs the kernel. `attention` has two overloads: the default
// one takes every term of the scores; `short_call` takes the masks that are arithmetic, and few arguments, because
// PyTorch spends time on each. The schemas are a file format, since exported programs contain them (all but that of
// `short_call`, which nothing records): new arguments come last, with defaults.
// src/multihead/kernels/native/schemas.txt has all of them.
//
// Two schemas front the forward pass. PyTorch spends time on each argument, so calls that need no plan have a short
// one, `attention.short_call`: plain tensors, or few queries on the int8 keys of a cache, a mask that is arithmetic
// (`Mask.band`: full, causal, window, lengths and their conjunctions), no bias, sinks, dropout or observer. All other
// calls and all graphs have the full one, `attention`. Both only fill the struct `Arguments`, whose `prepare` is the
// one place that checks layout, dtype and sizes and converts what the kernel cannot read; a test compares their results
// bit for bit. A second preparation in Python, on which one of the ways relied, once gave wrong gradients for features
// that are not contiguous. Where an operator raises in the short way, the planned call finds the error or another
// kernel. For one query of 8 heads the short way takes about as long as SDPA, a planned call 3 to 4 times as long.
//
// Negative-bit views need no code of ours: PyTorch's dispatcher resolves them before it calls an operator.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stdexcept>
#include <vector>

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
  FUNCTION(int32_t, aoti_torch_dtype_int8)                                                              \
  FUNCTION(int32_t, aoti_torch_dtype_int64)                                                             \
  FUNCTION(int32_t, aoti_torch_dtype_bool)                                                              \
  FUNCTION(int32_t, aoti_torch_device_type_cpu)                                                         \
  FUNCTION(int32_t, aoti_torch_memory_format_contiguous_format)

struct Torch {
#define MEMBER(result, name, ...) result (*name)(__VA_ARGS__);
  TORCH_FUNCTIONS(MEMBER)
#undef MEMBER
  int32_t float32, bfloat16, float16, int8, int64, boolean, cpu;  // numbers of dtypes, and of the device type
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
  explicit Tensor(const char *name) : name(name) {}
  Tensor(const char *name, StackValue handle) : name(name) { take(handle); }
  Tensor(const Tensor &) = delete;
  Tensor &operator=(const Tensor &) = delete;
  ~Tensor() { drop(); }

  explicit operator bool() const { return handle_; }

  // Replace the tensor by another one.
  void take(StackValue handle) {
    drop();
    handle_ = reinterpret_cast<TensorHandle>(handle);
    check(torch.aoti_torch_get_dim(handle_, &dims));
    check(torch.aoti_torch_get_sizes(handle_, &sizes));
    check(torch.aoti_torch_get_strides(handle_, &strides));
    check(torch.aoti_torch_get_dtype(handle_, &dtype));
    check(torch.aoti_torch_get_device_type(handle_, &device));
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

  template <class Element>
  Element *elements() const {
    return static_cast<Element *>(data);
  }

  const char *name;
  int64_t dims = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device = 0;
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
void read_optional(StackValue optional, Tensor &tensor) {
  StackValue handle;
  if (read_optional(optional, handle)) tensor.take(handle);
}
// Read an optional number, which stays as it is where the argument is None.
bool read_optional(StackValue optional, double &number_) {
  StackValue value;
  if (!read_optional(optional, value)) return false;
  number_ = number<double>(value);
  return true;
}

// Replace a tensor by a contiguous one.
void make_contiguous(Tensor &tensor) {
  StackValue stack[] = {tensor.release(), static_cast<StackValue>(torch.aoti_torch_memory_format_contiguous_format())};
  check(torch.torch_call_dispatcher("aten::contiguous", "", stack, TORCH_2_11));
  tensor.take(stack[0]);
}

// Replace a tensor by one whose features, its last axis, are contiguous.
void make_features_contiguous(Tensor &tensor) {
  if (tensor.strides[3] != 1 && tensor.sizes[3] != 1) make_contiguous(tensor);
}

// Replace a tensor by one in float32.
void make_float32(Tensor &tensor) {
  if (tensor.dtype == torch.float32) return;
  StackValue stack[] = {tensor.release(), 0};  // self, non_blocking
  check(torch.torch_call_dispatcher("aten::_cast_Float", "", stack, TORCH_2_11));
  tensor.take(stack[0]);
}

// Allocate a tensor (up to 4 dimensions) on the CPU, contiguous or with these strides.
StackValue empty(int64_t dims, const int64_t *sizes, int32_t dtype, const int64_t *strides = nullptr) {
  int64_t contiguous[4], step = 1;
  for (int64_t axis = dims; !strides && axis-- > 0; step *= sizes[axis] > 1 ? sizes[axis] : 1) contiguous[axis] = step;
  TensorHandle handle;
  if (torch.aoti_torch_empty_strided(dims, sizes, strides ? strides : contiguous, dtype, torch.cpu, 0, &handle))
    fail("There is no memory for a tensor that the native kernel returns.");
  return reinterpret_cast<StackValue>(handle);
}

int64_t count_of(const Tensor &tensor) {
  int64_t count = 1;
  for (int64_t axis = 0; axis < tensor.dims; axis++) count *= tensor.sizes[axis];
  return count;
}

// Set a dense float32 tensor to 0.
void clear(Tensor &tensor) { memset(tensor.data, 0, sizeof(float) * static_cast<size_t>(count_of(tensor))); }

// Replace a dense tensor by a copy in another dtype with the same strides; no copy where it has that dtype.
void convert(Tensor &tensor, int32_t dtype) {
  if (tensor.dtype == dtype) return;
  Tensor converted(tensor.name, empty(tensor.dims, tensor.sizes, dtype, tensor.strides));
  StackValue stack[] = {converted.release(), tensor.release(), 0};  // self, src, non_blocking
  check(torch.torch_call_dispatcher("aten::copy_", "", stack, TORCH_2_11));
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

// ---------------------------------------------------------------- the arguments of a call

thread_local int64_t forced_set = -1;  // the instruction set of this thread, or -1 for that of the process
int64_t process_set = -1;              // that of the process, or -1 for the fastest one

int64_t instruction_set() {
  if (forced_set >= 0) return forced_set;
  return process_set >= 0 ? process_set : multihead_fastest();
}

bool equal(const int64_t *sizes, int64_t a, int64_t b, int64_t c) {
  return sizes[0] == a && sizes[1] == b && sizes[2] == c;
}

RowStrides row_strides(const Tensor &tensor) { return {tensor.strides[0], tensor.strides[1], tensor.strides[2]}; }

long long printed(int64_t number) { return static_cast<long long>(number); }  // for %lld

// The statistics of the forward pass: a statistic is wanted if its flag is set in `statistics`, which exported programs
// contain. Those in this list are float32, (batch, heads, queries) each, `offset_weights` one for each offset.
constexpr int64_t AT_OFFSETS = 16, AT_TARGET = 32, AT_SPECIAL = 64, LARGEST_KEY = 128, ALL_STATISTICS = 511;
constexpr int64_t OFFSETS[] = {0, -1, 1};
constexpr int64_t NUM_OFFSETS = sizeof OFFSETS / sizeof OFFSETS[0];
constexpr int64_t REACH = 3;  // of near_weight
constexpr struct {
  int64_t flag, rows;
  float *Call::*address;
} STATISTICS[] = {{1, 1, &Call::entropy},
                  {2, 1, &Call::largest_weight},
                  {4, 1, &Call::mean_distance},
                  {8, 1, &Call::distance_spread},
                  {AT_OFFSETS, NUM_OFFSETS, &Call::offset_weights},
                  {AT_TARGET, 1, &Call::target_key_weight},
                  {AT_SPECIAL, 1, &Call::special_keys_weight},
                  {256, 1, &Call::near_weight}};

// The schema of the arguments that the passes share; the operators of one pass have further ones before or after them.
#define ARGUMENTS                                                                                                   \
  "Tensor q, Tensor k, Tensor? v, Tensor start, Tensor stop, Tensor? visible, Tensor? bias, Tensor? relative, "     \
  "Tensor? sinks, float scale, float? softcap, float dropout, Tensor? seed, int batch_start=0, int head_start=0, "  \
  "int total_heads=0, int query_start=0, int key_start=0"
#define FORWARD_ARGUMENTS                                                                                           \
  ARGUMENTS ", Tensor? k_scales=None, Tensor? v_scales=None, int statistics=0, Tensor? positions=None, "            \
            "Tensor? target_keys=None, Tensor? special_keys=None"
constexpr int NUM_ARGUMENTS = 18;

// The arguments of a call. They are all read before anything is checked, so that nothing stays behind on the stack
// where a check fails. Then `prepare` checks them, makes them readable and fills `call`.
struct Arguments {
  Tensor q{"q"}, k{"k"}, v{"v"}, start{"start"}, stop{"stop"}, visible{"visible"}, bias{"bias"}, relative{"relative"};
  Tensor sinks{"sinks"}, seed{"seed"}, k_scales{"k_scales"}, v_scales{"v_scales"}, positions{"positions"};
  Tensor target_keys{"target_keys"}, special_keys{"special_keys"}, lengths{"lengths"};
  double scale = 0, softcap = 0;
  bool scaled = true, capped = false;
  int64_t statistics = 0;
  // Which keys a query sees: those from `start` to `stop`, or those of a band. The position of query i is then
  // query_start + i. It sees the keys from `before` keys before its position to `after` keys after it, and of them
  // those before the length of its sample. A negative `before` or `after` sets no limit on its side. A negative
  // query_start is 0, and wants as many queries as keys.
  bool band = false;
  int64_t before = -1, after = -1, query_start = 0;

  Call call = {};

  void read(const StackValue *stack);
  void read_forward(const StackValue *stack);
  void read_band(const StackValue *stack);
  void prepare();

 private:
  IntegerPair bounds_, samples_;

  void set_inputs();
  void set_int8();
  void set_terms();
  void set_relative();
  void set_dropout();
  void set_bounds();
  void set_band();
  void set_statistics();
};

// Read ARGUMENTS.
void Arguments::read(const StackValue *stack) {
  for (Tensor *tensor : {&q, &k}) tensor->take(*stack++);
  read_optional(*stack++, v);
  for (Tensor *tensor : {&start, &stop}) tensor->take(*stack++);
  for (Tensor *tensor : {&visible, &bias, &relative, &sinks}) read_optional(*stack++, *tensor);
  scale = number<double>(*stack++);
  capped = read_optional(*stack++, softcap);
  call.dropout = number<double>(*stack++);
  read_optional(*stack++, seed);
  for (int64_t *index : {&call.batch_start, &call.head_start, &call.total_heads, &call.first_row, &call.key_start})
    *index = number<int64_t>(*stack++);
}

// Read FORWARD_ARGUMENTS.
void Arguments::read_forward(const StackValue *stack) {
  read(stack);
  stack += NUM_ARGUMENTS;
  for (Tensor *tensor : {&k_scales, &v_scales}) read_optional(*stack++, *tensor);
  statistics = number<int64_t>(*stack++);
  for (Tensor *tensor : {&positions, &target_keys, &special_keys}) read_optional(*stack++, *tensor);
}

// Read the arguments of the overload for masks that are arithmetic.
void Arguments::read_band(const StackValue *stack) {
  band = true;
  for (Tensor *tensor : {&q, &k}) tensor->take(*stack++);
  for (Tensor *tensor : {&v, &lengths}) read_optional(*stack++, *tensor);
  for (int64_t *count : {&before, &after, &query_start}) *count = number<int64_t>(*stack++);
  scaled = read_optional(*stack++, scale);
  capped = read_optional(*stack++, softcap);
  statistics = number<int64_t>(*stack++);
  for (Tensor *tensor : {&k_scales, &v_scales}) read_optional(*stack++, *tensor);
}

void Arguments::prepare() {
  for (const Tensor *tensor : {&q, &k, &v, &start, &stop, &visible, &bias, &relative, &sinks, &seed, &k_scales,
                               &v_scales, &positions, &target_keys, &special_keys, &lengths})
    if (*tensor && tensor->device != torch.cpu) fail("%s is not on the CPU, where q is. Move it there.", tensor->name);
  set_inputs();
  if (k_scales || v_scales) set_int8();
  set_terms();
  if (call.dropout != 0) set_dropout();
  if (band) set_band();
  else set_bounds();
  call.start = bounds_.first;
  call.stop = bounds_.second;
  if (statistics) set_statistics();
  call.instruction_set = instruction_set();
  uint32_t threads;
  check(torch.torch_get_num_threads(&threads));
  call.threads = threads;
}

// Set the sizes, dtype and strides of q, k and v, whose features are contiguous afterwards. Negative-bit views were
// resolved by PyTorch's dispatcher, as for every operator.
void Arguments::set_inputs() {
  const bool int8 = k_scales && v_scales;
  for (Tensor *tensor : {&q, &k, &v}) {
    if (!*tensor) continue;  // no values
    if (tensor->dims != 4)
      fail("%s has shape %s. Give (batch, heads, queries or keys, features).", tensor->name, tensor->shape().text);
    if (tensor->dtype != (int8 && tensor != &q ? torch.int8 : q.dtype))
      fail(int8 ? "%s is not int8, and its scales are given." : "q and %s have different dtypes. Convert them to one.",
           tensor->name);
    make_features_contiguous(*tensor);
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
  call.value_dim = v ? v.sizes[3] : 0;
  const bool empty = !call.heads || !call.kv_heads || !call.head_dim || (v && !call.value_dim);
  if (empty || !equal(k.sizes, call.batch, call.kv_heads, call.keys) || k.sizes[3] != call.head_dim ||
      (v && !equal(v.sizes, call.batch, call.kv_heads, call.keys)) || call.heads % call.kv_heads)
    fail("q has shape %s, k %s and v %s. Give (batch, heads, queries, head_dim), (batch, kv_heads, keys, head_dim) and "
         "(batch, kv_heads, keys, value_dim), with heads a multiple of kv_heads.",
         q.shape().text, k.shape().text, v ? v.shape().text : "None");
  call.q = q.data;
  call.k = k.data;
  call.q_strides = row_strides(q);
  call.k_strides = row_strides(k);
  if (!v) return;
  call.v = v.data;
  call.v_strides = row_strides(v);
}

// Set the factors of the rows of k and v, which are int8.
void Arguments::set_int8() {
  for (Tensor *scales : {&k_scales, &v_scales}) {
    if (!*scales || scales->dtype != torch.float32 || scales->dims != 3 ||
        !equal(scales->sizes, call.batch, call.kv_heads, call.keys))
      fail("%s has shape %s. Give k_scales and v_scales, (batch, kv_heads, keys) = (%lld, %lld, %lld) float32.",
           scales->name, *scales ? scales->shape().text : "None", printed(call.batch), printed(call.kv_heads),
           printed(call.keys));
    if (scales->strides[2] != 1) make_contiguous(*scales);
  }
  call.k_scales = k_scales.elements<const float>();
  call.v_scales = v_scales.elements<const float>();
  call.k_scales_strides = {k_scales.strides[0], k_scales.strides[1], 1};
  call.v_scales_strides = {v_scales.strides[0], v_scales.strides[1], 1};
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
         tensor.name, tensor.shape().text, printed(sizes[0]), printed(sizes[1]), printed(sizes[2]), printed(sizes[3]));
  return {strides[0], strides[1], strides[2], strides[3]};
}

// Set the scale, the softcap, the mask, the bias and the sinks.
void Arguments::set_terms() {
  call.scale = scaled ? scale : 1 / sqrt(static_cast<double>(call.head_dim));
  if (!isfinite(call.scale)) fail("scale is %g. Give a finite number.", call.scale);
  if (capped) {
    if (!(softcap > 0) || isinf(softcap)) fail("softcap is %g. Give a positive number, or None.", softcap);
    call.softcap = softcap;
  }
  if (visible) {
    if (visible.dtype != torch.boolean) fail("visible is no bool tensor. Give True where a key is visible.");
    call.visible_strides = broadcast_strides(call, visible);
    call.visible = visible.elements<const uint8_t>();
  }
  if (bias && relative) fail("Both `bias` and `relative` are given. Pass one of them, or their sum.");
  if (bias) {
    make_float32(bias);
    call.bias_strides = broadcast_strides(call, bias);
    call.bias = bias.elements<const float>();
  }
  if (relative) set_relative();
  if (sinks) {
    if (sinks.dims != 1 || sinks.sizes[0] != call.heads)
      fail("sinks has shape %s. Give (heads,) = (%lld,).", sinks.shape().text, printed(call.heads));
    make_float32(sinks);
    make_contiguous(sinks);
    call.sinks = sinks.elements<const float>();
  }
}

// Set the bias to one number per diagonal: a tensor whose row stride is -1.
void Arguments::set_relative() {
  make_float32(relative);
  const int64_t *sizes = relative.sizes, diagonals = call.queries + call.keys - 1;
  if (relative.dims != 3 || (sizes[0] != 1 && sizes[0] != call.batch) || (sizes[1] != 1 && sizes[1] != call.heads) ||
      (sizes[2] != diagonals && call.queries + call.keys > 0))
    fail("relative has shape %s. Give (batch or 1, heads or 1, queries + keys - 1) = (%lld or 1, %lld or 1, %lld).",
         relative.shape().text, printed(call.batch), printed(call.heads), printed(diagonals));
  if (!call.queries || !call.keys) return;
  make_contiguous(relative);
  call.bias = relative.elements<const float>() + call.queries - 1;
  call.bias_strides = {relative.sizes[0] > 1 ? relative.strides[0] : 0, relative.sizes[1] > 1 ? relative.strides[1] : 0,
                       -1, 1};
}

void Arguments::set_dropout() {
  if (!(call.dropout >= 0 && call.dropout <= 1)) fail("dropout is %g. Give a number from 0 to 1.", call.dropout);
  if (!seed || seed.dtype != torch.int64 || count_of(seed) != 1)
    fail("dropout is %g and seed is no int64 tensor of one integer.", call.dropout);
  call.seed = *seed.elements<const int64_t>();
}

// Set the bounds of each query from `start` and `stop`, (batch or 1, queries).
void Arguments::set_bounds() {
  for (const Tensor *edge : {&start, &stop})
    if (edge->dtype != torch.int64 || edge->dims != 2 || (edge->sizes[0] != 1 && edge->sizes[0] != call.batch) ||
        edge->sizes[1] != call.queries)
      fail("%s has shape %s. Give (batch or 1, queries) = (%lld or 1, %lld) int64.", edge->name, edge->shape().text,
           printed(call.batch), printed(call.queries));
  // Where there is no sample, none reads its bounds.
  const int64_t samples = start.sizes[0] != 1 || stop.sizes[0] != 1 || !call.batch ? call.batch : 1;
  bounds_.allocate(samples * call.queries);
  int64_t *to = bounds_.first;
  for (const Tensor *edge : {&start, &stop})
    for (int64_t sample = 0; sample < samples; sample++) {
      const int64_t *from = edge->elements<const int64_t>() + (edge->sizes[0] > 1 ? sample * edge->strides[0] : 0);
      for (int64_t row = 0; row < call.queries; row++) *to++ = from[row * edge->strides[1]];
    }
  call.bounds_batch_stride = samples > 1 ? call.queries : 0;
}

// Set the bounds of each query from those of a band.
void Arguments::set_band() {
  // Sums of larger numbers could overflow; see `masks/counts.py`.
  constexpr int64_t MAX_POSITION = int64_t(1) << 40;
  if (query_start > MAX_POSITION || before > MAX_POSITION || after > MAX_POSITION)
    fail("before is %lld, after %lld and query_start %lld. Give numbers up to 2^40.", printed(before), printed(after),
         printed(query_start));
  if (query_start < 0) {
    if (call.queries != call.keys) fail("There are more or fewer queries than keys. Give query_start.");
    query_start = 0;
  }
  if (lengths && (lengths.dims != 1 || lengths.dtype != torch.int64 ||
                  (lengths.sizes[0] != call.batch && lengths.sizes[0] != 1)))
    fail("lengths has shape %s. Give (batch or 1,) int64.", lengths.shape().text);
  const int64_t samples = (lengths && lengths.sizes[0] > 1) || !call.batch ? call.batch : 1;
  bounds_.allocate(samples * call.queries);
  int64_t *first = bounds_.first, *end = bounds_.second;
  for (int64_t sample = 0; sample < samples; sample++) {
    const int64_t keys = lengths ? lengths.elements<const int64_t>()[sample * lengths.strides[0]] : call.keys;
    if (keys < 0 || keys > call.keys) fail("A length lies outside the %lld keys.", printed(call.keys));
    for (int64_t row = 0; row < call.queries; row++) {
      const int64_t position = query_start + row;
      *first++ = before < 0 || position < before ? 0 : position - before < keys ? position - before : keys;
      *end++ = after < 0 || position + after >= keys ? keys : position + after + 1;
    }
  }
  call.bounds_batch_stride = samples > 1 ? call.queries : 0;
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

// Set what the wanted statistics read: the offsets, the position of the first query, the target key and special keys.
void Arguments::set_statistics() {
  if (statistics < 0 || statistics > ALL_STATISTICS)
    fail("statistics is %lld. Give a sum of powers of 2 below %lld.", printed(statistics), printed(ALL_STATISTICS + 1));
  call.offsets = OFFSETS;
  call.num_offsets = statistics & AT_OFFSETS ? NUM_OFFSETS : 0;
  call.reach = REACH;
  if (band) {
    samples_.allocate(call.batch);
    for (int64_t sample = 0; sample < call.batch; sample++) {
      samples_.first[sample] = sample && !call.bounds_batch_stride ? samples_.first[0] : first_key(call, sample);
      samples_.second[sample] = query_start;
    }
    call.target_key = samples_.first;
    call.query_start = samples_.second;
  }
  for (Tensor *tensor : {&positions, &target_keys}) {
    if (!*tensor) continue;
    if (tensor->dims != 1 || tensor->sizes[0] != call.batch)
      fail("%s has shape %s. Give (batch,) = (%lld,) integers.", tensor->name, tensor->shape().text,
           printed(call.batch));
    make_contiguous(*tensor);
    convert(*tensor, torch.int64);
  }
  if (positions) call.query_start = positions.elements<const int64_t>();
  if (target_keys) call.target_key = target_keys.elements<const int64_t>();
  if (special_keys) {
    if (special_keys.dtype != torch.boolean || special_keys.dims != 2 || special_keys.sizes[0] != call.batch ||
        special_keys.sizes[1] != call.keys)
      fail("special_keys has shape %s. Give (batch, keys) = (%lld, %lld) bool.", special_keys.shape().text,
           printed(call.batch), printed(call.keys));
    make_contiguous(special_keys);
    call.special_keys = special_keys.elements<const uint8_t>();
  }
  if (((statistics & AT_TARGET) && !target_keys && !band) || ((statistics & AT_SPECIAL) && !special_keys))
    fail("statistics is %lld, which needs target_keys (32) or special_keys (64). Give them.", printed(statistics));
}

// ---------------------------------------------------------------- running a pass

void run(const Call &call, Pass pass) {
  switch (multihead_run(&call, pass)) {
    case Status::DONE: break;
    case Status::NO_MEMORY:
      fail("There is no memory for the native kernel's workspace of %lld bytes.",
           printed(multihead_workspace(&call, pass)));
    case Status::BAD_BOUNDS:
      fail("The bounds of some query lie outside the %lld keys. Give bounds from 0 to %lld.", printed(call.keys),
           printed(call.keys));
    default: fail("The native kernel has no instruction set %lld here.", printed(call.instruction_set));
  }
}

// The strides of torch.empty_like(tensor): those of the tensor if it is dense, else dense ones in the order of its own.
// So the heads of a split projection stay interleaved, and merging them copies nothing. Returns whether the features
// are contiguous.
bool strides_like(const Tensor &tensor, int64_t (&strides)[4]) {
  int order[4] = {3, 2, 1, 0};  // from the innermost axis outwards
  for (int i = 1; i < 4; i++)
    for (int j = i; j > 0; j--) {
      const int inner = order[j - 1], outer = order[j];
      const int64_t a = tensor.strides[inner], b = tensor.strides[outer];
      if (a == 0 || b == 0) continue;  // the order of a repeated axis is undecided
      if (a < b || (a == b && tensor.sizes[inner] <= tensor.sizes[outer])) break;
      order[j - 1] = outer;
      order[j] = inner;
    }
  int64_t step = 1;
  for (const int axis : order) {
    strides[axis] = step;
    if (tensor.sizes[axis] > 1) step *= tensor.sizes[axis];
  }
  return strides[3] == 1 || tensor.sizes[3] == 1;
}

// ---------------------------------------------------------------- the forward pass

const char FULL[] = "attention(" FORWARD_ARGUMENTS ") -> (Tensor, Tensor, Tensor, Tensor)";

const char SHORT_CALL[] =
    "attention.short_call(Tensor q, Tensor k, Tensor? v, Tensor? lengths, int before, int after, int query_start, "
    "float? scale, float? softcap, int statistics=0, Tensor? k_scales=None, Tensor? v_scales=None) "
    "-> (Tensor, Tensor, Tensor?, Tensor?)";

// Allocate the output (batch, heads, queries, value_dim), the logsumexp (batch, heads, queries), the wanted statistics
// in float32 (number, batch, heads, queries), and the largest keys (batch, heads, queries) or (0); compute them, and
// return them on the stack. The overload `short_call` returns None for the last two where no statistic is wanted.
void attend(Arguments &arguments, StackValue *stack) {
  arguments.prepare();
  Call &call = arguments.call;
  const int64_t statistics = arguments.statistics;
  const int64_t sizes[] = {call.batch, call.heads, call.queries, call.value_dim};
  int64_t strides[4];
  if (call.value_dim != call.head_dim || !strides_like(arguments.q, strides)) {
    const int64_t heads_inside[] = {call.queries * call.heads * call.value_dim, call.value_dim,
                                    call.heads * call.value_dim, 1};
    memcpy(strides, heads_inside, sizeof strides);
  }
  Tensor output("output", empty(4, sizes, arguments.q.dtype, strides));
  Tensor logsumexp("logsumexp", empty(3, sizes, torch.float32)), measured("measured"), largest_key("largest_key");
  call.output = output.data;
  call.output_strides = {strides[0], strides[1], strides[2]};
  call.logsumexp = logsumexp.elements<float>();
  if (statistics || !arguments.band) {
    int64_t count[] = {0, call.batch, call.heads, call.queries};
    for (const auto &each : STATISTICS)
      if (statistics & each.flag) count[0] += each.rows;
    measured.take(empty(4, count, torch.float32));
    const int64_t nothing[] = {0};
    largest_key.take(statistics & LARGEST_KEY ? empty(3, sizes, torch.int64) : empty(1, nothing, torch.int64));
    if (statistics & LARGEST_KEY) call.largest_key = largest_key.elements<int64_t>();
    float *rows = measured.elements<float>();
    for (const auto &each : STATISTICS) {
      if (!(statistics & each.flag)) continue;
      call.*each.address = rows;
      rows += each.rows * call.batch * call.heads * call.queries;
    }
  }
  run(call, Pass::FORWARD);
  *stack++ = output.release();
  *stack++ = logsumexp.release();
  for (Tensor *result : {&measured, &largest_key})
    if (!arguments.band) *stack++ = result->release();
    else *stack++ = *result ? reinterpret_cast<StackValue>(new StackValue(result->release())) : 0;
}

void attention(StackValue *stack, uint64_t, uint64_t) {
  Arguments arguments;
  arguments.read_forward(stack);
  attend(arguments, stack);
}

void attention_short_call(StackValue *stack, uint64_t, uint64_t) {
  Arguments arguments;
  arguments.read_band(stack);
  attend(arguments, stack);
}

// ---------------------------------------------------------------- the bytes that a forward pass takes

const char WORKSPACE[] = "workspace(" FORWARD_ARGUMENTS ") -> int";

void workspace(StackValue *stack, uint64_t, uint64_t) {
  Arguments arguments;
  arguments.read_forward(stack);
  arguments.prepare();
  stack[0] = static_cast<StackValue>(multihead_workspace(&arguments.call, Pass::FORWARD));
}

// ---------------------------------------------------------------- the backward pass

const char BACKWARD[] =
    "attention_backward(Tensor output, Tensor logsumexp, Tensor grad_output, Tensor? grad_logsumexp, " ARGUMENTS
    ", *, bool bias_wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)";

// Make a tensor per query readable: (batch, heads, queries, value_dim) with contiguous features in the dtype of q, or
// (batch, heads, queries) contiguous in float32.
void prepare_rows(const Arguments &arguments, Tensor &tensor, int64_t dims) {
  const Call &call = arguments.call;
  const bool fits = tensor.dims == dims && equal(tensor.sizes, call.batch, call.heads, call.queries);
  if (!fits || (dims == 4 && tensor.sizes[3] != call.value_dim) || tensor.device != torch.cpu ||
      tensor.dtype != (dims == 4 ? arguments.q.dtype : torch.float32)) {
    char width[24] = "";
    if (dims == 4) snprintf(width, sizeof width, ", %lld", printed(call.value_dim));
    fail("%s has shape %s. Give (%lld, %lld, %lld%s), %s, on the CPU, as torch.ops.multihead.attention returns.",
         tensor.name, tensor.shape().text, printed(call.batch), printed(call.heads), printed(call.queries), width,
         dims == 4 ? "in the dtype of q" : "float32");
  }
  if (dims == 4) make_features_contiguous(tensor);
  else make_contiguous(tensor);
}

// Allocate a gradient with the strides of torch.empty_like(tensor), or contiguous where its features would not be.
StackValue gradient_like(const Tensor &tensor, int32_t dtype) {
  int64_t strides[4];
  return empty(4, tensor.sizes, dtype, strides_like(tensor, strides) ? strides : nullptr);
}

// Copy rows [first, first + count) of a contiguous (batch, heads, queries).
std::vector<float> rows_of(const Call &call, const float *all, int64_t first, int64_t count) {
  std::vector<float> rows;
  for (int64_t head = 0; all && head < call.batch * call.heads; head++)
    rows.insert(rows.end(), all + head * call.queries + first, all + head * call.queries + first + count);
  return rows;
}

// Run the backward pass with the gradient of `relative`: the sums of the diagonals of a map. That map is computed in
// blocks of rows of LINES_BYTES at most, but at least 64 rows. dk and dv are float32 sums over the blocks, because
// bfloat16 would lose small terms.
constexpr int64_t LINES_BYTES = int64_t(32) << 20;

void run_by_diagonals(const Arguments &arguments, Tensor &dk, Tensor &dv, Tensor &drelative) {
  const Call &call = arguments.call;
  const int64_t samples = drelative.sizes[0], heads = drelative.sizes[1], diagonals = drelative.sizes[2];
  const int64_t fitting = LINES_BYTES / (4 * samples * heads * call.keys), height = fitting > 64 ? fitting : 64;
  const int64_t element = call.dtype == Dtype::FLOAT32 ? 4 : 2;
  clear(dk);
  clear(dv);
  for (int64_t first = 0; first < call.queries; first += height) {
    const int64_t count = call.queries - first < height ? call.queries - first : height;
    const auto skip = [&](const void *address, const RowStrides &strides) {
      return static_cast<char *>(const_cast<void *>(address)) + first * strides.row * element;
    };
    Call part = call;
    part.queries = count;
    part.first_row += first;
    part.q = skip(call.q, call.q_strides);
    part.output = skip(call.output, call.output_strides);
    part.grad_output = skip(call.grad_output, call.grad_output_strides);
    part.dq = skip(call.dq, call.dq_strides);
    part.start += first;
    part.stop += first;
    part.bias += first * call.bias_strides.row;
    if (call.visible) part.visible += first * call.visible_strides.row;
    std::vector<float> logsumexp = rows_of(call, call.logsumexp, first, count), delta(logsumexp.size());
    std::vector<float> grad_logsumexp = rows_of(call, call.grad_logsumexp, first, count);
    part.logsumexp = logsumexp.data();
    part.delta = delta.data();
    if (call.grad_logsumexp) part.grad_logsumexp = grad_logsumexp.data();
    // Row i begins i numbers earlier in its line, so that a diagonal of the map is a column of the lines.
    const int64_t width = count + call.keys;
    std::vector<float> lines(static_cast<size_t>(samples * heads * count * width));
    part.dbias = lines.data() + count - 1;
    part.dbias_strides = {samples > 1 ? heads * count * width : 0, heads > 1 ? count * width : 0, width - 1, 1};
    Tensor dk_part("dk", gradient_like(arguments.k, arguments.k.dtype));
    Tensor dv_part("dv", gradient_like(arguments.v, arguments.v.dtype));
    part.dk = dk_part.data;
    part.dv = dv_part.data;
    run(part, Pass::BACKWARD);
    for (int64_t line = 0; line < samples * heads * count; line++) {
      float *to = drelative.elements<float>() + line / count * diagonals + call.queries - first - count;
      for (int64_t column = 0; column < width - 1; column++) to[column] += lines[line * width + column];
    }
    for (int64_t head = 0; head < call.batch * call.heads; head++)
      memcpy(call.delta + head * call.queries + first, delta.data() + head * count, sizeof(float) * count);
    Tensor *const sums[] = {&dk, &dv}, *const parts[] = {&dk_part, &dv_part};
    for (int i = 0; i < 2; i++) {
      convert(*parts[i], torch.float32);
      const float *from = parts[i]->elements<const float>();
      float *to = sums[i]->elements<float>();
      for (int64_t at = 0; at < count_of(*sums[i]); at++) to[at] += from[at];
    }
  }
}

// Return the gradient of the bias with one number for all keys, (..., 1), of one with a number per key, (..., keys).
StackValue summed_over_keys(const Tensor &dbias) {
  const int64_t sizes[] = {dbias.sizes[0], dbias.sizes[1], dbias.sizes[2], 1}, keys = dbias.sizes[3];
  Tensor sums(dbias.name, empty(4, sizes, torch.float32));
  const float *row = dbias.elements<const float>();
  for (int64_t i = 0; i < count_of(sums); i++, row += keys) {
    double sum = 0;
    for (int64_t key = 0; key < keys; key++) sum += row[key];
    sums.elements<float>()[i] = static_cast<float>(sum);
  }
  return sums.release();
}

// Return the gradient of the sinks (heads): the sums of -p delta, with p = exp(sink - L) and delta = dO . O - dL.
StackValue gradient_of_sinks(const Call &call) {
  Tensor sums("dsinks", empty(1, &call.heads, torch.float32));
  for (int64_t head = 0; head < call.heads; head++) {
    double sum = 0;
    for (int64_t sample = 0; sample < call.batch; sample++)
      for (int64_t row = 0; row < call.queries; row++) {
        const int64_t at = (sample * call.heads + head) * call.queries + row;
        // In a row without keys delta is 0 and p inf.
        if (call.delta[at] != 0) sum -= expf(call.sinks[head] - call.logsumexp[at]) * call.delta[at];
      }
    sums.elements<float>()[head] = static_cast<float>(sum);
  }
  return sums.release();
}

// Return the gradients of q, k, v, the bias or the relative bias, and the sinks, in their shapes and dtypes; (0) for
// those that are not there or, in case of the bias, not wanted.
void attention_backward(StackValue *stack, uint64_t, uint64_t) {
  Tensor output("output", stack[0]), logsumexp("logsumexp", stack[1]), grad_output("grad_output", stack[2]);
  Tensor grad_logsumexp("grad_logsumexp");
  read_optional(stack[3], grad_logsumexp);
  Arguments arguments;
  arguments.read(stack + 4);
  const bool bias_wanted = stack[4 + NUM_ARGUMENTS] & 1;
  const Tensor &q = arguments.q, &k = arguments.k, &v = arguments.v;
  const Tensor *bias = arguments.bias ? &arguments.bias : arguments.relative ? &arguments.relative : nullptr;
  const int32_t bias_dtype = bias ? bias->dtype : 0, sinks_dtype = arguments.sinks.dtype;  // as they were given
  if (!v) fail("v is None, and gradients need the values.");
  arguments.prepare();
  Call &call = arguments.call;
  for (Tensor *rows : {&output, &grad_output}) prepare_rows(arguments, *rows, 4);
  prepare_rows(arguments, logsumexp, 3);
  if (grad_logsumexp) prepare_rows(arguments, grad_logsumexp, 3);
  call.output = output.data;
  call.output_strides = row_strides(output);
  call.logsumexp = logsumexp.elements<float>();
  call.grad_output = grad_output.data;
  call.grad_output_strides = row_strides(grad_output);
  call.grad_logsumexp = grad_logsumexp.elements<const float>();

  const bool diagonal = bias_wanted && arguments.relative && call.bias;
  Tensor dq("dq", gradient_like(q, q.dtype));
  Tensor dk("dk", gradient_like(k, diagonal ? torch.float32 : k.dtype));
  Tensor dv("dv", gradient_like(v, diagonal ? torch.float32 : v.dtype));
  Tensor delta("delta", empty(3, q.sizes, torch.float32)), dbias("dbias"), dsinks("dsinks");
  const int64_t nothing[] = {0};
  call.dq = dq.data;
  call.dk = dk.data;
  call.dv = dv.data;
  call.delta = delta.elements<float>();
  call.dq_strides = row_strides(dq);
  call.dk_strides = row_strides(dk);
  call.dv_strides = row_strides(dv);
  if (bias && bias_wanted) {
    const int64_t sizes[] = {bias->sizes[0], bias->sizes[1], bias->sizes[2], call.keys};  // one number for each key
    dbias.take(empty(bias->dims, sizes, torch.float32));
    clear(dbias);
    if (arguments.bias) {
      call.dbias = dbias.elements<float>();
      call.dbias_strides = broadcast_strides(call, dbias);
    }
  }
  if (diagonal) run_by_diagonals(arguments, dk, dv, dbias);
  else run(call, Pass::BACKWARD);
  convert(dk, k.dtype);
  convert(dv, v.dtype);
  if (dbias) {
    if (arguments.bias && bias->sizes[3] != call.keys) dbias.take(summed_over_keys(dbias));
    convert(dbias, bias_dtype);
  } else {
    dbias.take(empty(1, nothing, q.dtype));
  }
  dsinks.take(call.sinks ? gradient_of_sinks(call) : empty(1, nothing, q.dtype));
  if (call.sinks) convert(dsinks, sinks_dtype);
  for (Tensor *gradient : {&dq, &dk, &dv, &dbias, &dsinks}) *stack++ = gradient->release();
}

// ---------------------------------------------------------------- the sums of each key

const char KEY_SUMS[] = "key_sums(Tensor logsumexp, int pool_rows, int pool_keys, " ARGUMENTS ") -> (Tensor, Tensor)";

// Return the sums of the weights that each key receives from all queries, (batch, heads, keys), and of those that each
// cell of pool_rows x pool_keys of the map receives, (batch, heads, row cells, key cells), or (0) where these are 0.
void key_sums(StackValue *stack, uint64_t, uint64_t) {
  Tensor logsumexp("logsumexp", stack[0]);
  const int64_t pool_rows = number<int64_t>(stack[1]), pool_keys = number<int64_t>(stack[2]);
  Arguments arguments;
  arguments.read(stack + 3);
  arguments.prepare();
  Call &call = arguments.call;
  prepare_rows(arguments, logsumexp, 3);
  call.logsumexp = logsumexp.elements<float>();
  const bool pooled = pool_rows != 0 || pool_keys != 0;
  if (pooled && (pool_rows < 1 || pool_keys < 1))
    fail("A cell of the map has %lld queries and %lld keys. Give at least 1 of each, or 0 of both for no map.",
         printed(pool_rows), printed(pool_keys));
  const int64_t of_keys[] = {call.batch, call.heads, call.keys};
  Tensor sums("key_sums", empty(3, of_keys, torch.float32)), map("pooled_map");
  clear(sums);
  call.key_sums = sums.elements<float>();
  const int64_t cells[] = {call.batch, call.heads, pooled ? (call.queries + pool_rows - 1) / pool_rows : 0,
                           pooled ? (call.keys + pool_keys - 1) / pool_keys : 0};
  const int64_t nothing[] = {0};
  map.take(pooled ? empty(4, cells, torch.float32) : empty(1, nothing, torch.float32));
  if (pooled) {
    clear(map);
    call.pooled_map = map.elements<float>();
    call.pool_rows = pool_rows;
    call.pool_keys = pool_keys;
  }
  run(call, Pass::KEY_SUMS);
  stack[0] = sums.release();
  stack[1] = map.release();
}

}  // namespace

// ---------------------------------------------------------------- the functions of the library

const struct {
  const char *schema, *name;
  BoxedFunction function;
} OPERATORS[] = {{FULL, "attention", attention},
                 {SHORT_CALL, "attention.short_call", attention_short_call},
                 {BACKWARD, "attention_backward", attention_backward},
                 {KEY_SUMS, "key_sums", key_sums},
                 {WORKSPACE, "workspace", workspace}};

EXPORT const char *multihead_schema(int64_t index) {
  return index >= 0 && index < static_cast<int64_t>(sizeof OPERATORS / sizeof OPERATORS[0]) ? OPERATORS[index].schema
                                                                                           : nullptr;
}

EXPORT const char *multihead_torch_functions() {
#define NAME(result, name, ...) #name " "
  static const char names[] = TORCH_FUNCTIONS(NAME);
  return names;
}

EXPORT int64_t multihead_register(void *const *functions) {
  static bool registered = false;
  if (registered) return 1;
#define TAKE(result, name, ...) torch.name = reinterpret_cast<result (*)(__VA_ARGS__)>(*functions++);
  TORCH_FUNCTIONS(TAKE)
  torch.float32 = torch.aoti_torch_dtype_float32();
  torch.bfloat16 = torch.aoti_torch_dtype_bfloat16();
  torch.float16 = torch.aoti_torch_dtype_float16();
  torch.int8 = torch.aoti_torch_dtype_int8();
  torch.int64 = torch.aoti_torch_dtype_int64();
  torch.boolean = torch.aoti_torch_dtype_bool();
  torch.cpu = torch.aoti_torch_device_type_cpu();
  LibraryHandle definitions, cpu;  // never deleted: the operators stay as long as the process
  if (torch.aoti_torch_library_init_fragment("multihead", __FILE__, __LINE__, &definitions) ||
      torch.aoti_torch_library_init_impl("multihead", "CPU", __FILE__, __LINE__, &cpu))
    return 0;
  for (const auto &each : OPERATORS)
    if (torch.aoti_torch_library_def(definitions, each.schema) ||
        torch.torch_library_impl(cpu, each.name, each.function, TORCH_2_11))
      return 0;
  registered = true;
  return 1;
}

EXPORT void multihead_choose(int64_t set) { process_set = set; }

EXPORT void multihead_choose_in_thread(int64_t set) { forced_set = set; }
