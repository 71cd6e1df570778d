// What changed between two records, which the page opens with: the heads ranked by divergence.
import { $, el, translate, waitingNote } from '../shared/dom.js';
import { kindNames, kindTags } from '../shared/kinds.js';
import { count } from '../shared/numbers.js';
import { json, sampleAt } from './api.js';
import { toBoth } from './permalink.js';
import { view } from './record.js';

const kept = new Map();  // the answers, by run, sample and other run
let other = -1, turn = 0;

export function changed(record) {
  const others = view.served ? view.runs.map((_, n) => n).filter(n => n !== record.run) : [];
  $('changedsec').hidden = !others.length;
  if (!others.length) return;
  if (!others.includes(other)) other = others[0];
  const choice = el('select', { 'aria-label': translate('compare with'), onchange: event => { other = +event.target.value; changed(record); } },
    ...others.map(n => el('option', { value: n, textContent: view.runs[n].name })));
  choice.value = other;
  const key = `${record.run} ${record.sample} ${other}`, mine = ++turn;
  const rank = async () => {
    $('changed').replaceChildren(waitingNote());
    const answer = await json(`${sampleAt(record.run, record.sample)}/changed/${key.split(' ')[2]}`).catch(error => ({ error: error.message, heads: [] }));
    if (!answer.error) kept.set(key, answer);
    if (mine === turn) show(record, answer);
  };
  $('changedtools').replaceChildren(el('span', { textContent: translate('compare with') + ' ' }), choice);
  if (kept.has(key)) show(record, kept.get(key)); else rank();
}

function show(record, { heads, every, sentences, all, error }) {
  if (!heads.length) { $('changed').replaceChildren(el('p', { className: 'note', role: 'status', textContent: error || translate('no changed') })); return; }
  const most = Math.max(...heads.map(one => one.divergence ?? 0)) || 1;
  const columns = [['head column', 't'], ['divergence column', ''], ['largest change', 't'], ['kinds column', 't']].map(([key, name]) => el('th', { scope: 'col', className: name, textContent: translate(key) }));
  const rows = heads.map(one => {
    const link = el('a', { href: toBoth(record.run, record.sample, one.layer, one.head, other), textContent: record.short(record.index(one.layer, one.head)) }), [before, after] = one.kinds;
    return el('tr', {}, el('th', { scope: 'row' }, link),
      el('td', {}, el('span', { className: 'v', v: (one.divergence ?? 0) / most, textContent: one.divergence?.toFixed(3) ?? '–' })),
      el('td', { className: 't', textContent: one.change ? translate('changed statistic', one.change) : '' }),
      el('td', { className: 't' }, kindTags(before), ...(kindNames(before) === kindNames(after) ? [] : [' → ', kindTags(after)])));
  });
  const notes = [...(heads.length < all ? [translate('changed shown', { n: count(heads.length), all: count(all) })] : []), translate('changed bars', { n: most.toFixed(3) }), ...(every > 1 ? [translate('changed every', { n: every })] : [])];
  $('changed').replaceChildren(...sentences.map(sentence => el('p', { textContent: sentence })), el('table', { className: 'every' }, el('caption', { className: 'vh', textContent: translate('changed') }), el('thead', {}, el('tr', {}, ...columns)), el('tbody', {}, ...rows)), el('p', { className: 'note', textContent: notes.join(translate('join.sentences')) }));
}
