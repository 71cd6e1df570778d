// Arrays that were requested, kept up to a number of bytes: those least recently used leave first.
export class KeptArrays {
  // bytesOf(value): the size of a kept value; arrived(): called when one is kept.
  constructor(maxBytes, bytesOf, arrived) {
    this.maxBytes = maxBytes;
    this.bytesOf = bytesOf;
    this.arrived = arrived;
    this.kept = new Map();
    this.requested = new Map();
    this.held = 0;
  }

  has(name) {
    return this.kept.has(name);
  }
  get(name) {
    const found = this.kept.get(name);
    if (found) {
      this.kept.delete(name);
      this.kept.set(name, found); // the last one in the order
    }
    return found;
  }

  // Abort the requests of all names but these.
  abortOthers(names) {
    for (const [name, control] of this.requested)
      if (!names.has(name)) {
        control.abort();
        this.requested.delete(name);
      }
  }

  // Keep what load(signal) resolves to; rejects if it fails, but not if it was aborted.
  async request(name, load) {
    const control = new AbortController();
    this.requested.set(name, control);
    try {
      this.keep(name, await load(control.signal));
    } catch (error) {
      if (!control.signal.aborted) throw error;
    } finally {
      if (this.requested.get(name) === control) this.requested.delete(name);
    }
  }

  keep(name, value) {
    this.kept.set(name, value);
    this.held += this.bytesOf(value);
    for (const [oldest, one] of this.kept) {
      if (this.held <= this.maxBytes || oldest === name) break;
      this.kept.delete(oldest);
      this.held -= this.bytesOf(one);
    }
    this.arrived();
  }
}
