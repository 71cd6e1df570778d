// The sentence that the page is about: what the model expects, and what it expects without the heads that are off.
import { $, translate } from '../shared/dom.js';
import { formatShort } from '../shared/numbers.js';
import { quoteToken } from '../shared/tokens.js';
import { answers, changedHeads, chosenPlace, commonFactor, state } from './state.js';
import { labelOfPlace } from './words.js';

const SMALLEST_CHANGE = 0.01; // of a similarity, below which the sentence says that it hardly changes
export const formatSimilarity = value => value.toFixed(3).replace('-', '−'); // a similarity
const likeliest = (next, side) => next.reduce((best, one) => (one[side] > best[side] ? one : best));

export function headsNamed() {
  const heads = changedHeads();
  return heads.length === 1 ? answers.record.short(heads[0]) : translate('heads', { n: heads.length });
}
export function changeNamed() {
  const heads = headsNamed();
  const factor = commonFactor();
  return factor === 0
    ? translate('without', { heads })
    : factor === null
      ? translate('with changed', { heads })
      : translate('with scaled', { heads, factor });
}

// The pair of sentences that are most alike, or whose similarity changes most.
function pairs(before, after) {
  const all = before.flatMap((row, a) =>
    row.slice(0, a).map((value, b) => ({ a: b + 1, b: a + 1, before: value, after: after[a][b] })),
  );
  const most = by => all.reduce((best, one) => (by(one) > by(best) ? one : best));
  return { alike: most(one => one.before), changed: most(one => Math.abs(one.after - one.before)) };
}

export function showSentence() {
  const { words, change, model } = answers;
  const touched = state.heads.size > 0;
  const last = chosenPlace() === words.tokens.length - 1;
  let line;
  if (model.kind === 'encoder') {
    if (words.sentences.length < 2) line = translate('one sentence');
    else {
      const { alike, changed } = pairs(words.similarity, change.similarity);
      line = touched
        ? translate(
            Math.abs(changed.after - changed.before) < SMALLEST_CHANGE ? 'similarity stays' : 'similarity changed',
            {
              change: changeNamed(),
              a: changed.a,
              b: changed.b,
              before: formatSimilarity(changed.before),
              after: formatSimilarity(changed.after),
            },
          )
        : translate('most alike', { a: alike.a, b: alike.b, value: formatSimilarity(alike.before) });
    }
  } else {
    const top = likeliest(change.next, 'before');
    const now = likeliest(change.next, 'after');
    const where = last
      ? translate('where next')
      : translate('where after', { token: quoteToken(labelOfPlace(chosenPlace())) });
    if (!touched) line = translate('expects', { token: quoteToken(top.token), where, share: formatShort(top.before) });
    else {
      const most =
        now === top ? '' : translate('most', { token: quoteToken(now.token), share: formatShort(now.after) });
      const [next, later] =
        formatShort(top.after) === formatShort(top.before)
          ? ['expects still', 'expects still after']
          : ['expects now', 'expects now after'];
      line =
        translate(last ? next : later, {
          change: changeNamed(),
          token: quoteToken(top.token),
          where,
          before: formatShort(top.before),
          after: formatShort(top.after),
          most,
        }) + translate(change.worse === 1 ? 'worse 1' : 'worse', { n: change.worse, all: change.predictions });
    }
  }
  $('sentence').textContent = [line, ...(touched ? [] : [translate('choose')])].join(translate('join.sentences'));
}
