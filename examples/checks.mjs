// What the JavaScript examples share: their arguments, a line for each check, and what they ask for.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { parseArgs } from "node:util";

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: {
    "api-key": { type: "string", default: "none" },
    model: { type: "string", default: "smollm2-135m" },
  },
});
assert(positionals.length === 1, "usage: node main.mjs URL [--api-key KEY] [--model NAME]");

/** Where requests go. `url` has no path; clients add `/v1` or their own. */
export const server = {
  url: positionals[0].replace(/\/+$/, ""),
  apiKey: values["api-key"],
  model: values.model,
};

/** Run all checks, print `ok` or `FAILED` for each with what it saw, and set the exit status. */
export async function runChecks(checks) {
  for (const [name, check] of Object.entries(checks)) {
    const startedMs = performance.now();
    try {
      const seen = await check();
      const tookS = ((performance.now() - startedMs) / 1000).toFixed(1);
      console.log(`ok     ${name} (${tookS} s): ${seen}`);
    } catch (error) {
      process.exitCode = 1;
      console.log(`FAILED ${name}\n${error.stack ?? error}`);
    }
  }
}

export const MAX_TOKENS = 40;
export const QUESTION = "What is the capital of France? Answer in one sentence.";
export const TOOL_QUESTION = "What is the weather in Paris?";
export const SHAPE_QUESTION = "Describe a person named Ada as JSON.";
export const CITIES = ["Paris", "London", "Seoul"];

/** The tool that models are given. */
export const getWeather = ({ city }) => JSON.stringify({ city, sky: "clear", celsius: 21 });

/** Return some 700 tokens that no server has seen before, so that a cache hit is our own. */
export function longPrompt() {
  const lines = Array.from(
    { length: 40 },
    (_, n) => `Ferry ${n} leaves pier ${n % 7} at ${n % 24}:${n % 6}0.`,
  );
  return `Timetable ${randomUUID()}. Answer briefly.\n${lines.join("\n")}`;
}
