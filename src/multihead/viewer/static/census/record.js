// The census that the page shows: its heads, and their statistics as they are summarised.
import { NBSP, translate } from '../shared/dom.js';
import { HeadList } from '../shared/headlist.js';
import { addLegend } from '../shared/kindlist.js';
import { known } from '../shared/numbers.js';
import { statistic } from '../shared/statistics.js';

/** @type {CensusData} */
export const D = JSON.parse(document.getElementById('data').textContent);
export const TWO = D.runs.length > 1;
addLegend(D.legend);

// The choice of the reader: the statistic, and whether the reader chose it; how it is summarised over queries, which
// census or difference the grid shows, one kind of head or all, the order of the table, and the head in the inspector.
export const state = {
  kind: '',
  id: D.columns[0].id,
  chosen: false,
  of: 'mean',
  shows: 'A',
  order: TWO ? '-divergence' : 'head',
  lit: 0,
};

export const LIST = new HeadList(D.layers);
if (D.findings.length) state.lit = Math.max(0, LIST.index(D.findings[0].layer, D.findings[0].head)); // the inspector opens on what is found
export const kindsOf = (i, run = 0) => D.runs[run].kinds[i] ?? []; // none where chance is unknown
// The page of a head opens on the statistic that the reader chose, else on the head's own.
export const addressOf = (i, id = state.chosen ? state.id : D.own[i]) =>
  `#L${LIST.heads[i].l}H${LIST.heads[i].h}/${id}`;
export function choose(id) {
  state.id = id;
  state.chosen = true;
}

export const columnOf = id => D.columns.find(one => one.id === id);
// Chance is that of the mean.
export const summarised = (id, run = 0, of = state.of) =>
  statistic(columnOf(id), D.runs[run].numbers[id][of], undefined, of === 'mean' ? D.runs[run].chance[id] : undefined);
const nats = { id: 'divergence', label: translate('divergence label'), unit: D.nats, format: '.3f', about: '' };

// The statistic that the cells of the grid show, and whether its sign is shown: a difference.
export function shownStatistic() {
  if (state.shows === 'B') return summarised(state.id, 1);
  if (state.shows === 'divergence') return statistic(nats, D.divergence[state.id] ?? LIST.heads.map(() => null));
  if (state.shows === 'difference') {
    const [a, b] = D.runs.map(run => run.numbers[state.id][state.of]);
    return statistic(
      columnOf(state.id),
      a.map((value, i) => (known(value) && known(b[i]) ? b[i] - value : null)),
    );
  }
  return summarised(state.id);
}

// The columns of the table. Of two censuses each column holds both numbers, and the first one ranks the heads.
export function tableStatistics() {
  const first = D.columns.map(one => summarised(one.id));
  if (!TWO) return first;
  const both = first.map(one => {
    const other = summarised(one.id, 1);
    return {
      ...one,
      chance: [...one.chance, ...other.chance],
      number: i => `${one.number(i)}${NBSP}→${NBSP}${other.number(i)}`,
    };
  });
  return [statistic(nats, D.divergence['']), ...both];
}
