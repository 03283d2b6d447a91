// The first view: what comes and goes, how fast, and who does the work.

import { LineChart } from "./chart.js";
import { h, keyed, setText } from "./dom.js";
import { NONE, compact, count, rate, seconds, share, words } from "./format.js";
import { Pools } from "./pools.js";

const REASONS = {
  always: "the operator asks for a prefill worker",
  cheaper: "a prefill worker is cheaper",
  decode_cheaper: "the decode worker is cheaper",
  decode_idle: "the decode worker is idle",
  never: "the operator asks for no hand-over",
  no_decode_worker: "there is no decode worker",
  no_prefill_worker: "there is no prefill worker",
  prefill_busy: "prefill workers are busy",
  short_suffix: "little of the prompt is new",
};

export class Overview {
  constructor() {
    this.model = 0;
    this.picker = h("div", { className: "picker", role: "group", "aria-label": "Model" });
    this.tiles = {
      output: tile("Output", "tokens/s"),
      ttft: tile("First token", "P50, last 30 s"),
      itl: tile("Between tokens", "P50, last 30 s"),
      cached: tile("Cache hits", "of prompt tokens, last 30 s"),
      queue: tile("Waiting", "requests"),
    };
    const at = (read) => (moment) => {
      const point = moment.points[this.model];
      return point ? (read(point) ?? null) : null;
    };
    const percentiles = (name) =>
      ["p50", "p90", "p99"].map((one, index) => ({
        name: one.toUpperCase(),
        tone: `rank-${index}`,
        value: at((point) => point[name]?.[one]),
      }));
    this.charts = [
      new LineChart({
        title: "Time to first token",
        hint: "of the last 30 s",
        series: percentiles("ttft_s"),
        format: seconds,
      }),
      new LineChart({
        title: "Time between tokens",
        hint: "of the last 30 s",
        series: percentiles("itl_s"),
        format: seconds,
      }),
      new LineChart({
        title: "Tokens a second",
        hint: "over 5 s",
        series: [
          { name: "Output", tone: "decode", value: at((point) => point.output_tokens_per_s) },
          { name: "Prompt", tone: "prefill", value: at((point) => point.prompt_tokens_per_s) },
        ],
        format: rate,
        least: 10,
      }),
      new LineChart({
        title: "Requests at the workers",
        hint: "",
        series: [
          { name: "Running", tone: "decode", value: at((point) => point.running) },
          { name: "Waiting", tone: "rank-2", value: at((point) => point.waiting) },
        ],
        format: (value) => (value === null ? NONE : rate(value)),
        least: 4,
      }),
    ];
    this.pools = new Pools();
    this.routes = h("ul", { className: "routes" });
    this.noRoutes = h("p", { className: "empty" });
    this.element = h(
      "section",
      { "aria-labelledby": "overview-title" },
      h("h1", { id: "overview-title", className: "visually-hidden" }, "Overview"),
      this.picker,
      h("dl", { className: "tiles" }, Object.values(this.tiles).map((one) => one.element)),
      h("h2", {}, "Workers"),
      this.pools.element,
      h("h2", {}, "The last five minutes"),
      h("div", { className: "charts" }, this.charts.map((chart) => chart.element)),
      h("h2", {}, "Why prompts are computed where they are"),
      h("div", { className: "panel" }, this.routes, this.noRoutes),
    );
  }

  update({ now, history }) {
    this.showPicker(now.models);
    const model = now.models[this.model];
    if (model) this.showTiles(model, now);
    for (const chart of this.charts) chart.update(history);
    this.pools.update(now);
    this.showRoutes(now.cluster.routes);
  }

  showPicker(models) {
    this.picker.hidden = models.length < 2;
    keyed(
      this.picker,
      models.map(({ name }, index) => ({ name, index })),
      ({ name }) => name,
      ({ name, index }) => {
        const choose = () => {
          this.model = index;
        };
        return { element: h("button", { type: "button", onclick: choose }, name) };
      },
      (child, { index }) => child.element.setAttribute("aria-pressed", index === this.model),
    );
  }

  showTiles({ point, totals }, now) {
    const { output, ttft, itl, cached, queue } = this.tiles;
    output.show(rate(point.output_tokens_per_s), `${compact(totals.output_tokens)} since the start`);
    ttft.show(...percentile(point.ttft_s, totals.ttft_s));
    itl.show(...percentile(point.itl_s, totals.itl_s));
    const all = totals.prompt_tokens ? totals.cached_tokens / totals.prompt_tokens : null;
    cached.show(share(point.cached_share), `${share(all)} since the start`);
    const waiting = now.cluster.queued_requests + point.waiting;
    const tokens = now.cluster.queued_tokens;
    queue.show(
      count(waiting),
      `${count(point.running)} running${tokens ? `, ${compact(tokens)} tokens in the queue` : ""}`,
    );
  }

  showRoutes(routes) {
    const rows = Object.entries(routes).sort((one, other) => other[1] - one[1]);
    const all = rows.reduce((sum, [, number]) => sum + number, 0);
    this.noRoutes.hidden = rows.length > 0;
    setText(this.noRoutes, "No route has been chosen yet. A gateway with one worker chooses none.");
    keyed(
      this.routes,
      rows,
      ([reason]) => reason,
      ([reason]) => {
        const bar = h("i", { className: "bar-fill" });
        const number = h("span", { className: "number" });
        const isPrefill = reason === "always" || reason === "cheaper";
        const element = h(
          "li",
          {},
          h("span", { className: "route-name" }, words(reason)),
          h("span", { className: "route-why" }, REASONS[reason] ?? ""),
          h("span", { className: `bar ${isPrefill ? "role-prefill" : "role-decode"}`, "aria-hidden": "true" }, bar),
          number,
        );
        return { element, bar, number };
      },
      ({ bar, number }, [, value]) => {
        bar.style.width = `${(value / all) * 100}%`;
        setText(number, `${count(value)} · ${share(value / all)}`);
      },
    );
  }
}

function percentile(now, total) {
  if (now) return [seconds(now.p50), `P90 ${seconds(now.p90)} · P99 ${seconds(now.p99)}`];
  if (total) return [NONE, `P50 ${seconds(total.p50)} since the start`];
  return [NONE, "nothing measured yet"];
}

function tile(title, unit) {
  const value = h("span", { className: "tile-value" }, NONE);
  const note = h("span", { className: "tile-note" });
  return {
    element: h(
      "div",
      { className: "tile panel" },
      h("dt", {}, title, h("span", { className: "hint" }, unit)),
      h("dd", {}, value, note),
    ),
    show(text, more) {
      setText(value, text);
      setText(note, more);
    },
  };
}
