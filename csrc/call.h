// The interface between the operators and the kernels: one call of attention as addresses, sizes, strides and options.
//
// Every field has 8 bytes, and no type comes from torch or Python. In shapes, `rows` are queries or keys and `dim` is
// head_dim or value_dim. Strides count elements, not bytes; the last axis of a tensor with RowStrides is contiguous,
// and tensors without strides are contiguous.
//
// What is left of the C struct's own door is for C++: `multihead_run` and `multihead_layout` serve the benchmark of two
// builds and the fuzzer. `ctypes` calls the functions that choose and list instruction sets, and `multihead_sum_rows`.
//
// Bounds differ by sample and not by head: no mask of the package has an interval per head, so the kernel has no stride
// for it. A mask that differs by head is evaluated cell by cell.
#pragma once
#include <stdint.h>

enum class Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

enum class Pass : int64_t {
  FORWARD = 0,   // output, logsumexp and the statistics of each query
  BACKWARD = 1,  // the gradients
  KEY_SUMS = 2,  // the sum of the weights that each key, or each cell of a map, receives
};

enum class Status : int64_t {
  DONE = 0,
  NO_MEMORY = 1,         // for the workspace
  BAD_BOUNDS = 2,        // a start or stop outside [0, keys]
  NO_SUCH_PASS = 3,      // an unknown pass, or an instruction set that does not run here
  TOO_MANY_OFFSETS = 4,  // more than MAX_OFFSETS
};

struct RowStrides {  // of a tensor (batch, heads, rows, dim)
  int64_t batch, head, row;
};
struct CellStrides {  // of a tensor (batch, heads, queries, keys); any of them may be 0, which repeats the axis
  int64_t batch, head, row, key;
};

constexpr int64_t MAX_OFFSETS = 8;

