// The record that the page shows: its heads, layers, texts and statistics.
import { NBSP, translate } from '../shared/dom.js';
import { addLegend } from '../shared/kindlist.js';
import { statistic } from '../shared/statistics.js';

export const D = JSON.parse(document.getElementById('data').textContent);
addLegend(D.legend);

// Every head of every layer in one list; layers may have different numbers of heads. The code identifies a layer by its
// index l in the list; the page shows its number in the model, which differs if only some layers were recorded.
export const HEADS = D.layers.flatMap((layer, l) => Array.from({ length: layer.heads }, (_, h) => ({ l, h, number: layer.number })));
const FIRST = D.layers.map((_, l) => HEADS.findIndex(head => head.l === l));
export const WIDEST = Math.max(...D.layers.map(layer => layer.heads));
export const indexOf = (l, h) => l < D.layers.length && h >= 0 && h < D.layers[l].heads ? FIRST[l] + h : -1;
export const numbered = (number, h) => HEADS.findIndex(head => head.number === number && head.h === h);
export const layerOf = i => D.layers[HEADS[i].l];
export const kindsOf = i => D.kinds[i];
export const kindOf = i => D.kinds[i][0];  // its colour
export const roleOf = i => layerOf(i).role;
export const isAligned = i => layerOf(i).aligned.includes(HEADS[i].h);
export const shortName = i => `L${HEADS[i].number}${NBSP}H${HEADS[i].h}`;
export const longName = i => translate('layer head', { layer: HEADS[i].number, head: HEADS[i].h });
export const addressOf = i => `#L${HEADS[i].number}H${HEADS[i].h}`;

// The tokens of a layer's queries or keys: a range of one of the page's texts, or positions if there is no text.
export function tokensOf(source) {
  const text = D.texts[source.text];
  return { text, from: source.from, label: p => text ? text.labels[p + source.from] : String(p) };
}

// The largest values that the masks allow; the bars of other statistics end at the largest value of their column.
const FULL = { entropy: i => D.top[i], effective_keys: i => layerOf(i).keys };
export const STATISTICS = D.columns.map(column => statistic(column, D.metrics[column.id], Object.hasOwn(FULL, column.id) ? FULL[column.id] : undefined, Object.hasOwn(D.chance, column.id) ? D.chance[column.id] : []));
export const ENTROPY = STATISTICS.find(one => one.id === 'entropy');
