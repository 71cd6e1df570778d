// The page itself: which of its two faces is shown, the keyboard, and the start.
let failure = '';
const mapState = () => failure || (D.store.mode === 'none' ? say(D.store.reason) : '');

function overview() {
  paintedText();
  findings();
  chips();
  grid();
  inspect(lit);
  if (thumbs.length) $('scale').replaceChildren(...legend(320, gridNote()));
  else $('scale').replaceChildren(el('div', { className: 'note' }, gridNote()));
  $('mapstate').hidden = !mapState();
  $('mapstate').textContent = mapState();
  table();
}

function route() {
  const asked = location.hash.match(/^#L(\d+)H(\d+)$/), i = asked ? numbered(+asked[1], +asked[2]) : -1, before = shownHead;
  if (i < 0 && location.hash && location.hash !== '#' && before < 0) return;  // a link inside the first page
  $('all').hidden = i >= 0;
  $('head').hidden = i < 0;
  document.title = (i >= 0 ? longName(i) + ' · ' : '') + D.title + ' · multihead';
  if (i >= 0) {
    if (before < 0) scrollTo(0, 0);
    headPage(i);
    return;
  }
  shownHead = -1;
  opening++;
  if (before < 0) return;
  lit = before;
  overview();
  const link = $('grid').querySelector(`[data-i="${before}"]`);
  link.focus({ preventScroll: true });
  link.scrollIntoView({ block: 'center' });
}

function draw() {
  palette();
  if (shownHead >= 0) headPage(shownHead); else overview();
}

// Arrows walk over the heads, in the grid and on a head's page; layers may differ in heads.
function neighbour(i, key) {
  const { l, h } = HEADS[i], near = layer => layer >= 0 && layer < D.layers.length ? indexOf(layer, Math.min(h, D.layers[layer].heads - 1)) : -1;
  return { ArrowLeft: indexOf(l, h - 1), ArrowRight: indexOf(l, h + 1), ArrowUp: near(l - 1), ArrowDown: near(l + 1) }[key];
}
addEventListener('keydown', event => {
  if (/INPUT|TEXTAREA/.test(event.target.tagName) || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === 'Escape' && shownHead >= 0) { location.hash = ''; return; }
  const inGrid = $('grid').contains(event.target), box = event.target.closest?.('.reading');
  const scrolls = box && box.scrollHeight > box.clientHeight && /Up|Down/.test(event.key);
  const next = shownHead >= 0 && !scrolls ? neighbour(shownHead, event.key) : inGrid ? neighbour(lit, event.key) : undefined;
  if (next === undefined) return;
  event.preventDefault();
  if (next < 0) return;
  if (shownHead >= 0) location.replace(address(next)); else $('grid').querySelector(`[data-i="${next}"]`).focus();
});
addEventListener('hashchange', route);
dark.addEventListener('change', draw);
let width = innerWidth;
addEventListener('resize', () => {
  if (shownHead >= 0) show();
  else if (innerWidth <= 640 !== width <= 640) grid();
  width = innerWidth;
});
$('filter').oninput = table;
$('more').onclick = () => { showAll = !showAll; table(); };
let wasAll = false;
addEventListener('beforeprint', () => { wasAll = showAll; showAll = true; table(); });
addEventListener('afterprint', () => { showAll = wasAll; table(); });

async function start() {
  palette();
  definitions();
  if (D.store.mode !== 'none' && typeof DecompressionStream === 'undefined') failure = say('old browser');
  else await loadThumbs();
  lit = D.findings.length ? numbered(D.findings[0].layer, D.findings[0].head) : 0;
  overview();
  route();
}
start().catch(error => { failure = String(error); thumbs = []; overview(); throw error; });
