// Whether the last input came from the keyboard: only then the focus moves with the page, and a ring shows where it is.
import { beforeEvent } from './host.js';

export const lastInput = { used: false };
beforeEvent('keydown', event => {
  if (!/^(Shift|Control|Alt|Meta)$/.test(event.key)) lastInput.used = true;
});
beforeEvent('pointerdown', () => {
  lastInput.used = false;
});
