// The page of a series: when heads became a kind, the heads at one step, a slider over the steps that can play, and one
// head over all steps.
import { colourScheme, paintElement, toneOf, updatePalette } from '../shared/colour.js';
import { $, el, elementIn, translate } from '../shared/dom.js';
import { drawHeads } from '../shared/headgrid.js';
import { HeadList } from '../shared/headlist.js';
import { chanceWords, helpButton } from '../shared/help.js';
import { addLegend, colourOfKind, nounOfKind, statisticOfKind } from '../shared/kindlist.js';
import { glyphElement, kindChips, kindNames, kindTags } from '../shared/kinds.js';
import { FIRST_ROWS, moreButton } from '../shared/more.js';
import { formatCount, isKnown } from '../shared/numbers.js';
import {
  definedStatistics,
  makeStatistic,
  numbersTable,
  showDefinitions,
  statisticScale,
  withUnit,
} from '../shared/statistics.js';
import { svgElement } from '../shared/svg.js';
import { fitGridToWindow, whenWidthChanges } from '../shared/window.js';

/** @type {SeriesData} */
const D = JSON.parse($('data').textContent);
const LIST = new HeadList(D.layers);
const LAST = D.steps.length - 1;
addLegend(D.legend);

// The choice of the reader: the place of the step, the statistic, the kind whose heads alone are shown or '', and the
// head whose line is drawn; while the film plays, its timer.
const state = { at: LAST, id: D.columns[0].id, kind: '', lit: 0, timer: 0 };
let wide = true;
let cells = []; // whether a cell has room for its number

// A statistic of all heads at the step that is shown; a full bar is the end of its colour scale.
const valuesOf = id => D.values[id][state.at];
const shown = id =>
  makeStatistic(
    D.columns.find(one => one.id === id),
    valuesOf(id),
    () => D.ends[id][1],
  );
// The kinds of a head at a step; none where they were not watched.
const kindsAt = (i, at) => (D.kinds.length ? D.combinations[D.kinds[at][i]] : []);
const kindsOf = i => kindsAt(i, state.at);
const EVER = [...new Set(D.combinations.flat())]; // the kinds that some head has at some step
// The place of a value on the scale of its statistic, which is the same at all steps: 0 to 1.
const share = (id, value) => (value - D.ends[id][0]) / (D.ends[id][1] - D.ends[id][0]);

function frameOfFilm() {
  const one = shown(state.id);
  const step = formatCount(D.steps[state.at]);
  $('step').value = String(state.at);
  $('step').setAttribute('aria-valuetext', translate('step', { n: step }));
  $('at').textContent = translate('step of', {
    n: step,
    place: formatCount(state.at + 1),
    all: formatCount(D.steps.length),
  });
  cells.forEach((cell, i) => {
    const value = one.values[i];
    cell.classList.toggle('none', !isKnown(value));
    if (isKnown(value)) paintElement(cell, toneOf('linear', share(state.id, value), 1));
    else cell.removeAttribute('style');
    const kinds = kindsOf(i);
    if (kinds.length) cell.style.setProperty('--k', colourOfKind(kinds[0]));
    else cell.style.removeProperty('--k');
    cell.classList.toggle('dim', !!state.kind && !kinds.includes(state.kind));
    cell.textContent = wide && isKnown(value) ? one.number(i) : '';
    cell.setAttribute(
      'aria-label',
      [LIST.long(i), kindNames(kinds), `${one.label} ${one.text(i)}`].filter(Boolean).join(', '),
    );
  });
  if (D.kinds.length) chips();
  inspect(state.lit);
}

// The kinds of the heads at the step shown; a kind that no head has now keeps its button, so that nothing moves while
// the film plays.
function chips() {
  const box = $('chips');
  const held = elementIn(box, ':focus')?.dataset.kind;
  kindChips(
    box,
    LIST.heads.map((_, i) => kindsOf(i)),
    state.kind,
    kind => {
      state.kind = kind;
      frameOfFilm();
    },
    EVER,
  );
  if (held) elementIn(box, `[data-kind=${held}]`).focus();
}

