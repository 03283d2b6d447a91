// Numbers and times as people read them. "–" is what has not been measured.

export const NONE = "–";

const whole = new Intl.NumberFormat("en");
const clockFormat = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});

export const count = (value) => whole.format(Math.round(value));

export function compact(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 10_000) return whole.format(Math.round(value));
  if (value < 1_000_000) return `${short(value / 1000)}k`;
  return `${short(value / 1_000_000)}M`;
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value < 10 ? short(value) : compact(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0005) return "0 ms";
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 99.95) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return age(value);
}

export function age(value) {
  const all = Math.round(value);
  if (all < 120) return `${all} s`;
  if (all < 7200) return `${Math.floor(all / 60)} min`;
  if (all < 172_800) return `${Math.floor(all / 3600)} h`;
  return `${Math.floor(all / 86_400)} days`;
}

export function share(value) {
  if (value === null || value === undefined) return NONE;
  const percent = value * 100;
  return `${percent > 0 && percent < 9.95 ? percent.toFixed(1) : Math.round(percent)} %`;
}

export function money(amount, currency) {
  const value = Number(amount);
  if (value === 0) return `0 ${currency}`;
  const digits = value < 0.01 ? 6 : value < 1 ? 4 : 2;
  return `${value.toFixed(digits)} ${currency}`;
}

export const clock = (unixSeconds) => clockFormat.format(new Date(unixSeconds * 1000));

export const words = (name) => name.replaceAll("_", " ");

function short(value) {
  return value >= 100 ? String(Math.round(value)) : value.toFixed(1).replace(/\.0$/, "");
}
