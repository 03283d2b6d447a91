// Workers by pool: prefill beside decode, as a prompt goes.

import { h, keyed, setClass, setText } from "./dom.js";
import { NONE, compact, count, rate, seconds, share } from "./format.js";

const ROLES = ["prefill", "decode", "mixed"];
const ROLE_TEXT = {
  prefill: "computes prompts",
  decode: "writes answers",
  mixed: "prompts and answers",
};

export class Pools {
  constructor() {
    this.element = h("div", { className: "pools" });
  }

  update({ cluster }) {
    keyed(this.element, poolsOf(cluster), (pool) => pool.key, createPool, updatePool);
  }
}

function poolsOf({ workers, absent, engines }) {
  const pools = new Map();
  const models = new Set([...workers, ...absent].map((one) => one.model));
  const add = (model, role, card) => {
    const key = `${model} ${role}`;
    if (!pools.has(key)) {
      pools.set(key, { key, role, model: models.size > 1 ? model : "", cards: [] });
    }
    pools.get(key).cards.push(card);
  };
  for (const one of workers) add(one.model, one.role, { kind: "worker", key: one.instance_id, one });
  for (const one of absent) add(one.model, one.role, { kind: "absent", key: `absent ${one.name}`, one });
  for (const one of engines) {
    models.add(one.model);
    add(one.model, one.stage, { kind: "engine", key: one.url, one });
  }
  const order = ({ role }) => ROLES.indexOf(role);
  return [...pools.values()].sort(
    (one, other) => one.model.localeCompare(other.model) || order(one) - order(other),
  );
}

function createPool({ role, model }) {
  const total = h("span", { className: "hint" });
  const cards = h("ul", { className: "workers" });
  const title = `${role[0].toUpperCase()}${role.slice(1)}`;
  const element = h(
    "section",
    { className: `pool role-${role}`, "aria-label": `${title} pool ${model}` },
    h("header", {}, h("h3", {}, title, model ? h("span", { className: "pool-model" }, model) : null), total),
    cards,
  );
  return { element, cards, total, role };
}

function updatePool({ cards, total, role }, pool) {
  const number = pool.cards.filter(({ kind }) => kind !== "absent").length;
  setText(total, `${ROLE_TEXT[role]} · ${number} of ${pool.cards.length}`);
  keyed(cards, pool.cards, ({ key }) => key, createCard, (card, { one }) => card.update(one));
}

function createCard({ kind }) {
  if (kind === "worker") return new WorkerCard();
  return kind === "absent" ? new AbsentCard() : new EngineCard();
}

class WorkerCard {
  constructor() {
    this.name = h("strong");
    this.dot = h("i", { "aria-hidden": "true" });
    this.status = h("span", { className: "worker-state" });
    this.used = h("i", { className: "bar-fill" });
    this.held = h("i", { className: "bar-fill held" });
    this.bar = h("span", { className: "bar", role: "meter", "aria-label": "KV cache in use" }, this.used, this.held);
    this.kv = h("span", { className: "number" });
    this.facts = facts(["Running", "Waiting", "Prompt tokens due", "Prefill", "Decode step", "Drafts accepted"]);
    this.where = h("span", { className: "where" });
    this.element = h(
      "li",
      { className: "worker panel" },
      h("div", { className: "worker-head" }, this.dot, this.name, this.status),
      h("div", { className: "kv" }, h("span", {}, "KV"), this.bar, this.kv),
      this.facts.element,
      this.where,
    );
  }

  update(one) {
    const { kv_blocks_used: used, kv_blocks_held: held, kv_blocks_total: total } = one;
    const isBusy = one.running > 0 || one.prefill_tokens_waiting > 0;
    setText(this.name, one.name);
    setClass(this.dot, `dot ${one.draining ? "wait" : isBusy ? "busy" : "good"}`);
    setText(this.status, one.draining ? "draining" : isBusy ? "busy" : "idle");
    const fill = total ? used / total : 0;
    this.used.style.width = `${(total ? (used - held) / total : 0) * 100}%`;
    this.held.style.width = `${(total ? held / total : 0) * 100}%`;
    this.bar.setAttribute("aria-valuenow", Math.round(fill * 100));
    this.bar.title = `${count(used)} of ${count(total)} blocks in use, ${count(held)} of them kept for other workers`;
    setText(this.kv, `${compact(used * one.block_size)} of ${compact(total * one.block_size)} tokens · ${share(fill)}`);
    this.facts.show([
      count(one.running),
      count(one.waiting),
      compact(one.prefill_tokens_waiting),
      one.prefill_tokens_per_s ? `${rate(one.prefill_tokens_per_s)} tok/s` : NONE,
      one.decode_step_s ? seconds(one.decode_step_s) : NONE,
      drafts(one),
    ]);
    const restarts = one.restarts ? ` · started ${one.restarts + 1} times` : "";
    const host = one.host ? ` on ${one.host}` : "";
    setText(this.where, `pid ${one.pid}${host}${one.supervised ? "" : " · joined by itself"}${restarts}`);
  }
}

function drafts({ drafted, accepted }) {
  if (!drafted[0]) return NONE;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const tokens = 1 + sum(accepted) / drafted[0];
  return `${share(sum(accepted) / sum(drafted))} · ${tokens.toFixed(1)} tok a step`;
}

class AbsentCard {
  constructor() {
    this.name = h("strong");
    this.dot = h("i", { "aria-hidden": "true" });
    this.status = h("span", { className: "worker-state" });
    this.reason = h("p", { className: "where" });
    this.element = h(
      "li",
      { className: "worker panel is-absent" },
      h("div", { className: "worker-head" }, this.dot, this.name, this.status),
      this.reason,
    );
  }

  update(one) {
    setText(this.name, one.name);
    setClass(this.dot, `dot ${one.state === "failed" ? "bad" : "wait"}`);
    const next = one.next_start_in_s;
    setText(this.status, next === null ? one.state : `starts again in ${seconds(next)}`);
    setText(this.reason, one.reason);
  }
}

class EngineCard {
  constructor() {
    this.name = h("strong");
    this.dot = h("i", { "aria-hidden": "true" });
    this.status = h("span", { className: "worker-state" });
    this.facts = facts(["Running", "Tokens", "Requests", "Failures"]);
    this.element = h(
      "li",
      { className: "worker panel" },
      h("div", { className: "worker-head" }, this.dot, this.name, this.status),
      this.facts.element,
    );
  }

  update(one) {
    setText(this.name, `${one.engine} ${one.url}`);
    setClass(this.dot, `dot ${one.state === "ready" ? (one.running ? "busy" : "good") : "bad"}`);
    setText(this.status, one.state);
    this.facts.show([count(one.running), compact(one.tokens), count(one.requests), count(one.failures)]);
  }
}

function facts(names) {
  const values = names.map(() => h("dd"));
  const pairs = names.map((name, index) => h("div", {}, h("dt", {}, name), values[index]));
  return {
    element: h("dl", { className: "facts" }, pairs),
    show: (texts) => texts.forEach((text, index) => setText(values[index], text)),
  };
}
