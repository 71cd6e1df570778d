// Add a statistic of a batch to the running summary of a layer: per head the sum, the count, the extremes, a histogram.
// Compiled without flags of any instruction set. One thread adds the values of a head in their order, so that the result
// does not depend on the number of threads.
#include <math.h>
#include <string.h>

#include "call.h"
#include "threads.h"

// values and counted are (batch, heads, queries), totals, counts, minima and maxima (heads), bins (heads, num_bins). With
// NaN among the values of a head, its extremes are NaN. The second half of a
// histogram has the values from 0, whose bin is the exponent and the first 6 bits of the mantissa of the floating-point
// number, less `first_bin`; numbers outside the histogram are in its first or last bin, NaN in the last. The first half
// has the negative values in the reverse order, so that values ascend, but those of the bin of 0 are in that one.
EXPORT void multihead_summarise(const float *values, const uint8_t *counted, int64_t batch, int64_t heads,
                                int64_t queries, int64_t first_bin, int64_t num_bins, double *totals, double *counts,
                                double *minima, double *maxima, int64_t *bins, int64_t threads) {
  const int64_t last = num_bins / 2 - 1;  // index of the last bin of each sign
  const auto summarise_head = [=](int64_t head) {
    int64_t *const histogram = bins + head * num_bins + last + 1;  // begins with the bin of 0
    double total = 0;
    int64_t count = 0;
    float least = INFINITY, most = -INFINITY;
    bool missing = false;
    for (int64_t sample = 0; sample < batch; sample++) {
      const int64_t row = (sample * heads + head) * queries;
      for (int64_t i = row; i < row + queries; i++) {
        if (!counted[i]) continue;
        int32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        const int64_t size = ((bits & INT32_MAX) >> 17) - first_bin, bin = size < 0 ? 0 : size < last ? size : last;
        histogram[bin && values[i] < 0 ? -1 - bin : bin]++;
        total += values[i];
        count++;
        least = values[i] < least ? values[i] : least;
        most = values[i] > most ? values[i] : most;
        missing |= values[i] != values[i];
      }
    }
    totals[head] += total;
    counts[head] += static_cast<double>(count);
    if (missing) least = most = NAN;
    // A comparison with NaN is false, so that it stays.
    minima[head] = least < minima[head] || missing ? least : minima[head];
    maxima[head] = most > maxima[head] || missing ? most : maxima[head];
  };
  const bool is_small = batch * heads * queries < 1 << 13;  // takes less time than waking another thread
  run_parallel(is_small ? 1 : threads, [&](Team &team) { team.for_each(heads, summarise_head); });
}
