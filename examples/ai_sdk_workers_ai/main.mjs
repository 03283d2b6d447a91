// Vercel's AI SDK with the Workers AI provider: chat, streaming, tools, structured output, cached tokens.
//
// The provider has no option for its base URL, but it takes a `fetch`: that is where requests turn.

import assert from "node:assert/strict";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { createWorkersAI } from "workers-ai-provider";
import { z } from "zod";
import { runChecks, server } from "../checks.mjs";
import {
  CITIES,
  MAX_TOKENS,
  QUESTION,
  SHAPE_QUESTION,
  TOOL_QUESTION,
  getWeather,
  longPrompt,
} from "../task.mjs";

const ACCOUNT = process.env.TWINFIRE_ACCOUNT ?? "any";
const workersAI = createWorkersAI({
  accountId: ACCOUNT,
  apiKey: server.apiKey,
  fetch: (url, init) => fetch(url.replace("https://api.cloudflare.com", server.url), init),
});
const model = workersAI(server.model, { sessionAffinity: "twinfire-example" });
const common = { model, maxOutputTokens: MAX_TOKENS, maxRetries: 0 };

async function chat() {
  const { text } = await generateText({ ...common, prompt: QUESTION });
  assert(text);
  return JSON.stringify(text);
}

async function streaming() {
  const result = streamText({ ...common, prompt: QUESTION });
  let text = "";
  let numPieces = 0;
  for await (const piece of result.textStream) {
    text += piece;
    numPieces += 1;
  }
  assert(text && numPieces > 1, `${numPieces} pieces with the text ${text}`);
  const usage = await result.usage;
  assert(usage.outputTokens > 0, `usage: ${JSON.stringify(usage)}`);
  return `${numPieces} pieces, ${usage.outputTokens} tokens`;
}

async function tools() {
  const cities = [];
  const { text, steps } = await generateText({
    ...common,
    prompt: TOOL_QUESTION,
    tools: {
      get_weather: tool({
        description: "Get the weather of a city.",
        inputSchema: z.object({ city: z.enum(CITIES) }),
        execute: async (query) => {
          cities.push(query.city);
          return getWeather(query);
        },
      }),
    },
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.equal(steps.length, 2);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert(cities.length > 0, "the tool was not called");
  assert(text, "no final answer");
  return `get_weather(${cities}), then ${JSON.stringify(text)}`;
}

async function structuredOutput() {
  const { output } = await generateText({
    ...common,
    prompt: SHAPE_QUESTION,
    output: Output.object({
      schema: z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) }),
    }),
  });
  assert(output.name !== undefined && output.age >= 0, JSON.stringify(output));
  return JSON.stringify(output);
}

async function cachedTokens() {
  const prompt = longPrompt();
  const seen = [];
  for (const question of ["When does ferry 3 leave?", "And ferry 5?"]) {
    const { usage } = await generateText({
      ...common,
      maxOutputTokens: 4,
      instructions: prompt,
      prompt: question,
    });
    seen.push(usage.inputTokenDetails.cacheReadTokens ?? 0);
  }
  assert(seen[1] > 0, `cached tokens of the two requests: ${seen}`);
  return `cached tokens ${seen[0]}, then ${seen[1]}`;
}

await runChecks({
  chat,
  streaming,
  tools,
  "structured output": structuredOutput,
  "cached tokens": cachedTokens,
});
