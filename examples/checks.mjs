// What the JavaScript examples share: their arguments, and a line for each check.

import assert from "node:assert/strict";
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
