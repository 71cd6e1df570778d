// The filter of heads: words separated by spaces, all of which must match, such as L2, H7, L2H7, prev>40, entropy<2,
// a kind, encoder, decoder, cross, alignment, or a part of the module path.
import { translate } from './dom.js';
import { LEGEND, statisticOfKind } from './kindlist.js';
import { kindName, roleName } from './kinds.js';
import { isKnown } from './numbers.js';

const lower = text => text.toLocaleLowerCase();
const ROLES = ['encoder', 'decoder', 'cross'];
const TESTS = {
  '<': (a, b) => a < b,
  '>': (a, b) => a > b,
  '<=': (a, b) => a <= b,
  '>=': (a, b) => a >= b,
  '=': (a, b) => a === b,
};

// Words separated by spaces or commas; the signs of a comparison belong to the word before them.
const words = filter =>
  lower(filter)
    .replaceAll('＞', '>')
    .replaceAll('＜', '<')
    .replace(/\s*([<>]=?)\s*/g, '$1')
    .split(/[\s、，]+/)
    .filter(Boolean);
const placeIn = word => word.match(/^(?:l(\d+))?(?:h(\d+))?$/);
const boundIn = word => word.match(/^([^<>=]+)(<=?|>=?|=)(-?[\d.]+)%?$/);
function names(text, { kinds, path, role, aligned }) {
  if (role && ROLES.includes(text)) return role === text;
  const words = [
    ...kinds,
    ...kinds.map(kindName).map(lower),
    lower(path),
    lower(roleName(role)),
    ...(aligned ? ['alignment', translate('alignment')] : []),
  ];
  return words.some(each => each.includes(text));
}

// Find a statistic by its label or name, the beginning of one, or the beginning of a part of its name.
function statisticNamed(statistics, word) {
  const called = one => [lower(one.label), one.id];
  const begins = each => each.startsWith(word);
  return (
    statistics.find(one => called(one).includes(word)) ??
    statistics.find(one => called(one).some(begins)) ??
    statistics.find(one => one.id.split('_').some(begins))
  );
}

// Return whether head i passes the filter: its layer l and head h, its kinds, the module path and the role of its
// layer, and whether it is an alignment head.
export function passesFilter(filter, statistics, i, head) {
  const { l, h } = head;
  return words(filter).every(word => {
    const place = placeIn(word);
    const bound = boundIn(word);
    if (place) return (place[1] === undefined || +place[1] === l) && (place[2] === undefined || +place[2] === h);
    if (bound) {
      const one = statisticNamed(statistics, bound[1]);
      return !!one && isKnown(one.values[i]) && TESTS[bound[2]](one.values[i] * one.times, +bound[3]);
    }
    return names(word, head);
  });
}

// Explain in a sentence why a word of a filter matches no head, whatever the numbers are: it is unknown, or names a
// statistic that was not recorded; '' if there is no such word. `heads` are described as for `fits`.
export function explainNoMatch(filter, statistics, /** @type {UnrecordedStatistic[]} */ unrecorded, heads) {
  const missing = one =>
    translate(LEGEND.some(kind => kind.repeats && kind.id === one.id) ? 'filter.unmeasured' : 'filter.unrecorded', {
      label: one.label,
      name: one.id,
    });
  for (const word of words(filter)) {
    const bound = boundIn(word);
    const name = bound ? bound[1] : word.replace(/[<>=].*/, '');
    if (placeIn(word) || (bound && statisticNamed(statistics, name)) || heads.some(head => names(word, head))) continue;
    const kind = LEGEND.map(each => each.id).find(each =>
      names(word, { kinds: [each], path: '', role: '', aligned: false }),
    );
    const absent = bound
      ? statisticNamed(unrecorded, name)
      : unrecorded.find(one => (kind ? one.id === statisticOfKind(kind) : [lower(one.label), one.id].includes(name)));
    if (absent) return missing(absent);
    if (bound)
      return translate('filter.statistic', {
        word: name,
        known: statistics.map(each => each.label).join(translate('join.comma')),
      });
    if (kind) return translate('filter.kind', { kind: kindName(kind) });
    return translate(name !== word || statisticNamed(statistics, word) ? 'filter.number' : 'filter.word', { word });
  }
  return '';
}