// INPUT(type, name) is a const address, OUTPUT(type, name) a mutable one; `void` elements have the dtype of the call. A
// null address leaves an input or an output out if its comment has "or null". With k_scales and v_scales, k and v are
// int8, as in a quantised cache, and only the forward pass reads them.
#define MULTIHEAD_CALL_FIELDS(INPUT, OUTPUT, NUMBER, ROW_STRIDES, CELL_STRIDES)                                       \
  /* Inputs of every pass */                                                                                          \
  INPUT(void, q)         /* (batch, heads, queries, head_dim) */                                                      \
  INPUT(void, k)         /* (batch, kv_heads, keys, head_dim) */                                                      \
  INPUT(void, v)         /* (batch, kv_heads, keys, value_dim) */                                                     \
  INPUT(int64_t, start)  /* (batch or 1, queries): a query sees the keys [start, stop) */                             \
  INPUT(int64_t, stop)   /* (batch or 1, queries) */                                                                  \
  INPUT(uint8_t, visible) /* (batch, heads, queries, keys), or null; 0 hides a key of the interval */                 \
  INPUT(float, bias)     /* (batch, heads, queries, keys), or null; -inf hides a key */                               \
  INPUT(float, sinks)    /* (heads) logits that take weight and have no value, or null */                             \
  INPUT(float, k_scales) /* (batch, kv_heads, keys): factors of the rows of k, which is int8 then; or null */         \
  INPUT(float, v_scales) /* (batch, kv_heads, keys): factors of the rows of v; null where k_scales is */              \
                                                                                                                      \
  /* Forward pass; the other passes read these two */                                                                 \
  OUTPUT(void, output)      /* (batch, heads, queries, value_dim) */                                                  \
  OUTPUT(float, logsumexp)  /* (batch, heads, queries), natural logarithm; -inf where no key is visible */            \
                                                                                                                      \
  /* Statistics of the forward pass, each (batch, heads, queries), or null where it is not wanted */                  \
  OUTPUT(float, entropy)              /* in nats */                                                                   \
  OUTPUT(float, largest_weight)                                                                                       \
  OUTPUT(int64_t, largest_key)        /* the key with the largest weight, the first of equal ones; -1 for none */     \
  OUTPUT(float, mean_distance)        /* mean of |position - key| under the weights */                                \
  OUTPUT(float, distance_spread)      /* its standard deviation */                                                    \
  OUTPUT(float, offset_weights)       /* (offsets, batch, heads, queries): the weight on position + offset */         \
  OUTPUT(float, target_key_weight)    /* the weight on target_key */                                                  \
  OUTPUT(float, special_keys_weight)  /* the sum of the weights on special_keys */                                    \
  OUTPUT(float, near_weight)          /* the sum of the weights on the keys at most `reach` from the position */      \
  INPUT(int64_t, query_start)   /* (batch) position of the first query, or null for 0 */                              \
  INPUT(int64_t, offsets)       /* (num_offsets) */                                                                   \
  INPUT(int64_t, target_key)    /* (batch), -1 for none; or null */                                                   \
  INPUT(uint8_t, special_keys)  /* (batch, keys) of 0 or 1, or null */                                                \
                                                                                                                      \
  /* Backward pass */                                                                                                 \
  INPUT(void, grad_output)      /* (batch, heads, queries, value_dim) */                                              \
  INPUT(float, grad_logsumexp)  /* (batch, heads, queries), or null */                                                \
  OUTPUT(float, delta)          /* (batch, heads, queries): grad_output . output - grad_logsumexp */                  \
  OUTPUT(void, dq)              /* as q */                                                                            \
  OUTPUT(void, dk)              /* as k */                                                                            \
  OUTPUT(void, dv)              /* as v */                                                                            \
  OUTPUT(float, dbias)          /* as bias, or null; the gradient is added to its contents */                         \
                                                                                                                      \
  /* Pass KEY_SUMS */                                                                                                 \
  OUTPUT(float, key_sums)    /* (batch, heads, keys), or null */                                                      \
  OUTPUT(float, pooled_map)  /* (batch, heads, ceil(queries / pool_rows), ceil(keys / pool_keys)), or null */         \
                                                                                                                      \
  NUMBER(int64_t, batch)                                                                                              \
  NUMBER(int64_t, heads)     /* a multiple of kv_heads */                                                             \
  NUMBER(int64_t, kv_heads)                                                                                           \
  NUMBER(int64_t, queries)                                                                                            \
  NUMBER(int64_t, keys)                                                                                               \
  NUMBER(int64_t, head_dim)                                                                                           \
  NUMBER(int64_t, value_dim)                                                                                          \
  ROW_STRIDES(q)                                                                                                      \
  ROW_STRIDES(k)                                                                                                      \
  ROW_STRIDES(v)                                                                                                      \
  ROW_STRIDES(k_scales)     /* in both, keys are contiguous: the stride of rows is 1 */                               \
  ROW_STRIDES(v_scales)                                                                                               \
  ROW_STRIDES(output)                                                                                                 \
  ROW_STRIDES(grad_output)                                                                                            \
  ROW_STRIDES(dq)                                                                                                     \
  ROW_STRIDES(dk)                                                                                                     \
  ROW_STRIDES(dv)                                                                                                     \
  CELL_STRIDES(visible)                                                                                               \
  CELL_STRIDES(bias)                                                                                                  \
  CELL_STRIDES(dbias)                                                                                                 \
  NUMBER(int64_t, bounds_batch_stride)  /* of start and stop; 0 where all samples share them */                       \
                                                                                                                      \
  NUMBER(Dtype, dtype)              /* of q, k, v, output and their gradients */                                      \
  NUMBER(int64_t, instruction_set)  /* an index, see multihead_instruction_set */                                     \
  NUMBER(int64_t, threads)                                                                                            \
  NUMBER(int64_t, num_offsets)      /* at most MAX_OFFSETS */                                                         \
  NUMBER(int64_t, reach)            /* of near_weight, in keys; from 0 to 2^30 */                                     \
  NUMBER(int64_t, first_row)        /* index of row 0 in a longer call: for its position and its dropout */           \
  NUMBER(int64_t, pool_rows)        /* queries per cell of pooled_map */                                              \
  NUMBER(int64_t, pool_keys)        /* keys per cell of pooled_map */                                                 \
  NUMBER(int64_t, seed)             /* of the dropout */                                                              \
  NUMBER(int64_t, batch_start)      /* indices of sample 0, head 0 and key 0 in a call that is split over several */  \
  NUMBER(int64_t, head_start)       /* processes or rows, and its number of heads, 0 for `heads`: for its dropout */  \
  NUMBER(int64_t, total_heads)                                                                                        \
  NUMBER(int64_t, key_start)                                                                                          \
                                                                                                                      \
  NUMBER(double, scale)    /* of q . k */                                                                             \
  NUMBER(double, softcap)  /* c of c tanh(score / c); 0 for none */                                                   \
  NUMBER(double, dropout)  /* share of the weights that is dropped */

