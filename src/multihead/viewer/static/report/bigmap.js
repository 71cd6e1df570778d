// Draw the large map of a head's page: cells, token rulers, margin strips, crosshair. head.js decides what to draw.
import { css, hatching, sized } from '../shared/colour.js';
import { translate } from '../shared/dom.js';
import { clip, niceStep, upright } from '../shared/labels.js';
import { percent } from '../shared/numbers.js';
import { D, tokensOf } from './record.js';

// The layout: left and top of the map, the size of a cell, the space for strips. The map is at most `high` pixels high.
export function geometry(head, width, high) {
  const brief = layout(head, width, high, 44);
  return brief.wide && brief.x >= WORDS && head.whole && tokensOf(head.layer.keyTokens).text ? layout(head, width, high, 82) : brief;
}

const WORDS = 8.5;  // pixels of a cell that is labelled with its token
function layout(head, width, high, tall) {
  const wide = innerWidth > 640, { rows, cols } = head.map;
  const left = wide ? 92 : 30, top = wide ? tall : 36, strip = wide ? 56 : 24, room = Math.max(120, width - left - strip), tallest = wide ? Math.max(280, high - top - strip) : 1100;
  const x = Math.min(Math.max(12, Math.min(44, 480 / Math.max(rows, cols))), room / cols), y = Math.min(x, tallest / rows);
  // A map of few queries and many keys (or the reverse) is stretched, or it would be too thin to read.
  const across = rows > 1.5 * cols ? Math.min(x, 8 * y) : y, down = rows * y < 90 && cols > 2 * rows ? Math.min(24, 90 / rows) : y, level = rows * y < 90 ? x : across;
  return { left, top, strip, x: level, y: down, wide, width: left + level * cols + strip, height: top + down * rows + strip, mapWidth: level * cols, mapHeight: down * rows };
}

// The names of the axes, in the corner between the rulers.
function axes(pen, g) {
  pen.font = `11px ${css('sans')}`;
  pen.fillStyle = css('faint');
  pen.textAlign = 'right';
  if (g.wide) {
    pen.fillText(translate('key') + ' →', g.left - 12, g.top - 30);
    pen.fillText(translate('query') + ' ↓', g.left - 12, g.top - 14);
  } else {
    pen.textAlign = 'left';
    pen.fillText(`${translate('query')} ↓  ${translate('key')} →`, 0, 6);
  }
}

function rulers(pen, head, g, at) {
  const { rows, cols } = head.map, queries = tokensOf(head.layer.queryTokens), keys = tokensOf(head.layer.keyTokens);
  const face = (on, size) => { pen.font = `${on ? 650 : 420} ${size}px ${css('sans')}`; pen.fillStyle = css(on ? 'ink' : 'faint'); };
  const words = { y: head.whole && g.y >= WORDS && g.wide && queries.text, x: head.whole && g.x >= WORDS && g.top > 50 && g.wide && keys.text };
  pen.textBaseline = 'middle';
  pen.textAlign = 'right';
  const onY = g.top + (at.r + .5) * g.y, onX = g.left + (at.c + .5) * g.x;
  const row = (label, y, on) => { face(on, words.y ? Math.max(9, Math.min(11, g.y - .5)) : 11); pen.fillText(words.y ? clip(pen, label, g.left - 12) : label, g.left - 6, y); };
  if (words.y) for (let r = 0; r < rows; r++) row(queries.label(r), g.top + (r + .5) * g.y, r === at.r);
  else {
    const step = niceStep(22 / g.y * head.rowBlock), place = p => g.top + (p + .5) / head.rowBlock * g.y;
    for (let p = 0; p < head.layer.queries; p += step) if (Math.abs(place(p) - onY) > 13) row(p, place(p), false);
    row(at.r * head.rowBlock, onY, true);
  }
  const column = (label, x, on) => {
    face(on, words.x ? Math.max(9, Math.min(11, g.x - .5)) : 11);
    const level = !words.x || upright(label);
    pen.save();
    pen.translate(x, g.top - 6);
    if (!level) pen.rotate(-Math.PI / 2);
    pen.textAlign = level ? 'center' : 'left';
    pen.fillText(words.x ? clip(pen, label, g.top - 10) : label, 0, level ? -5 : 0);
    pen.restore();
  };
  if (words.x) for (let c = 0; c < cols; c++) column(keys.label(c), g.left + (c + .5) * g.x, c === at.c);
  else {
    const step = niceStep(34 / g.x * head.colBlock), place = p => g.left + (p + .5) / head.colBlock * g.x;
    for (let p = 0; p < head.layer.keys; p += step) if (Math.abs(place(p) - onX) > 30 && place(p) < g.left + g.mapWidth - 14) column(p, place(p), false);
    column(at.c * head.colBlock, onX, true);
  }
}

