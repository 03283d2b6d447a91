// A conversation with a model: streamed, with what was cached, what was called and who served it.

import { adminKey, events, fetchOk, withKey } from "./api.js";
import { Answer } from "./answer.js";
import { h, setText } from "./dom.js";

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string", pattern: "^[A-Z][a-z]{1,19}$" }, unit: { enum: ["celsius", "fahrenheit"] } },
        required: ["city", "unit"],
        additionalProperties: false,
      },
    },
  },
];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { answer: { type: "string" }, confidence: { enum: ["low", "high"] } },
  required: ["answer", "confidence"],
  additionalProperties: false,
};
const NEAR_END_PX = 80;

export class Playground {
  constructor() {
    this.messages = [];
    this.session = null;
    this.running = null;
    this.workerNames = new Map();
    this.talk = h("div", { className: "talk", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.hello = h(
      "div",
      { className: "empty" },
      h("p", {}, "Ask something. The whole conversation is sent each time, so the second answer finds the first in the cache."),
    );
    this.talk.append(this.hello);
    // Who has scrolled up to read is left there.
    this.isFollowing = true;
    this.talk.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.talk;
      this.isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    });
    this.makeSettings();
    this.makeComposer();
    const clear = h("button", { type: "button", onclick: () => this.clear() }, "New conversation");
    this.element = h(
      "section",
      { className: "playground", "aria-labelledby": "playground-title" },
      h(
        "div",
        { className: "bar-of-tools" },
        h("h1", { id: "playground-title" }, "Playground"),
        h("label", { className: "inline" }, "Model", this.model),
        clear,
      ),
      h(
        "div",
        { className: "playground-body" },
        h("div", { className: "talk-side panel" }, this.talk, this.composer),
        this.settings,
      ),
    );
  }

  setModels(names) {
    const chosen = this.model.value;
    this.model.replaceChildren(...names.map((name) => h("option", {}, name)));
    if (names.includes(chosen)) this.model.value = chosen;
  }

  setWorkers(workers) {
    this.workerNames = new Map(workers.map((one) => [one.instance_id, one.name]));
  }

