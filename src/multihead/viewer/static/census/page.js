// Start the page of a census, and show one of two views: all heads by one statistic, or one head.
import { colourScheme, paintElement, toneOf, updatePalette } from '../shared/colour.js';
import { $, el, elementAround, elementIn, isTyped, translate } from '../shared/dom.js';
import { explainNoMatch, passesFilter } from '../shared/filter.js';
import { drawHeads } from '../shared/headgrid.js';
import { chanceWords, helpButton } from '../shared/help.js';
import { lastInput } from '../shared/keys.js';
import { kindChips, kindNames, kindTags } from '../shared/kinds.js';
import { isKnown } from '../shared/numbers.js';
import { numbersTable, showDefinitions, statisticScale, withUnit } from '../shared/statistics.js';
import { showAllRows, showTable } from '../shared/table.js';
import { fitGridToWindow, whenWidthChanges } from '../shared/window.js';
import { distribution, histogram, showHead } from './head.js';
import {
  addressOf,
  CENSUS,
  chooseStatistic,
  HEADS,
  IS_COMPARISON,
  kindsOf,
  shownStatistic,
  state,
  summaryOf,
  tableStatistics,
} from './record.js';

let shownHead = -1;
const ends = one => Math.max(1e-9, ...one.values.filter(isKnown).map(Math.abs));

function choice(name, label, options, chosen, choose) {
  const box = el(
    'select',
    {
      name,
      onchange: event => {
        choose(event.target.value);
        overview();
        elementIn(document, `select[name=${name}]`).focus();
      },
    },
    ...options.map(([value, textContent]) => el('option', { value, textContent, selected: value === chosen })),
  );
  return el('label', {}, label, box);
}

function choices() {
  $('choices').replaceChildren(
    choice(
      'statistic',
      translate('choose.statistic'),
      CENSUS.columns.map(one => [one.id, withUnit(one)]),
      state.id,
      id => {
        chooseStatistic(id);
        if (!IS_COMPARISON) state.order = '-' + id;
      },
    ),
    choice(
      'of',
      translate('choose.of'),
      ['mean', 'median', 'p95', 'max'].map(of => [of, translate('of.' + of)]),
      state.of,
      of => {
        state.of = of;
      },
    ),
    ...(IS_COMPARISON
      ? [
          choice(
            'shows',
            translate('choose.shows'),
            ['A', 'B', 'difference', 'divergence'].map(each => [each, translate('shows.' + each)]),
            state.shows,
            shows => {
              state.shows = shows;
            },
          ),
        ]
      : []),
  );
}

function cell(one, i, end, wide) {
  const value = one.values[i];
  const [kind] = kindsOf(i);
  const box = el('span', { className: isKnown(value) ? 'cell' : 'cell none', ...(kind && { k: kind }) });
  if (!isKnown(value)) return box;
  if (state.shows === 'difference') paintElement(box, 0.5 - value / end / 2, 'apart');
  else paintElement(box, toneOf('linear', value, end));
  if (wide) box.append(one.number(i));
  return box;
}

function chips() {
  kindChips(
    $('chips'),
    HEADS.heads.map((_, i) => kindsOf(i)),
    state.kind,
    kind => {
      state.kind = kind;
      chips();
      dim();
      headsTable();
    },
  );
}

function dim() {
  for (const a of $('grid').querySelectorAll('a'))
    a.classList.toggle('dim', !!state.kind && !kindsOf(+a.dataset.i).includes(state.kind));
}

