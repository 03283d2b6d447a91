// One answer of the playground, as it comes: reasoning, text, tool calls, and what it took.

import { h, setText } from "./dom.js";
import { compact, count, money, seconds, share, words } from "./format.js";

export class Answer {
  // `nameOf` names a worker by its id; `sendResults` gets tool messages once all calls have one.
  constructor(nameOf, sendResults) {
    this.nameOf = nameOf;
    this.sendResults = sendResults;
    this.startedAt = performance.now();
    this.firstAt = null;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.finish = null;
    this.usage = null;
    this.thought = h("p", { className: "said" });
    this.thinking = h("details", { className: "thinking", open: true, hidden: true }, h("summary", {}, "Reasoning"), this.thought);
    this.text = h("p", { className: "said" });
    this.callList = h("div", { className: "calls" });
    this.wait = h("p", { className: "waiting" }, "Waiting for the first token");
    this.fault = h("p", { className: "fault", role: "alert", hidden: true });
    this.facts = h("ul", { className: "answer-facts" });
    this.element = h(
      "article",
      { className: "turn assistant", "aria-busy": "true" },
      h("h3", {}, "Model"),
      this.thinking,
      this.text,
      this.callList,
      this.wait,
      this.fault,
      this.facts,
    );
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices ?? [];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? {};
    if (!content && !thought && !calls?.length) return;
    if (this.firstAt === null) {
      this.firstAt = performance.now();
      this.wait.hidden = true;
    }
    if (thought) {
      this.reasoning += thought;
      this.thinking.hidden = false;
      this.thought.append(thought);
    }
    if (content) {
      this.content += content;
      this.text.append(content);
    }
    for (const call of calls ?? []) this.takeCall(call);
  }

  takeCall({ index, id, function: called }) {
    let call = this.calls[index];
    if (!call) {
      call = { id, name: called?.name ?? "", text: "", shown: h("pre", { tabindex: "0" }) };
      this.calls[index] = call;
      call.element = h(
        "section",
        { className: "call", "aria-label": `Call of ${call.name}` },
        h("h4", {}, h("span", { className: "tag" }, "tool"), call.name),
        call.shown,
      );
      this.callList.append(call.element);
    }
    if (called?.arguments) {
      call.text += called.arguments;
      setText(call.shown, call.text);
    }
  }

  end() {
    this.element.setAttribute("aria-busy", "false");
    this.wait.hidden = true;
    for (const call of this.calls) setText(call.shown, pretty(call.text));
    if (!this.content && !this.calls.length && !this.reasoning) this.showFault("The answer is empty.");
    this.showUsage();
    if (!this.isWhole) this.showFault("The call was cut off: its arguments are not complete.");
    else if (this.calls.length) this.askForResults();
  }

  fail(text) {
    this.element.setAttribute("aria-busy", "false");
    this.wait.hidden = true;
    this.showFault(text);
  }

  showFault(text) {
    setText(this.fault, text);
    this.fault.hidden = false;
  }

  get isWhole() {
    return this.calls.length === 0 || this.finish === "tool_calls";
  }

  message() {
    const message = { role: "assistant", content: this.content || null };
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return message;
  }

  showRoute(headers) {
    const told = (name) => headers.get(`twinfire-route-${name}`) ?? "";
    this.route = { prefill: told("prefill"), decode: told("decode"), reason: told("reason"), attempts: told("attempts") };
  }

  showUsage() {
    const { usage, route } = this;
    const facts = [];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      const fill = h("i", { className: "bar-fill" });
      fill.style.width = `${(cached / Math.max(usage.prompt_tokens, 1)) * 100}%`;
      facts.push([
        "Cached",
        `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens, ${share(cached / Math.max(usage.prompt_tokens, 1))}`,
        h("span", { className: "bar cached", "aria-hidden": "true" }, fill),
      ]);
      const reasoning = usage.completion_tokens_details?.reasoning_tokens;
      facts.push(["Output", `${count(usage.completion_tokens)} tokens${reasoning ? `, ${count(reasoning)} of reasoning` : ""}`]);
    }
    if (this.firstAt !== null) {
      facts.push(["First token", seconds((this.firstAt - this.startedAt) / 1000)]);
      const rest = (performance.now() - this.firstAt) / 1000;
      const number = (usage?.completion_tokens ?? 0) - 1;
      if (number > 0 && rest > 0) facts.push(["Speed", `${compact(number / rest)} tok/s`]);
    }
    if (route?.decode) {
      const [prefill, decode] = [this.nameOf(route.prefill), this.nameOf(route.decode)];
      const way = prefill === decode ? decode : `${prefill} → ${decode}`;
      facts.push(["Route", `${way}${route.reason ? `, ${words(route.reason)}` : ""}`]);
    }
    if (usage?.cost) facts.push(["Cost", money(usage.cost, "")]);
    if (this.finish) facts.push(["Ended by", words(this.finish)]);
    this.facts.replaceChildren(...facts.map(([name, text, more]) => h("li", {}, h("b", {}, name), ` ${text}`, more)));
  }

  askForResults() {
    const inputs = this.calls.map(({ name }) =>
      h("input", { type: "text", placeholder: `What ${name} gives back`, "aria-label": `Result of ${name}`, required: true }),
    );
    this.results = h(
      "form",
      {
        className: "results",
        onsubmit: (event) => {
          event.preventDefault();
          const results = this.calls.map(({ id }, index) => ({ role: "tool", tool_call_id: id, content: inputs[index].value }));
          this.sendResults(results);
        },
      },
      inputs,
      h("button", { type: "submit" }, "Give the results"),
    );
    this.callList.append(this.results);
  }

  closeCalls() {
    this.results?.remove();
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
