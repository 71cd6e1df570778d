// The filter of heads: words separated by spaces, all of which must match, such as L2, H7, L2H7, prev>40, entropy<2,
// a kind, or a part of the module path.
import { kindName } from './kinds.js';
import { known } from './numbers.js';

const lower = text => text.toLocaleLowerCase();
const TESTS = { '<': (a, b) => a < b, '>': (a, b) => a > b, '<=': (a, b) => a <= b, '>=': (a, b) => a >= b, '=': (a, b) => a === b };

// Find a statistic by its label or name, the beginning of one, or the beginning of a part of its name.
function statisticNamed(statistics, word) {
  const names = one => [lower(one.label), one.id], begins = each => each.startsWith(word);
  return statistics.find(one => names(one).includes(word)) ?? statistics.find(one => names(one).some(begins)) ?? statistics.find(one => one.id.split('_').some(begins));
}

// Return whether head i passes the filter: its layer l and head h, its kinds, and the module path of its layer.
export function fits(filter, statistics, i, { l, h, kinds, path }) {
  return lower(filter).replaceAll('＞', '>').replaceAll('＜', '<').replace(/\s*([<>]=?)\s*/g, '$1').split(/[\s、，]+/).filter(Boolean).every(word => {
    const place = word.match(/^(?:l(\d+))?(?:h(\d+))?$/), bound = word.match(/^([^<>=]+)(<=?|>=?|=)(-?[\d.]+)%?$/);
    if (place) return (place[1] === undefined || +place[1] === l) && (place[2] === undefined || +place[2] === h);
    if (bound) {
      const one = statisticNamed(statistics, bound[1]);
      return !!one && known(one.values[i]) && TESTS[bound[2]](one.values[i] * one.times, +bound[3]);
    }
    return kinds.some(kind => kind.includes(word) || lower(kindName(kind)).includes(word)) || lower(path).includes(word);
  });
}