function grid() {
  const box = $('grid');
  const held = box.contains(document.activeElement);
  const one = shownStatistic();
  const end = ends(one);
  const shape = fitGridToWindow(HEADS, box);
  drawHeads(box, HEADS, shape, i => {
    const link = el(
      'a',
      {
        href: addressOf(i),
        tabIndex: i === state.lit ? 0 : -1,
        'aria-label': [HEADS.long(i), kindNames(kindsOf(i)), `${one.label} ${one.text(i)}`, one.level(i)]
          .filter(Boolean)
          .join(', '),
        onmouseenter: () => inspect(i),
        onfocus: () => inspect(i),
      },
      cell(one, i, end, shape.cell >= 34),
    );
    link.dataset.i = i;
    return link;
  });
  dim();
  if (held) elementIn(box, `[data-i="${state.lit}"]`).focus();
  const signed = state.shows === 'difference';
  const marks = (
    signed
      ? [
          [0, end],
          [50, 0],
          [100, -end],
        ]
      : [
          [0, 0],
          [100, end],
        ]
  ).map(([left, value]) => [left, value ? (signed && value > 0 ? '+' : '') + one.tick(value) : '0']);
  $('scale').replaceChildren(
    ...statisticScale(one, signed ? 'apart' : 'ink', marks, translate(signed ? 'scale signed' : 'scale largest')),
  );
}

function inspect(i) {
  state.lit = i;
  for (const a of $('grid').querySelectorAll('a')) a.tabIndex = +a.dataset.i === i ? 0 : -1;
  $('insp').replaceChildren(
    el('h3', {}, HEADS.long(i), kindTags(kindsOf(i))),
    el('p', { className: 'path', textContent: HEADS.layer(i).name }),
    ...distribution(state.id, i),
    numbersTable(
      CENSUS.columns.map(one => summaryOf(one.id)),
      i,
    ),
  );
}

function headsTable() {
  const statistics = tableStatistics();
  const described = i => ({
    ...HEADS.heads[i],
    kinds: kindsOf(i),
    path: HEADS.layer(i).name,
    role: '',
    aligned: false,
  });
  showTable({
    kinds: HEADS.heads.map((_, i) => kindsOf(i)),
    statistics,
    link: i => el('a', { href: addressOf(i), textContent: HEADS.short(i) }),
    path: i => HEADS.layer(i).name,
    passes: i =>
      (!state.kind || kindsOf(i).includes(state.kind)) && passesFilter($('filter').value, statistics, i, described(i)),
    order: state.order,
    reorder: order => {
      state.order = order;
    },
    why: explainNoMatch(
      $('filter').value,
      statistics,
      [],
      HEADS.heads.map((_, i) => described(i)),
    ),
    marks: () => [],
  });
}

function findings() {
  if (IS_COMPARISON && !CENSUS.findings.length) {
    $('finds').replaceChildren(el('li', { textContent: translate('nothing changed') }));
    return;
  }
  $('finds').replaceChildren(
    ...CENSUS.findings.map(({ layer, head, statistic, sentence, count }) => {
      const i = HEADS.index(layer, head);
      const words = el(
        'p',
        {},
        el('b', { textContent: HEADS.long(i) }),
        translate('join.sentences') + sentence,
        el('small', { textContent: count }),
      );
      return el(
        'li',
        {},
        el(
          'a',
          { href: addressOf(i, statistic) },
          el('div', {}, ...CENSUS.runs.map((_, run) => histogram(statistic, i, run))),
          words,
        ),
      );
    }),
  );
}

// The kinds that heads have, with their chance and the heads with the largest shares.
function kindsFound(/** @type {CensusRun} */ { label, found }, /** @type {number} */ run) {
  const heading = ['kind', 'heads', 'chance', 'largest shares'].map(key =>
    el('th', { scope: 'col', textContent: translate('found.' + key) }),
  );
  const rows = found.map(({ kind, number, chance, best }) =>
    el(
      'tr',
      {},
      el('th', { scope: 'row' }, kindTags([kind])),
      el('td', { textContent: number }),
      el('td', { textContent: chance }),
      el(
        'td',
        {},
        ...best.flatMap(({ layer, head, share }) => {
          const i = HEADS.index(layer, head);
          return [el('a', { href: addressOf(i), textContent: `${HEADS.short(i)} ${share}` }), ' '];
        }),
      ),
    ),
  );
  return el(
    'div',
    {},
    ...(IS_COMPARISON ? [el('h3', { textContent: `${'AB'[run]}: ${label}` })] : []),
    rows.length
      ? el('table', { className: 'found' }, el('thead', {}, el('tr', {}, ...heading)), el('tbody', {}, ...rows))
      : el('p', { className: 'note', textContent: translate('no kinds') }),
  );
}

