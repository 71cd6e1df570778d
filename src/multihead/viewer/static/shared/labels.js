// Labels on the rulers of a map.
const UPRIGHT = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Extended_Pictographic}\u3000-\u303f\uff00-\uffef]\ufe0f?$/u;

// Return whether a label above a column is drawn upright: a single Chinese or Japanese character or a pictogram.
export const upright = label => UPRIGHT.test(label);

// The smallest of 1, 2, 5, 10, 20, ... that is at least `min`.
export const niceStep = min => { const ten = 10 ** Math.floor(Math.log10(Math.max(1, min))); return [1, 2, 5, 10].find(m => m * ten >= min) * ten; };

// Truncate a label to a width in pixels.
export function clip(pen, label, max) {
  if (pen.measureText(label).width <= max) return label;
  const letters = [...label].slice(0, 60);
  while (letters.length > 1 && pen.measureText(letters.join('') + '…').width > max) letters.pop();
  return letters.join('') + '…';
}
