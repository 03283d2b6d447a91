// OpenCode: chat, streaming, tools, structured output, cached tokens.
//
// Starts `opencode serve` with a configuration and a home of its own, and drives it over HTTP as its
// own terminal and editors do. Agents have short prompts and one tool: OpenCode's own prompt and
// tools are larger than the context of the default model.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { runChecks, server } from "../checks.mjs";
import { QUESTION, SHAPE_QUESTION, TOOL_QUESTION, longPrompt } from "../task.mjs";

const START_LIMIT_MS = 60_000;
const NUM_TOOL_TRIES = 4;
const PASSWORD = "only for this run";
const here = (name) => fileURLToPath(new URL(name, import.meta.url));

const OWN_TOOLS = "bash edit write read grep glob list patch apply_patch todowrite todoread webfetch".split(" ");
OWN_TOOLS.push(..."websearch codesearch task skill question lsp batch multiedit".split(" "));
const noOwnTools = Object.fromEntries(OWN_TOOLS.map((name) => [name, false]));
const agent = (prompt, tools) => ({ mode: "primary", prompt, tools: { ...noOwnTools, ...tools } });

const CONFIG = {
  autoupdate: false,
  share: "disabled",
  model: `twinfire/${server.model}`,
  small_model: `twinfire/${server.model}`,
  provider: {
    twinfire: {
      npm: "@ai-sdk/openai-compatible",
      name: "Twinfire",
      options: { baseURL: `${server.url}/v1`, apiKey: server.apiKey },
      models: {
        [server.model]: { tool_call: true, limit: { context: 8192, output: 64 } },
      },
    },
  },
  mcp: { weather: { type: "local", command: ["node", here("weather_mcp.mjs")], enabled: true } },
  agent: {
    brief: agent("You answer briefly.", { "weather_*": false }),
    weather: agent("You answer briefly. Call weather_get before you answer.", {}),
    ferries: agent(longPrompt(), { "weather_*": false }),
  },
};

const home = await mkdtemp(join(tmpdir(), "twinfire-opencode-"));
const opencode = spawn(here("node_modules/.bin/opencode"), ["serve", "--port", "0"], {
  cwd: home,
  env: {
    ...process.env,
    HOME: home,
    XDG_CONFIG_HOME: join(home, "config"),
    XDG_DATA_HOME: join(home, "data"),
    XDG_CACHE_HOME: join(home, "cache"),
    XDG_STATE_HOME: join(home, "state"),
    OPENCODE_CONFIG_CONTENT: JSON.stringify(CONFIG),
    OPENCODE_DISABLE_AUTOUPDATE: "1",
    OPENCODE_DISABLE_MODELS_FETCH: "1",
    OPENCODE_SERVER_PASSWORD: PASSWORD,
  },
});
process.on("SIGTERM", () => {
  opencode.kill("SIGKILL");
  process.exit(143);
});
const url = await new Promise((resolve, reject) => {
  let output = "";
  const take = (text) => {
    output += text;
    const found = /listening on (http:\S+)/.exec(output);
    if (found) resolve(found[1]);
  };
  opencode.stdout.on("data", take);
  opencode.stderr.on("data", take);
  opencode.on("error", reject);
  opencode.on("exit", () => reject(new Error(`opencode ended:\n${output}`)));
  setTimeout(() => reject(new Error(`opencode did not start:\n${output}`)), START_LIMIT_MS).unref();
});

async function call(path, body) {
  const response = await fetch(url + path, {
    method: body ? "POST" : "GET",
    headers: {
      Authorization: `Basic ${btoa(`opencode:${PASSWORD}`)}`,
      "Content-Type": "application/json",
    },
    body: body && JSON.stringify(body),
  });
  assert(response.ok, `${path}: ${response.status} ${response.ok ? "" : await response.text()}`);
  return response;
}

const newSession = async () => (await call("/session", { title: "example" })).json();

async function ask(session, agentName, text, format) {
  const body = { agent: agentName, parts: [{ type: "text", text }], format };
  const answer = await (await call(`/session/${session.id}/message`, body)).json();
  assert(!answer.info.error, JSON.stringify(answer.info.error));
  return answer;
}

