// The picture of a map: cells as ink on hatched paper, which shows where a cell is masked.
import { bitmapOf, hatchingPattern, sizeCanvas } from './colour.js';
import { el } from './dom.js';

// Draw a map { rows, cols, values } as a square. Cells wider than a pixel have hard edges; the browser averages a finer
// map.
export function drawMap(pen, map, x, y, size, scale, top, lut = 'ink') {
  pen.imageSmoothingEnabled = size * (devicePixelRatio || 1) < Math.max(map.rows, map.cols) * 1.25;
  pen.imageSmoothingQuality = 'high';
  pen.drawImage(bitmapOf(map, lut, scale, top), x, y, size, size);
}

export function mapPicture(map, size, scale, top, lut = 'ink') {
  const canvas = el('canvas', { className: 'thumb', 'aria-hidden': 'true' });
  const pen = sizeCanvas(canvas, size, size);
  pen.fillStyle = hatchingPattern(pen, size > 100 ? 7 : 4);
  pen.fillRect(0, 0, size, size);
  drawMap(pen, map, 0, 0, size, scale, top, lut);
  return canvas;
}
