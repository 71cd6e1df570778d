// Labels on the rulers of a map.
const UPRIGHT = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Extended_Pictographic}\u3000-\u303f\uff00-\uffef]\ufe0f?$/u;

// Whether a label above a column stays upright: a single Chinese or Japanese character or a pictogram.
export const upright = label => UPRIGHT.test(label);

// The smallest of 1, 2, 5, 10, 20, ... that is at least this large.
export const niceStep = least => { const ten = 10 ** Math.floor(Math.log10(Math.max(1, least))); return [1, 2, 5, 10].find(m => m * ten >= least) * ten; };

// A label cut to a width.
export function clip(pen, label, most) {
  if (pen.measureText(label).width <= most) return label;
  const letters = [...label].slice(0, 60);
  while (letters.length > 1 && pen.measureText(letters.join('') + '…').width > most) letters.pop();
  return letters.join('') + '…';
}
