// The page of one head, or of two compared: its panels, and what is around its map.
import { $, elementIn, translate } from '../shared/dom.js';
import { root } from '../shared/host.js';
import { kindNames, roleName } from '../shared/kinds.js';
import { isSingle, scaleChoice } from '../shared/legend.js';
import { formatCount } from '../shared/numbers.js';
import { numberRows } from '../shared/statistics.js';
import { downloadLinks, pathOfHead, server } from './api.js';
import { showDifferences } from './compare.js';
import { clampView, viewOf } from './geometry.js';
import { legendOfMap } from './legend.js';
import { drawMiniMap, shown } from './map.js';
import { drawNavigator } from './navigator.js';
import { showNearest } from './nearest.js';
import { buildingNote } from './overview.js';
import { forgetPanels, PANELS } from './panels.js';
import { markUnsaved, saveAddress, state } from './permalink.js';
import { pointing, readQuery } from './reading.js';
import { view } from './record.js';
import { tilesArrived } from './tiles.js';

/** @import { Sample } from './record.js' */

const MAX_WEIGHTS_PER_DOWNLOAD = 1 << 20;
/** @type {Scene} */
let scene = null;
let pointed = null;
let raf = 0;
let listed = '';

/**
 * What the drawing functions need of the head in view and of the one that it is compared with.
 * @typedef {ReturnType<typeof sceneOf>} Scene
 */

// The scene of a record, and of the other record with which it is compared, or itself.
function sceneOf(/** @type {Sample} */ record, other) {
  const { a, b } = state;
  const layer = record.numbered.get(a.l);
  const second = b && other.has(b.l, b.h) ? b : { r: state.run, ...a };
  const otherRecord = second.r === state.run ? record : other;
  const otherLayer = otherRecord.numbered.get(second.l);
  const sides = record.sides(layer);
  const otherSides = otherRecord.sides(otherLayer);
  const i = record.index(a.l, a.h);
  const j = otherRecord.index(second.l, second.h);
  const runs = otherRecord !== record;
  return {
    record,
    otherRecord,
    layer,
    otherLayer,
    i,
    j,
    runs,
    coarse: record.coarse && otherRecord.coarse,
    sides,
    otherSides,
    a: placeOf(record, layer, a.h),
    b: placeOf(otherRecord, otherLayer, second.h),
    titles: titlesOf(record, otherRecord, i, j),
    strange: runs && !isSameText(sides.key, otherSides.key),
  };
}

// Where the maps of a head are requested; `masked`: whether the first key is left out.
const placeOf = (/** @type {Sample} */ record, /** @type {LayerDescription} */ layer, h) => ({
  run: record.run,
  sample: state.sample,
  l: layer.number,
  h,
  masked: state.masked && layer.rows === 'all',
});

// The titles of the maps of the heads i and j, and of their difference: a name, and a note.
function titlesOf(/** @type {Sample} */ record, /** @type {Sample} */ otherRecord, i, j) {
  const runs = otherRecord !== record;
  const name = (of, n, which) => (runs ? `${of.short(n)} ${translate(which)}` : of.short(n));
  return {
    a: [name(record, i, 'in a'), runs ? record.name : kindNames(record.allKinds[i])],
    b: [name(otherRecord, j, 'in b'), runs ? otherRecord.name : kindNames(otherRecord.allKinds[j])],
    d: [runs ? translate('a minus b') : `${record.short(i)} − ${otherRecord.short(j)}`, translate('difference')],
  };
}

const isSameText = (one, two) =>
  !one.text ||
  !two.text ||
  (one.text.shown.length === two.text.shown.length && one.text.shown.every((token, p) => token === two.text.shown[p]));

// Show the page of the head in view.
export function showHead(/** @type {Sample} */ record, other) {
  scene = sceneOf(record, other);
  pointed = null;
  forgetPanels();
  headings();
  $('numbers').replaceChildren(...numberRows(record.metrics, scene.i));
  if (listed !== `${record.run} ${record.sample} ${scene.i}`) {
    listed = `${record.run} ${record.sample} ${scene.i}`;
    showNearest(scene);
  }
  drawNavigator(scene);
  showAndHide();
  redraw();
}

function headings() {
  const { record, i, layer } = scene;
  $('headname').textContent = record.named(i);
  $('shownhead').textContent = [
    roleName(layer.role),
    kindNames(record.allKinds[i]),
    record.aligned(i) ? translate('alignment') : '',
  ]
    .filter(Boolean)
    .join(translate('join.comma'));
  $('map').setAttribute('aria-label', translate('map label', { layer: state.a.l, head: state.a.h }));
  $('mini').setAttribute('aria-label', translate('mini label'));
}

