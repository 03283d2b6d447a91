// The openai JavaScript client: chat, streaming, tools, structured output, cached tokens.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
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

const client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: server.apiKey });
const common = { model: server.model, max_tokens: MAX_TOKENS };
const messages = [{ role: "user", content: QUESTION }];
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });

async function chat() {
  const answer = await client.chat.completions.create({ ...common, messages });
  assert(answer.choices[0].message.content);
  return JSON.stringify(answer.choices[0].message.content);
}

async function streaming() {
  const stream = await client.chat.completions.create({
    ...common,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let numChunks = 0;
  let usage = null;
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      text += choice.delta.content ?? "";
      numChunks += 1;
    }
    usage = chunk.usage ?? usage;
  }
  assert(text && numChunks > 2, `${numChunks} chunks with the text ${text}`);
  assert(usage?.completion_tokens > 0, "no usage at the end of the stream");
  return `${numChunks} chunks, ${usage.completion_tokens} tokens`;
}

async function tools() {
  const request = {
    ...common,
    messages: [{ role: "user", content: TOOL_QUESTION }],
    parallel_tool_calls: false,
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "Get the weather of a city.",
          parameters: z.toJSONSchema(z.object({ city: z.enum(CITIES) })),
        },
      },
    ],
  };
  const asked = await client.chat.completions.create({ ...request, tool_choice: "required" });
  const [choice] = asked.choices;
  assert.equal(choice.finish_reason, "tool_calls");
  const [call] = choice.message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  const query = JSON.parse(call.function.arguments);
  assert(CITIES.includes(query.city), call.function.arguments);
  request.messages.push(choice.message);
  request.messages.push({ role: "tool", tool_call_id: call.id, content: getWeather(query) });
  const final = await client.chat.completions.create({ ...request, tool_choice: "none" });
  const text = final.choices[0].message.content;
  assert(text, "no final answer");
  return `get_weather(${query.city}), then ${JSON.stringify(text)}`;
}

async function structuredOutput() {
  const answer = await client.chat.completions.parse({
    ...common,
    messages: [{ role: "user", content: SHAPE_QUESTION }],
    response_format: zodResponseFormat(Person, "person"),
  });
  return JSON.stringify(Person.parse(answer.choices[0].message.parsed));
}

async function cachedTokens() {
  const prompt = longPrompt();
  const seen = [];
  for (const question of ["When does ferry 3 leave?", "And ferry 5?"]) {
    const { usage } = await client.chat.completions.create({
      model: server.model,
      max_tokens: 4,
      messages: [
        { role: "system", content: prompt },
        { role: "user", content: question },
      ],
    });
    seen.push(usage.prompt_tokens_details?.cached_tokens ?? 0);
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
