// Sets of heads that one button switches off: the strongest induction heads, and a random draw to compare with.
import { answers } from './state.js';

const MOST = 3;
const INDUCTION = ['repeated_induction', 'induction']; // as measured on random repeats, or else on the text

const induction = () =>
  (INDUCTION.map(kind => answers.words.kinds[kind]).find(list => list?.length) ?? [])
    .map(([l, h]) => answers.record.index(l, h))
    .filter(i => i >= 0);
export const strongestHeads = () => induction().slice(0, MOST);

// Numbers from 0 to 1 that are the same for every reader: a linear congruential generator.
function numbers(seed) {
  let at = Math.imul(seed + 1, 0x9e3779b1) >>> 0;
  return () => {
    at = (Math.imul(at, 1664525) + 1013904223) >>> 0;
    return at / 2 ** 32;
  };
}

// The n-th draw: as many heads of each layer as the strongest induction heads have there, none of them an induction
// head.
export function randomHeads(n) {
  const { record } = answers;
  const next = numbers(n);
  const left = new Set(induction());
  const drawn = [];
  record.allKinds.forEach((kinds, i) => {
    if (kinds.some(kind => INDUCTION.includes(kind))) left.add(i);
  });
  for (const i of strongestHeads()) {
    const free = record.heads
      .map((_, other) => other)
      .filter(other => record.heads[other].l === record.heads[i].l && !left.has(other));
    if (!free.length) continue;
    drawn.push(free[Math.floor(next() * free.length)]);
    left.add(drawn.at(-1));
  }
  return drawn.sort((a, b) => a - b);
}
