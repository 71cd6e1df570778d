// The page of all heads: title, filter and kinds, the grid with its inspector, the table, what the words mean.
import { address, sampleAt } from './api.js';
import { fade, grid, kindTag, litHead, mapsMissing, redrawRows, thumb, told, topWeight, drawRow } from './grid.js';
import { fits } from './filter.js';
import { scaleChoice, ticked } from './legend.js';
import { save, state, toHead } from './permalink.js';
import { glyph, KINDS, kindName, view, withUnit } from './record.js';
import { table } from './table.js';
import { $, count, el, known, NBSP, say } from './words.js';

let record = null, goTo = () => {};
const passes = i => (!state.kind || record.kinds[i] === state.kind) && (!state.filter || fits(record, i, state.filter));

export function overview(shown, openHead) {
  record = shown;
  goTo = openHead;
  if (!KINDS.includes(state.kind)) state.kind = '';
  $('title').textContent = record.title;
  $('lead').textContent = say(record.heads.length === 1 ? 'lead one' : 'lead', { heads: count(record.heads.length), layers: count(record.layers.length), tokens: count(record.keys), pattern: patternOf(record) });
  $('filter').value = state.filter;
  $('filter').placeholder = say('filter hint');
  chips();
  grid(record, passes, goTo);
  told.pointed = inspect;
  told.arrived = (of, l) => { if (of === record) { if (state.scale === 'linear') redrawRows(); else drawRow(l); scale(); later(); } };
  inspect(litHead());
  scale();
  table(record, passes);
  links();
  definitions();
  $('foot').textContent = say('foot', { version: view.version });
}

// Small pictures beside the inspector and the table come with their layer; drawn once a burst.
let waiting = 0;
function later() {
  clearTimeout(waiting);
  waiting = setTimeout(() => { inspect(litHead()); table(record, passes); }, 150);
}

export function patternOf(of) {
  const found = [...new Set(of.layers.map(layer => layer.crosses ? 'cross' : layer.pattern))];
  return found.map(name => say('pattern ' + name)).join(say('between parts'));
}

function chips() {
  const counts = KINDS.map(kind => [kind, record.kinds.filter(each => each === kind).length]).filter(([, n]) => n);
  $('chips').setAttribute('aria-label', say('show kind'));
  $('chips').replaceChildren(...counts.map(([kind, n]) => {
    const chip = el('button', { className: 'chip', k: kind, 'aria-pressed': String(state.kind === kind), onclick: () => {
      state.kind = state.kind === kind ? '' : kind;
      narrowed();
      chips();
      $('chips').querySelector(`[data-kind=${kind}]`).focus();
    } }, glyph(kind), kindName(kind) + ' ', el('i', { textContent: count(n) }));
    chip.dataset.kind = kind;
    return chip;
  }));
}

function narrowed() {
  fade(record, passes);
  table(record, passes);
  save();
}
$('filter').oninput = () => { state.filter = $('filter').value; narrowed(); };

function scale() {
  const missing = mapsMissing(record), change = name => {
    state.scale = name;
    redrawRows();
    scale();
    inspect(litHead());
    table(record, passes);
    save();
    $('scale').querySelector('[aria-pressed=true]').focus();
  };
  const hidden = record.layers.some(layer => layer.pattern !== 'full'), notes = [say('one scale'), hidden ? say(record.layers.every(layer => /^(full|causal)$/.test(layer.pattern)) ? 'hidden later' : 'hidden') : say('none hidden')];
  $('scale').hidden = missing;
  $('scale').replaceChildren(ticked(Math.min(320, $('gridbox').clientWidth - 8), topWeight.value), scaleChoice(change), el('div', { className: 'note', textContent: notes.join(say('between sentences')) }));
  const words = missing ? say('statistics only') : building();
  $('gridstate').hidden = !words;
  $('gridstate').textContent = words;
}
export function building(of = record) {
  const { state: at, done, total, inMemory, error } = of.progress;
  if (error) return error;
  return at === 'building' ? say(inMemory ? 'building in memory' : 'building', { share: Math.floor(100 * done / Math.max(1, total)) + NBSP + '%' }) : '';
}
export const progressed = () => scale();

function inspect(i) {
  const { l, h } = record.heads[i], link = el('a', { href: toHead(record.run, record.sample, l, h), tabIndex: -1, 'aria-hidden': 'true' }, thumb(record, i, 300));
  link.classList.add('framed');
  link.style.setProperty('--k', `var(--${record.kinds[i]})`);
  $('insp').replaceChildren(link, el('h3', {}, record.long(i), kindTag(record, i)), el('p', { className: 'path', textContent: record.layer(i).name }),
    el('table', { className: 'numbers' }, el('caption', { className: 'vh', textContent: say('head statistics') }), el('tbody', {}, ...numberRows(record, i))));
}

export function numberRows(of, i) {
  return of.metrics.map(one => el('tr', {}, el('th', { scope: 'row', textContent: one.share ? one.label : withUnit(one) }),
    el('td', { className: 'b' }, el('i', { v: one.filled(i) })), el('td', { textContent: one.text(i) })));
}

function links() {
  const to = form => el('a', { href: address(`${sampleAt(record.run, record.sample)}/table.${form}`), download: '', textContent: form.toUpperCase() });
  $('tablelinks').replaceChildren(say('as a file') + ' ', to('csv'), ' ', to('json'));
}

function definitions() {
  const given = record.thresholds, percents = {};
  for (const name of ['mass', 'local', 'broad']) percents[name] = known(given[name]) ? Math.round(given[name] * 100) + NBSP + '%' : '';
  const entry = (title, words, kind) => el('div', kind ? { k: kind } : {}, el('dt', {}, ...(kind ? [glyph(kind)] : []), title[0].toLocaleUpperCase() + title.slice(1)), el('dd', { textContent: words }));
  const told = key => { const words = say(key, { ...percents, ...given, ...percents }); return words === key ? '' : words; };
  const metrics = record.metrics.map(one => [one.label, told('def ' + one.name)]).filter(([, words]) => words).map(([title, words]) => entry(title, words));
  const kinds = KINDS.map(kind => [kind, told('def kind ' + kind)]).filter(([kind, words]) => words && (record.kinds.includes(kind) || kind !== 'separator')).map(([kind, words]) => entry(kindName(kind), words, kind));
  $('defs').replaceChildren(...metrics, ...kinds);
}
