// What accounts have used, from the ledger; asked for only while it is shown.

import { getJson } from "./api.js";
import { h, setText } from "./dom.js";
import { compact, count, money, share } from "./format.js";

const PERIODS = [
  [1, "Today"],
  [7, "7 days"],
  [30, "30 days"],
  [365, "A year"],
];
const REFRESH_MS = 15_000;

export class Usage {
  constructor() {
    this.days = 1;
    this.timer = null;
    this.buttons = PERIODS.map(([days, name]) =>
      h("button", { type: "button", "aria-pressed": days === this.days, onclick: () => this.choose(days) }, name),
    );
    this.fault = h("p", { className: "fault", role: "alert", hidden: true });
    this.body = h("div", { className: "usage", "aria-live": "off" });
    this.element = h(
      "section",
      { "aria-labelledby": "usage-title" },
      h(
        "div",
        { className: "bar-of-tools" },
        h("h1", { id: "usage-title" }, "Usage"),
        h("div", { className: "picker", role: "group", "aria-label": "Period" }, this.buttons),
        h("span", { className: "hint" }, "Days are days of UTC."),
      ),
      this.fault,
      this.body,
    );
  }

  setVisible(isVisible) {
    clearInterval(this.timer);
    this.timer = null;
    if (!isVisible) return;
    this.load();
    this.timer = setInterval(() => document.hidden || this.load(), REFRESH_MS);
  }

  choose(days) {
    this.days = days;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", PERIODS[index][0] === days));
    this.load();
  }

  async load() {
    const { days } = this;
    try {
      const usage = await getJson(`dashboard/api/usage?days=${days}`);
      this.fault.hidden = true;
      if (days === this.days) this.show(usage);
    } catch (error) {
      setText(this.fault, error.message);
      this.fault.hidden = false;
    }
  }

  show(usage) {
    if (!usage.totals.length) {
      this.body.replaceChildren(h("p", { className: "empty panel" }, "Nothing was used in this time."));
      return;
    }
    const isLong = usage.by_day.length > 1;
    this.body.replaceChildren(
      h("dl", { className: "tiles" }, usage.totals.flatMap(totalTiles)),
      ...(isLong ? [h("h2", {}, "By day"), daysOf(usage.by_day)] : []),
      ...(usage.budgets.length ? [h("h2", {}, "Today's budgets"), budgets(usage.budgets)] : []),
      h("h2", {}, "By account"),
      table("Account", usage.by_account, (row) => row.account),
      h("h2", {}, "By model"),
      table("Model", usage.by_model, (row) => row.model),
    );
  }
}

function totalTiles(total) {
  const cached = total.input_tokens ? total.cached_tokens / total.input_tokens : null;
  return [
    ["Requests", count(total.requests), `${count(total.finished)} finished`],
    ["Input tokens", compact(total.input_tokens), `${share(cached)} cached`],
    ["Output tokens", compact(total.output_tokens), total.reasoning_tokens ? `${compact(total.reasoning_tokens)} of reasoning` : ""],
    ["Cost", money(total.price, total.currency), ""],
  ].map(([name, value, note]) =>
    h(
      "div",
      { className: "tile panel" },
      h("dt", {}, name),
      h("dd", {}, h("span", { className: "tile-value" }, value), h("span", { className: "tile-note" }, note)),
    ),
  );
}

function table(title, rows, nameOf) {
  const highest = Math.max(...rows.map((row) => row.input_tokens + row.output_tokens), 1);
  const body = rows.map((row) => {
    const cached = row.input_tokens ? row.cached_tokens / row.input_tokens : 0;
    const fill = h("i", { className: "bar-fill" });
    fill.style.width = `${((row.input_tokens + row.output_tokens) / highest) * 100}%`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, nameOf(row), h("span", { className: "bar", "aria-hidden": "true" }, fill)),
      h("td", {}, count(row.requests)),
      h("td", {}, compact(row.input_tokens)),
      h("td", {}, share(cached)),
      h("td", {}, compact(row.output_tokens)),
      h("td", {}, money(row.price, row.currency)),
    );
  });
  const head = [title, "Requests", "Input", "Cached", "Output", "Cost"];
  return h(
    "div",
    { className: "table-box panel" },
    h(
      "table",
      { className: "sums" },
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, body),
    ),
  );
}

function daysOf(days) {
  const highest = Math.max(...days.map((day) => day.input_tokens + day.output_tokens), 1);
  return h(
    "ol",
    { className: "days panel" },
    days.map((day) => {
      const fill = h("i", { className: "bar-fill" });
      fill.style.width = `${((day.input_tokens + day.output_tokens) / highest) * 100}%`;
      return h(
        "li",
        {},
        h("span", {}, day.day),
        h("span", { className: "bar", "aria-hidden": "true" }, fill),
        h("span", { className: "number" }, `${compact(day.input_tokens + day.output_tokens)} tokens · ${money(day.price, day.currency)}`),
      );
    }),
  );
}

function budgets(rows) {
  return h(
    "ul",
    { className: "days panel" },
    rows.map((row) => {
      const shares = [
        row.budget_tokens ? row.spent_tokens / row.budget_tokens : 0,
        Number(row.budget) ? Number(row.spent) / Number(row.budget) : 0,
      ];
      const used = Math.min(Math.max(...shares), 1);
      const fill = h("i", { className: `bar-fill ${used >= 1 ? "bad" : used > 0.8 ? "wait" : ""}` });
      fill.style.width = `${used * 100}%`;
      const texts = [
        row.budget_tokens === null ? "" : `${compact(row.spent_tokens)} of ${compact(row.budget_tokens)} tokens`,
        row.budget === null ? "" : `${money(row.spent, row.currency)} of ${money(row.budget, row.currency)}`,
        row.is_disabled ? "disabled" : "",
      ];
      return h(
        "li",
        {},
        h("span", {}, row.account),
        h("span", { className: "bar", role: "meter", "aria-label": `Budget of ${row.account}`, "aria-valuenow": Math.round(used * 100) }, fill),
        h("span", { className: "number" }, texts.filter(Boolean).join(" · ")),
      );
    }),
  );
}
