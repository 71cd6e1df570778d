// The maps of every head over training. Everything else on the page needs no script.
import { bitmapOf, colourScheme, updatePalette } from '../../multihead/viewer/static/shared/colour.js';
import { el, elementIn, elementsIn, translate } from '../../multihead/viewer/static/shared/dom.js';
import { tickedRamp } from '../../multihead/viewer/static/shared/legend.js';
import { formatExact } from '../../multihead/viewer/static/shared/numbers.js';

/** @type {LabData} */
const D = JSON.parse(document.getElementById('data').textContent);
const SCALE = 'root';
const headsName = n => (n === 1 ? translate('1 head') : translate('heads', { n }));

// The picture of a head: one pixel per weight; a masked weight is transparent, so that the hatching shows.
function picture(rows, causal) {
  const values = Float32Array.from(rows.flatMap((row, i) => row.map((w, j) => (causal && j > i ? NaN : w / 1000))));
  const canvas = bitmapOf({ rows: rows.length, cols: rows[0].length, values }, 'ink', SCALE, 1);
  canvas.className = 'map';
  canvas.setAttribute('role', 'img');
  return canvas;
}

const ramp = () =>
  el('div', { className: 'ramp' }, el('span', { textContent: translate('scale') }), tickedRamp(220, SCALE, 1));

function measures(/** @type {LabTask} */ task, /** @type {LabLook} */ look) {
  const cells = Object.entries(look.measures).flatMap(([name, value]) => {
    const label = el('span', {
      textContent: translate('measure.' + (task.name === 'one' && name === 'first lookup' ? 'only lookup' : name)),
    });
    if (name === 'entropy') return [label, el('span', { className: 'wide', textContent: value.toFixed(2) })];
    return [label, el('span', {}, el('i', { v: value })), el('b', { textContent: formatExact(value) })];
  });
  return el('div', { className: 'measures' }, ...cells);
}

function show(box, /** @type {LabTask} */ task, /** @type {number} */ chosen) {
  const course = task.courses.find(one => one.heads === chosen);
  const line = el('p', { className: 'note num', role: 'status', textContent: translate('point') });
  const label = `${document.getElementById('h-' + task.name).textContent} ${headsName(chosen)}`;
  const grid = gridOf(task, course, line);
  const scroll = el('div', { className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': label }, grid);
  box.dataset.heads = chosen;
  elementIn(document, `[data-note="${task.name}"]`).textContent = task.note;
  box.replaceChildren(el('div', { className: 'bar' }, choiceOfHeads(box, task, chosen), ramp()), scroll, line);
}

// The maps of each head at each step, and its measures at the end; `line` says which weight is under the pointer.
function gridOf(/** @type {LabTask} */ task, /** @type {LabCourse} */ course, line) {
  const { moments } = course;
  const grid = el(
    'div',
    { className: 'heads' },
    el('span'),
    ...moments.map(({ step }) => el('span', { className: 'hd num', textContent: translate('step', { n: step }) })),
    el('span', { className: 'hd end', textContent: translate('at the end') }),
  );
  grid.style.setProperty('--n', String(moments.length));
  moments.at(-1).looks.forEach((look, i) => {
    const name = translate(isCausal(task) ? 'layer head' : 'only head', { layer: look.layer, head: look.head });
    grid.append(
      el('span', { className: 'nm', textContent: name }),
      ...moments.map(moment => mapOf(task, moment, i, name, line)),
      measures(task, look),
    );
  });
  return grid;
}

const isCausal = (/** @type {LabTask} */ task) => task.name === 'induction';

// The map of head i at a step.
function mapOf(/** @type {LabTask} */ task, /** @type {LabMoment} */ { step, looks }, i, name, line) {
  const causal = isCausal(task);
  const rows = looks[i].picture;
  const map = picture(rows, causal);
  const title = `${name}, ${translate('step', { n: step })}`;
  const from = causal ? 0 : 1; // the number of the first row
  map.setAttribute('aria-label', title);
  map.onpointermove = event => {
    const row = Math.min(rows.length - 1, Math.floor((event.offsetY / map.clientHeight) * rows.length));
    const column = Math.min(rows[0].length - 1, Math.floor((event.offsetX / map.clientWidth) * rows[0].length));
    const weight = causal && column > row ? translate('hidden') : formatExact(rows[row][column] / 1000);
    const place = { row: row + from, column: column + from, weight };
    line.textContent = `${title} · ` + translate(causal ? 'value induction' : 'value lookup', place);
  };
  map.onpointerleave = () => {
    line.textContent = translate('point');
  };
  return map;
}

const choiceOfHeads = (box, /** @type {LabTask} */ task, /** @type {number} */ chosen) =>
  el(
    'div',
    { className: 'seg', role: 'group', 'aria-label': translate('choose heads') },
    ...task.courses.map(one =>
      el('button', {
        textContent: headsName(one.heads),
        'aria-pressed': String(one.heads === chosen),
        onclick: () => {
          show(box, task, one.heads);
          elementIn(box, '[aria-pressed=true]').focus();
        },
      }),
    ),
  );

function draw() {
  updatePalette();
  for (const box of elementsIn(document, '.looks')) {
    const task = D.tasks.find(one => one.name === box.dataset.task);
    const heads = task.courses.map(one => one.heads);
    show(box, task, +box.dataset.heads || (heads.includes(2) ? 2 : heads[0]));
  }
}
colourScheme.addEventListener('change', draw);
draw();
