// Elements without markup in strings: text stays text, whoever wrote it.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) element.setAttribute(name, String(value));
    else if (name in element && name !== "list" && name !== "form") element[name] = value;
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Writes only what differs, so that a selection or a screen reader is not disturbed.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

// Keeps one child per key, in the items' order; children that stay are updated in place.
export function keyed(container, items, keyOf, create, update) {
  const known = container.keyedChildren ?? (container.keyedChildren = new Map());
  const wanted = new Set(items.map(keyOf));
  for (const [key, child] of known) {
    if (!wanted.has(key)) {
      child.element.remove();
      known.delete(key);
    }
  }
  let before = container.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = known.get(key);
    if (!child) {
      child = create(item);
      known.set(key, child);
    }
    if (child.element === before) before = before.nextElementSibling;
    else container.insertBefore(child.element, before);
    update(child, item);
  }
}
