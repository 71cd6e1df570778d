// The table of every number: sort, filter, twelve rows first.
const SHOWN = 12;
let sortBy = METRICS.some(metric => metric.id === 'entropy') ? 'entropy' : 'head', descending = false, showAll = false;

const lower = text => text.toLocaleLowerCase();
function metricCalled(word) {
  const fits = name => lower(name).startsWith(word);
  return METRICS.find(metric => lower(metric.label) === word || metric.id === word) ?? METRICS.find(metric => fits(metric.id) || fits(metric.label));
}

// Words joined by spaces, all must hold: L2, H7, L2H7, prev>40, entropy<2, a kind, a part of the module path.
function fits(i, filter) {
  return lower(filter).replaceAll('＞', '>').replaceAll('＜', '<').split(/[\s、，]+/).filter(Boolean).every(word => {
    const place = word.match(/^(?:l(\d+))?(?:h(\d+))?$/), bound = word.match(/^([^<>=]+)([<>]=?)([\d.]+)%?$/);
    if (place) return (place[1] === undefined || +place[1] === HEADS[i].number) && (place[2] === undefined || +place[2] === HEADS[i].h);
    if (bound) {
      const metric = metricCalled(bound[1]);
      if (!metric || !known(metric.values[i])) return false;
      const value = metric.values[i] * (metric.share ? 100 : 1), limit = +bound[3];
      return bound[2] === '<' ? value < limit : bound[2] === '>' ? value > limit : bound[2] === '<=' ? value <= limit : value >= limit;
    }
    return kindOf(i).includes(word) || lower(kindName(kindOf(i))).includes(word) || lower(layerOf(i).name).includes(word);
  });
}

function columnHead(id, label, words) {
  const turn = () => {
    descending = sortBy === id ? !descending : !words && id !== 'entropy';
    sortBy = id;
    table();
    $('cols').querySelector('[aria-sort] button').focus();
  };
  const head = el('th', { scope: 'col', className: words ? 't' : '' }, el('button', { textContent: label, onclick: turn }));
  if (sortBy === id) head.setAttribute('aria-sort', descending ? 'descending' : 'ascending');
  return head;
}

function tableRow(i) {
  const link = el('a', { href: address(i) }, shortName(i));
  if (thumbs[i]) { const small = bitmap(thumbs[i]); small.className = 'map'; small.setAttribute('aria-hidden', 'true'); link.prepend(small); }
  return el('tr', {}, el('th', { scope: 'row', title: layerOf(i).name }, link), el('td', { className: 't' }, kindTag(i)),
    ...METRICS.map(metric => el('td', {}, el('span', { className: 'v', v: metric.filled(i), textContent: metric.share ? percentNumber(metric.values[i]) : metric.text(i) }))));
}

function table() {
  $('cols').replaceChildren(columnHead('head', say('head column'), true), columnHead('kind', say('kind column'), true),
    ...METRICS.map(metric => columnHead(metric.id, withUnit(metric), false)));
  const by = METRICS.find(metric => metric.id === sortBy);
  const value = i => by ? by.values[i] ?? -Infinity : sortBy === 'kind' ? KINDS.indexOf(kindOf(i)) : i;
  const ids = HEADS.map((_, i) => i).filter(i => (!kindOn || kindOf(i) === kindOn) && fits(i, $('filter').value))
    .sort((a, b) => (value(a) - value(b)) * (descending ? -1 : 1) || a - b);
  $('rows').replaceChildren(...(showAll ? ids : ids.slice(0, SHOWN)).map(tableRow));
  if (!ids.length) $('rows').append(el('tr', {}, el('td', { className: 't none', colSpan: METRICS.length + 2, textContent: say('no match') })));
  $('count').textContent = ids.length < HEADS.length ? say('of heads', { n: ids.length, all: HEADS.length }) : say(ids.length === 1 ? '1 head' : 'heads', { n: ids.length });
  $('more').hidden = ids.length <= SHOWN;
  $('more').textContent = showAll ? say('show fewer') : say('show all', { n: ids.length });
  sharpen($('rows'));
}

function definitions() {
  const given = { ...D.thresholds, separator: D.separator };
  const tops = D.top.filter(known), top = tops.length ? Math.max(...tops).toFixed(2) : '–';
  const entry = (title, words, kind) => el('div', kind ? { k: kind } : {}, el('dt', {}, ...(kind ? [glyph(kind)] : []), title[0].toLocaleUpperCase() + title.slice(1)), el('dd', { textContent: words }));
  const metrics = METRICS.filter(metric => D.words['def ' + metric.id]).map(metric => entry(metric.label, say('def ' + metric.id, { top })));
  if (D.received) metrics.push(entry(say('received'), say('def received')));
  const kinds = KINDS.filter(kind => !['separator', 'duplicate', 'induction'].includes(kind) || D.metrics[kind])
    .map(kind => entry(kindName(kind), say('def kind ' + kind + (kind === 'local' && D.bound ? ' bound' : ''), given), kind));
  $('defs').replaceChildren(...metrics, ...kinds);
}
