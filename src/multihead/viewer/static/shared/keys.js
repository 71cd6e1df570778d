// Whether the last input came from the keyboard: only then the focus moves with the page, and a ring shows where it is.
import { before } from './host.js';

export const keys = { used: false };
before('keydown', event => {
  if (!/^(Shift|Control|Alt|Meta)$/.test(event.key)) keys.used = true;
});
before('pointerdown', () => {
  keys.used = false;
});
