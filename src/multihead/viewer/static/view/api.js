// Send requests to the server, and detect when it no longer responds.
import { el } from '../shared/dom.js';
import { addressOf, request } from './host.js';

export const pathOfSample = (run, sample) => `api/runs/${run}/samples/${sample}`;
export const pathOfHead = (run, sample, l, h) => `${pathOfSample(run, sample)}/heads/${l}/${h}`;

// Links to an address in two formats.
export const downloadLinks = (path, query = '') =>
  ['csv', 'json'].flatMap((form, n) => [
    n ? ' ' : '',
    el('a', { href: addressOf(`${path}.${form}${query}`), download: '', textContent: form.toUpperCase() }),
  ]);

// The response is not ready yet (503): retry later.
export class NotReadyError extends Error {}

// gone: the server does not respond; alive: the address by which it is found again.
export const server = { gone: false, alive: 'api/view', changed: () => {} };
async function answer(path, signal) {
  let response;
  try {
    response = await request(path, signal);
  } catch (error) {
    if (error.name !== 'AbortError') lost();
    throw error;
  }
  if (response.status === 503) throw new NotReadyError();
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Error(body.error ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

export async function requestJson(path, signal) {
  return (await answer(path, signal)).json();
}

// Fetch an array of float32, its shape, and the weights per cell of a map (rows, columns); NaN = absent cell.
export async function requestFloats(path, signal) {
  const response = await answer(path, signal);
  const numbers = name => (response.headers.get(name) ?? '').split(',').map(Number);
  return {
    shape: numbers('X-Shape'),
    block: numbers('X-Block'),
    values: new Float32Array(await response.arrayBuffer()),
  };
}

// Read a response of lines of JSON as they arrive; each(value) is called per line.
export async function requestLines(path, signal, each) {
  const reader = (await answer(path, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    const parts = (rest + (value ?? '')).split('\n');
    rest = done ? '' : parts.pop();
    for (const part of parts) if (part) each(JSON.parse(part));
    if (done) return;
  }
}

// Retry every two seconds until the server responds. A restarted server has another token, so its page must be
// reopened.
function lost() {
  if (server.gone) return;
  server.gone = true;
  server.changed();
  const again = setInterval(async () => {
    const back = await request(server.alive).then(
      response => response.ok,
      () => false,
    );
    if (!back) return;
    clearInterval(again);
    server.gone = false;
    server.changed();
  }, 2000);
}
