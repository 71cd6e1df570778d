// "Share this view": one file with the heads in view, their maps and the place, made by the server. Its size is shown
// before the browser saves it; a large one can be made smaller.
import { $, el, translate } from '../shared/dom.js';
import { frame } from '../shared/host.js';
import { pathOfSample } from './api.js';
import { place, request } from './host.js';
import { saveAddressNow, state } from './permalink.js';

const SMALL = 2e6; // bytes

// What the file shall hold, as the server reads it: the heads, and the place in view, which it opens with.
function wanted(most) {
  saveAddressNow();
  const given = new URLSearchParams({ a: `${state.a.l}.${state.a.h}`, place: place.read() });
  if (state.compare) given.set('b', `${state.b.l}.${state.b.h}`);
  if (state.compare && state.b.r !== state.run) given.set('run', state.b.r);
  if (most) given.set('most', most);
  return `${pathOfSample(state.run, state.sample)}/share?${given}`;
}

const show = (...parts) => {
  $('shared').hidden = !parts.length;
  $('shared').replaceChildren(...parts);
};
const button = (words, onclick) => el('button', { className: 'btn', textContent: words, onclick });

async function share(most) {
  show(el('progress'), ' ', translate('sharing'));
  try {
    const response = await request(wanted(most));
    if (!response.ok)
      throw new Error((await response.json().catch(() => ({}))).error ?? `${response.status} ${response.statusText}`);
    const name = /filename="([^"]+)"/.exec(response.headers.get('Content-Disposition') ?? '')?.[1] ?? 'view.html';
    const file = await response.blob();
    const size = file.size;
    const save = () => {
      const url = URL.createObjectURL(file);
      Object.assign(document.createElement('a'), { href: url, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
      show();
    };
    const readable =
      size < 1e6
        ? translate('kilobytes', { n: (size / 1e3).toFixed(0) })
        : translate('megabytes', { n: +(size / 1e6).toFixed(1) });
    const smaller = size > SMALL && !most ? [button(translate('share smaller'), () => share(SMALL)), ' '] : [];
    show(
      translate('share size', { size: readable }) + ' ',
      button(translate('save'), save),
      ' ',
      ...smaller,
      button(translate('close'), () => show()),
    );
    $('shared').querySelector('button').focus();
  } catch (error) {
    show(error.message);
  }
}

export function listenToShare() {
  $('share').onclick = () => share(0);
  const { note } = frame.dataset; // this page is such a file
  if (note) show(note);
}
