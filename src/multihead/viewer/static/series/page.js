// The page of a series: the heads at one step, a slider over the steps that can play, and one head over all steps.
import { dark, paint, palette, tone } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { drawHeads } from '../shared/headgrid.js';
import { HeadList } from '../shared/headlist.js';
import { chanceWords, helpButton } from '../shared/help.js';
import { count, known } from '../shared/numbers.js';
import { definitions, described, numbersTable, statistic, statisticScale, withUnit } from '../shared/statistics.js';
import { svg } from '../shared/svg.js';
import { fittedToWindow, whenWidthChanges } from '../shared/window.js';

const D = JSON.parse($('data').textContent);
const LIST = new HeadList(D.layers), LAST = D.steps.length - 1;

// The choice of the reader: the place of the step, the statistic, and the head whose line is drawn; while the film plays, its timer.
const state = { at: LAST, id: D.columns[0].id, lit: 0, timer: 0 };
let wide = true, cells = [];  // whether a cell has room for its number

// A statistic of all heads at the step that is shown; a full bar is the end of its colour scale.
const valuesOf = id => D.values[id][state.at];
const shown = id => statistic(D.columns.find(one => one.id === id), valuesOf(id), () => D.ends[id][1]);
// The place of a value on the scale of its statistic, which is the same at all steps: 0 to 1.
const share = (id, value) => (value - D.ends[id][0]) / (D.ends[id][1] - D.ends[id][0]);

function frameOfFilm() {
  const one = shown(state.id), step = count(D.steps[state.at]);
  $('step').value = state.at;
  $('step').setAttribute('aria-valuetext', translate('step', { n: step }));
  $('at').textContent = translate('step of', { n: step, place: count(state.at + 1), all: count(D.steps.length) });
  cells.forEach((cell, i) => {
    const value = one.values[i];
    cell.classList.toggle('none', !known(value));
    if (known(value)) paint(cell, tone('linear', share(state.id, value), 1)); else cell.removeAttribute('style');
    cell.textContent = wide && known(value) ? one.number(i) : '';
    cell.setAttribute('aria-label', `${LIST.long(i)}, ${one.label} ${one.text(i)}`);
  });
  inspect(state.lit);
}

function grid() {
  const box = $('grid'), shape = fittedToWindow(LIST, box);
  wide = shape.cell >= 34;
  cells = LIST.heads.map((_, i) => el('button', { className: 'cell', tabIndex: i === state.lit ? 0 : -1, onmouseenter: () => inspect(i), onfocus: () => inspect(i) }));
  drawHeads(box, LIST, shape, i => cells[i]);
}

function legend() {
  const one = shown(state.id), [low, end] = D.ends[state.id];
  $('scale').replaceChildren(...statisticScale(one, 'ink', [[0, one.tick(low)], [100, one.tick(end)]], translate(one.percentage ? 'scale whole' : 'scale largest')));
}

// A head's line over the steps, from 0 to 1 in both directions; a step at which it was not observed is a gap.
function line(i) {
  const [first, last] = [D.steps[0], D.steps[LAST]], x = at => last > first ? (D.steps[at] - first) / (last - first) : .5;
  const points = D.steps.map((_, at) => [x(at), D.values[state.id][at][i]]), place = ([left, value]) => `${left.toFixed(4)} ${(1 - share(state.id, value)).toFixed(4)}`;
  const course = points.map((point, at) => known(point[1]) ? (at && known(points[at - 1][1]) ? 'L' : 'M') + place(point) : '').join('');
  const drawn = svg('svg', { class: 'line', viewBox: '0 0 1 1', preserveAspectRatio: 'none', role: 'img', 'aria-label': translate('line label', { head: LIST.long(i), label: shown(state.id).label }) },
    svg('path', { class: 'now', d: `M${x(state.at)} 0V1` }), svg('path', { class: 'course', d: course }), ...(known(points[state.at][1]) ? [svg('path', { class: 'dot', d: `M${place(points[state.at])}h0` })] : []));
  drawn.onpointerdown = drawn.onpointermove = event => {
    if (event.type === 'pointermove' && !event.buttons) return;
    const box = drawn.getBoundingClientRect(), left = (event.clientX - box.left) / box.width;
    go(D.steps.reduce((best, _, at) => Math.abs(x(at) - left) < Math.abs(x(best) - left) ? at : best, 0));
  };
  return [drawn, el('div', { className: 'ends' }, ...[...new Set([first, last])].map(step => el('span', { textContent: translate('step', { n: count(step) }) })))];
}

function inspect(i) {
  cells.forEach((cell, each) => { cell.tabIndex = each === i ? 0 : -1; });
  cells[state.lit].removeAttribute('aria-current');
  cells[i].setAttribute('aria-current', 'true');
  state.lit = i;
  $('insp').replaceChildren(el('h3', { textContent: LIST.long(i) }), el('p', { className: 'path', textContent: LIST.layer(i).name }), ...line(i), numbersTable(D.columns.map(one => shown(one.id)), i));
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
  if (state.timer) { stop(); return; }
  go(state.at < LAST ? state.at : 0, true);
  $('play').textContent = translate('pause');
  // A short series slowly, so that each step is seen; a long one in about ten seconds.
  state.timer = setInterval(() => { if (state.at < LAST) go(state.at + 1, true); else stop(); }, Math.max(60, Math.min(500, 10000 / D.steps.length)));
}

function draw() {
  palette();
  grid();
  legend();
  frameOfFilm();
}

$('statistic').append(...D.columns.map(one => el('option', { value: one.id, textContent: withUnit(one) })));
$('statistic').onchange = event => { state.id = event.target.value; legend(); frameOfFilm(); };
$('step').oninput = event => go(+event.target.value);
$('play').onclick = play;
$('play').disabled = !LAST;
$('grid').addEventListener('keydown', event => {
  const next = LIST.moved(state.lit, event.key);
  if (next === undefined) return;
  event.preventDefault();
  if (next >= 0) cells[next].focus();
});
dark.addEventListener('change', draw);
whenWidthChanges(draw);

definitions($('defs'), D.columns, []);
$('helps').append(helpButton([[['←', '→', '↑', '↓'], 'press.neighbour'], [['?'], 'press.help']], [...described(D.columns), chanceWords()]));
stop();
draw();
