// The census that the page shows: its heads, and their statistics as they are summarised.
import { NBSP, translate } from '../shared/dom.js';
import { HeadList } from '../shared/headlist.js';
import { addLegend } from '../shared/kindlist.js';
import { isKnown } from '../shared/numbers.js';
import { makeStatistic } from '../shared/statistics.js';

/** @type {CensusData} */
export const CENSUS = JSON.parse(document.getElementById('data').textContent);
export const IS_COMPARISON = CENSUS.runs.length > 1;
addLegend(CENSUS.legend);

// The choice of the reader: the statistic, and whether the reader chose it; how it is summarised over queries, which
// census or difference the grid shows, one kind of head or all, the order of the table, and the head in the inspector.
export const state = {
  kind: '',
  id: CENSUS.columns[0].id,
  chosen: false,
  of: 'mean',
  shows: 'A',
  order: IS_COMPARISON ? '-divergence' : 'head',
  lit: 0,
};

export const HEADS = new HeadList(CENSUS.layers);
// The inspector opens on what is found.
if (CENSUS.findings.length) state.lit = Math.max(0, HEADS.index(CENSUS.findings[0].layer, CENSUS.findings[0].head));
export const kindsOf = (i, run = 0) => CENSUS.runs[run].kinds[i] ?? []; // none where chance is unknown
// The page of a head opens on the statistic that the reader chose, else on the head's own.
export const addressOf = (i, id = state.chosen ? state.id : CENSUS.own[i]) =>
  `#L${HEADS.heads[i].l}H${HEADS.heads[i].h}/${id}`;
export function chooseStatistic(id) {
  state.id = id;
  state.chosen = true;
}

export const columnOfStatistic = id => CENSUS.columns.find(one => one.id === id);
// Chance is that of the mean.
export const summaryOf = (id, run = 0, of = state.of) =>
  makeStatistic(
    columnOfStatistic(id),
    CENSUS.runs[run].numbers[id][of],
    undefined,
    of === 'mean' ? CENSUS.runs[run].chance[id] : undefined,
  );
const nats = { id: 'divergence', label: translate('divergence label'), unit: CENSUS.nats, format: '.3f', about: '' };

// The statistic that the cells of the grid show, and whether its sign is shown: a difference.
export function shownStatistic() {
  if (state.shows === 'B') return summaryOf(state.id, 1);
  if (state.shows === 'divergence')
    return makeStatistic(nats, CENSUS.divergence[state.id] ?? HEADS.heads.map(() => null));
  if (state.shows === 'difference') {
    const [a, b] = CENSUS.runs.map(run => run.numbers[state.id][state.of]);
    return makeStatistic(
      columnOfStatistic(state.id),
      a.map((value, i) => (isKnown(value) && isKnown(b[i]) ? b[i] - value : null)),
    );
  }
  return summaryOf(state.id);
}

// The columns of the table. Of two censuses each column holds both numbers, and the first one ranks the heads.
export function tableStatistics() {
  const first = CENSUS.columns.map(one => summaryOf(one.id));
  if (!IS_COMPARISON) return first;
  const both = first.map(one => {
    const other = summaryOf(one.id, 1);
    return {
      ...one,
      chance: [...one.chance, ...other.chance],
      number: i => `${one.number(i)}${NBSP}→${NBSP}${other.number(i)}`,
    };
  });
  return [makeStatistic(nats, CENSUS.divergence['']), ...both];
}
