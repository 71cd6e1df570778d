// The pointer on the map: hover, drag, wheel, pinch and double click, and the pointer on the small map of the whole.
import { $ } from '../shared/dom.js';
import { cellAt, centreView, zoomView } from './geometry.js';
import { pointAt, pointedNow, redraw, sceneNow } from './head.js';
import { isWheelZoom } from './host.js';
import { shown } from './map.js';
import { marginsLoaded } from './margins.js';
import { state } from './permalink.js';
import { tilesArrived } from './tiles.js';

const MIN_DRAG = 4; // pixels that a finger moves before the map moves with it
const DOUBLE_CLICK = 0.35; // the part of the keys in view that stays in view

const fingers = new Map(); // pointers that are down
let drag = null; // where the only finger went down, and what was in view then
let pinch = null; // where two fingers were

export function listenToPointer() {
  const map = $('map');
  map.addEventListener('wheel', turnWheel, { passive: false });
  map.onpointerdown = press;
  map.onpointermove = move;
  map.onpointerup = release;
  map.onpointercancel = lift;
  map.onpointerleave = leave;
  map.ondblclick = event => zoomAt(event, DOUBLE_CLICK);
  $('mini').onpointerdown = jump;
  $('mini').onpointermove = jump;
  tilesArrived.notify = redraw;
  marginsLoaded.notify = redraw;
}

// The [query, key] of a place on the screen, with fractions; null outside of the maps.
function placeAt({ clientX, clientY }) {
  const box = $('map').getBoundingClientRect();
  for (const pane of shown.panes) {
    const cell = cellAt(pane, clientX - box.left, clientY - box.top);
    if (cell) return cell;
  }
  return null;
}

// The weight at a place on the screen, or null.
function weightAt(event) {
  const { layer } = sceneNow();
  const cell = placeAt(event);
  return cell && [Math.min(layer.queries - 1, Math.floor(cell[0])), Math.min(layer.keys - 1, Math.floor(cell[1]))];
}

function zoomAt(event, factor) {
  if (!sceneNow()) return;
  zoomView(factor, sceneNow().layer, placeAt(event));
  redraw();
}

function turnWheel(event) {
  if (!isWheelZoom(event)) return;
  event.preventDefault();
  zoomAt(event, Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0016)));
}

function press(event) {
  fingers.set(event.pointerId, event);
  $('map').setPointerCapture(event.pointerId);
  drag = fingers.size === 1 ? { X: event.clientX, Y: event.clientY, x: state.x, y: state.y, moved: false } : null;
  pinch = null;
}

function move(event) {
  if (!sceneNow()) return;
  if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event);
  if (fingers.size === 2) pinchBy();
  else if (drag) dragTo(event);
  else pointAt(weightAt(event));
}

// A press that did not move the map chooses the query.
function release(event) {
  const cell = sceneNow() && drag && !drag.moved ? weightAt(event) : null;
  if (cell) {
    state.q = cell[0];
    pointAt(event.pointerType === 'mouse' ? pointedNow() : cell);
  }
  lift(event);
}

function lift(event) {
  fingers.delete(event.pointerId);
  drag = null;
}

function leave(event) {
  if (event.pointerType === 'mouse' && !drag) pointAt(null);
}

function dragTo(event) {
  const [pane] = shown.panes;
  const dx = event.clientX - drag.X;
  const dy = event.clientY - drag.Y;
  if (Math.hypot(dx, dy) > MIN_DRAG) drag.moved = true;
  if (!drag.moved) return;
  state.x = drag.x - dx / pane.x;
  state.y = drag.y - dy / pane.y;
  pointAt(null);
}

// Move and zoom the map by what two fingers moved since the last event.
function pinchBy() {
  const [one, two] = [...fingers.values()];
  const [pane] = shown.panes;
  const now = {
    apart: Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY),
    clientX: (one.clientX + two.clientX) / 2,
    clientY: (one.clientY + two.clientY) / 2,
  };
  drag = null;
  if (pinch) {
    state.x -= (now.clientX - pinch.clientX) / pane.x;
    state.y -= (now.clientY - pinch.clientY) / pane.y;
    zoomAt(now, pinch.apart / now.apart);
  }
  pinch = now;
}

// Move the part in view to the place on the small map.
function jump(event) {
  if (!event.buttons || !sceneNow()) return;
  const box = $('mini').getBoundingClientRect();
  const { layer } = sceneNow();
  const query = ((event.clientY - box.top) / box.height) * layer.queries;
  const key = ((event.clientX - box.left) / box.width) * layer.keys;
  centreView(layer, query, key);
  redraw();
}
