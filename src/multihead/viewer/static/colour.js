// One ramp from paper to ink, three scales, and the legend that shows them.
const dark = matchMedia('screen and (prefers-color-scheme: dark)');
const RAMP = {
  light: '#FBFAF7 #BFDFF1 #86C2E6 #54A3DA #387FCA #325AB4 #32388E #281E5E #150D2C',
  dark: '#101317 #1C2C4C #26477B #2966A2 #2B88C0 #30ADC8 #57CFC4 #A9E9B6 #FBF9CE',
};
const SCALES = {
  linear: { at: w => w, ticks: [0, .25, .5, .75, 1] },
  root: { at: Math.sqrt, ticks: [0, .01, .1, .25, .5, 1] },
  log: { at: w => w <= 1e-4 ? 0 : 1 + Math.log10(w) / 4, ticks: [1e-4, 1e-3, .01, .1, 1] },
};
let scale = 'root', LUT = new Uint8ClampedArray(256 * 3);

function palette() {
  const stops = RAMP[dark.matches ? 'dark' : 'light'].split(' ').map(hex => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)));
  for (let i = 0; i < 256; i++) {
    const place = i / 255 * (stops.length - 1), a = Math.min(stops.length - 2, Math.floor(place));
    for (let c = 0; c < 3; c++) LUT[i * 3 + c] = stops[a][c] + (stops[a + 1][c] - stops[a][c]) * (place - a);
  }
}
const css = role => getComputedStyle(document.documentElement).getPropertyValue('--' + role).trim();
const tone = w => Math.round(255 * Math.max(0, Math.min(1, SCALES[scale].at(w))));
const rgb = t => `rgb(${LUT[t * 3]},${LUT[t * 3 + 1]},${LUT[t * 3 + 2]})`;

// Black or white text, whichever keeps 4.5 : 1 on this tone: they change places at relative luminance .179.
function inkOn(t) {
  const luminance = [.2126, .7152, .0722].reduce((sum, weight, c) => {
    const v = LUT[t * 3 + c] / 255;
    return sum + weight * (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  }, 0);
  return luminance > .179 ? '#000' : '#fff';
}
function paint(span, w) {
  const t = w > 0 ? tone(w) : 0;
  span.style.background = t > 4 ? rgb(t) : '';
  span.style.color = t > 4 ? inkOn(t) : '';
}

// A map as pixels: one a cell; a forbidden cell (NaN) is left clear, so that the hatching beneath shows.
function bitmap(map) {
  const canvas = el('canvas', { width: map.cols, height: map.rows }), pen = canvas.getContext('2d');
  const image = pen.createImageData(map.cols, map.rows);
  for (let i = 0; i < map.values.length; i++) {
    const w = map.values[i];
    if (w !== w) continue;
    const t = tone(w) * 3;
    image.data[i * 4] = LUT[t];
    image.data[i * 4 + 1] = LUT[t + 1];
    image.data[i * 4 + 2] = LUT[t + 2];
    image.data[i * 4 + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

const tickText = w => w === 0 ? '0' : (scale === 'log' && w === 1e-4 ? '≤ ' : '') + (w < .01 ? w * 100 : Math.round(w * 100)) + NBSP + '%';
function legend(width, note) {
  const ramp = el('canvas', { width, height: 12, 'aria-hidden': 'true' }), pen = ramp.getContext('2d'), { at, ticks } = SCALES[scale];
  ramp.style.width = width + 'px';
  ramp.style.height = '12px';
  for (let x = 0; x < width; x++) { pen.fillStyle = rgb(Math.round(x / (width - 1) * 255)); pen.fillRect(x, 0, 1, 12); }
  const apart = ticks.filter((w, n) => !n || (at(w) - at(ticks[n - 1])) * width > 30);
  const marks = el('div', { className: 'ticks' }, ...apart.map(w => { const s = el('span', { textContent: tickText(w) }); s.style.left = at(w) * 100 + '%'; return s; }));
  const choice = el('div', { className: 'seg', role: 'group', 'aria-label': say('scale') }, ...Object.keys(SCALES).map(name => el('button', {
    textContent: say(name), 'aria-pressed': String(name === scale), title: name === 'root' ? say('root hint') : '',
    onclick: () => { scale = name; draw(); document.querySelector('main:not([hidden]) .seg [aria-pressed=true]').focus(); },
  })));
  return [el('div', {}, ramp, marks), choice, el('div', { className: 'note' }, note)];
}
