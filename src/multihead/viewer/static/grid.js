// Findings, kinds, the grid of all heads and its inspector.
let kindOn = '', lit = 0;

function frame(i) {
  const box = el('span', { className: 'fr', k: kindOf(i) });
  if (thumbs[i]) {
    const canvas = bitmap(thumbs[i]);
    canvas.className = 'map';
    canvas.setAttribute('aria-hidden', 'true');
    box.append(canvas);
  } else box.append(el('span', { className: 'blank' }, glyph(kindOf(i))));
  return box;
}

// A cell wider than a pixel has hard edges; a finer map is averaged by the browser.
function sharpen(scope) {
  for (const canvas of scope.querySelectorAll('canvas.map')) {
    canvas.style.imageRendering = canvas.clientWidth * (devicePixelRatio || 1) >= canvas.width * 1.25 ? 'pixelated' : 'auto';
  }
}

function findings() {
  $('findsec').hidden = !D.findings.length;
  $('finds').replaceChildren(...D.findings.map(finding => {
    const i = numbered(finding.layer, finding.head);
    const words = el('p', {}, el('b', { textContent: longName(i) }), say('between sentences') + finding.sentence, el('small', { textContent: finding.count }));
    return el('li', {}, el('a', { href: address(i) }, frame(i), words));
  }));
  sharpen($('finds'));
}

function chips() {
  $('chips').replaceChildren(...KINDS.filter(countOf).map(kind => el('button', {
    className: 'chip', k: kind, 'aria-pressed': String(kindOn === kind),
    onclick: () => { kindOn = kindOn === kind ? '' : kind; chips(); dim(); table(); $('chips').querySelector(`[data-kind=${kind}]`).focus(); },
  }, glyph(kind), kindName(kind) + ' ', el('i', { textContent: countOf(kind) }))));
  [...$('chips').children].forEach((chip, n) => { chip.dataset.kind = KINDS.filter(countOf)[n]; });
}

function dim() {
  for (const a of $('grid').querySelectorAll('a')) a.classList.toggle('dim', !!kindOn && kindOf(+a.dataset.i) !== kindOn);
}

function grid() {
  const box = $('grid'), held = box.contains(document.activeElement), short = innerWidth <= 640;
  document.documentElement.style.setProperty('--H', WIDEST);
  box.classList.toggle('many', WIDEST > 16);
  // Many layers make a long page and few heads make large maps: a cell keeps to a size that the eye takes in.
  box.style.setProperty('--cell', D.layers.length > 12 ? '56px' : '110px');
  box.closest('.work').classList.toggle('tight', D.layers.length > 12 ? WIDEST < 14 : WIDEST < 8);
  const step = WIDEST > 16 && short ? 4 : 1;
  const rows = [el('div', { className: 'gr', role: 'row' }, el('span', { role: 'columnheader' }),
    ...Array.from({ length: WIDEST }, (_, h) => el('span', { className: 'ax', role: 'columnheader', textContent: h % step ? '' : (short || WIDEST > 24 ? '' : 'H') + h })))];
  D.layers.forEach((layer, l) => {
    const row = el('div', { className: 'gr', role: 'row' }, el('span', { className: 'ax l', role: 'rowheader', textContent: (short ? '' : 'L') + layer.number, title: layer.name }));
    for (let h = 0; h < layer.heads; h++) {
      const i = indexOf(l, h), entropy = METRICS.find(metric => metric.id === 'entropy');
      const label = `${longName(i)}, ${kindName(kindOf(i))}` + (entropy ? `, ${entropy.label} ${entropy.text(i)} ${say('nats')}` : '');
      const link = el('a', { href: address(i), tabIndex: i === lit ? 0 : -1, 'aria-label': label, onmouseenter: () => inspect(i), onfocus: () => inspect(i) }, frame(i));
      link.dataset.i = i;
      row.append(el('span', { role: 'gridcell' }, link));
    }
    rows.push(row);
  });
  box.replaceChildren(...rows);
  sharpen(box);
  dim();
  if (held) box.querySelector(`[data-i="${lit}"]`).focus();
}

function metricTable(i) {
  const rows = METRICS.map(metric => el('tr', {},
    el('th', { scope: 'row', textContent: metric.share ? metric.label : withUnit(metric) }),
    el('td', { className: 'b' }, el('i', { v: metric.filled(i) })), el('td', { textContent: metric.text(i) })));
  return el('table', { className: 'mt' }, el('caption', { className: 'vh', textContent: say('head statistics') }), el('tbody', {}, ...rows));
}

function inspect(i) {
  lit = i;
  for (const a of $('grid').querySelectorAll('a')) a.tabIndex = +a.dataset.i === i ? 0 : -1;
  $('insp').replaceChildren(frame(i), el('h3', {}, longName(i), kindTag(i)), el('p', { className: 'path', textContent: layerOf(i).name }), metricTable(i));
  sharpen($('insp'));
}

function gridNote() {
  const notes = thumbs.length ? [say('one scale')] : [];
  if (thumbs.length || D.sight.hides) notes.push(D.sight.hides ? say(D.sight.later ? 'hidden later' : 'hidden') : say('none hidden'));
  if (D.sight.blind) notes.push(D.sight.blind === 1 ? say('blind one') : say('blind', { layers: D.sight.blind }));
  return notes.join(say('between sentences'));
}
