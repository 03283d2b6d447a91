// What the JavaScript examples ask for. Answers are short, so that the smallest of models ends them.

import { randomUUID } from "node:crypto";

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