function firstScreen() {
  findings();
  $('found').style.setProperty('--sides', String(CENSUS.runs.length));
  $('found').replaceChildren(...CENSUS.runs.map(kindsFound));
}

function overview() {
  firstScreen();
  choices();
  chips();
  grid();
  inspect(state.lit);
  headsTable();
}

let opened = ''; // the statistic that the page of the head shows
const openHead = () =>
  showHead(shownHead, opened, id => {
    chooseStatistic(id);
    location.replace(addressOf(shownHead));
  });

function route() {
  const place = location.hash.match(/^#L(\d+)H(\d+)(?:\/(\w+))?$/);
  const i = place ? HEADS.index(+place[1], +place[2]) : -1;
  const before = shownHead;
  if (i < 0 && location.hash && location.hash !== '#' && before < 0) return; // a link inside the page of all heads
  if (i >= 0) opened = CENSUS.columns.some(one => one.id === place[3]) ? place[3] : CENSUS.own[i];
  shownHead = i;
  $('all').hidden = i >= 0;
  $('head').hidden = i < 0;
  document.title = (i >= 0 ? HEADS.long(i) + ' · ' : '') + CENSUS.title + ' · multihead';
  if (i >= 0 && before < 0) scrollTo(0, 0);
  if (i >= 0) {
    const held = $('head').contains(document.activeElement);
    openHead();
    if (held) elementIn($('head'), '.card[aria-pressed=true]').focus({ preventScroll: true });
    return;
  }
  if (before < 0) return;
  state.lit = before;
  overview();
  // The cell of the head whose page was left is in sight, and has the focus where keys are used.
  const link = elementIn($('grid'), `[data-i="${before}"]`);
  if (lastInput.used) link.focus({ preventScroll: true });
  link.scrollIntoView({ block: 'center' });
}

function draw() {
  updatePalette();
  if (shownHead >= 0) openHead();
  else overview();
}

addEventListener('keydown', event => {
  if (isTyped(event)) return;
  if (event.key === 'Escape' && shownHead >= 0) {
    location.hash = '';
    return;
  }
  const next =
    shownHead >= 0
      ? /Left|Right/.test(event.key)
        ? HEADS.moved(shownHead, event.key)
        : undefined
      : elementAround(event, '#grid')
        ? HEADS.moved(state.lit, event.key)
        : undefined;
  if (next === undefined) return;
  event.preventDefault();
  if (next < 0) return;
  if (shownHead >= 0) location.replace(addressOf(next));
  else elementIn($('grid'), `[data-i="${next}"]`).focus();
});
addEventListener('hashchange', route);
colourScheme.addEventListener('change', draw);
whenWidthChanges(() => {
  if (shownHead < 0) {
    grid();
    inspect(state.lit);
  }
});
$('filter').oninput = headsTable;
addEventListener('beforeprint', () => {
  showAllRows(true);
  headsTable();
});
addEventListener('afterprint', () => {
  showAllRows(false);
  headsTable();
});

updatePalette();
showDefinitions($('defs'), CENSUS.columns, HEADS.heads.some((_, i) => kindsOf(i).length) ? CENSUS.legend : []);
$('helps').append(
  helpButton(
    [
      [['←', '→', '↑', '↓'], 'press.neighbour'],
      [['Enter'], 'press.open'],
      [['Esc'], 'press.back'],
      [['?'], 'press.help'],
    ],
    [[translate('shows.divergence'), translate('divergence words')], chanceWords()],
  ),
);
overview();
route();
