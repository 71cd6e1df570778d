// The panels of a head's page, in their order. A panel shows one thing about the head in view, in a box of the page's
// own:
//   box: the id of its box; without anything to show the box is hidden
//   fits(scene): whether it has something to show
//   draw(scene, pointed, read, redraw): draw it. scene: the head, or two, and their layers, texts and titles (head.js);
//     pointed: the [query, key] under the pointer, key -1 for a whole query, or null; read: the query that is read
//     (reading.js), or null until its weights have arrived; redraw(): draw the page again after a choice
//   forget(): forget what was drawn, because the page is another one
// A new panel is a module with these, its box in index.html, and its place in this list.
import { mapPanel } from './map.js';
import { contextPanel, stripPanel, textPanel, valuePanel } from './reading.js';

export const PANELS = [mapPanel, valuePanel, stripPanel, contextPanel, textPanel];
export function forgetPanels() {
  for (const panel of PANELS) panel.forget();
}
