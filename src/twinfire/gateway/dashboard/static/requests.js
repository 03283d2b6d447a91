// The live log: requests that run and those that ended, with where their first token's time went.

import { h, keyed, setClass, setText } from "./dom.js";
import { NONE, clock, compact, count, money, seconds, share, words } from "./format.js";

export const PARTS = [
  ["request", "reading the request and its tokens"],
  ["gateway_queue", "waiting in the gateway for a worker"],
  ["lost", "tries that failed"],
  ["prefill_queue", "waiting at the worker that computes the prompt"],
  ["prefill", "computing the prompt"],
  ["transfer", "moving its KV blocks"],
  ["decode_queue", "waiting at the worker that decodes"],
  ["first_decode", "the first step, and messages"],
];
const COLUMNS = ["Time", "Request", "Status", "Prompt", "Output", "Route", "First token", "Total"];
const SHOWN = 100;

export class Requests {
  constructor() {
    this.isPaused = false;
    this.filter = h("input", {
      type: "search",
      placeholder: "Filter by account, model, path or id",
      "aria-label": "Filter requests",
      oninput: () => this.draw(),
    });
    this.failures = h("input", { type: "checkbox", onchange: () => this.draw() });
    this.pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.toggle() }, "Pause");
    this.rows = h("tbody");
    this.empty = h("p", { className: "empty" });
    const legend = PARTS.map(([part, text]) =>
      h("li", {}, h("i", { className: `swatch part-${part}`, "aria-hidden": "true" }), words(part), h("span", {}, text)),
    );
    this.element = h(
      "section",
      { "aria-labelledby": "requests-title" },
      h(
        "div",
        { className: "bar-of-tools" },
        h("h1", { id: "requests-title" }, "Requests"),
        this.filter,
        h("label", { className: "check" }, this.failures, "Failures only"),
        this.pause,
      ),
      h(
        "details",
        { className: "parts" },
        h("summary", {}, "Parts of the time to the first token"),
        h("ul", {}, legend),
      ),
      h(
        "div",
        { className: "table-box panel" },
        h(
          "table",
          { className: "requests" },
          h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col", className: column(name) }, name)))),
          this.rows,
        ),
        this.empty,
      ),
      h("p", { className: "hint" }, "What was asked and answered is not kept here."),
    );
  }

  toggle() {
    this.isPaused = !this.isPaused;
    this.pause.setAttribute("aria-pressed", this.isPaused);
    setText(this.pause, this.isPaused ? "Go on" : "Pause");
  }

  update(data) {
    if (this.isPaused) return;
    this.items = [
      ...data.now.running.map((one) => ({ ...one, key: `running ${one.request_id}`, isRunning: true })),
      ...data.finished.toReversed().map((one) => ({ ...one, key: one.number })),
    ];
    this.names = new Map(data.now.cluster.workers.map((one) => [one.instance_id, one.name]));
    this.hasAny = this.items.length > 0;
    this.draw();
  }

  draw() {
    if (!this.items) return;
    const text = this.filter.value.trim().toLowerCase();
    const shown = this.items
      .filter((one) => !this.failures.checked || (!one.isRunning && one.outcome !== "finished"))
      .filter((one) => !text || searchable(one).includes(text))
      .slice(0, SHOWN);
    const usual = usualLongest(shown.map((one) => one.ttft_s).filter((one) => one !== null));
    this.empty.hidden = shown.length > 0;
    setText(this.empty, this.hasAny ? "No request is like that." : "No request yet. The playground sends some.");
    keyed(
      this.rows,
      shown,
      (one) => one.key,
      () => new Row(),
      (row, one) => row.update(one, usual, (id) => this.names.get(id) ?? id.slice(0, 8)),
    );
  }
}

class Row {
  constructor() {
    const cell = (name, ...children) => h("td", { className: column(name) }, children);
    this.time = h("span");
    this.path = h("span", { className: "path" });
    this.who = h("span", { className: "under" });
    this.status = h("span", { className: "status" });
    this.finish = h("span", { className: "under" });
    this.prompt = h("span");
    this.cached = h("span", { className: "under" });
    this.output = h("span");
    this.speed = h("span", { className: "under" });
    this.route = h("span", { className: "route" });
    this.reason = h("span", { className: "under" });
    this.ttft = h("span", { className: "number" });
    this.parts = h("span", { className: "stack", role: "img" });
    this.total = h("span");
    this.more = h("button", { type: "button", className: "more", "aria-expanded": "false", onclick: () => this.toggle() }, this.path);
    this.details = null;
    this.element = h(
      "tr",
      {},
      cell("Time", this.time),
      cell("Request", this.more, this.who),
      cell("Status", this.status, this.finish),
      cell("Prompt", this.prompt, this.cached),
      cell("Output", this.output, this.speed),
      cell("Route", this.route, this.reason),
      cell("First token", this.ttft, this.parts),
      cell("Total", this.total),
    );
  }

