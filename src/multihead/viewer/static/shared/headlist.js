// The heads of a record, a census or a series, layer after layer. A head is its index in this list, or the number of
// its layer in the model and its own number in the layer. Only some layers of a model may be there, and they may have
// different numbers of heads.
import { NBSP, translate } from './dom.js';

/** @template {HeadsOfLayer} Layer */
export class HeadList {
  /** @param {Layer[]} layers */
  constructor(layers) {
    this.layers = layers;
    this.heads = layers.flatMap(layer => Array.from({ length: layer.heads }, (_, h) => ({ l: layer.number, h })));
    this.numbered = new Map(layers.map(layer => [layer.number, layer]));
    this.first = new Map(layers.map(({ number }) => [number, this.heads.findIndex(head => head.l === number)]));
    this.widest = Math.max(...layers.map(layer => layer.heads));
  }

  has(l, h) {
    return h >= 0 && h < (this.numbered.get(l)?.heads ?? 0);
  }
  index(l, h) {
    return this.has(l, h) ? this.first.get(l) + h : -1;
  }
  layer(i) {
    return this.numbered.get(this.heads[i].l);
  }
  short(i) {
    return `L${this.heads[i].l}${NBSP}H${this.heads[i].h}`;
  }
  long(i) {
    return translate('layer head', { layer: this.heads[i].l, head: this.heads[i].h });
  }

  // The head to which a key moves from head i in the grid, -1 at its border, undefined for other keys.
  moved(i, key) {
    const { l, h } = this.heads[i];
    const layer = this.layer(i);
    const place = this.layers.indexOf(layer);
    const near = other => (other ? this.index(other.number, Math.min(h, other.heads - 1)) : -1);
    return {
      ArrowLeft: this.index(l, h - 1),
      ArrowRight: this.index(l, h + 1),
      ArrowUp: near(this.layers[place - 1]),
      ArrowDown: near(this.layers[place + 1]),
      Home: this.index(l, 0),
      End: this.index(l, layer.heads - 1),
    }[key];
  }
}
