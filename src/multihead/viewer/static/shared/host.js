// Where a page runs: here in a document of its own. In a notebook a widget takes the place of this module
// (widget/widget.js).
export const root = document; // its elements are found by their ids
export const frame = document.documentElement; // has the language, the colours and the state of the page
export const texts = JSON.parse(document.getElementById('texts').textContent);
export const scheme = matchMedia('screen and (prefers-color-scheme: dark)'); // paper is never dark
export const onKeyDown = act => addEventListener('keydown', act);
export const beforeEvent = (kind, act) => addEventListener(kind, act, true); // called before the page acts on an event