// Show the parts of the page for which there are weights or a server, and hide the others.
function showAndHide() {
  const { record, layer } = scene;
  const drawable = layer.blocks.length > 0;
  const whole = layer.rows === 'all';
  $('one').classList.toggle('mapless', !drawable);
  for (const part of /** @type {const} */ (['nearest', 'nearesthead'])) $(part).hidden = !view.similar || !whole;
  for (const part of /** @type {const} */ (['export', 'exporthead'])) $(part).hidden = !view.served || !whole;
  for (const part of /** @type {const} */ (['scales', 'sink', 'compare'])) $(part).hidden = !drawable;
  $('share').hidden = !view.served || !whole;
  $('zoomone').hidden = !drawable || !isSingle(layer.blocks[0]);
  $('blank').hidden = drawable;
  $('blank').textContent = record.noMaps;
}

export const sceneNow = () => scene;
export const leaveHead = () => {
  scene = null;
};

/** The [query, key] under the pointer or of the arrow keys, key -1 for a whole query; null without one. */
export const pointedNow = () => pointed;

/**
 * Show a cell as pointed at.
 * @param {number[] | null} cell
 */
export function pointAt(cell) {
  pointed = cell;
  redraw();
}
pointing.point = query => pointAt(query < 0 ? null : [query, -1]);

// Draw the page again with the next frame, and save its state in the address.
export function redraw() {
  markUnsaved();
  cancelAnimationFrame(raf);
  raf = requestAnimationFrame(() => {
    if (!scene) {
      saveAddress();
      return;
    }
    scene = sceneOf(scene.record, scene.otherRecord);
    clampView(scene.layer);
    controls();
    if (scene.layer.blocks.length) drawAll();
    saveAddress();
  });
}

function drawAll() {
  const read = readQuery(scene, pointed);
  for (const panel of PANELS) {
    const box = $(panel.box);
    box.hidden = !panel.fits(scene);
    if (!box.hidden) panel.draw(scene, pointed, read, redraw);
  }
  drawMiniMap(scene);
  showDifferences(scene, redraw);
  captionsOfMap();
  if (!$('export').hidden) exportLinks();
}

// The legend and the notes below the map, and whether all tiles in view have arrived.
function captionsOfMap() {
  const level = shown.span?.level ?? 0;
  const [rows, columns] = scene.layer.blocks[level];
  const single = isSingle([rows, columns]);
  const cells =
    (single ? translate('single weights') : translate('means', { rows, columns })) +
    (state.compare ? '' : scene.record.precision) +
    (scene.a.masked ? translate('first key hidden') : '');
  $('legend').replaceChildren(...legendOfMap(shown.tops, state.compare));
  $('level').textContent = [
    shown.span ? cells : '',
    buildingNote(scene.record),
    scene.strange ? translate('other text') : '',
    server.gone ? '' : tilesArrived.trouble,
  ]
    .filter(Boolean)
    .join(translate('join.parts'));
  $('where').textContent = single ? '' : translate('block', { rows, columns });
  $('map').dataset.level = String(level);
  $('map').dataset.whole = String(!!shown.span && shown.a.whole && (!shown.b || shown.b.whole));
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
  if (held) elementIn($('scales'), '[aria-pressed=true]').focus();
}

// The head in view, the queries and keys of the part of its map in view, and the chosen query; null without a head.
export function inView() {
  if (!scene) return null;
  const { layer, a } = scene;
  const part = viewOf(layer);
  const pane = shown.panes[0];
  const high = pane ? pane.py / pane.y : part.rows;
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
  const { a } = scene;
  const { queries: q, keys: k } = inView();
  const cells = (q[1] - q[0]) * (k[1] - k[0]);
  if (cells > MAX_WEIGHTS_PER_DOWNLOAD) {
    $('export').textContent = translate('export too many', { n: formatCount(MAX_WEIGHTS_PER_DOWNLOAD) });
    return;
  }
  $('export').replaceChildren(
    translate('export view', { n: formatCount(cells) }) + ' ',
    ...downloadLinks(`${pathOfHead(a.run, a.sample, a.l, a.h)}/weights`, `?queries=${q.join(':')}&keys=${k.join(':')}`),
  );
}
