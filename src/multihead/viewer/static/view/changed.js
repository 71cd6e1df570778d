// What changed between two records, which the page opens with: the heads ranked by divergence.
import { $, el, translate, waitingNote } from '../shared/dom.js';
import { kindNames, kindTags } from '../shared/kinds.js';
import { formatCount } from '../shared/numbers.js';
import { pathOfSample, requestJson } from './api.js';
import { toBoth } from './permalink.js';
import { view } from './record.js';

/** @import { Sample } from './record.js' */

const kept = new Map(); // the answers, by run, sample and other run
let other = -1;
let turn = 0;

export function showChangedHeads(/** @type {Sample} */ record) {
  const others = view.served ? view.runs.map((_, n) => n).filter(n => n !== record.run) : [];
  $('changedsec').hidden = !others.length;
  if (!others.length) return;
  if (!others.includes(other)) other = others[0];
  const choice = el(
    'select',
    {
      'aria-label': translate('compare with'),
      onchange: event => {
        other = +event.target.value;
        showChangedHeads(record);
      },
    },
    ...others.map(n => el('option', { value: n, textContent: view.runs[n].name })),
  );
  choice.value = String(other);
  const key = `${record.run} ${record.sample} ${other}`;
  const mine = ++turn;
  const rank = async () => {
    $('changed').replaceChildren(waitingNote());
    /** @type {ChangedHeads} */
    const answer = await requestJson(`${pathOfSample(record.run, record.sample)}/changed/${key.split(' ')[2]}`).catch(
      error => ({
        error: error.message,
        heads: [],
      }),
    );
    if (!answer.error) kept.set(key, answer);
    if (mine === turn) show(record, answer);
  };
  $('changedtools').replaceChildren(el('span', { textContent: translate('compare with') + ' ' }), choice);
  if (kept.has(key)) show(record, kept.get(key));
  else rank();
}

const column = ([key, name]) => el('th', { scope: 'col', className: name, textContent: translate(key) });
const body = (columns, rows) =>
  el(
    'table',
    { className: 'every' },
    el('caption', { className: 'vh', textContent: translate('changed') }),
    el('thead', {}, el('tr', {}, ...columns.map(column))),
    el('tbody', {}, ...rows),
  );
const said = sentences => sentences.map(sentence => el('p', { textContent: sentence }));

/**
 * @param {Sample} record
 * @param {ChangedHeads} answer
 */
function show(record, answer) {
  $('changednote').hidden = !answer.sameTexts;
  if (answer.kinds) showKinds(answer);
  else if (answer.heads.length) showHeads(record, answer);
  else showNone(answer);
}

// Of two models, the kinds of their heads.
function showKinds(/** @type {ChangedHeads} */ { kinds, sentences }) {
  const rows = kinds.map(([kind, label, before, after]) =>
    el(
      'tr',
      {},
      el('th', { scope: 'row' }, el('span', { className: 'kind', k: kind }, label)),
      el('td', { className: 't', textContent: before }),
      el('td', { className: 't', textContent: after }),
    ),
  );
  const columns = ['kinds column', 'in before', 'in after'].map(key => [key, 't']);
  $('changed').replaceChildren(...said(sentences), body(columns, rows));
}

function showNone(/** @type {ChangedHeads} */ { sentences = [], error }) {
  const note = error || (sentences.length ? '' : translate('no changed'));
  $('changed').replaceChildren(
    ...said(sentences),
    ...(note ? [el('p', { className: 'note', role: 'status', textContent: note })] : []),
  );
}

// The heads of one model, on the same texts with their divergence, else with what clearly changed.
/**
 * @param {Sample} record
 * @param {ChangedHeads} answer
 */
function showHeads(record, { heads, every, sentences, all, sameTexts }) {
  const most = Math.max(...heads.map(one => one.divergence ?? 0)) || 1;
  const measured = sameTexts
    ? [
        ['divergence column', ''],
        ['largest change', 't'],
      ]
    : [['change of texts', 't']];
  const columns = [['head column', 't'], ...measured, ['kinds column', 't']];
  const notes = [
    ...(heads.length < all
      ? [translate('changed shown', { n: formatCount(heads.length), all: formatCount(all) })]
      : []),
    ...(sameTexts ? [translate('changed bars', { n: most.toFixed(3) })] : []),
    ...(every > 1 ? [translate('changed every', { n: every })] : []),
  ];
  $('changed').replaceChildren(
    ...said(sentences),
    body(
      columns,
      heads.map(one => rowOf(record, one, sameTexts, most)),
    ),
    ...(notes.length ? [el('p', { className: 'note', textContent: notes.join(translate('join.sentences')) })] : []),
  );
}

const statisticChanged = (/** @type {StatisticChangeDescription} */ { label, before, after }) =>
  translate('changed statistic', { label, before, after });

// The row of a changed head; the bar of its divergence is full at `most`.
/**
 * @param {Sample} record
 * @param {ChangedHeadDescription} changed
 * @param {boolean} sameTexts
 * @param {number} most
 */
function rowOf(record, { layer, head, divergence, kinds, change }, sameTexts, most) {
  const link = el('a', {
    href: toBoth(record.run, record.sample, layer, head, other),
    textContent: record.short(record.index(layer, head)),
  });
  const bar = () =>
    el('span', { className: 'v', v: (divergence ?? 0) / most, textContent: divergence?.toFixed(3) ?? '–' });
  const [before, after] = kinds;
  return el(
    'tr',
    {},
    el('th', { scope: 'row' }, link),
    ...(sameTexts ? [el('td', {}, bar())] : []),
    el('td', { className: 't', textContent: change ? statisticChanged(change) : '' }),
    el(
      'td',
      { className: 't' },
      kindTags(before),
      ...(kindNames(before) === kindNames(after) ? [] : [' → ', kindTags(after)]),
    ),
  );
}