function grid() {
  const box = $('grid');
  const shape = fitGridToWindow(LIST, box);
  wide = shape.cell >= 34;
  // A cell that scrolls below a mouse that rests is not chosen.
  const light = i => {
    if (state.lit !== i) inspect(i);
  };
  cells = LIST.heads.map((_, i) =>
    el('button', {
      className: 'cell',
      tabIndex: i === state.lit ? 0 : -1,
      onmousemove: () => light(i),
      onfocus: () => light(i),
    }),
  );
  drawHeads(box, LIST, shape, i => cells[i]);
}

function legend() {
  const one = shown(state.id);
  const [low, end] = D.ends[state.id];
  $('scale').replaceChildren(
    ...statisticScale(
      one,
      'ink',
      [
        [0, one.tick(low)],
        [100, one.tick(end)],
      ],
      translate(one.percentage ? 'scale whole' : 'scale largest'),
    ),
  );
}

// The place of a step between the first one and the last, from 0 to 1.
const across = at => (D.steps[LAST] > D.steps[0] ? (D.steps[at] - D.steps[0]) / (D.steps[LAST] - D.steps[0]) : 0.5);

// A head's line over the steps, from 0 to 1 in both directions; a step at which it was not observed is a gap.
function line(i) {
  const points = D.steps.map((_, at) => [across(at), D.values[state.id][at][i]]);
  const place = (/** @type {number[]} */ [left, value]) =>
    `${left.toFixed(4)} ${(1 - share(state.id, value)).toFixed(4)}`;
  const course = points
    .map((point, at) => (isKnown(point[1]) ? (at && isKnown(points[at - 1][1]) ? 'L' : 'M') + place(point) : ''))
    .join('');
  const drawn = svgElement(
    'svg',
    {
      class: 'line',
      viewBox: '0 0 1 1',
      preserveAspectRatio: 'none',
      role: 'img',
      'aria-label': translate('line label', { head: LIST.long(i), label: shown(state.id).label }),
    },
    svgElement('path', { class: 'now', d: `M${across(state.at)} 0V1` }),
    svgElement('path', { class: 'course', d: course }),
    ...(isKnown(points[state.at][1]) ? [svgElement('path', { class: 'dot', d: `M${place(points[state.at])}h0` })] : []),
  );
  drawn.onpointerdown = drawn.onpointermove = event => {
    if (event.type === 'pointermove' && !event.buttons) return;
    const box = drawn.getBoundingClientRect();
    const left = (event.clientX - box.left) / box.width;
    go(D.steps.reduce((best, _, at) => (Math.abs(across(at) - left) < Math.abs(across(best) - left) ? at : best), 0));
  };
  return [
    drawn,
    ...(D.kinds.length ? [strip(i)] : []),
    el(
      'div',
      { className: 'ends' },
      ...[...new Set([D.steps[0], D.steps[LAST]])].map(step =>
        el('span', { textContent: translate('step', { n: formatCount(step) }) }),
      ),
    ),
  ];
}

// The first kind of a head over the steps, as a strip of colours below its line; each step has half of the way to its
// neighbours.
function strip(i) {
  const border = at => (at < 0 ? 0 : at >= LAST ? 1 : (across(at) + across(at + 1)) / 2);
  const pieces = [];
  D.steps.forEach((_, at) => {
    const [kind] = kindsAt(i, at);
    const before = pieces.at(-1);
    if (before?.kind === kind) before.end = border(at);
    else pieces.push({ kind, start: border(at - 1), end: border(at) });
  });
  return svgElement(
    'svg',
    {
      class: 'strip',
      viewBox: '0 0 1 1',
      preserveAspectRatio: 'none',
      role: 'img',
      'aria-label': translate('kinds label', { head: LIST.long(i) }),
    },
    ...pieces
      .filter(({ kind }) => kind)
      .map(({ kind, start, end }) => {
        const piece = svgElement('path', { d: `M${start.toFixed(4)} 0H${end.toFixed(4)}V1H${start.toFixed(4)}z` });
        piece.style.setProperty('--k', colourOfKind(kind));
        return piece;
      }),
  );
}

