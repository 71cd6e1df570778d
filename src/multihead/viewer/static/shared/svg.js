// Pictures that are elements of the page: the glyphs of kinds, and the line of a head.

// Create an element of an SVG picture with attributes and children.
export function svgElement(tag, attributes, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
