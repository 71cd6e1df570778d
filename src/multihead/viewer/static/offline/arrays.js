// The arrays that are stored in the file, and what else the file answers with: the page of a report, or of a shared
// view. A stored array has a shape and a coding, and its numbers are in the script tag that has its name:
//   float32: four planes of bytes, the byte with the exponent first
//   root16, root12, root8: weights on a square-root scale, with the number of bits in the name; code 0 is a masked
//     cell, code 1 is zero
//   linear16: numbers from 0 to `top`
/** @type {OfflineData} */
export const HELD = JSON.parse(document.getElementById('held').textContent);
const MAX_ARRAYS = 24; // arrays that stay decoded

const decoded = new Map(); // name -> the numbers of the arrays that were decoded last

export const hasArray = name => Object.hasOwn(HELD.arrays, name);

/** Decode the numbers of an array, or return them if they were decoded recently. */
export async function decodeArray(name) {
  if (!decoded.has(name)) {
    const array = HELD.arrays[name];
    const count = array.shape.reduce((all, size) => all * size, 1);
    decoded.set(
      name,
      inflate(name).then(bytes => decode(bytes, array, count)),
    );
    if (decoded.size > MAX_ARRAYS) decoded.delete(decoded.keys().next().value);
  }
  return decoded.get(name);
}

/** Decompress the bytes of an array. */
async function inflate(name) {
  const text = atob(document.getElementById(name).textContent);
  const raw = new Uint8Array(text.length);
  for (let i = 0; i < raw.length; i++) raw[i] = text.charCodeAt(i);
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Convert `count` numbers from the planes of bytes in which an array is stored. */
function decode(bytes, /** @type {StoredArray} */ { coding, top = 1 }, count) {
  if (coding === 'float32') return decodeFloats(bytes, count);
  const codeAt = { linear16: code16, root16: code16, root12: code12, root8: code8 }[coding];
  const steps = 2 ** Number(coding.replace(/\D/g, '')) - 2;
  const values = new Float32Array(count);
  for (let i = 0; i < count; i++) {
    const code = codeAt(bytes, i, count);
    if (coding === 'linear16') values[i] = (code / 65535) * top;
    else values[i] = code ? ((code - 1) / steps) ** 2 : NaN;
  }
  return values;
}

function decodeFloats(bytes, count) {
  const whole = new Uint8Array(count * 4);
  for (let plane = 0; plane < 4; plane++)
    for (let i = 0; i < count; i++) whole[i * 4 + 3 - plane] = bytes[plane * count + i];
  return new Float32Array(whole.buffer);
}

const code8 = (bytes, i) => bytes[i];
const code16 = (bytes, i, count) => (bytes[i] << 8) | bytes[count + i];
// Two codes of 12 bits share a byte of the second plane.
function code12(bytes, i, count) {
  const shared = bytes[count + (i >> 1)];
  return (bytes[i] << 4) | (i & 1 ? shared & 15 : shared >> 4);
}

/** Decode the largest weights of a head's queries: after the codes, planes of the steps from key to key. */
export async function decodeLargest(head) {
  const name = `${head} largest`;
  const array = HELD.arrays[name];
  const [queries, each] = array.shape;
  const count = queries * each;
  const bytes = await inflate(name);
  const places = new Int32Array(count);
  const first = array.coding === 'root8' ? 1 : 2;
  const planes = bytes.length / count;
  for (let i = 0; i < count; i++) {
    let step = 0;
    for (let plane = first; plane < planes; plane++) step = (step << 8) | bytes[plane * count + i];
    places[i] = step + (i % each ? places[i - 1] : 0);
  }
  return { each, places, values: decode(bytes, array, count) };
}
