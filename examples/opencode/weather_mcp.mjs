// A tool server for OpenCode: the Model Context Protocol over standard input and output.

import { createInterface } from "node:readline";
import { CITIES, getWeather } from "../task.mjs";

const GET_WEATHER = {
  name: "get",
  description: "Get the weather of a city.",
  inputSchema: {
    type: "object",
    properties: { city: { type: "string", enum: CITIES } },
    required: ["city"],
    additionalProperties: false,
  },
};

function resultOf(method, params) {
  switch (method) {
    case "initialize":
      return {
        protocolVersion: params.protocolVersion,
        capabilities: { tools: {} },
        serverInfo: { name: "weather", version: "1.0.0" },
      };
    case "tools/list":
      return { tools: [GET_WEATHER] };
    case "tools/call":
      return { content: [{ type: "text", text: getWeather(params.arguments) }] };
    default:
      return {};
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue; // a notification
  console.log(JSON.stringify({ jsonrpc: "2.0", id, result: resultOf(method, params) }));
}
