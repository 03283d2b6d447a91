// Lines over the last minutes, in SVG. Gaps are seconds at which nothing was measured.

import { h, setText, svg } from "./dom.js";
import { age } from "./format.js";

export const SPAN_S = 300;
const GAP_S = 4;
const HEIGHT = 150;
const MARGIN = { top: 10, right: 8, bottom: 20, left: 52 };

// `series` are {name, tone, value: (moment) => number or null}; `format` writes a value.
export class LineChart {
  constructor({ title, hint, series, format, least = 0 }) {
    this.series = series;
    this.format = format;
    this.least = least;
    this.moments = [];
    this.chosen = null;
    this.paths = series.map(({ tone }) => svg("path", { class: `line tone-${tone}` }));
    this.grid = svg("g", { class: "grid" });
    this.cursor = svg("line", { class: "cursor", visibility: "hidden" });
    this.svg = svg("svg", { class: "plot", role: "img", tabindex: "0" });
    this.svg.append(this.grid, ...this.paths, this.cursor);
    this.empty = h("p", { className: "chart-empty" }, "Nothing measured in this time.");
    this.values = series.map(() => h("span", { className: "legend-value" }));
    this.when = h("span", { className: "legend-when" });
    const legend = series.map(({ name, tone }, index) =>
      h(
        "span",
        { className: "legend-item" },
        h("i", { className: `swatch tone-${tone}`, "aria-hidden": "true" }),
        `${name} `,
        this.values[index],
      ),
    );
    this.element = h(
      "figure",
      { className: "chart panel" },
      h(
        "figcaption",
        {},
        h("h3", {}, title, h("span", { className: "hint" }, hint)),
        h("div", { className: "legend" }, legend, this.when),
      ),
      h("div", { className: "plot-box" }, this.svg, this.empty),
    );
    this.title = title;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  update(moments) {
    this.moments = moments;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const { moments, series } = this;
    const end = moments.length ? moments[moments.length - 1].time_s : 0;
    const inner = { width: width - MARGIN.left - MARGIN.right, bottom: HEIGHT - MARGIN.bottom };
    const lines = series.map(({ value }) => moments.map(value));
    const highest = Math.max(this.least, ...lines.flat().filter((one) => one !== null));
    const isEmpty = lines.every((line) => line.every((one) => one === null));
    const top = niceTop(highest);
    this.x = (time) => MARGIN.left + (1 - (end - time) / SPAN_S) * inner.width;
    const y = (value) => inner.bottom - (value / top) * (inner.bottom - MARGIN.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawGrid(width, top, y, isEmpty);
    lines.forEach((line, index) => {
      this.paths[index].setAttribute("d", pathOf(moments, line, this.x, y));
    });
    this.empty.hidden = !isEmpty;
    this.inner = inner;
    this.showChosen();
  }

  drawGrid(width, top, y, isEmpty) {
    const parts = [0, 0.5, 1].flatMap((share) => {
      const height = y(top * share);
      const line = { x1: MARGIN.left, x2: width - MARGIN.right, y1: height, y2: height };
      const label = svg("text", { x: MARGIN.left - 8, y: height + 4, "text-anchor": "end" });
      label.textContent = isEmpty ? "" : this.format(top * share);
      return [svg("line", line), label];
    });
    const times = width < 360 ? [SPAN_S, 0] : [SPAN_S, SPAN_S * 0.8, SPAN_S * 0.6, SPAN_S * 0.4, SPAN_S * 0.2, 0];
    for (const ago of times) {
      const x = MARGIN.left + (1 - ago / SPAN_S) * (width - MARGIN.left - MARGIN.right);
      const anchor = ago === 0 ? "end" : ago === SPAN_S ? "start" : "middle";
      const label = svg("text", { x, y: HEIGHT - 4, "text-anchor": anchor });
      label.textContent = ago ? `−${ago / 60} min` : "now";
      parts.push(label);
    }
    this.grid.replaceChildren(...parts);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = event.clientX - box.left;
    let best = null;
    this.moments.forEach((moment, index) => {
      const distance = Math.abs(this.x(moment.time_s) - x);
      if (best === null || distance < best.distance) best = { index, distance };
    });
    this.choose(best && this.moments[best.index].time_s);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.moments.length) return;
    event.preventDefault();
    const last = this.moments.length - 1;
    const index = this.chosen === null ? last : this.indexOfChosen() + step;
    this.choose(this.moments[Math.min(Math.max(index, 0), last)].time_s);
  }

  choose(time) {
    this.chosen = time;
    this.showChosen();
  }

  indexOfChosen() {
    const index = this.moments.findIndex((moment) => moment.time_s >= this.chosen);
    return index < 0 ? this.moments.length - 1 : index;
  }

  showChosen() {
    const last = this.moments.length - 1;
    const index = this.chosen === null ? last : this.indexOfChosen();
    const moment = this.moments[index];
    const shown = this.series.map(({ value }) => this.format(moment ? value(moment) : null));
    shown.forEach((text, position) => setText(this.values[position], text));
    const isPast = this.chosen !== null && moment && index < last;
    setText(this.when, isPast ? `${age(this.moments[last].time_s - moment.time_s)} ago` : "");
    this.cursor.setAttribute("visibility", this.chosen !== null && moment ? "visible" : "hidden");
    if (moment && this.inner) {
      const x = this.x(moment.time_s);
      const place = { x1: x, x2: x, y1: MARGIN.top, y2: this.inner.bottom };
      for (const [name, value] of Object.entries(place)) this.cursor.setAttribute(name, value);
    }
    const told = this.series.map(({ name }, position) => `${name} ${shown[position]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${told}`);
  }
}

function pathOf(moments, values, x, y) {
  let path = "";
  let lastTime = null;
  moments.forEach((moment, index) => {
    if (values[index] === null || x(moment.time_s) < MARGIN.left) {
      lastTime = null;
      return;
    }
    const isNew = lastTime === null || moment.time_s - lastTime > GAP_S;
    const place = `${x(moment.time_s).toFixed(1)} ${y(values[index]).toFixed(1)}`;
    // A point of its own would not be seen without a length.
    path += isNew ? `M${place}h0.01` : `L${place}`;
    lastTime = moment.time_s;
  });
  return path;
}

function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 3, 4, 5, 6, 8, 10].find((one) => one * power >= value * 1.04) ?? 10;
  return step * power;
}
