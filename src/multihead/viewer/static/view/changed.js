// What changed between two records, which the page opens with: the heads ranked by divergence.
import { $, el, translate, waitingNote } from '../shared/dom.js';
import { kindNames, kindTags } from '../shared/kinds.js';
import { count } from '../shared/numbers.js';
import { json, sampleAt } from './api.js';
import { toBoth } from './permalink.js';
import { view } from './record.js';

const kept = new Map(); // the answers, by run, sample and other run
let other = -1,
  turn = 0;

export function changed(record) {
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
        changed(record);
      },
    },
    ...others.map(n => el('option', { value: n, textContent: view.runs[n].name })),
  );
  choice.value = other;
  const key = `${record.run} ${record.sample} ${other}`,
    mine = ++turn;
  const rank = async () => {
    $('changed').replaceChildren(waitingNote());
    const answer = await json(`${sampleAt(record.run, record.sample)}/changed/${key.split(' ')[2]}`).catch(error => ({
      error: error.message,
      heads: [],
    }));
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

// Heads of one model, on the same texts with their divergence; or the kinds of heads of two models.
function show(record, { heads, kinds, every, sentences = [], all, sameTexts, error }) {
  $('changednote').hidden = !sameTexts;
  if (kinds) {
    const rows = kinds.map(([kind, label, before, after]) =>
      el(
        'tr',
        {},
        el('th', { scope: 'row' }, el('span', { className: 'kind', k: kind }, label)),
        el('td', { className: 't', textContent: before }),
        el('td', { className: 't', textContent: after }),
      ),
    );
    $('changed').replaceChildren(
      ...said(sentences),
      body(
        [
          ['kinds column', 't'],
          ['in before', 't'],
          ['in after', 't'],
        ],
        rows,
      ),
    );
    return;
  }
  if (!heads.length) {
    $('changed').replaceChildren(
      ...said(sentences),
      ...(error || !sentences.length
        ? [el('p', { className: 'note', role: 'status', textContent: error || translate('no changed') })]
        : []),
    );
    return;
  }
  const most = Math.max(...heads.map(one => one.divergence ?? 0)) || 1;
  const columns = [
    ['head column', 't'],
    ...(sameTexts
      ? [
          ['divergence column', ''],
          ['largest change', 't'],
        ]
      : [['change of texts', 't']]),
    ['kinds column', 't'],
  ];
  const rows = heads.map(one => {
    const link = el('a', {
        href: toBoth(record.run, record.sample, one.layer, one.head, other),
        textContent: record.short(record.index(one.layer, one.head)),
      }),
      [before, after] = one.kinds;
    return el(
      'tr',
      {},
      el('th', { scope: 'row' }, link),
      ...(sameTexts
        ? [
            el(
              'td',
              {},
              el('span', {
                className: 'v',
                v: (one.divergence ?? 0) / most,
                textContent: one.divergence?.toFixed(3) ?? '–',
              }),
            ),
          ]
        : []),
      el('td', { className: 't', textContent: one.change ? translate('changed statistic', one.change) : '' }),
      el(
        'td',
        { className: 't' },
        kindTags(before),
        ...(kindNames(before) === kindNames(after) ? [] : [' → ', kindTags(after)]),
      ),
    );
  });
  const notes = [
    ...(heads.length < all ? [translate('changed shown', { n: count(heads.length), all: count(all) })] : []),
    ...(sameTexts ? [translate('changed bars', { n: most.toFixed(3) })] : []),
    ...(every > 1 ? [translate('changed every', { n: every })] : []),
  ];
  $('changed').replaceChildren(
    ...said(sentences),
    body(columns, rows),
    ...(notes.length ? [el('p', { className: 'note', textContent: notes.join(translate('join.sentences')) })] : []),
  );
}