function strips(pen, head, g, at) {
  const bar = (on, ...box) => { pen.fillStyle = css(on ? 'ink' : 'bar'); pen.fillRect(...box); };
  const max = g.wide ? 36 : 14, draw = (values, top, length, mark, put) => {
    const size = length / values.length, gap = size > 3 ? 1 : 0;
    for (let i = 0; i < values.length; i++) put(Math.floor(mark * values.length) === i, i * size + gap / 2, Math.max(.5, size - gap), values[i] > 0 ? Math.max(.5, values[i] / top * max) : 0);
  };
  const faint = (words, align, x, y) => { pen.fillStyle = css('faint'); pen.font = `11px ${css('sans')}`; pen.textAlign = align; pen.fillText(words, x, y); };
  if (head.received) {
    const top = Math.max(...head.received, 1e-9);
    draw(head.received, top, g.mapWidth, (at.c + .5) / head.map.cols, (on, x, size, long) => bar(on, g.left + x, g.top + g.mapHeight + 5, size, long));
    if (g.wide) { faint(D.labels.received, 'right', g.left - 6, g.top + g.mapHeight + 11); faint(translate('max', { share: percent(top) }), 'right', g.left - 6, g.top + g.mapHeight + 26); }
  }
  if (head.entropy) {
    const top = head.layer.strips.find(strip => strip.id === 'entropy').top || 1;
    draw(head.entropy, top, g.mapHeight, (at.r + .5) / head.map.rows, (on, y, size, long) => bar(on, g.left + g.mapWidth + 5, g.top + y, long, size));
    if (g.wide) { faint(D.labels.entropy, 'left', g.left + g.mapWidth + 5, g.top - 22); faint(`0–${top.toFixed(1)}`, 'left', g.left + g.mapWidth + 5, g.top - 8); }
  }
}

export function drawMap(canvas, head, pixels, g, at) {
  const ratio = devicePixelRatio || 1, pen = sized(canvas, g.width, g.height);
  pen.fillStyle = hatching(pen);
  pen.fillRect(g.left, g.top, g.mapWidth, g.mapHeight);
  pen.imageSmoothingEnabled = Math.min(g.x, g.y) * ratio < 1;
  pen.drawImage(pixels, g.left, g.top, g.mapWidth, g.mapHeight);
  pen.strokeStyle = css('line2');
  pen.strokeRect(g.left - .5, g.top - .5, g.mapWidth + 1, g.mapHeight + 1);
  axes(pen, g);
  rulers(pen, head, g, at);
  strips(pen, head, g, at);
  const x = g.left + at.c * g.x, y = g.top + at.r * g.y;
  pen.strokeStyle = css('ink');
  pen.globalAlpha = .55;
  pen.strokeRect(g.left - .5, y - .5, g.mapWidth + 1, g.y + 1);
  pen.strokeRect(x - .5, g.top - .5, g.x + 1, g.mapHeight + 1);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  pen.strokeRect(x - 1, y - 1, g.x + 2, g.y + 2);
}
