// The layout of the grid of all heads: the number of columns of layers, and the size of a map.
const BETWEEN = 28, WORDS = 30, ROLES = 84;  // pixels between columns, and of the labels of layers

// Choose columns and size so that the maps are as large as fits into the width and `high` pixels; a phone has one column.
// roles: the labels name the roles of layers too; low: the least pixels for `high`; largest: the largest map.
export function fitted({ layers, heads, roles }, width, { phone, high = 0, low = 520, largest = 110 }) {
  const tall = Math.max(low, high), least = phone ? 20 : 16;
  let best = { score: 0 };
  for (let columns = 1; columns <= (phone ? 1 : Math.min(4, layers)); columns++) {
    const gap = heads > 16 || phone ? 3 : 5, across = ((width - (columns - 1) * BETWEEN) / columns - (roles ? ROLES : WORDS)) / heads - gap, down = tall / Math.ceil(layers / columns) - gap;
    if (columns > 1 && across < least) break;  // it would have to be scrolled
    const score = Math.min(largest, across, down);
    if (score > best.score * 1.15) best = { columns, gap, score, cell: Math.floor(Math.min(largest, across, Math.max(down, 40))) };
  }
  const columns = best.columns ?? 1;
  return { columns, perColumn: Math.ceil(layers / columns), gap: best.gap ?? 3, cell: Math.max(least, best.cell ?? 0), phone };
}

// Give a grid the sizes that its style reads.
export function applied(box, { columns, perColumn, gap, cell }, heads, roles) {
  for (const [name, value] of Object.entries({ '--cell': `${cell}px`, '--gap': `${gap}px`, '--H': heads, '--rows': perColumn + 1, '--columns': columns })) box.style.setProperty(name, value);
  box.classList.toggle('small', cell < 30);
  box.classList.toggle('roles', roles);
}
