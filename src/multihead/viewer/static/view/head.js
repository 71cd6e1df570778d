// The page of one head, or of two compared: its panels, and the pointer on the map.
import { $, translate } from '../shared/dom.js';
import { root } from '../shared/host.js';
import { kindNames, roleName } from '../shared/kinds.js';
import { isSingle, scaleChoice } from '../shared/legend.js';
import { count } from '../shared/numbers.js';
import { numberRows } from '../shared/statistics.js';
import { downloads, headAt, server } from './api.js';
import { differences } from './compare.js';
import { cellAt, centre, clamp, move, viewOf, zoom } from './geometry.js';
import { zooms } from './host.js';
import { legend } from './legend.js';
import { mini, shown } from './map.js';
import { navigator } from './navigator.js';
import { nearest } from './nearest.js';
import { marginsLoaded } from './margins.js';
import { building } from './overview.js';
import { forgetPanels, PANELS } from './panels.js';
import { save, state, unsaved } from './permalink.js';
import { view } from './record.js';
import { pointing, reading } from './reading.js';
import { row } from './rows.js';
import { arrived } from './tiles.js';

const MAX_CELLS = 1 << 20;
let scene = null,
  pointed = null,
  raf = 0,
  listed = '';

// Collect what the drawing functions need of the two heads.
function stage(record, other) {
  const { a, b } = state,
    layer = record.numbered.get(a.l),
    second = b && other.has(b.l, b.h) ? b : { r: state.run, ...a };
  const otherRecord = second.r === state.run ? record : other,
    otherLayer = otherRecord.numbered.get(second.l);
  const i = record.index(a.l, a.h),
    j = otherRecord.index(second.l, second.h),
    runs = otherRecord !== record;
  const name = (of, n, which) => (runs ? `${of.short(n)} ${translate(which)}` : of.short(n));
  return {
    record,
    otherRecord,
    layer,
    otherLayer,
    i,
    j,
    runs,
    coarse: record.coarse && otherRecord.coarse,
    sides: record.sides(layer),
    otherSides: otherRecord.sides(otherLayer),
    a: { run: state.run, sample: state.sample, l: a.l, h: a.h, masked: state.masked && layer.rows === 'all' },
    b: {
      run: otherRecord.run,
      sample: otherRecord.sample,
      l: second.l,
      h: second.h,
      masked: state.masked && otherLayer.rows === 'all',
    },
    titles: {
      a: [name(record, i, 'in a'), runs ? record.name : kindNames(record.allKinds[i])],
      b: [name(otherRecord, j, 'in b'), runs ? otherRecord.name : kindNames(otherRecord.allKinds[j])],
      d: [runs ? translate('a minus b') : `${record.short(i)} − ${otherRecord.short(j)}`, translate('difference')],
    },
    strange: runs && !sameText(record.sides(layer).key, otherRecord.sides(otherLayer).key),
  };
}
const sameText = (one, two) =>
  !one.text ||
  !two.text ||
  (one.text.shown.length === two.text.shown.length && one.text.shown.every((token, p) => token === two.text.shown[p]));

export function headPage(record, other) {
  scene = stage(record, other);
  pointed = null;
  forgetPanels();
  const { i, layer } = scene,
    drawable = layer.blocks.length > 0;
  $('one').classList.toggle('mapless', !drawable);
  $('headname').textContent = record.named(i);
  $('shownhead').textContent = [
    roleName(scene.layer.role),
    kindNames(record.allKinds[i]),
    record.aligned(i) ? translate('alignment') : '',
  ]
    .filter(Boolean)
    .join(translate('join.comma'));
  $('map').setAttribute('aria-label', translate('map label', { layer: state.a.l, head: state.a.h }));
  $('mini').setAttribute('aria-label', translate('mini label'));
  $('numbers').replaceChildren(...numberRows(record.metrics, i));
  if (listed !== `${record.run} ${record.sample} ${i}`) {
    listed = `${record.run} ${record.sample} ${i}`;
    nearest(scene);
  }
  for (const part of ['nearest', 'nearesthead']) $(part).hidden = !view.similar || layer.rows !== 'all';
  for (const part of ['export', 'exporthead']) $(part).hidden = !view.served || layer.rows !== 'all';
  navigator(scene);
  for (const part of ['scales', 'sink', 'compare']) $(part).hidden = !drawable;
  $('share').hidden = !view.served || layer.rows !== 'all';
  $('zoomone').hidden = !drawable || !isSingle(layer.blocks[0]);
  $('blank').hidden = drawable;
  $('blank').textContent = record.noMaps;
  redraw();
}
export const sceneNow = () => scene;
pointing.point = query => {
  pointed = query < 0 ? null : [query, -1];
  redraw();
};
export const leaveHead = () => {
  scene = null;
};

