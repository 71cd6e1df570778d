// Whether the last input came from the keyboard: only then the focus moves with the page, and a ring shows where it is.
import { before } from './host.js';

export const keys = { used: false };
before('keydown', event => { if (!/^(Shift|Control|Alt|Meta)$/.test(event.key)) keys.used = true; });
before('pointerdown', () => { keys.used = false; });

// The head to which an arrow key moves from head h of a layer in the grid, -1 at its border, undefined for other keys. Layers
// may have different numbers of heads; index(place, h): the index of a head by the place of its layer, or -1.
export function neighbour(key, place, h, layers, index) {
  const near = other => layers[other] ? index(other, Math.min(h, layers[other].heads - 1)) : -1;
  return { ArrowLeft: index(place, h - 1), ArrowRight: index(place, h + 1), ArrowUp: near(place - 1), ArrowDown: near(place + 1) }[key];
}