  makeSettings() {
    this.model = h("select", { id: "model" });
    this.system = h("textarea", { id: "system", rows: 3, placeholder: "None" });
    this.maxTokens = h("input", { id: "max-tokens", type: "number", min: 1, value: 256 });
    this.temperature = h("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: 0.7 });
    this.tools = h("textarea", { id: "tools", rows: 6, spellcheck: false, placeholder: "A JSON list; none" });
    this.toolChoice = h("select", { id: "tool-choice" }, ["auto", "required", "none"].map((name) => h("option", {}, name)));
    this.format = h(
      "select",
      { id: "format", onchange: () => this.showSchema() },
      [["text", "Text"], ["json_object", "Any JSON object"], ["json_schema", "JSON by a schema"]].map(([value, name]) => h("option", { value }, name)),
    );
    this.schema = h("textarea", { id: "schema", rows: 6, spellcheck: false, value: JSON.stringify(EXAMPLE_SCHEMA, null, 1) });
    this.schemaField = field("Schema", this.schema);
    this.schemaField.hidden = true;
    this.key = h("input", { id: "api-key", type: "password", autocomplete: "off", placeholder: "As signed in, or none" });
    const insert = () => {
      this.tools.value = JSON.stringify(EXAMPLE_TOOLS, null, 1);
      this.toolChoice.value = "required";
    };
    this.settings = h(
      "details",
      { className: "settings panel", open: matchMedia("(min-width: 60rem)").matches },
      h("summary", {}, "Settings"),
      h(
        "form",
        { onsubmit: (event) => event.preventDefault() },
        field("System prompt", this.system),
        h("div", { className: "pair" }, field("Most output tokens", this.maxTokens), field("Temperature", this.temperature)),
        field("Tools", this.tools, h("button", { type: "button", className: "link", onclick: insert }, "Take an example")),
        h("div", { className: "pair" }, field("Tool choice", this.toolChoice), field("Answer", this.format)),
        this.schemaField,
        field("API key", this.key),
      ),
    );
  }

  makeComposer() {
    this.input = h("textarea", {
      rows: 2,
      placeholder: "Your message",
      "aria-label": "Your message",
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          this.submit();
        }
      },
    });
    this.send = h("button", { type: "submit", className: "primary" }, "Send");
    this.fault = h("p", { className: "fault", role: "alert", hidden: true });
    this.composer = h(
      "form",
      {
        className: "composer",
        onsubmit: (event) => {
          event.preventDefault();
          if (this.running) this.running.abort();
          else this.submit();
        },
      },
      this.fault,
      h("div", { className: "composer-row" }, this.input, this.send),
    );
    this.talk.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
  }

  showSchema() {
    this.schemaField.hidden = this.format.value !== "json_schema";
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.session = null;
    this.talk.replaceChildren(this.hello);
    this.input.focus();
  }

  submit() {
    const text = this.input.value.trim();
    if (!text || this.running) return;
    this.say([{ role: "user", content: text }], () => {
      this.input.value = "";
    });
  }

  // Sends `added` after what was said before; `accepted` is called once the request can be made.
  say(added, accepted) {
    let body;
    try {
      body = this.bodyOf([...this.messages, ...added]);
    } catch (error) {
      this.showFault(error.message);
      return;
    }
    this.showFault("");
    accepted();
    this.hello.remove();
    for (const { role, content, tool_call_id: callId } of added) {
      const who = role === "tool" ? `Result of ${callId}` : "You";
      this.talk.append(h("article", { className: `turn ${role}` }, h("h3", {}, who), h("p", { className: "said" }, content)));
    }
    this.answer(body, added);
  }

  bodyOf(messages) {
    const system = this.system.value.trim();
    const body = {
      model: this.model.value,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      max_completion_tokens: Number(this.maxTokens.value) || 256,
      temperature: Number(this.temperature.value),
      stream: true,
      stream_options: { include_usage: true },
    };
    const tools = this.tools.value.trim();
    if (tools) {
      body.tools = parsed(tools, "Tools");
      body.tool_choice = this.toolChoice.value;
    }
    if (this.format.value === "json_object") body.response_format = { type: "json_object" };
    if (this.format.value === "json_schema") {
      const schema = parsed(this.schema.value, "The schema");
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    }
    return body;
  }

  async answer(body, added) {
    const nameOf = (instance) => this.workerNames.get(instance) ?? instance.slice(0, 8);
    const answer = new Answer(nameOf, (results) => this.say(results, () => answer.closeCalls()));
    this.talk.append(answer.element);
    this.scroll(true);
    this.running = new AbortController();
    setText(this.send, "Stop");
    const headers = {
      "content-type": "application/json",
      "twinfire-route": "1",
      "twinfire-cost": "1",
      // The route is told in headers, which leave with the first event.
      "x-queued-comments": "0",
    };
    if (this.session) headers["x-session-affinity"] = this.session;
    try {
      const response = await fetchOk("v1/chat/completions", {
        method: "POST",
        headers: withKey(this.key.value.trim() || adminKey(), headers),
        body: JSON.stringify(body),
        signal: this.running.signal,
      });
      this.session = response.headers.get("x-session-affinity") ?? this.session;
      answer.showRoute(response.headers);
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        answer.take(JSON.parse(data));
        this.scroll(false);
      }
      answer.end();
      // A call that was cut off can have no result, so nothing could follow it.
      if (answer.isWhole) this.messages.push(...added, answer.message());
    } catch (error) {
      answer.fail(error.name === "AbortError" ? "Stopped." : error.message);
    }
    this.running = null;
    setText(this.send, "Send");
    this.scroll(false);
  }

  showFault(text) {
    setText(this.fault, text);
    this.fault.hidden = !text;
  }

  scroll(isForced) {
    if (isForced || this.isFollowing) this.talk.scrollTop = this.talk.scrollHeight;
  }
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} must be JSON: ${error.message}`);
  }
}

function field(name, input, ...more) {
  return h("div", { className: "field" }, h("label", { htmlFor: input.id }, name), input, more);
}
