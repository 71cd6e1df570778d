// Add the statistics of an attention call to the running sums of a layer: moments and extremes, a histogram, and the sum
// of each text. Compiled without flags of any instruction set. One thread adds the values of a row in their order, so
// that the result does not depend on the number of threads.
#include <math.h>
#include <string.h>

#include "call.h"
#include "threads.h"

// values and counted are (rows, queries); a row is one statistic of one head. The queries of text t are those from
// ends[t] to ends[t + 1]. levels is (levels, queries), the chance levels, and level_of_row has the row of each row's own,
// -1 where there is none. Set are counts, totals, squares (the sum of the squared deviations from the mean of the row),
// minima and maxima, (rows) each, and per text the sum of value - level, 0 without levels, and the number of values,
// (rows, texts) each.
// Values are added to bins, (rows, num_bins): the second half of a histogram has the values from 0, whose bin is the
// exponent and the first 6 bits of the mantissa of the floating-point number, less `first_bin`; numbers outside the
// histogram are in its first or last bin. The first half has the negative values in the reverse order, so that values
// ascend, but those of the bin of 0 are in that one.
EXPORT void multihead_sum_rows(const float *values, const uint8_t *counted, const float *levels,
                                const int64_t *level_of_row, const int64_t *ends, int64_t rows, int64_t queries,
                                int64_t texts, int64_t first_bin, int64_t num_bins, double *counts, double *totals,
                                double *squares, double *minima, double *maxima, double *text_totals,
                                double *text_counts, int64_t *bins, int64_t threads) {
  const int64_t last = num_bins / 2 - 1;  // index of the last bin of each sign
  const auto sum_row = [=](int64_t row) {
    int64_t *const histogram = bins + row * num_bins + last + 1;  // begins with the bin of 0
    const float *const value = values + row * queries;
    const uint8_t *const counts_here = counted + row * queries;
    const float *const level = level_of_row[row] < 0 ? nullptr : levels + level_of_row[row] * queries;
    double total = 0, deviations = 0;
    int64_t count = 0;
    float least = INFINITY, most = -INFINITY;
    for (int64_t text = 0; text < texts; text++) {
      double excess = 0;
      const int64_t before = count;
      for (int64_t i = ends[text]; i < ends[text + 1]; i++) {
        if (!counts_here[i]) continue;
        int32_t bits;
        memcpy(&bits, value + i, sizeof bits);
        const int64_t size = ((bits & INT32_MAX) >> 17) - first_bin, bin = size < 0 ? 0 : size < last ? size : last;
        histogram[bin && value[i] < 0 ? -1 - bin : bin]++;
        total += value[i];
        count++;
        least = value[i] < least ? value[i] : least;
        most = value[i] > most ? value[i] : most;
        if (level) excess += static_cast<double>(value[i]) - level[i];
      }
      text_totals[row * texts + text] = excess;
      text_counts[row * texts + text] = static_cast<double>(count - before);
    }
    const double mean = count ? total / static_cast<double>(count) : 0;
    for (int64_t i = 0; i < queries; i++) {
      if (counts_here[i]) deviations += (value[i] - mean) * (value[i] - mean);
    }
    counts[row] = static_cast<double>(count);
    totals[row] = total;
    squares[row] = deviations;
    minima[row] = least;
    maxima[row] = most;
  };
  const bool is_small = rows * queries < 1 << 13;  // takes less time than waking another thread
  run_parallel(is_small ? 1 : threads, [&](Team &team) { team.for_each(rows, sum_row); });
}