struct Call {
#define MULTIHEAD_INPUT(type, name) const type *name;
#define MULTIHEAD_OUTPUT(type, name) type *name;
#define MULTIHEAD_NUMBER(type, name) type name;
#define MULTIHEAD_ROW_STRIDES(name) RowStrides name##_strides;
#define MULTIHEAD_CELL_STRIDES(name) CellStrides name##_strides;
  MULTIHEAD_CALL_FIELDS(MULTIHEAD_INPUT, MULTIHEAD_OUTPUT, MULTIHEAD_NUMBER, MULTIHEAD_ROW_STRIDES,
                        MULTIHEAD_CELL_STRIDES)
#undef MULTIHEAD_INPUT
#undef MULTIHEAD_OUTPUT
#undef MULTIHEAD_NUMBER
#undef MULTIHEAD_ROW_STRIDES
#undef MULTIHEAD_CELL_STRIDES
};

// The names of the fields, separated by spaces.
#define MULTIHEAD_FIELD(type, name) #name " "
#define MULTIHEAD_ROWS(name) #name "_strides.batch " #name "_strides.head " #name "_strides.row "
#define MULTIHEAD_CELLS(name) MULTIHEAD_ROWS(name) #name "_strides.key "
constexpr char MULTIHEAD_LAYOUT[] =
    MULTIHEAD_CALL_FIELDS(MULTIHEAD_FIELD, MULTIHEAD_FIELD, MULTIHEAD_FIELD, MULTIHEAD_ROWS, MULTIHEAD_CELLS);
#undef MULTIHEAD_FIELD
#undef MULTIHEAD_ROWS
#undef MULTIHEAD_CELLS

// How to run one pass with one instruction set.
struct PassFunctions {
  int64_t (*workspace)(const Call &call);           // bytes of memory that `run` needs
  void (*run)(const Call &call, char *workspace);  // the workspace is aligned to 64 bytes
};

// The passes of one instruction set.
struct Kernels {
  PassFunctions forward, backward, key_sums;
  int64_t tile_rows, tile_columns;  // of a register tile, of which all cells are computed or none
};

// The C functions of the library; all of them may be called from any thread at any time.
extern "C" {
const char *multihead_layout();                          // MULTIHEAD_LAYOUT of this build
const char *multihead_instruction_set(int64_t index);    // name of set 0, 1, ..., null after the last; widest last
int64_t multihead_compiled(int64_t index);               // 1 if this build contains the set, else 0
int64_t multihead_runs(int64_t index);                   // 1 if this build contains the set and this CPU can run it
int64_t multihead_fastest();                             // the fastest set that runs here
int64_t multihead_fastest_of_cpu();                      // the same, but this build may lack it
int64_t multihead_tile_rows(int64_t index);              // of the set's register tiles; 0 if this build lacks it
int64_t multihead_tile_columns(int64_t index);
int64_t multihead_workspace(const Call *call, Pass pass);  // bytes of memory that the pass needs, -1 for no such pass
Status multihead_run(const Call *call, Pass pass);
const char *multihead_schema(int64_t index);             // schema of operator 0, 1, ..., null after the last
const char *multihead_torch_functions();                 // the names of libtorch's functions that the operators call
int64_t multihead_register(void *const *functions);      // define the operators, given these; 1 if torch accepts them
void multihead_choose(int64_t set);                      // the set of the operators in this process
void multihead_choose_in_thread(int64_t set);            // and in this thread; -1 for that of the process
// Sum rows of values, and add them to histograms, see summary.cpp.
void multihead_sum_rows(const float *values, const uint8_t *counted, const float *levels, const int64_t *level_of_row,
                         const int64_t *ends, int64_t rows, int64_t queries, int64_t texts, int64_t first_bin,
                         int64_t num_bins, double *counts, double *totals, double *squares, double *minima,
                         double *maxima, double *text_totals, double *text_counts, int64_t *bins, int64_t threads);
}

#define EXPORT extern "C" __attribute__((visibility("default")))