const textOf = (answer) => answer.parts.filter((p) => p.type === "text").map((p) => p.text).join("");

async function chat() {
  const text = textOf(await ask(await newSession(), "brief", QUESTION));
  assert(text, "no text");
  return JSON.stringify(text);
}

async function* eventsOf(session) {
  const { body } = await call("/event");
  let buffered = "";
  for await (const piece of body.pipeThrough(new TextDecoderStream())) {
    buffered += piece;
    const lines = buffered.split("\n");
    buffered = lines.pop();
    for (const line of lines.filter((l) => l.startsWith("data: "))) {
      const event = JSON.parse(line.slice("data: ".length));
      const { sessionID, part } = event.properties ?? {};
      if ((sessionID ?? part?.sessionID) === session.id) yield event;
    }
  }
}

async function streaming() {
  const session = await newSession();
  const events = eventsOf(session);
  const next = events.next();
  const answering = ask(session, "brief", QUESTION);
  let numDeltas = 0;
  for (let { value } = await next; value?.type !== "session.idle"; { value } = await events.next()) {
    if (value.type === "message.part.delta") numDeltas += 1;
  }
  await events.return();
  const { info } = await answering;
  assert(numDeltas > 1, `${numDeltas} deltas`);
  assert(info.tokens.output > 0, JSON.stringify(info.tokens));
  return `${numDeltas} deltas, ${info.tokens.output} tokens`;
}

// OpenCode forces calls only while it wants structured output, and goes on until it has that. A small
// model may call the tool for ever: so the turn is stopped once the result is there, and the next turn,
// which sends the call and its result back, answers in words.
async function tools() {
  const schema = {
    type: "object",
    properties: { celsius: { type: "integer", minimum: -60, maximum: 60 } },
    required: ["celsius"],
    additionalProperties: false,
  };
  for (let tried = 1; tried <= NUM_TOOL_TRIES; tried += 1) {
    const session = await newSession();
    const events = eventsOf(session);
    const next = events.next();
    const asking = ask(session, "weather", TOOL_QUESTION, { type: "json_schema", schema });
    const stopped = asking.catch(() => undefined);
    let weather;
    for (let { value } = await next; value?.type !== "session.idle"; { value } = await events.next()) {
      const part = value.type === "message.part.updated" ? value.properties.part : undefined;
      if (part?.tool !== "weather_get" || part.state.status !== "completed") continue;
      weather = part;
      break;
    }
    await events.return();
    await call(`/session/${session.id}/abort`, {});
    await stopped;
    if (!weather) continue;
    const text = textOf(await ask(session, "brief", "So what is the weather there?"));
    assert(text, "no final answer");
    return `weather_get(${JSON.stringify(weather.state.input)}), then ${JSON.stringify(text)}`;
  }
  throw new Error(`the tool was not called in ${NUM_TOOL_TRIES} sessions`);
}

async function structuredOutput() {
  const schema = {
    type: "object",
    properties: {
      name: { type: "string", maxLength: 12 },
      age: { type: "integer", minimum: 0, maximum: 120 },
    },
    required: ["name", "age"],
    additionalProperties: false,
  };
  const format = { type: "json_schema", schema };
  const { info } = await ask(await newSession(), "brief", SHAPE_QUESTION, format);
  assert(info.structured?.name !== undefined, JSON.stringify(info));
  return JSON.stringify(info.structured);
}

async function cachedTokens() {
  const session = await newSession();
  const seen = [];
  for (const question of ["When does ferry 3 leave?", "And ferry 5?"]) {
    seen.push((await ask(session, "ferries", question)).info.tokens.cache.read);
  }
  assert(seen[1] > seen[0], `cached tokens of the two requests: ${seen}`);
  return `cached tokens ${seen[0]}, then ${seen[1]}`;
}

try {
  await runChecks({
    chat,
    streaming,
    tools,
    "structured output": structuredOutput,
    "cached tokens": cachedTokens,
  });
} finally {
  const ended = new Promise((resolve) => opencode.on("exit", resolve));
  opencode.kill("SIGKILL"); // SIGTERM makes it wait for whoever still listens to its events
  await ended;
  await rm(home, { recursive: true, force: true });
}
process.exit();
