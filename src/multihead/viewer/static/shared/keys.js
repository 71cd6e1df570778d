// Whether the last input came from the keyboard: only then the focus moves with the page, and a ring shows where it is.
export const keys = { used: false };
addEventListener('keydown', event => { if (!/^(Shift|Control|Alt|Meta)$/.test(event.key)) keys.used = true; }, true);
addEventListener('pointerdown', () => { keys.used = false; }, true);