  // A bar as long as its cell is a wait of `usual` seconds or more.
  update(one, usual, nameOf) {
    this.one = one;
    this.nameOf = nameOf;
    setClass(this.element, one.isRunning ? "is-running" : one.outcome === "finished" ? "" : "is-failed");
    setText(this.time, one.isRunning ? "now" : clock(one.started_s));
    setText(this.path, one.endpoint.replace(/^\/(v1|client\/v4)\//, ""));
    setText(this.who, [one.account, one.model].filter(Boolean).join(" · "));
    setText(this.status, one.isRunning ? "running" : String(one.status));
    setText(this.finish, one.isRunning ? "" : words(one.outcome === "cancelled" ? "client left" : one.finish));
    setText(this.prompt, one.input_tokens ? count(one.input_tokens) : NONE);
    setText(this.cached, one.input_tokens && one.cached_tokens ? `${share(one.cached_tokens / one.input_tokens)} cached` : "");
    setText(this.output, one.output_tokens ? count(one.output_tokens) : NONE);
    const decodeS = (one.isRunning ? one.age_s : one.total_s) - (one.ttft_s ?? 0);
    const speed = one.output_tokens > 1 && decodeS > 0 ? (one.output_tokens - 1) / decodeS : null;
    setText(this.speed, speed === null ? "" : `${compact(speed)} tok/s`);
    setText(this.route, routeOf(one, nameOf));
    setText(this.reason, words(one.route_reason));
    setText(this.ttft, seconds(one.ttft_s));
    setText(this.total, seconds(one.isRunning ? one.age_s : one.total_s));
    this.drawParts(one, usual);
  }

  drawParts(one, usual) {
    const parts = partsOf(one);
    const text = parts.map(([part, value]) => `${words(part)} ${seconds(value)}`).join(", ");
    if (this.drawn === text && this.usual === usual) return;
    this.drawn = text;
    this.usual = usual;
    this.parts.hidden = parts.length === 0;
    this.parts.setAttribute("aria-label", text);
    this.parts.title = text;
    this.parts.style.width = `${Math.min(100, Math.max(4, ((one.ttft_s ?? 0) / usual) * 100))}%`;
    const whole = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
    this.parts.replaceChildren(
      ...parts.map(([part, value]) => {
        const piece = h("i", { className: `part-${part}` });
        piece.style.width = `${(value / whole) * 100}%`;
        return piece;
      }),
    );
  }

  toggle() {
    const isOpen = this.details === null;
    this.more.setAttribute("aria-expanded", isOpen);
    if (isOpen) {
      this.details = detailsOf(this.one, this.nameOf);
      this.who.after(this.details);
    } else {
      this.details.remove();
      this.details = null;
    }
  }
}

// Nine of ten waits are no longer: one that was very long must not make all others look alike.
function usualLongest(waits) {
  const sorted = waits.toSorted((one, other) => one - other);
  return sorted[Math.floor((sorted.length - 1) * 0.9)] || 0.001;
}

function detailsOf(one, nameOf) {
  const pairs = [["Request id", one.request_id], ["Path", one.endpoint]];
  if (!one.isRunning) {
    pairs.push(["Price", money(one.price, one.currency)]);
    if (one.attempts) pairs.push(["Tries", `${one.attempts}${one.resumes ? `, went on elsewhere ${one.resumes} times` : ""}`]);
    if (one.reasoning_tokens) pairs.push(["Reasoning", `${count(one.reasoning_tokens)} tokens`]);
  }
  if (one.decode_worker) pairs.push(["Workers", routeOf(one, nameOf)]);
  const parts = partsOf(one).map(([part, value]) =>
    h("li", {}, h("i", { className: `swatch part-${part}`, "aria-hidden": "true" }), `${words(part)} `, h("b", {}, seconds(value))),
  );
  return h(
    "div",
    { className: "details" },
    h("dl", {}, pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    parts.length ? h("ul", {}, parts) : null,
  );
}

function partsOf(one) {
  const known = one.first_token_parts ?? {};
  return PARTS.map(([part]) => [part, Math.max(0, known[part] ?? 0)]).filter(([, value]) => value > 0.0001);
}

function routeOf(one, nameOf) {
  if (!one.decode_worker) return NONE;
  const { prefill_worker: prefill, decode_worker: decode } = one;
  return prefill && prefill !== decode ? `${nameOf(prefill)} → ${nameOf(decode)}` : nameOf(decode);
}

const searchable = (one) =>
  [one.account, one.model, one.endpoint, one.request_id, one.finish].join(" ").toLowerCase();

const column = (name) => `col-${name.toLowerCase().replace(" ", "-")}`;