export function redraw() {
  unsaved();
  cancelAnimationFrame(raf);
  raf = requestAnimationFrame(() => {
    if (!scene) {
      save();
      return;
    }
    scene = stage(scene.record, scene.otherRecord);
    clamp(scene.layer);
    controls();
    if (scene.layer.blocks.length) drawAll();
    save();
  });
}

function drawAll() {
  const read = reading(scene, pointed);
  for (const panel of PANELS) {
    const box = $(panel.box);
    box.hidden = !panel.fits(scene);
    if (!box.hidden) panel.draw(scene, pointed, read, redraw);
  }
  mini(scene);
  differences(scene, redraw);
  const [rows, columns] = scene.layer.blocks[shown.span?.level ?? 0],
    single = isSingle([rows, columns]),
    words = building(scene.record);
  $('legend').replaceChildren(...legend(shown.tops, state.compare));
  $('level').textContent = [
    shown.span
      ? (single ? translate('single weights') : translate('means', { rows, columns })) +
        (state.compare ? '' : scene.record.precision) +
        (scene.a.masked ? translate('first key hidden') : '')
      : '',
    words,
    scene.strange ? translate('other text') : '',
    server.gone ? '' : arrived.trouble,
  ]
    .filter(Boolean)
    .join(translate('join.parts'));
  $('where').textContent = single ? '' : translate('block', { rows, columns });
  $('map').dataset.level = String(shown.span?.level ?? 0);
  $('map').dataset.whole = String(!!shown.span && shown.a.whole && (!shown.b || shown.b.whole));
  if (!$('export').hidden) exportLinks();
}

function controls() {
  $('compare').setAttribute('aria-pressed', String(state.compare));
  $('sink').setAttribute('aria-pressed', String(state.masked));
  const held = $('scales').contains(root.activeElement);
  $('scales').replaceChildren(
    scaleChoice(state.scale, name => {
      state.scale = name;
      redraw();
    }),
  );
  if (held) $('scales').querySelector('[aria-pressed=true]').focus();
}

// The head in view, the queries and keys of the part of its map in view, and the chosen query; null without a head.
export function inView() {
  if (!scene) return null;
  const { layer, a } = scene,
    part = viewOf(layer),
    pane = shown.panes[0],
    high = pane ? pane.py / pane.y : part.rows;
  const ends = (from, size, n) => [Math.floor(from), Math.min(n, Math.ceil(from + size))];
  return {
    layer: a.l,
    head: a.h,
    queries: ends(part.y, high, layer.queries),
    keys: ends(part.x, part.cols, layer.keys),
    query: state.q,
  };
}

function exportLinks() {
  const { a } = scene,
    { queries: q, keys: k } = inView(),
    cells = (q[1] - q[0]) * (k[1] - k[0]);
  if (cells > MAX_CELLS) {
    $('export').textContent = translate('export too many', { n: count(MAX_CELLS) });
    return;
  }
  $('export').replaceChildren(
    translate('export view', { n: count(cells) }) + ' ',
    ...downloads(`${headAt(a.run, a.sample, a.l, a.h)}/weights`, `?queries=${q.join(':')}&keys=${k.join(':')}`),
  );
}

// ---- the pointer: hover, drag, wheel, pinch, double click
const fingers = new Map();
let drag = null,
  pinch = null;
const at = event => {
  const box = $('map').getBoundingClientRect();
  for (const pane of shown.panes) {
    const cell = cellAt(pane, event.clientX - box.left, event.clientY - box.top);
    if (cell) return cell;
  }
  return null;
};
const within = cell =>
  cell && [Math.min(scene.layer.queries - 1, Math.floor(cell[0])), Math.min(scene.layer.keys - 1, Math.floor(cell[1]))];

