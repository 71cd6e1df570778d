// The grid of a page that is the whole window: the pages of a census and of a series.
import { fitGrid } from './headgrid.js';

// The size of the grid in `box`, which is in a box that scrolls.
export const fitGridToWindow = (list, box) =>
  fitGrid(list, box.parentElement.clientWidth - 8, { phone: innerWidth <= 640, high: innerHeight * 0.7 });

// Call draw() when the width of the window has changed, not only its height, as where a phone hides its address bar.
export function whenWidthChanges(draw) {
  let width = innerWidth;
  addEventListener('resize', () => {
    if (innerWidth !== width) draw();
    width = innerWidth;
  });
}