// A change of a head as a sentence, whose step is a link that shows all heads there by the statistic of the kind;
// then(i) is called after it.
function sentence({ layer, head, kind, gained, step, at }, then = _head => {}) {
  const i = LIST.index(layer, head);
  const show = event => {
    event.preventDefault();
    choose(statisticOfKind(kind));
    go(at);
    inspect(i);
    then(i);
  };
  const part = {
    '{head}': () => el('b', { textContent: LIST.short(i) }),
    '{step}': () => el('a', { href: '#grid', textContent: translate('step', { n: formatCount(step) }), onclick: show }),
  };
  const words = translate(gained ? 'became' : 'no longer', { noun: nounOfKind(kind) }).split(/(\{head\}|\{step\})/);
  return el('li', { k: kind }, glyphElement(kind), el('span', {}, ...words.map(each => part[each]?.() ?? each)));
}

let listed = FIRST_ROWS; // how many changes are in the list over all heads
function changes() {
  const words = D.changes
    .slice(0, listed)
    .map(each => sentence(each, i => cells[i].scrollIntoView({ block: 'center' })));
  $('changes').replaceChildren(
    ...(words.length ? words : [el('li', { className: 'note', textContent: translate('no changes') })]),
  );
  moreButton($('more'), D.changes.length, listed, number => {
    listed = number;
    changes();
  });
}

// The changes of one head, in the order of the steps.
const story = i => D.changes.filter(({ layer, head }) => LIST.index(layer, head) === i).sort((a, b) => a.step - b.step);

function inspect(i) {
  cells.forEach((cell, each) => {
    cell.tabIndex = each === i ? 0 : -1;
  });
  cells[state.lit].removeAttribute('aria-current');
  cells[i].setAttribute('aria-current', 'true');
  state.lit = i;
  const told = story(i).map(each => sentence(each));
  $('insp').replaceChildren(
    el('h3', {}, LIST.long(i), ...(D.kinds.length ? [kindTags(kindsOf(i))] : [])),
    el('p', { className: 'path', textContent: LIST.layer(i).name }),
    ...line(i),
    ...(told.length ? [el('ul', { className: 'changes' }, ...told)] : []),
    numbersTable(
      D.columns.map(one => shown(one.id)),
      i,
    ),
  );
}

// Show another step; the film stops, unless it plays.
function go(at, playing = false) {
  if (!playing) stop();
  state.at = at;
  frameOfFilm();
}

function stop() {
  clearInterval(state.timer);
  state.timer = 0;
  $('play').textContent = translate('play');
}

function play() {
  if (state.timer) {
    stop();
    return;
  }
  go(state.at < LAST ? state.at : 0, true);
  $('play').textContent = translate('pause');
  // A short series slowly, so that each step is seen; a long one in about ten seconds.
  state.timer = setInterval(
    () => {
      if (state.at < LAST) go(state.at + 1, true);
      else stop();
    },
    Math.max(60, Math.min(500, 10000 / D.steps.length)),
  );
}

function choose(id) {
  state.id = $('statistic').value = id;
  legend();
  frameOfFilm();
}

function draw() {
  updatePalette();
  grid();
  legend();
  frameOfFilm();
}

$('statistic').append(...D.columns.map(one => el('option', { value: one.id, textContent: withUnit(one) })));
$('statistic').onchange = () => choose($('statistic').value);
$('step').oninput = () => go(+$('step').value);
$('play').onclick = play;
$('play').disabled = !LAST;
$('grid').addEventListener('keydown', event => {
  const next = LIST.moved(state.lit, event.key);
  if (next === undefined) return;
  event.preventDefault();
  if (next >= 0) cells[next].focus();
});
colourScheme.addEventListener('change', draw);
whenWidthChanges(draw);

if (D.kinds.length) {
  changes();
  addEventListener('beforeprint', () => {
    listed = Infinity;
    changes();
  });
  addEventListener('afterprint', () => {
    listed = FIRST_ROWS;
    changes();
  });
}
showDefinitions($('defs'), D.columns, D.legend);
$('helps').append(
  helpButton(
    [
      [['←', '→', '↑', '↓'], 'press.neighbour'],
      [['?'], 'press.help'],
    ],
    [...definedStatistics(D.columns), chanceWords()],
  ),
);
stop();
draw();