export function listen() {
  const map = $('map');
  map.addEventListener(
    'wheel',
    event => {
      if (!zooms(event)) return;
      event.preventDefault();
      if (scene) {
        zoom(Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), scene.layer, at(event));
        redraw();
      }
    },
    { passive: false },
  );
  map.onpointerdown = event => {
    fingers.set(event.pointerId, event);
    map.setPointerCapture(event.pointerId);
    drag = fingers.size === 1 ? { X: event.clientX, Y: event.clientY, x: state.x, y: state.y, moved: false } : null;
    pinch = null;
  };
  map.onpointermove = event => {
    if (!scene) return;
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event);
    if (fingers.size === 2) {
      pinched();
      return;
    }
    if (drag) dragged(event);
    else {
      pointed = within(at(event));
      redraw();
    }
  };
  map.onpointerup = event => {
    if (scene && drag && !drag.moved) {
      const cell = within(at(event));
      if (cell) {
        state.q = cell[0];
        pointed = event.pointerType === 'mouse' ? pointed : cell;
        redraw();
      }
    }
    fingers.delete(event.pointerId);
    drag = null;
  };
  map.onpointercancel = event => {
    fingers.delete(event.pointerId);
    drag = null;
  };
  map.onpointerleave = event => {
    if (event.pointerType === 'mouse' && !drag) {
      pointed = null;
      redraw();
    }
  };
  map.ondblclick = event => {
    if (scene) {
      zoom(0.35, scene.layer, at(event));
      redraw();
    }
  };
  const jump = event => {
    if (!event.buttons || !scene) return;
    const box = $('mini').getBoundingClientRect(),
      { layer } = scene;
    centre(
      layer,
      ((event.clientY - box.top) / box.height) * layer.queries,
      ((event.clientX - box.left) / box.width) * layer.keys,
    );
    redraw();
  };
  $('mini').onpointerdown = jump;
  $('mini').onpointermove = jump;
  arrived.notify = marginsLoaded.notify = redraw;
}

function dragged(event) {
  const pane = shown.panes[0],
    dx = event.clientX - drag.X,
    dy = event.clientY - drag.Y;
  if (Math.hypot(dx, dy) > 4) drag.moved = true;
  if (!drag.moved) return;
  state.x = drag.x - dx / pane.x;
  state.y = drag.y - dy / pane.y;
  pointed = null;
  redraw();
}

function pinched() {
  const [one, two] = [...fingers.values()],
    pane = shown.panes[0],
    now = {
      apart: Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY),
      clientX: (one.clientX + two.clientX) / 2,
      clientY: (one.clientY + two.clientY) / 2,
    };
  drag = null;
  if (pinch) {
    state.x -= (now.clientX - pinch.clientX) / pane.x;
    state.y -= (now.clientY - pinch.clientY) / pane.y;
    zoom(pinch.apart / now.apart, scene.layer, at(now));
    redraw();
  }
  pinch = now;
}

// ---- actions of the buttons and the keys
export const zoomBy = factor => {
  zoom(factor, scene.layer, null);
  redraw();
};
export const zoomWhole = () => {
  Object.assign(state, { x: 0, y: 0, n: 0 });
  redraw();
};
export function zoomOne() {
  const weights = row(scene.a, state.q),
    { layer } = scene;
  let best = -1;
  if (weights)
    for (let j = layer.keys > 1 ? 1 : 0; j < weights.length; j++)
      if (weights[j] >= 0 && (best < 0 || weights[j] > weights[best])) best = j;
  centre(layer, state.q, best < 0 ? Math.min(state.q, layer.keys - 1) : best, 56);
  redraw();
}
export function pan(right, down) {
  move(scene.layer, (right * state.n) / 8, (down * state.n) / 8);
  redraw();
}
// Shift and an arrow move the selected cell, by a block where a cell is a block; Enter pins its query.
export function step(right, down) {
  const { layer } = scene,
    [high, wide] = layer.blocks[shown.span?.level ?? 0],
    from = pointed ?? [state.q, Math.floor(state.x + state.n / 2)];
  pointed = [
    Math.max(0, Math.min(layer.queries - 1, from[0] + down * high)),
    Math.max(0, Math.min(layer.keys - 1, from[1] + right * wide)),
  ];
  const pane = shown.panes[0],
    outside = (p, start, size) => p < start || p >= start + size;
  if (outside(pointed[0], state.y, pane.py / pane.y) || outside(pointed[1], state.x, state.n))
    centre(layer, pointed[0], pointed[1]);
  redraw();
}
export function keep() {
  if (!pointed) return;
  state.q = pointed[0];
  redraw();
}
