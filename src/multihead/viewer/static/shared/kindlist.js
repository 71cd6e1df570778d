// The kinds of heads that a page knows, in the order of its legend: id, label, about, statistic, glyph, colour,
// repeats, measured; on the page of a series also noun, what a head of the kind is called in a sentence.
// They come with the data of a record; those of a second record are added.
/** @type {KindDescription[]} */
export const LEGEND = [];

export const addLegend = (/** @type {KindDescription[]} */ kinds) =>
  LEGEND.push(...kinds.filter(kind => !LEGEND.some(each => each.id === kind.id)));

const known = id => LEGEND.find(kind => kind.id === id);
export const labelOfKind = id => known(id)?.label ?? id;
export const glyphOfKind = id => known(id)?.glyph ?? '';
export const nounOfKind = id => known(id)?.noun ?? '';
export const statisticOfKind = id => known(id)?.statistic;
export const isOutlineKind = id => !!known(id)?.repeats;

// One of a kind’s two colours: on a light page --light has no value and --dark is empty, on a dark page the reverse.
export const colourOfKind = id =>
  known(id) ? `var(--light, ${known(id).colour[0]}) var(--dark, ${known(id).colour[1]})` : 'var(--line2)';
